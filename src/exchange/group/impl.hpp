// SPDX-License-Identifier: Apache-2.0
// State of one rank: its bootstrap connection, heap, workers and fault state.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "arch/cpu/cpu_arch.hpp"
#include "arch/cpu/worker_pool.hpp"
#include "base/agreed_fields.hpp"
#include "base/as_error.hpp"
#include "base/forked.hpp"
#include "bootstrap/bootstrap.hpp"
#include "bootstrap/deadline.hpp"
#include "exchange/group/call_difference.hpp"
#include "exchange/group/device_rank.hpp"
#include "exchange/group/remote_headers.hpp"
#include "heap/collective_step.hpp"
#include "heap/heap.hpp"
#include "protocol/call.hpp"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard {

namespace detail {

class Carrier;
class WeightRails;

/// One rank's side of a collective registration. Lives as long as the user's RegisteredMemory.
struct Registration {
  std::byte* data = nullptr;  ///< this rank's buffer
  size_t bytes = 0;
  int slot = 0;  ///< identical on all ranks
  /// [W] distance from rank r's mapping of this rank's segment to rank r's mapping of `data`, modulo 2^64. The array is in
  /// memory readable by kernels.
  const uint64_t* distances = nullptr;
  std::vector<uint64_t> host_distances;
  std::shared_ptr<void> mapping;  ///< CUDA: the other ranks' buffers
};

/// Creates the objects of groups that defer copies. Set by the test library, which alone contains the code for it.
template <class Impl, class Config>
inline std::unique_ptr<Impl> (*make_deferred)(Group&, const Config&) = nullptr;

/// A split call that has been sent but not received.
struct SentCall {
  virtual ~SentCall() = default;
  /// Performs the work that receiving ranks wait for: passes on rows from other hosts. \throws the errors of the call.
  virtual void pass_on() = 0;
};

/// A rank's report on its part of a construction.
struct ConstructionReport {
  StepReport report;
  AgreedProposal agreed;     ///< filled by agree()
  bool is_placed = true;     ///< false while the ranks agree on `heap_offset`
  uint64_t heap_offset = 0;  ///< the lowest offset that this rank can assign to the object
};

/// True for errors that result from an abort by this or another rank, and for errors that the peers detect as well.
bool is_known_to_peers(ErrorCode code);

/// Bit of the `object` argument of Group::Impl::enter: if set, the other bits hold the call's site (NormalExchange::set_site)
/// instead of the object.
inline constexpr uint32_t kSiteOfCall = 1u << 15;
}  // namespace detail

struct Group::Impl {
  using TuningInForce = std::shared_ptr<const Tuning>;
  Impl(std::unique_ptr<detail::Bootstrap> bootstrap, std::unique_ptr<detail::SymmetricHeap> heap, const GroupOptions& options,
       TuningInForce tuning);
  Impl(std::unique_ptr<detail::Bootstrap> bootstrap, detail::DeviceParts parts, const GroupOptions& options,
       TuningInForce tuning);
  ~Impl();

