// SPDX-License-Identifier: Apache-2.0
// State of one rank: its link to the others, its heap, its workers and its fault state.
#pragma once

#include <array>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "arch/cpu/cpu_arch.hpp"
#include "arch/cpu/worker_pool.hpp"
#include "base/agreed_fields.hpp"
#include "base/as_error.hpp"
#include "base/forked.hpp"
#include "bootstrap/bootstrap.hpp"
#include "bootstrap/deadline.hpp"
#include "exchange/group/device_rank.hpp"
#include "exchange/group/far_headers.hpp"
#include "heap/collective_step.hpp"
#include "heap/heap.hpp"
#include "protocol/call.hpp"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard {

namespace detail {

/// One rank's side of a collective registration; lives as long as the user's RegisteredMemory.
struct Registration {
  std::byte* data = nullptr;  ///< this rank's buffer
  size_t bytes = 0;
  int slot = 0;  ///< the same on all ranks
  /// [W] from rank r's mapping of this rank's segment to rank r's mapping of `data`, modulo 2^64. In the memory that kernels
  /// read.
  const uint64_t* distances = nullptr;
  std::vector<uint64_t> host_distances;
  std::shared_ptr<void> mapping;  ///< CUDA: the other ranks' buffers
};

/// What makes the objects of groups that defer copies: set by the library of the tests, which alone has the code for it.
template <class Impl, class Config>
inline std::unique_ptr<Impl> (*make_deferred)(Group&, const Config&) = nullptr;

/// A call in two halves that has been sent and not received.
struct SentCall {
  virtual ~SentCall() = default;
  /// Does what ranks wait for that receive it already: this rank passes rows of other hosts on. \throws what the call throws.
  virtual void pass_on() = 0;
};

/// What a rank reports of its share of a construction.
struct ConstructionReport {
  StepReport report;
  AgreedClaim agreed;        ///< agree() fills it
  uint64_t heap_offset = 0;  ///< of the object's block, if it has one
};

/// True for an error that a rank throws because of an abort, its own or another rank's, or that its peers find by themselves.
bool peers_know_of(ErrorCode code);

/// Bit of Group::Impl::enter's `object`: the rest is the site of the call, NormalExchange::set_site, which stands for its
/// object.
inline constexpr uint32_t kSiteOfCall = 1u << 15;
}  // namespace detail

struct Group::Impl {
  using TuningInForce = std::shared_ptr<const Tuning>;
  Impl(std::unique_ptr<detail::Bootstrap> bootstrap, std::unique_ptr<detail::SymmetricHeap> heap, const GroupOptions& options,
       TuningInForce tuning);
  Impl(std::unique_ptr<detail::Bootstrap> bootstrap, detail::DeviceParts parts, const GroupOptions& options,
       TuningInForce tuning);
  ~Impl();

