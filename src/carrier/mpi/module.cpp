// SPDX-License-Identifier: Apache-2.0
// The MPI module: transfers the legs of rounds as MPI messages on a private communicator.
//
// A leg is a head followed by its bytes, in messages of at most MpiCarrierSpec::max_bytes, all with the tag for the two ranks.
// MPI preserves the order of messages with the same tag between two processes, so the n-th head received is the n-th head that
// the peer sent; its contents show whether both ends mean the same leg. The bytes are received only after an expected head,
// because an MPI implementation may write a whole message that is longer than its buffer before reporting the truncation.
//
// MPI accesses a request's memory until the request has completed, and a send to a peer that never receives does not complete.
// Requests that a destroyed carrier leaves behind are kept, along with their memory, until a later call on any carrier finds
// them completed.
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "carrier/mpi/module.hpp"

namespace switchyard::detail {
namespace {

using Clock = std::chrono::steady_clock;

/// Maximum number of ranks in a group; a tag encodes both ranks of a leg, and its remaining values distinguish groups.
constexpr int kRanks = 64;

/// Serializes calls of MPI. Held during calls that do not wait, and during creation of the communicator.
std::mutex& mpi_mutex() {
  static std::mutex mutex;
  return mutex;
}
MPI_Comm communicator = MPI_COMM_NULL;  // guarded by mpi_mutex()

MpiEnd end_with(MpiEnd end, MpiText* why, const char* text) {
  std::snprintf(why->text, sizeof why->text, "%s", text);
  return end;
}
bool failed(int code, const char* call, MpiText* why) {
  if (code == MPI_SUCCESS) return false;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  std::snprintf(why->text, sizeof why->text, "%s: %.400s", call, text);
  return true;
}

/// True if MPI can no longer be used in this process.
bool is_over() {
  int finalized = 0;
  return MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0;
}

void finalize_at_exit() {
  if (!is_over()) MPI_Finalize();
}

MpiEnd start_mpi(MpiText* why) {
  int initialized = 0, level = MPI_THREAD_SINGLE;
  if (failed(MPI_Initialized(&initialized), "MPI_Initialized", why)) return MpiEnd::failed;
  if (!initialized) {
    if (failed(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread", why)) return MpiEnd::failed;
    std::atexit(finalize_at_exit);  // a launcher treats a process that ends without finalizing as crashed
  } else if (failed(MPI_Query_thread(&level), "MPI_Query_thread", why)) {
    return MpiEnd::failed;
  }
  if (level < MPI_THREAD_SERIALIZED)
    return end_with(MpiEnd::unsupported, why,
                    "was started without MPI_THREAD_SERIALIZED: call MPI_Init_thread with it, or with MPI_THREAD_MULTIPLE");
  return MpiEnd::ok;
}

/// Collective over the processes in MPI_COMM_WORLD, but with a deadline: issues the non-blocking call and polls it.
MpiEnd make_communicator(Clock::time_point deadline, MpiText* why) {
  MPI_Comm made = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  if (failed(MPI_Comm_idup(MPI_COMM_WORLD, &made, &request), "MPI_Comm_idup", why)) return MpiEnd::failed;
  for (int done = 0; !done;) {
    if (failed(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Comm_idup", why)) return MpiEnd::failed;
    if (done) break;
    if (Clock::now() > deadline)
      return end_with(MpiEnd::timeout, why,
                      "not all processes of MPI_COMM_WORLD have made a group over MPI within the deadline");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (failed(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", why)) return MpiEnd::failed;
  communicator = made;
  return MpiEnd::ok;
}

MpiEnd begin(int64_t deadline_ms, int* process, MpiText* why) {
  const std::lock_guard lock(mpi_mutex());
  if (is_over()) return end_with(MpiEnd::unsupported, why, "MPI_Finalize has been called in this process");
  if (communicator == MPI_COMM_NULL) {
    if (const MpiEnd end = start_mpi(why); end != MpiEnd::ok) return end;
    const MpiEnd end = make_communicator(Clock::now() + std::chrono::milliseconds(deadline_ms), why);
    if (end != MpiEnd::ok) return end;
  }
  return failed(MPI_Comm_rank(communicator, process), "MPI_Comm_rank", why) ? MpiEnd::failed : MpiEnd::ok;
}

const char* library() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  return text;
}

struct Head {
  uint64_t nonce, number, bytes;
  bool operator==(const Head&) const = default;
};

/// One direction of a leg. Its address is stable while MPI holds requests for it.
struct Transfer {
  uint64_t round;
  Head head, seen{};
  std::span<std::byte> into = {};          ///< receiving
  std::vector<MPI_Request> requests = {};  ///< sending: of the head and the pieces; receiving: of the head or of the pieces
};
using Transfers = std::list<Transfer>;

struct Link {
  int peer, process, tag_out, tag_in;
  uint64_t sent = 0, received = 0;  ///< legs started
  Transfers sends = {};
  Transfers heads = {};   ///< receiving: the head of the first is requested, none of the others
  Transfers pieces = {};  ///< receiving, after heads with the expected contents

  bool waits_for(uint64_t round) const {
    const auto due = [round](const Transfers& list) { return !list.empty() && list.front().round <= round; };
    return due(pieces) || due(heads) || due(sends);
  }
};

/// Requests that MPI still holds after their carrier was destroyed.
struct Remains {
  Transfers transfers;
  std::shared_ptr<const void> memory;  ///< of their bytes
};

/// Guarded by mpi_mutex(). Never destroyed.
std::list<Remains>& remains() {
  static auto* const all = new std::list<Remains>;
  return *all;
}

bool completed(Transfer& t) {
  return std::all_of(t.requests.begin(), t.requests.end(), [](MPI_Request& request) {
    int done = 0;
    return MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0;
  });
}

/// Frees completed requests.
void sweep_remains() {
  for (Remains& each : remains()) each.transfers.remove_if(completed);
  remains().remove_if([](const Remains& each) { return each.transfers.empty(); });
}

class MpiCarrier final : public Carrier {
 public:
  MpiCarrier(const MpiCarrierSpec& spec, int groups) : rank_(spec.rank), nonce_(spec.nonce), max_bytes_(spec.max_bytes) {
    const int group = static_cast<int>(spec.nonce % static_cast<uint64_t>(groups));
    const auto tag = [&](int from, int to) { return (group * kRanks + from) * kRanks + to; };
    for (int r = 0; r < static_cast<int>(spec.processes.size()); ++r)
      if (r != spec.rank) links_.push_back({r, spec.processes[static_cast<size_t>(r)], tag(spec.rank, r), tag(r, spec.rank)});
  }

  ~MpiCarrier() override {
    const std::lock_guard lock(mpi_mutex());
    if (is_over()) return;
    Remains& left = left_.front();
    for (Link& link : links_) {
      for (Transfers* const receives : {&link.heads, &link.pieces}) {
        for (Transfer& t : *receives) cancel(t);
        left.transfers.splice(left.transfers.end(), *receives);
      }
      left.transfers.splice(left.transfers.end(), link.sends);
    }
    left.transfers.remove_if(completed);
    if (left.transfers.empty()) return;
    std::fprintf(stderr,
                 "switchyard: rank %d: %zu of the MPI transfers of an exchange that has ended are unfinished; MPI keeps "
                 "their memory until they finish\n",
                 rank_, left.transfers.size());
    left.memory = memory();
    remains().splice(remains().end(), left_);
  }

  void post(uint64_t round, std::span<const PeerTransfer> transfers, void*) override {
    const std::lock_guard lock(mpi_mutex());
    sweep_remains();
    for (const PeerTransfer& transfer : transfers) {
      const auto link = std::find_if(links_.begin(), links_.end(), [&](const Link& l) { return l.peer == transfer.peer; });
      if (link == links_.end()) {
        fail(RoundState::broken, transfer.peer);
        continue;
      }
      if (!transfer.receive.empty())
        link->heads.push_back({round, {nonce_, link->received++, transfer.receive.size()}, {}, transfer.receive});
      if (!transfer.send.empty()) begin_send(*link, round, transfer.send);
      receive_some(*link);
    }
  }

  RoundStatus advance(uint64_t round) override {
    const std::lock_guard lock(mpi_mutex());
    if (aborted_.load(std::memory_order_acquire) || is_over()) fail(RoundState::broken, -1);
    for (Link& link : links_) {
      if (failure_.state != RoundState::done) return failure_;
      while (!link.sends.empty() && done(link, link.sends.front())) link.sends.pop_front();
      receive_some(link);
    }
    if (failure_.state != RoundState::done) return failure_;
    for (const Link& link : links_)
      if (link.waits_for(round)) return {RoundState::in_progress, link.peer};
    return {};
  }

  void abort() noexcept override { aborted_.store(true, std::memory_order_release); }

 private:
  /// The first failure counts.
  void fail(RoundState state, int peer) {
    if (failure_.state == RoundState::done) failure_ = {state, peer};
  }

  void begin_send(Link& link, uint64_t round, std::span<const std::byte> bytes) {
    Transfer& t = link.sends.emplace_back(Transfer{round, {nonce_, link.sent++, bytes.size()}});
    add(link, t, MPI_Isend(&t.head, sizeof t.head, MPI_BYTE, link.process, link.tag_out, communicator, request_of(t)));
    for (size_t at = 0; at < bytes.size(); at += max_bytes_)
      add(link, t,
          MPI_Isend(bytes.data() + at, piece(bytes.size() - at), MPI_BYTE, link.process, link.tag_out, communicator,
                    request_of(t)));
  }
  /// Processes the heads that have arrived, and posts receives for the bytes after each expected head.
  void receive_some(Link& link) {
    while (failure_.state == RoundState::done && !link.heads.empty()) {
      Transfer& t = link.heads.front();
      if (t.requests.empty())
        add(link, t, MPI_Irecv(&t.seen, sizeof t.seen, MPI_BYTE, link.process, link.tag_in, communicator, request_of(t)));
      if (!done(link, t)) break;
      if (!(t.seen == t.head)) return fail(RoundState::unlike, link.peer);
      t.requests.clear();
      for (size_t at = 0; at < t.into.size(); at += max_bytes_)
        add(link, t,
            MPI_Irecv(t.into.data() + at, piece(t.into.size() - at), MPI_BYTE, link.process, link.tag_in, communicator,
                      request_of(t)));
      link.pieces.splice(link.pieces.end(), link.heads, link.heads.begin());
    }
    while (!link.pieces.empty() && done(link, link.pieces.front())) link.pieces.pop_front();
  }
  int piece(size_t left) const { return static_cast<int>(std::min(left, max_bytes_)); }
  static MPI_Request* request_of(Transfer& t) {
    t.requests.push_back(MPI_REQUEST_NULL);
    return &t.requests.back();
  }
  void add(const Link& link, Transfer& t, int code) {
    if (code == MPI_SUCCESS) return;
    t.requests.back() = MPI_REQUEST_NULL;
    fail(RoundState::broken, link.peer);
  }

  /// True if all messages of a transfer have been sent or received. A message longer than expected belongs to a different leg.
  bool done(const Link& link, Transfer& t) {
    int all = 0;
    statuses_.resize(t.requests.size());
    const int code = MPI_Testall(static_cast<int>(t.requests.size()), t.requests.data(), &all, statuses_.data());
    if (code == MPI_SUCCESS) return all != 0;
    RoundState state = RoundState::broken;
    for (const MPI_Status& status : statuses_) {
      int kind = MPI_SUCCESS;
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING &&
          MPI_Error_class(status.MPI_ERROR, &kind) == MPI_SUCCESS && kind == MPI_ERR_TRUNCATE)
        state = RoundState::unlike;
    }
    fail(state, link.peer);
    return false;
  }

  /// Cancels a receive that has not matched a message. MPI completes the others.
  static void cancel(Transfer& t) {
    for (MPI_Request& request : t.requests)
      if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
  }

  const int rank_;
  const uint64_t nonce_;
  const size_t max_bytes_;
  std::vector<Link> links_;
  std::vector<MPI_Status> statuses_;
  std::list<Remains> left_ = std::list<Remains>(1);  ///< for the destructor, which must not allocate
  RoundStatus failure_;                              ///< `done`: none
  std::atomic<bool> aborted_{false};
};

MpiEnd make(const MpiCarrierSpec* spec, Carrier** carrier, MpiText* why) {
  const std::lock_guard lock(mpi_mutex());
  if (communicator == MPI_COMM_NULL || is_over())
    return end_with(MpiEnd::unsupported, why, "has not been started, or has ended");
  void* value = nullptr;
  int there = 0;
  if (failed(MPI_Comm_get_attr(communicator, MPI_TAG_UB, &value, &there), "MPI_Comm_get_attr", why)) return MpiEnd::failed;
  const int max_tag = there ? *static_cast<int*>(value) : 32767;
  const int groups = max_tag / (kRanks * kRanks);
  if (groups < 1) return end_with(MpiEnd::unsupported, why, "has fewer than 4096 tags");
  sweep_remains();
  *carrier = new MpiCarrier(*spec, groups);
  return MpiEnd::ok;
}

}  // namespace
}  // namespace switchyard::detail

extern "C" __attribute__((visibility("default"))) const switchyard::detail::MpiModule* switchyard_internal_mpi_module_1() {
  static constexpr switchyard::detail::MpiModule kModule{switchyard::detail::library, switchyard::detail::begin,
                                                         switchyard::detail::make};
  return &kModule;
}
