// SPDX-License-Identifier: Apache-2.0
/// \file
/// Group: the ranks that exchange rows, their symmetric heap and their fault state.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/held.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

class Trace;

namespace detail {
struct Registration;
}

/// Memory of the caller, registered by all ranks of a group (Group::register_memory): combine reads rows in it where they lie,
/// as it does rows in a RowBuffer. Movable. Destruction is local and ends the registration for this rank: it stops offering
/// rows there and no longer reaches the other ranks' buffers. So each rank destroys its object after the same call, and frees
/// the memory, or gives it another use, after all ranks have destroyed theirs (Group::barrier in between). CUDA: destruction
/// waits for the GPU; a graph with a combine that was captured with rows there must not be replayed afterwards.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  RegisteredMemory(RegisteredMemory&&) noexcept = default;
  RegisteredMemory& operator=(RegisteredMemory&&) noexcept = default;
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;
  explicit operator bool() const noexcept { return impl_ != nullptr; }

  explicit RegisteredMemory(std::shared_ptr<detail::Registration> impl) noexcept : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<detail::Registration> impl_;
};

/// What carries rows between hosts.
enum class HostNetwork : uint8_t {
  sockets = 0,  ///< CPUs: TCP connections of the group's own, for tests and small groups. As an option: what is usual
  /// MPI, in a module that is loaded when the first object needs it (docs/concepts/hosts.md). All processes of MPI_COMM_WORLD
  /// are ranks of the group. CPUs.
  mpi = 1,
  /// NCCL, at least 2.19, which is looked up when the first object needs it (docs/concepts/hosts.md). GPUs have nothing else.
  nccl = 2,
};
template <>
struct NamesOf<HostNetwork> {
  static constexpr Named<HostNetwork> kAll[] = {
      {HostNetwork::sockets, "sockets"}, {HostNetwork::mpi, "mpi"}, {HostNetwork::nccl, "nccl"}};
};

/// Settings of a group. Every rank must pass the same values, except where noted.
struct GroupOptions {
  Backend backend = Backend::cpu;
  /// CUDA: GPU of this rank; -1: rank modulo the number of visible GPUs (torchrun, Open MPI, Slurm: local rank). Several ranks
  /// may share a GPU. May differ by rank.
  int device = -1;
  size_t heap_bytes = size_t{256} << 20;  ///< symmetric memory per rank, in bytes; see NormalExchange::memory_required
  /// Deadline of every wait inside a call; may differ by rank. Any duration from 1 ms on; milliseconds::max() is never (in
  /// fact, ten years). Group::set_timeout changes it.
  std::chrono::milliseconds timeout{30000};
  /// How long to wait for all ranks where they build something or take or give back memory, which they may reach at very
  /// different times: when the group is formed, in the construction of every object, and in register_memory(), sleep(), wake()
  /// and agree().
  std::chrono::milliseconds rendezvous_timeout{60000};
  int num_blocks = 1;  ///< CPU workers per rank = num_blocks * num_warps; may differ by rank
  int num_warps = 1;
  /// CUDA: most multiprocessors of any call, whatever its mode; 0: the environment's SWITCHYARD_NUM_SMS, or those of the GPU /
  /// ranks on it. The blocks of a call wait for peers and must all run at the same time: where other kernels that wait run
  /// beside them (NCCL, another group's), leave those theirs. May differ by rank.
  int num_sms = 0;
  /// Where this rank is: ranks with equal texts share a host, whose memory they map. Several texts with commas between them are
  /// for one rank each, in turn ("a,a,b": rank 3 is on a again). "": the environment's SWITCHYARD_HOST; if that is not set
  /// either, ranks that can share memory share a host. May differ by rank.
  std::string host = {};
  /// Several hosts: what carries their rows. sockets: the environment's SWITCHYARD_NETWORK ("sockets", "mpi" or "nccl") where
  /// that is set; else on GPUs nccl. A network that ranks of this backend do not have is Error(unsupported), on all ranks.
  HostNetwork network = HostNetwork::sockets;
  /// Several hosts, ranks as processes: ranks of another host of which nothing has come for longer count as dead, also if
  /// nobody waits for them. Ranks tell of themselves ten times a second. 0: the timeout and a second more, so that a call which
  /// waits says first for whom. May differ by rank.
  std::chrono::milliseconds silence{0};
};