  /// Tells the peers that this rank makes a collective call: first of all in each, on groups on the CPU; elsewhere only in
  /// those that the host makes, because streams may run exchanges in other orders. A receiving half is part of the call that
  /// sent. `object`: of the group's exchanges, from 1; 0: none. `waiting`: not a sending half. A call that waits
  /// passes on what was sent before, which may throw.
  void enter(detail::Operation operation, uint64_t object = 0, bool waiting = true);
  /// Several hosts: ends the share that other ranks wait for of all calls that were sent (`sent_calls`). First of all in calls
  /// that wait: a rank that waits in one would otherwise wait for a rank that waits for it.
  void pass_on();
  /// A rank whose calls are not those of this one, or -1.
  int find_other_call() const noexcept;
  /// Ends the peers' calls and throws: `rank` makes another call than this one, or this one than others.
  [[noreturn]] void throw_mismatch(const std::string& context, int rank);
  /// Everything but the epoch of a call. Clears the fault record and the move counters.
  detail::CallContext begin_call(detail::Operation operation);
  /// Throws what the last call recorded, if anything: PeerTimeout (and tells all peers), PeerFailed, ...
  void raise_fault(const char* operation, uint64_t call);
  /// Throws, without telling the peers, Error(invalid_argument) in a forked child and after leave().
  void check_member(const char* context) const;
  /// Tells the peers that this rank makes no more calls. Idempotent.
  void leave() noexcept;
  /// Throws if this rank has left, has aborted, or has received an abort. Also makes the first failure sticky.
  void check_alive(const char* context);
  /// check_alive for calls that use the heap: also throws while the group sleeps.
  void check_usable(const char* context);
  /// The whole of a collective call, whatever throws in it. Standard exceptions leave as Error. The peers' waits end before an
  /// exception goes on, unless they know: it is an AgreedError, which all ranks throw in step, or peers_know_of() its code.
  template <class F>
  decltype(auto) collective_call(const char* operation, F&& call) {
    check_member(operation);
    try {
      return detail::as_error(operation, call);
    } catch (const detail::AgreedError&) {
      throw;
    } catch (const Error& error) {
      if (!detail::peers_know_of(error.code())) post_abort(static_cast<int>(error.code()), 255);
      throw;
    } catch (...) {  // no standard exception: a thread that is being ended
      post_abort(static_cast<int>(ErrorCode::system), 255);
      throw;
    }
  }
  /// The one rule for how long the host waits for its peers in a collective call: rendezvous_timeout where `operation` builds
  /// an object or takes or gives back memory, which ranks reach at very different times, and timeout elsewhere.
  detail::Milliseconds deadline_of(detail::Operation operation) const;
  /// Collective, through the bootstrap, within deadline_of(operation): enters `operation`, which errors call `name`. A missing
  /// rank is reported as PeerTimeout.
  void all_gather(const void* mine, size_t bytes, void* all, const char* name, detail::Operation operation,
                  uint64_t object = 0);
  /// Collective: every construction begins with it, whatever the object, so that a rank that fails before it has begun can
  /// report the failure in the same step as ranks that construct. All throw the AgreedError of the lowest rank whose report has
  /// a code, or AgreedError(mismatch) if subjects, `fields` or heap offsets differ. Otherwise gathers `bytes` bytes of `data`
  /// into `all`.
  void agree(const char* subject, const detail::AgreedFields& fields, const detail::ConstructionReport& mine,
             const void* data = nullptr, size_t bytes = 0, void* all = nullptr);
  /// A collective_call, entered before, in which `step` makes collective calls of the bootstrap; a missing rank is reported as
  /// PeerTimeout. An abort of the group and a rank that has entered another call end them within about a second.
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
      } catch (const PeerFailed& error) {  // gone; if it said why before, that is the story
        if (const uint64_t word = abort_word()) throw_abort(word, operation);
        if (error.left()) post_word(detail::make_left_word(error.rank(), static_cast<int>(error.reason())));
        throw;
      } catch (const Error&) {  // the bootstrap may see what ranks of other calls bring
        if (const int other = find_other_call(); other >= 0) throw_mismatch(operation, other);
        throw;
      }
    });
  }
  /// The live registration that holds [p, p + bytes), or null.
  const detail::Registration* registration_of(const void* p, size_t bytes) const;
  /// Bit s: slot s is registered on this rank.
  uint64_t registered_slots() const;
  uint64_t registered_in_call = 0;  ///< that, when the call that runs began; for CallContext
  /// What the tuning in force when the group was formed says of an object on this rank's device.
  TuningValues tuned(TuningMode mode, int64_t hidden, int64_t tokens) const;
  /// Makes all ranks' waits end. Only the first failure counts. Never throws.
  void post_abort(int reason, int awaited) noexcept;
  uint64_t abort_word() const noexcept;
  /// True if `rank` has destroyed its Group. That is no failure while nobody needs the rank.
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

  detail::FaultRecord fault;
  uint64_t nonce = 0;    ///< random, the same on all ranks of this group
  uint64_t objects = 0;  ///< exchanges that ranks have agreed on so far
  // Settings of the objects that are made from now on. Tests change them (tests/testing).
  uint64_t first_epoch = 1;  ///< the same on all ranks
  int64_t round_bytes =
      int64_t{4} << 20;        ///< several hosts: about what a rank sends to a peer at a time; the same on all ranks
  bool defers_copies = false;  ///< CPU: make_deferred makes them
  /// Several hosts: calls whose receiving half may come after calls that other ranks make behind theirs.
  std::vector<detail::SentCall*> sent_calls;
  uint64_t fault_claims = 0;
  std::array<std::weak_ptr<detail::Registration>, kMaxRegistered> registrations;  ///< by slot
  std::vector<detail::WaitCounter> waits;                                         ///< [workers, world]
  std::vector<detail::MoveCounter> moved;                                         ///< [workers]

  detail::HeapHeader* header(int rank) const noexcept { return headers_[static_cast<size_t>(rank)]; }
  const detail::HostMap& host_map() const noexcept { return bootstrap->host_map(); }
  /// Throws, on all ranks alike, Error(unsupported) if the group has several hosts. `what` needs the memory of all ranks;
  /// `instead`: what the caller can do.
  void require_one_host(const char* what, const char* instead) const;
  /// Passes the options' limit on.
  void set_silence();
  std::unique_ptr<detail::FarHeaders> far;  ///< null: no ranks of other hosts, or only threads

 private:
  std::array<detail::HeapHeader*, kMaxRanks> headers_ = {};
  bool left_ = false;
  void find_headers(const detail::SymmetricHeap& memory);
  /// What ranks a and b have called that differs; "" if it is not known.
  std::string describe_mismatch(int a, int b) const;
  /// describe_mismatch once that is known, or what may differ.
  std::string describe_told_mismatch(int a, int b) const;
  void post_word(uint64_t word) noexcept;
  [[noreturn]] void throw_abort(uint64_t word, const char* context) const;
  void raise_missing(const char* operation, int rank, uint64_t start_ns);
};

}  // namespace switchyard