  /// Announces to the peers that this rank is making a collective call. On CPU groups, this is the first step of every
  /// collective call; on GPU groups, only of calls made by the host, because streams may run exchanges in different orders. A
  /// receiving half counts as part of its sending half's call. `object`: number among the group's exchanges, counted from 1; 0
  /// if none. `waiting`: false for a sending half. A call that waits first passes on the rows of earlier sent calls, which may
  /// throw.
  void enter(detail::Operation operation, uint64_t object = 0, bool waiting = true);
  /// With several hosts: performs the work of all sent calls (`sent_calls`) that other ranks wait for. The first step of every
  /// call that waits; otherwise, this rank could wait for a rank that is waiting for it.
  void pass_on();
  /// Returns a rank whose calls differ from this rank's, or -1.
  int find_other_call() const noexcept;
  /// Ends the peers' calls and throws because `rank` is making a different call than this rank.
  [[noreturn]] void throw_mismatch(const std::string& context, int rank, const detail::CallDifference& difference = {});
  /// The context of a call without its epoch. Clears the fault record and the move counters.
  detail::CallContext begin_call(detail::Operation operation);
  /// Throws the fault recorded by the last call, if any: PeerTimeout (which also aborts all peers), PeerFailed, ...
  void raise_fault(const char* operation, uint64_t call);
  /// Throws Error(invalid_argument), without announcing it to the peers, in a forked child and after leave().
  void check_member(const char* context) const;
  /// Announces to the peers that this rank will make no more calls. Idempotent.
  void leave() noexcept;
  /// Throws if this rank has left, has aborted, or has received an abort. Also makes the first failure sticky.
  void check_alive(const char* context);
  /// check_alive() for calls that use the heap; also throws while the group sleeps.
  void check_usable(const char* context);
  /// Runs a whole collective call and handles all exceptions. Standard exceptions are converted to Error. Before an exception
  /// propagates, the peers' waits are ended, unless the peers also have the error. This is the case for an AgreedError, which
  /// all ranks throw in the same step, and for codes that satisfy is_known_to_peers().
  template <class F>
  decltype(auto) collective_call(const char* operation, F&& call) {
    check_member(operation);
    try {
      return detail::as_error(operation, call);
    } catch (const detail::AgreedError&) {
      throw;
    } catch (const Error& error) {
      if (!detail::is_known_to_peers(error.code())) post_abort(static_cast<int>(error.code()), 255);
      throw;
    } catch (...) {  // not a standard exception: the thread is being cancelled
      post_abort(static_cast<int>(ErrorCode::system), 255);
      throw;
    }
  }
  /// The only rule for how long the host waits for its peers in a collective call: rendezvous_timeout if `operation` builds an
  /// object or takes or releases memory, because ranks reach such steps at very different times, and timeout otherwise.
  detail::Milliseconds deadline_of(detail::Operation operation) const;
  /// Collective, through the bootstrap and within deadline_of(operation). Enters `operation`, which is called `name` in errors.
  /// A missing rank is reported as PeerTimeout.
  void all_gather(const void* mine, size_t bytes, void* all, const char* name, detail::Operation operation,
                  uint64_t object = 0);
  /// Collective; the first step in constructing any object. A rank that fails before its own construction begins can thus
  /// report the failure in the same step as the ranks that construct. If a report has an error code, all ranks throw the
  /// AgreedError of the lowest such rank; if subjects or `fields` differ, they throw AgreedError(mismatch). Otherwise, gathers
  /// `bytes` bytes of `data` into `all`.
  void agree(const char* subject, const detail::AgreedFields& fields, const detail::ConstructionReport& mine,
             const void* data = nullptr, size_t bytes = 0, void* all = nullptr);
  /// Collective; a step in the construction of `subject` on ranks that place it in the heap. Returns the highest offset
  /// proposed by any rank, and whether all proposals are equal. Throws like agree(), including when other ranks are in agree()
  /// in this step.
  std::pair<uint64_t, bool> highest_offset(const char* subject, uint64_t mine);
  /// One step of agree() or highest_offset(): gathers the reports of all ranks and throws the errors common to both functions.
  std::vector<detail::ConstructionReport> gather_reports(const char* subject, const detail::AgreedFields& fields,
                                                         const detail::ConstructionReport& mine,
                                                         const detail::Deadline& deadline);
  /// Runs a collective_call, already entered, in which `step` makes collective bootstrap calls. A missing rank is reported as
  /// PeerTimeout. If the group is aborted or a rank has entered a different call, these calls end within about a second.
  template <class Step>
  void collectively(const char* operation, const Step& step) {
    const uint64_t start = detail::Cpu::now_ns();
    collective_call(operation, [&] {
      try {
        step();
        if (const int other = find_other_call(); other >= 0) throw_mismatch(operation, other);
      } catch (const RendezvousError& error) {
        if (error.missing_ranks().empty()) throw;
        raise_missing(operation, error.missing_ranks().front(), start);
      } catch (const PeerFailed& error) {  // the rank is gone; a reason that it reported earlier takes precedence
        if (const uint64_t word = abort_word()) throw_abort(word, operation);
        if (error.left()) post_word(detail::make_left_word(error.rank(), static_cast<int>(error.reason())));
        throw;
      } catch (const Error&) {  // the bootstrap may receive messages of ranks in other calls
        if (const int other = find_other_call(); other >= 0) throw_mismatch(operation, other);
        throw;
      }
    });
  }
  /// The live registration that contains [p, p + bytes), or null.
  const detail::Registration* registration_of(const void* p, size_t bytes) const;
  /// Bit s is set if slot s is registered on this rank.
  uint64_t registered_slots() const;
  uint64_t registered_in_call = 0;  ///< registered_slots() at the beginning of the current call; for CallContext
  /// Values from the tuning in force when the group was formed, for an object on this rank's device.
  TuningValues tuned(TuningMode mode, int64_t hidden, int64_t tokens) const;
  /// Ends all ranks' waits. Only the first failure counts. Never throws.
  void post_abort(int reason, int awaited) noexcept;
  uint64_t abort_word() const noexcept;
  /// True if `rank` has destroyed its Group. That is not a failure as long as no rank needs it.
  bool has_left(int rank) const noexcept;