/// As whom a process joins a group, and where its ranks meet ("" for a world of one).
struct Membership {
  int rank = 0;
  int world = 1;
  std::string store;
};

/// Time this rank spent waiting for flags of one peer since the group was formed.
struct WaitStatistics {
  double total_ms = 0;  ///< the longest-waiting worker's total, not the sum over workers
  double max_ms = 0;    ///< the longest single wait
  uint64_t waits = 0;   ///< number of waits that did not succeed at once
};

/// One rank's membership. Movable, not copyable. Destruction is local (not collective), idempotent and never throws:
/// memory disappears with its last user. A Group must outlive the exchange objects made from it. After its destruction, also by
/// an exception on its way, the rank has left: calls of peers that need more from it than it has delivered end with
/// PeerFailed(left), within about a second; all others go on. Only the process that joined is a member: in a forked child,
/// copies of a Group and of objects made from it may be destroyed, which does nothing; calls throw Error(invalid_argument).
///
/// Members of any object of this library that was moved from, or default-constructed, throw Error(invalid_argument).
///
/// Thread safety: one thread at a time per Group and its objects; different ranks' Groups are independent.
///
/// Collective calls, those of the Group and of all objects made from it (CUDA: of one object), come in the same order on all
/// ranks. Ranks that make different ones get Error(mismatch), on all ranks and long before the deadline; it says who called
/// what. (CUDA: calls of different objects, or of an object and of the Group, wait for each other until the deadline.)
class Group {
 public:
  /// All `world` ranks as threads of this process. Element r of the result belongs to rank r.
  /// \throws Error(invalid_argument) if world is not in [1, 64] or an option is out of range, Error(system) without memory.
  static std::vector<Group> in_process(int world, const GroupOptions& options = {});

  /// This process as one rank, found from SWITCHYARD_RANK / _WORLD_SIZE / _STORE / _JOB_TOKEN, or from the variables of
  /// torchrun, Open MPI or Slurm (docs/quickstart.md lists them). Blocks until all ranks have come.
  /// \throws RendezvousError naming the missing ranks; Error(invalid_argument) if no known variables are set.
  static Group from_environment(const GroupOptions& options = {});

  /// What from_environment would join, without joining it. Local. \throws as from_environment where variables are missing or
  /// malformed.
  static Membership find_in_environment();

  /// This process as rank `rank` of `world`, meeting at `store`: "unix:/path", "unix:@name" (abstract) or "tcp://host:port".
  /// Rank 0 serves the store. `token` (any text, the same on all ranks) keeps strangers out. Blocks until all ranks have come.
  /// Several threads of a process may each join as a rank, side by side: a process per host, for example.
  static Group connect(int rank, int world, const std::string& store, const std::string& token,
                       const GroupOptions& options = {});

  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;
  ~Group();

  int rank() const;
  int size() const;
  /// Hosts are numbered by their lowest ranks.
  int hosts() const;
  int host() const;  ///< of this rank
  /// \throws Error(invalid_argument) if there is no such rank.
  int host_of(int rank) const;
  const GroupOptions& options() const;

  /// Local: GroupOptions::timeout from now on. Captured graphs keep the deadline of their capture, and calls that are enqueued
  /// already theirs. \throws Error(invalid_argument) if less than 1 ms.
  void set_timeout(std::chrono::milliseconds timeout);

  /// Collective. Waits until all ranks called it. \throws PeerTimeout, PeerFailed, Error(mismatch).
  void barrier();
  /// Collective. Gathers `bytes` bytes of every rank, in rank order, into `all` (size() * bytes). Neither
  /// may be null unless `bytes` is 0.
  void all_gather(const void* mine, size_t bytes, void* all);

  /// GPUs: `memory` lies in memory of the library that this rank's objects made (rows, outputs, handles). What is enqueued on
  /// `stream` (cudaStream_t) until that memory ends uses it: nobody else has it before. A graph that is captured there keeps
  /// the memory. Calls of the library say this of their own streams. Local; nothing on the CPU. \throws
  /// Error(invalid_argument) if no such memory lies there
  void used_by(const void* memory, void* stream);

