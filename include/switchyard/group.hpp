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

/// Caller's memory, registered by all ranks of a group (Group::register_memory): combine reads rows in it in place, like rows
/// in a RowBuffer. Movable. Destruction is local and ends the registration for this rank, which then neither offers rows there
/// nor accesses the buffers of other ranks. Therefore all ranks must destroy their objects at the same point in their sequence
/// of calls, and may free or reuse the memory only after all ranks have done so (Group::barrier in between). CUDA: destruction
/// waits for the GPU; a graph that captured a combine of rows there must not be replayed afterwards.
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

/// Transport of rows between hosts.
enum class HostNetwork : uint8_t {
  sockets = 0,  ///< CPUs: TCP connections of the group, for tests and small groups. As an option: the default
  /// MPI, in a module that is loaded when the first object needs it (docs/concepts/hosts.md). All processes of MPI_COMM_WORLD
  /// are ranks of the group. CPUs.
  mpi = 1,
  /// NCCL, at least 2.19, loaded when the first object needs it (docs/concepts/hosts.md). The only network for GPUs.
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
  /// Deadline of every wait inside a call; may differ by rank. At least 1 ms; milliseconds::max() means never (in fact, ten
  /// years). Group::set_timeout changes it.
  std::chrono::milliseconds timeout{30000};
  /// Deadline of collective steps that ranks may reach at very different times: forming the group, the construction of every
  /// object, register_memory(), sleep(), wake() and agree().
  std::chrono::milliseconds rendezvous_timeout{60000};
  int num_blocks = 1;  ///< CPU workers per rank = num_blocks * num_warps; may differ by rank
  int num_warps = 1;
  /// CUDA: maximum number of multiprocessors of any call in any mode; 0: SWITCHYARD_NUM_SMS of the environment, or those of the
  /// GPU / ranks on it. The blocks of a call wait for peers and must all be resident: leave multiprocessors for other waiting
  /// kernels that run concurrently (NCCL, another group's). May differ by rank.
  int num_sms = 0;
  /// Host of this rank: ranks with equal texts share a host, whose memory they map. A comma-separated list holds one text per
  /// rank, repeated cyclically ("a,a,b": rank 3 is on a again). "": SWITCHYARD_HOST of the environment; if that is not set,
  /// ranks that can share memory share a host. May differ by rank.
  std::string host = {};
  /// Several hosts: transport of rows between them. sockets: SWITCHYARD_NETWORK of the environment ("sockets", "mpi" or "nccl")
  /// if set; else nccl on GPUs. A network that is not available for the backend results in Error(unsupported) on all ranks.
  HostNetwork network = HostNetwork::sockets;
  /// Several hosts, ranks as processes: a rank of another host that was silent for longer counts as dead, even if no call waits
  /// for it. Ranks send a sign of life ten times a second. 0 means the timeout plus one second, so that a waiting call first
  /// reports the rank that it waits for. May differ by rank.
  std::chrono::milliseconds silence{0};
};

/// Rank, world size and rendezvous address ("" for a world of one) with which a process joins a group.
struct Membership {
  int rank = 0;
  int world = 1;
  std::string store;
};

/// Time that this rank has spent waiting for flags of one peer since the group was formed.
struct WaitStatistics {
  double total_ms = 0;  ///< total of the worker that waited longest, not the sum over workers
  double max_ms = 0;    ///< the longest single wait
  uint64_t waits = 0;   ///< number of waits that did not succeed at once
};

/// One rank's membership. Movable, not copyable. Destruction is local (not collective), idempotent and never throws; memory is
/// freed with its last user. A Group must outlive the exchange objects made from it. After its destruction, also by stack
/// unwinding, the rank has left: calls of peers that need more from it than it has delivered end with PeerFailed(left), within
/// about a second; all others continue. Only the process that joined is a member: in a forked child, copies of a Group and of
/// objects made from it may be destroyed, which does nothing; calls throw Error(invalid_argument).
///
/// Members of any moved-from or default-constructed object of this library throw Error(invalid_argument).
///
/// Thread safety: one thread at a time per Group and its objects; different ranks' Groups are independent.
///
/// All ranks make the collective calls of the Group and of all objects made from it (CUDA: of one object) in the same order.
/// Ranks that make different calls get Error(mismatch), on all ranks and long before the deadline; the text states which rank
/// made which call. (CUDA: calls of different objects, or of an object and of the Group, wait for each other until the
/// deadline.)
class Group {
 public:
  /// Creates all `world` ranks as threads of this process. Element r of the result belongs to rank r.
  /// \throws Error(invalid_argument) if world is not in [1, 64] or an option is out of range, Error(system) without memory.
  static std::vector<Group> in_process(int world, const GroupOptions& options = {});

  /// Joins this process as one rank, from SWITCHYARD_RANK / _WORLD_SIZE / _STORE / _JOB_TOKEN, or from the variables of
  /// torchrun, Open MPI or Slurm (docs/quickstart.md lists them). Blocks until all ranks have joined.
  /// \throws RendezvousError naming the missing ranks; Error(invalid_argument) if no known variables are set.
  static Group from_environment(const GroupOptions& options = {});

  /// Membership that from_environment would join, without joining. Local. \throws as from_environment if variables are missing
  /// or malformed.
  static Membership find_in_environment();

  /// Joins this process as rank `rank` of `world` at `store`: "unix:/path", "unix:@name" (abstract) or "tcp://host:port". Rank
  /// 0 serves the store. `token` (any text, the same on all ranks) rejects processes of other jobs. Blocks until all ranks have
  /// joined. Several threads of a process may each join as a rank, for example with one process per host.
  static Group connect(int rank, int world, const std::string& store, const std::string& token,
                       const GroupOptions& options = {});

  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;
  ~Group();