  const detail::HomeProcess home;  ///< only the process that joined may leave
  std::unique_ptr<detail::Bootstrap> bootstrap;
  std::unique_ptr<detail::SymmetricHeap> heap;     ///< rows and flags; device memory if the group has a device
  std::unique_ptr<detail::SymmetricHeap> control;  ///< host memory with the abort words; null: they are in `heap`
  std::unique_ptr<detail::DeviceRank> device;      ///< null: CPU
  GroupOptions options;
  TuningInForce tuning;
  detail::WorkerPool pool;
  detail::Tracer* tracer = nullptr;
  uint64_t traced_steps = 0;  ///< steps of layers (StepTrace) that the rank's recordings contain

  detail::FaultRecord fault;
  uint64_t nonce = 0;     ///< random, identical on all ranks of this group
  uint64_t objects = 0;   ///< number of exchanges that ranks have agreed on so far
  int64_t selectors = 0;  ///< number of SlotSelectors and RouteCounters among them
  // Settings for objects created from now on. Tests change them (tests/testing).
  uint64_t first_epoch = 1;  ///< identical on all ranks
  int64_t round_bytes =
      int64_t{4} << 20;        ///< several hosts: approximate bytes sent to a peer at a time; identical on all ranks
  bool defers_copies = false;  ///< CPU: objects are made by make_deferred
  /// Several hosts: replaces the carriers of objects.
  std::function<std::unique_ptr<detail::Carrier>(std::unique_ptr<detail::Carrier>)> wrap_carrier;
  /// Several hosts, CPU: connections of move_weights(), made by its first call between hosts.
  std::shared_ptr<detail::WeightRails> weight_rails;
  /// With several hosts: calls whose receiving half may follow later calls of other ranks.
  std::vector<detail::SentCall*> sent_calls;
  uint64_t fault_claims = 0;
  std::array<std::weak_ptr<detail::Registration>, kMaxRegistered> registrations;  ///< by slot
  std::vector<detail::WaitCounter> waits;                                         ///< [workers, world]
  std::vector<detail::MoveCounter> moved;                                         ///< [workers]

  detail::HeapHeader* header(int rank) const noexcept { return headers_[static_cast<size_t>(rank)]; }
  const detail::HostMap& host_map() const noexcept { return bootstrap->host_map(); }
  /// Throws Error(unsupported) on all ranks if the group has several hosts. `what`: the feature that needs the memory of all
  /// ranks; `instead`: the alternative offered to the caller.
  void require_one_host(const char* what, const char* instead) const;
  /// Passes the silence limit in the options to the bootstrap.
  void set_silence();
  std::unique_ptr<detail::RemoteHeaders> remote;  ///< null: no ranks of other hosts, or only threads

 private:
  std::array<detail::HeapHeader*, kMaxRanks> headers_ = {};
  bool left_ = false;
  void find_headers(const detail::SymmetricHeap& memory);
  /// The difference between the calls of ranks a and b, or "" if it is unknown.
  std::string describe_mismatch(int a, int b) const;
  /// describe_mismatch(), else the options that differ according to rank `a`, which found the mismatch, else a list of possible
  /// differences. Waits for words that are on their way.
  std::string explain_mismatch(int a, int b) const;
  /// What rank `r` compared when it found that a peer made a different call; Site::none if it has not written it.
  detail::CallDifference difference_found_by(int r) const noexcept;
  void post_word(uint64_t word) noexcept;
  [[noreturn]] void throw_abort(uint64_t word, const char* context) const;
  void raise_missing(const char* operation, int rank, uint64_t start_ns);
};

}  // namespace switchyard