  /// Collective: one step in the construction of an object that consists of several objects of the group and may fail on one
  /// rank between them. `share` does this rank's part. agree() waits for GroupOptions::rendezvous_timeout, then gathers `bytes`
  /// bytes of `mine`, which `share` may fill, into `all`, as all_gather does. If `share` throws on some ranks, all ranks throw
  /// the error of the lowest of them, with its number and text, and the group stays usable. Peers may be in another agree() or
  /// construct an exchange meanwhile: they throw the error there; if no rank fails but subjects differ, all throw
  /// Error(mismatch). \throws PeerTimeout, PeerFailed.
  void agree(const char* subject, const std::function<void()>& share, const void* mine = nullptr, size_t bytes = 0,
             void* all = nullptr);

  /// Throws the pending fault of this rank, if any; otherwise returns. CUDA: invalid ids of objects with InvalidIds::raise are
  /// one, Error(invalid_argument), which names the objects and the numbers since the last check(); the group can be used.
  /// Local; waits for no kernel.
  void check() const;
  /// Makes every wait of every rank end with PeerFailed(this rank, reason). Local, idempotent; nothing in a
  /// forked child, or if moved from.
  void abort(int32_t reason) noexcept;
  /// This rank leaves: calls of peers that still need it end with PeerFailed(left), as after the destruction of the Group, but
  /// at once, although objects, handles and rows of the group live on. Local, idempotent. CUDA: waits for this rank's GPU.
  /// Every later collective call of the group and its objects, and check(), throws Error(invalid_argument); destruction, what
  /// handles hold in host memory and statistics work as before. Nothing in a forked child, or if moved from.
  void leave() noexcept;

  /// One entry per peer rank. Local. Counters never stop and cost nothing when no wait occurs.
  std::vector<WaitStatistics> wait_statistics() const;
  /// Collective. Makes the `bytes` bytes at `memory` reachable for all ranks; sizes may differ, and null with 0 bytes is a rank
  /// without a buffer. At most kMaxRegistered registrations at a time, which may overlap. CPU: any memory, if the ranks are
  /// threads; processes cannot see each other's ordinary memory. CUDA: cudaMalloc, or cuMemCreate with POSIX file descriptors,
  /// on the rank's GPU; the range lies in one allocation. \throws, on all ranks alike, Error(unsupported or invalid_argument)
  /// that says what the memory is and what is allowed.
  RegisteredMemory register_memory(void* memory, size_t bytes);
  static constexpr int kMaxRegistered = 64;

  /// Collective. Gives the physical memory of the symmetric heap back to the system (CUDA: to the GPU) until wake(). Exchange
  /// objects, handles and captured graphs survive, addresses stay what they are, and the calls after wake() continue those
  /// before. What is in the heap otherwise is lost and zero after wake(): the rows of Dispatched::x and of RowBuffers (direct
  /// staging). Not in the heap, hence untouched: registered memory, rows under ring staging, what the spans of Dispatched
  /// point to on the CPU; on CUDA those that belong to the handle survive too (kept in host memory).
  /// All calls of all ranks must have returned (CUDA: sleep() waits for the GPU). While the group sleeps nothing may touch the
  /// heap: calls that would are Error(invalid_argument) and change nothing, a graph must not be replayed; objects and the group
  /// may be destroyed. \throws, on all ranks alike, Error(unsupported) where memory cannot be given back (cudaIpc heap; ranks
  /// as processes before Linux 5.14). \throws Error(invalid_argument) if the group sleeps.
  void sleep();
  /// Collective. \throws Error(system) on all ranks if there is no memory: the group still sleeps, and wake() may be called
  /// again. \throws Error(invalid_argument) if the group is awake.
  void wake();
  bool asleep() const;

  /// Bytes of the symmetric heap in use and in total on this rank.
  size_t heap_used() const;
  size_t heap_size() const;

  /// Records this rank's calls in `trace` (made for this group's size) from now on; null stops. Local. The trace must outlive
  /// the recording. CPU: the trace must be made for the group's workers. CUDA: kernels record the first num_blocks x num_warps
  /// warps (others record nothing) in device memory, events_per_track each, 32 bytes an event; records come to the host when
  /// recording stops, which waits for the GPU: all ranks must have enqueued the same calls. Times are within
  /// Trace::clock_error_ns(), some microseconds, of the host's clock. \throws Error(invalid_argument) if the trace was made for
  /// another shape.
  void set_trace(Trace* trace);

  struct Impl;
  Impl& impl() const { return *impl_; }  ///< library internal
  explicit Group(std::unique_ptr<Impl> impl) noexcept;

 private:
  detail::Held<std::unique_ptr<Impl>, detail::kGroupObject> impl_;
};

}  // namespace switchyard
