// SPDX-License-Identifier: Apache-2.0
// One thread of a serving worker. It draws its steps from the life's seed, so all ranks make the same calls, but each with its
// own token counts, graph sizes, memory releases and delays. Every result is judged.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "soak/life.hpp"
#include "soak/place.hpp"
#include "switchyard/group.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

namespace soak {

inline constexpr bool kCuda = kBackend == switchyard::Backend::cuda;
/// kFamilies: number of graph families, of which those for low-latency mode are last. kNumbers: number of values that another
/// library sums.
inline constexpr int kTopk = 4, kMaxTokens = 128, kNormals = 3, kFamilies = kNormals + 2;
inline constexpr size_t kNumbers = size_t{1} << 16;
inline constexpr std::array<int, 5> kGraphTokens{8, 24, 56, 96, kMaxTokens};

/// Thrown when a rank's own code fails because the life requires it.
struct OwnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Size in bytes of the symmetric heap of a lane's group.
size_t heap_bytes_of(const Life& life);

class Lane {
 public:
  /// Collective. Call from the thread that will run the lane.
  Lane(const Life& life, int lane, switchyard::Group group, Report& report);
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  /// Waits for the lane's kernels, which may still read rows that are about to be freed.
  ~Lane();

  /// Call before run(), while no lane in the process has a waiting call.
  void capture_graphs();
  /// Runs all steps. \throws OwnError, or terminates by SIGKILL, if the life requires it; \throws Error if a peer's end affects
  /// this lane; \throws std::runtime_error for a wrong result.
  void run();

 private:
  /// A dispatch whose handle is kept.
  struct Routed {
    switchyard::Handle handle;
    CallNumber number;
    int64_t tokens = 0;
  };
  struct Normal {
    Normal(switchyard::Group& group, const switchyard::NormalConfig& config) : exchange(group, config) {}
    switchyard::NormalExchange exchange;
    std::optional<switchyard::Handle> first;  ///< kept from beginning to end
    std::deque<Routed> routed;                ///< equal on all ranks
    std::deque<switchyard::Dispatched> kept;  ///< differs by rank
    size_t free_buffers = 0;                  ///< number of row buffers that fit into the pool in addition to `first`
    bool counts_free_buffers() const {
      return kBackend == switchyard::Backend::cuda || exchange.config().staging == switchyard::Staging::direct;
    }
  };
  struct Sized {
    CallArrays arrays;
    std::unique_ptr<Place::Graph> graph;
  };
  /// Arguments of a layer call in normal mode.
  struct LayerCall {
    Form form;
    CallArrays arrays;
    CallNumber number, routed;
    bool captured = false;
    switchyard::DispatchOptions options;
    const Routed* again = nullptr;  ///< cached dispatch
    bool fails = false;             ///< the call must not deliver anything
  };

  uint64_t all(uint64_t what) const { return draw(life_.seed, 1000 + 8 * static_cast<uint64_t>(step_) + what, lane_ + 1); }
  uint64_t mine(uint64_t what) const { return draw(all(what), 77, static_cast<uint64_t>(rank()) + 1); }
  int rank() const { return group_->rank(); }
  Form form_of(int tokens) const;
  CallNumber number(uint64_t part = 0) const { return {static_cast<uint64_t>(step_) * 16 + part, nullptr, 0}; }
  CallArrays make_arrays();
  CallArrays& next_arrays() { return arrays_[next_++ % arrays_.size()]; }
  void make_inputs(const Form& form, const CallArrays& arrays, CallNumber n);
  switchyard::ExpertIds ids_of(const CallArrays& arrays, int64_t tokens) const;
  switchyard::ConstRows rows_of(const CallArrays& arrays, int64_t tokens) const;
  int64_t rows_to(const Normal& o, CallNumber n, int to) const;
  void count(const std::string& what) {
    ++report_.counts["steps_" + what];
    report_.steps[step_] += " " + what;
  }

  void make_objects();
  void end_if_requested();
  void step();
  void forward(Normal& o, bool again);
  switchyard::Dispatched layer(Normal& o, const LayerCall& call);
  void compute(Normal& o, const LayerCall& call, const switchyard::Dispatched& d, const switchyard::Rows& y);
  void keep(Normal& o, switchyard::Dispatched d);
  void overflow(Normal& o, bool drop);
  void exhaust(Normal& o);
  void by_ledger();
  void low_latency(const Form& form, const CallArrays& arrays, CallNumber n, int way);
  Sized& graph_of(int family, int size);
  void replay();
  void normal_graph(Normal& o, const Form& form, const CallArrays& arrays);
  void fork_helper();
  void add_up();
  void settle();
  void must_fail(switchyard::ErrorCode code, const char* what, const std::function<void()>& call);
  size_t free_buffers_of(Normal& o);
  void finish();

  const Life& life_;
  const uint64_t lane_;
  Report& report_;
  Place place_;
  std::unique_ptr<AllReduce> all_reduce_;  ///< destroyed after the group, because it may wait for an event that never occurs
  std::optional<switchyard::Group> group_;
  int step_ = 0;
  void *compute_ = nullptr, *comm_ = nullptr;
  std::vector<CallArrays> arrays_;
  size_t next_ = 0;
  Verdict* verdict_ = nullptr;
  uint64_t* graph_number_ = nullptr;
  std::vector<std::unique_ptr<Normal>> normals_;
  std::optional<switchyard::LowLatencyExchange> low_latency_;
  std::optional<switchyard::LowLatencyOutput> received_;
  std::optional<switchyard::LowLatencyRows> answers_;
  std::optional<switchyard::LedgerCombine> ledger_;
  std::map<std::pair<int, int>, Sized> graphs_;  ///< by family and size
  std::vector<float*> numbers_;
  size_t numbers_used_ = 0;
};

}  // namespace soak