  int rank() const;
  int size() const;
  /// Number of hosts. Hosts are numbered by their lowest ranks.
  int hosts() const;
  int host() const;  ///< host of this rank
  /// \throws Error(invalid_argument) if the rank does not exist.
  int host_of(int rank) const;
  const GroupOptions& options() const;

  /// Sets GroupOptions::timeout for later calls. Local. Captured graphs keep the deadline of their capture, and calls already
  /// enqueued keep theirs. \throws Error(invalid_argument) if less than 1 ms.
  void set_timeout(std::chrono::milliseconds timeout);

  /// Collective. Waits until all ranks have called it. \throws PeerTimeout, PeerFailed, Error(mismatch).
  void barrier();
  /// Collective. Gathers `bytes` bytes from every rank, in rank order, into `all` (size() * bytes). Neither pointer may be null
  /// unless `bytes` is 0.
  void all_gather(const void* mine, size_t bytes, void* all);

  /// GPUs: declares that `stream` (cudaStream_t) uses `memory`, library memory made by this rank's objects (rows, outputs,
  /// handles): work enqueued on `stream` before that memory is released finishes before the memory is reused. A graph being
  /// captured on `stream` keeps the memory. Library calls declare their own streams. Local; no effect on the CPU. \throws
  /// Error(invalid_argument) if the library did not allocate memory at that address.
  void used_by(const void* memory, void* stream);

  /// Collective: one step in the construction of an object that consists of several objects of the group, so that a rank may
  /// fail between two of them. `share` performs this rank's part. agree() waits up to GroupOptions::rendezvous_timeout, then
  /// gathers `bytes` bytes of `mine`, which `share` may fill, into `all`, like all_gather(). If `share` throws on some ranks,
  /// all ranks throw the error of the lowest of them, with its code and text, and the group stays usable. Peers in another
  /// agree(), or in the construction of an exchange, throw the error there. If no rank fails but subjects differ, all ranks
  /// throw Error(mismatch). \throws PeerTimeout, PeerFailed.
  void agree(const char* subject, const std::function<void()>& share, const void* mine = nullptr, size_t bytes = 0,
             void* all = nullptr);

  /// Throws the pending fault of this rank, if any. CUDA: invalid ids of objects with InvalidIds::raise are a fault,
  /// Error(invalid_argument), whose text gives the objects and the counts since the last check(); the group stays usable.
  /// Local; does not wait for kernels.
  void check() const;
  /// Ends every wait of every rank with PeerFailed(this rank, reason). Local, idempotent; does nothing in a forked child or on
  /// a moved-from object.
  void abort(int32_t reason) noexcept;
  /// Leaves the group: calls of peers that still need this rank end with PeerFailed(left), as after the destruction of the
  /// Group, but immediately, even though objects, handles and rows of the group stay alive. Local, idempotent. CUDA: waits for
  /// this rank's GPU. Every later collective call of the group and its objects, and check(), throws Error(invalid_argument);
  /// destruction, host-memory contents of handles, and statistics still work. Does nothing in a forked child or on a moved-from
  /// object.
  void leave() noexcept;

  /// One entry per peer rank. Local. The counters always run and cost nothing if no wait occurs.
  std::vector<WaitStatistics> wait_statistics() const;
  /// Collective. Makes the `bytes` bytes at `memory` accessible to all ranks. Sizes may differ; a rank without a buffer passes
  /// null and 0. At most kMaxRegistered registrations at a time, which may overlap. CPU: any memory, if the ranks are threads;
  /// processes cannot access each other's ordinary memory. CUDA: cudaMalloc, or cuMemCreate with POSIX file descriptors, on the
  /// rank's GPU, with the range in one allocation. \throws, on all ranks, Error(unsupported or invalid_argument); the text
  /// gives the kind of memory and the allowed kinds.
  RegisteredMemory register_memory(void* memory, size_t bytes);
  static constexpr int kMaxRegistered = 64;

  /// Collective. Returns the physical memory of the symmetric heap to the system (CUDA: to the GPU) until wake(). Exchange
  /// objects, handles and captured graphs survive, addresses do not change, and calls continue after wake(). Other contents of
  /// the heap are lost and zero after wake(): the rows of Dispatched::x and of RowBuffers (direct staging). Contents outside
  /// the heap are unaffected: registered memory, rows under ring staging and, on the CPU, the targets of the spans of
  /// Dispatched. On CUDA the spans that belong to the handle survive too (they are saved in host memory). All calls of all
  /// ranks must have returned (CUDA: sleep() waits for the GPU). While the group sleeps nothing may access the heap: calls that
  /// need it throw Error(invalid_argument) and change nothing, and graphs must not be replayed; objects and the group may be
  /// destroyed. \throws, on all ranks, Error(unsupported) if the memory cannot be returned (cudaIpc heap; ranks as processes
  /// before Linux 5.14). \throws Error(invalid_argument) if the group sleeps.
  void sleep();
  /// Collective. \throws Error(system) on all ranks if memory is insufficient; the group then still sleeps, and wake() may be
  /// repeated. \throws Error(invalid_argument) if the group is awake.
  void wake();
  bool asleep() const;

  /// Bytes of the symmetric heap on this rank: in use and total.
  size_t heap_used() const;
  size_t heap_size() const;

  /// Starts recording this rank's calls in `trace` (made for this group's size); null stops. Local. The trace must outlive the
  /// recording. CPU: the trace must be made for the group's workers. CUDA: the first num_blocks x num_warps warps of a kernel
  /// record into device memory (other warps record nothing), events_per_track each, 32 bytes per event. Records are copied to
  /// the host when recording stops, which waits for the GPU: all ranks must have enqueued the same calls. Times are within
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
