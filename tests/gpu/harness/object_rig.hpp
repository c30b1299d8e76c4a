// SPDX-License-Identifier: Apache-2.0
// Tests exchange objects on GPUs under varying conditions (streams, graphs, faults), with the harness scenarios and every
// element checked against the oracle.
//
// Every test body runs in a forked process, so a fault that corrupts a CUDA context, or a hang, fails only that test. Its ranks
// are threads. The host and the copy engines never access the heap: kernels copy its content to ordinary device memory in
// stream order, and this memory is read when all ranks are idle.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/kernels/object_kernels.hpp"
#include "harness/outcome.hpp"
#include "modes/normal/scenario.hpp"

namespace harness {

using namespace std::chrono_literals;
using switchyard::CombineOptions;
using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::GroupOptions;
using switchyard::Handle;
using switchyard::NormalConfig;
using switchyard::NormalExchange;
using switchyard::SizePolicy;

/// Throws a std::runtime_error that names the call. Leaves no error pending.
void must(cudaError_t status, const char* what);

/// Meeting point of ranks that are threads. A rank never waits for a rank that has left, and never longer than a minute.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}
  void arrive();
  void leave() noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int ranks_, here_ = 0;
  uint64_t round_ = 0;
  bool left_ = false;
};

/// A rank's inputs for one dispatch and combine, in device memory.
struct Inputs {
  switchyard::ConstRows x;
  switchyard::ExpertIds ids;
  const float* weights = nullptr;
  void* out = nullptr;
  size_t x_bytes = 0, ids_bytes = 0, weights_bytes = 0, out_bytes = 0;
};

/// Copy of a dispatch's output at one point in a stream. The shape and pointers are those of the dispatch; the contents are at
/// `base`.
struct Shot {
  Dispatched d;
  std::byte* base = nullptr;
};

/// Opened by the host; see launch_gate.
struct Gate {
  uint32_t *opened = nullptr, *timed_out = nullptr;  ///< mapped host memory
  void close(cudaStream_t stream, std::chrono::nanoseconds limit = 3s) const;
  void open() const { *static_cast<volatile uint32_t*>(opened) = 1; }
};

/// One rank of a test: its GPU, streams and memory, all created before any rank waits for another.
class Station {
 public:
  Station(Group& group, Failures& failures, Meeting& meeting);
  ~Station() { meeting_.leave(); }
  Station(const Station&) = delete;

  static constexpr int kStreams = 3;
  Group& group;
  Failures& f;
  int rank() const { return group.rank(); }
  int world() const { return group.size(); }
  int device() const { return device_; }
  cudaStream_t stream(int i = 0) const { return streams_[i % kStreams]; }
  const Gate& gate() const { return gate_; }

  /// Device memory for this test. Makes no CUDA call.
  std::byte* allocate(size_t bytes);
  /// Copies from and to the host. Must not be called while ranks wait for this rank.
  void* upload(const void* host, size_t bytes);
  Inputs upload(const Case& c, RankData& data);
  void read(void* host, const void* device, size_t bytes);

  /// Waits until all streams are idle and all ranks have arrived.
  void meet();
  /// Only waits for the other ranks.
  void gather() { meeting_.arrive(); }
  void synchronize();

  /// Enqueues the copies.
  Shot shoot(const Dispatched& d, cudaStream_t stream);
  std::byte* keep(const void* device, size_t bytes, cudaStream_t stream);
  /// Compares with the oracle. `handle` must belong to a dispatch with this routing. Must be called after meet(), and meet()
  /// must be called again before the next call.
  void check(const Case& c, const RankData& data, const Shot& shot, const Handle& handle);
  void check_combined(RankData& data, const Inputs& in, const void* out);
  void check_combined(RankData& data, const Inputs& in) { check_combined(data, in, in.out); }

  DispatchOptions dispatch_options(const Case& c, cudaStream_t stream) const;
  CombineOptions combine_options(const Case& c, cudaStream_t stream) const;
  /// Makes one dispatch and a combine of its rows, and compares the results. Collective.
  void round(NormalExchange& exchange, const Case& c, int repetition = 0);

 private:
  Meeting& meeting_;
  int device_ = 0;
  cudaStream_t streams_[kStreams] = {}, copies_ = nullptr;
  std::byte* arena_ = nullptr;
  size_t used_ = 0;
  Gate gate_;
};

/// A rank's exchange object and inputs. When the constructor returns, all ranks have created their objects.
struct ExchangeRig {
  ExchangeRig(Station& station, const std::shared_ptr<const Case>& given, const NormalConfig& config);
  Dispatched dispatch(int stream = 0);
  void combine(const switchyard::ConstRows& rows, const Handle& handle, int stream = 0);
  /// Row buffers that fill the pool except for `left` bytes.
  std::vector<switchyard::RowBuffer> fill_pool(const Handle& handle, size_t left = 0);

  Station& me;
  std::shared_ptr<const Case> c;
  NormalExchange exchange;
  RankData data;
  Inputs in;
};

/// Random values, experts that return their rows in place, and worst-case sizes.
Scenario gpu_scenario(const std::string& name, int world, Layout layout, int64_t tokens, uint64_t seed = 1);

/// Row width and number of multiprocessors of a test's calls. narrow: those of gpu_scenario; lanes copy the rows, and all
/// blocks of a kernel do the same work. wide: rows are copied in bulk, and the multiprocessors suffice for expert-major calls
/// to divide their blocks and for up to two ranks to push combine per_route rows. Supports up to four ranks, which fit with
/// their plans on a GPU with 132 multiprocessors.
enum class Width { narrow, wide };
const char* suffix_of(Width width);  ///< of a test's name
Scenario with_width(Scenario s, Width width);
/// Bytes per row of x.
size_t row_bytes_of(const Case& c);

/// Number of rows allocated by a worst-case-size dispatch.
int64_t worst_rows(const Case& c);
/// make_config with a pool for `times` times as many rows.
NormalConfig config_with_large_pool(const Case& c, int times);
size_t heap_for(const NormalConfig& config, int world, int objects = 1);

/// Number of multiprocessors for each of two calls that a rank may have in flight at the same time. Call inside on_gpus().
int half_of_a_rank(int world);

using StationBody = std::function<void(Station&)>;
/// Runs `body` in a separate process and expects no failure in any on_gpus() inside it.
void isolated(const std::function<void()>& body, std::chrono::milliseconds limit = 60s);
/// Runs `body` on all ranks of one group, in a separate process unless inside isolated().
void on_gpus(int world, size_t heap, std::chrono::milliseconds timeout, const StationBody& body);
inline void on_gpus(int world, size_t heap, const StationBody& body) { on_gpus(world, heap, 10s, body); }

}  // namespace harness
