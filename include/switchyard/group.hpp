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

#include "switchyard/detail/held.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

class Trace;

namespace detail {
struct Registration;
}

/// Caller's memory registered by all ranks of a group (Group::register_memory): combine reads rows in it in place, like rows in
/// a RowBuffer. Movable. Destruction is local and ends the registration for this rank, which then neither provides rows there
/// nor accesses the buffers of other ranks. All ranks must therefore destroy their objects at the same point in their sequence
/// of calls, and may free or reuse the memory only after all ranks have done so (use Group::barrier in between). CUDA:
/// destruction waits for the GPU; afterwards, graphs that captured a combine of rows in this memory must not be replayed.
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
  /// MPI, in a module loaded for the first object that requires it (docs/concepts/hosts.md). All processes of MPI_COMM_WORLD
  /// are ranks of the group. CPUs.
  mpi = 1,
  /// NCCL 2.19 or later, loaded for the first object that requires it (docs/concepts/hosts.md). The only network for GPUs.
  nccl = 2,
};
template <>
struct NamesOf<HostNetwork> {
  static constexpr Named<HostNetwork> kAll[] = {
      {HostNetwork::sockets, "sockets"}, {HostNetwork::mpi, "mpi"}, {HostNetwork::nccl, "nccl"}};
};

/// Settings of a group. All ranks must pass the same values except where noted.
struct GroupOptions {
  Backend backend = Backend::cpu;
  /// CUDA: GPU of this rank; -1: rank modulo the number of visible GPUs (torchrun, Open MPI, Slurm: local rank). Several ranks
  /// may share a GPU. May differ by rank.
  int device = -1;
  size_t heap_bytes = size_t{256} << 20;  ///< symmetric memory per rank, in bytes; see NormalExchange::memory_required
  /// Deadline of every wait inside a call; may differ by rank. At least 1 ms; milliseconds::max() means never (effectively, ten
  /// years). Group::set_timeout changes it.
  std::chrono::milliseconds timeout{30000};
  /// Deadline of collective steps that ranks may reach at very different times: forming the group, constructing any object,
  /// register_memory(), sleep(), wake() and agree().
  std::chrono::milliseconds rendezvous_timeout{60000};
  int num_blocks = 1;  ///< CPU workers per rank = num_blocks * num_warps; may differ by rank
  int num_warps = 1;
  /// CUDA: maximum number of multiprocessors for any call in any mode; 0: the environment variable SWITCHYARD_NUM_SMS, or those
  /// of the GPU / ranks on it. The blocks of a call wait for peers and must all be resident, so leave multiprocessors for other
  /// waiting kernels that run concurrently (NCCL, or another group's). May differ by rank.
  int num_sms = 0;
  /// Host name of this rank: ranks with the same name share a host and map its memory. A comma-separated list holds one name
  /// per rank, repeated cyclically ("a,a,b": rank 3 is on a again). "": the environment variable SWITCHYARD_HOST; if that is
  /// not set, ranks that can share memory share a host. May differ by rank.
  std::string host = {};
  /// Several hosts: transport of rows between them. With sockets, the environment variable SWITCHYARD_NETWORK ("sockets", "mpi"
  /// or "nccl") takes precedence if set; otherwise GPUs use nccl. A network that is unavailable for the backend results in
  /// Error(unsupported) on all ranks.
  HostNetwork network = HostNetwork::sockets;
  /// Several hosts, ranks as processes: a rank on another host that is silent for longer than this is considered dead, even if
  /// no call waits for it. Ranks send a heartbeat ten times per second. 0 means the timeout plus one second, so a waiting call
  /// first reports the rank for which it waits. May differ by rank.
  std::chrono::milliseconds silence{0};
};

/// Rank, world size and rendezvous address ("" for a world size of one) used by a process to join a group.
struct Membership {
  int rank = 0;
  int world = 1;
  std::string store;
};

/// Time that this rank has spent waiting for flags of one peer since the group was formed.
struct WaitStatistics {
  double total_ms = 0;  ///< total of the worker that waited longest, not the sum over workers
  double max_ms = 0;    ///< the longest single wait
  uint64_t waits = 0;   ///< number of waits that did not succeed immediately
};

/// One rank's membership. Movable, not copyable. Destruction is local (not collective), idempotent and never throws; memory is
/// freed when its last user is destroyed. A Group must outlive the exchange objects created from it. After its destruction,
/// including by stack unwinding, the rank has left: peers' calls that require more from it than it has delivered fail with
/// PeerFailed(left) within about a second; all other calls continue. Only the process that joined is a member. In a forked
/// child, destroying copies of a Group and of objects created from it does nothing, and calls throw Error(invalid_argument).
///
/// Calling a member function of any moved-from or default-constructed object of this library throws Error(invalid_argument).
///
/// Thread safety: a Group and its objects must be used by one thread at a time; Groups of different ranks are independent.
///
/// All ranks must make the collective calls on the Group and on all objects created from it (CUDA: on one object) in the same
/// order. If ranks make different calls, all ranks throw Error(mismatch) long before the deadline; the message states which
/// rank made which call. (CUDA: calls on different objects, or on an object and on the Group, wait for each other until the
/// deadline.)
class Group {
 public:
  /// Creates all `world` ranks as threads of this process. Element r of the result belongs to rank r.
  /// \throws Error(invalid_argument) if world is not in [1, 64] or an option is out of range, Error(system) if memory is
  /// insufficient.
  static std::vector<Group> in_process(int world, const GroupOptions& options = {});

  /// Joins this process as one rank, as described by SWITCHYARD_RANK / _WORLD_SIZE / _STORE / _JOB_TOKEN or by the environment
  /// variables of torchrun, Open MPI or Slurm (docs/quickstart.md lists them). Blocks until all ranks have joined.
  /// \throws RendezvousError naming the missing ranks; Error(invalid_argument) if no known variables are set.
  static Group from_environment(const GroupOptions& options = {});

  /// Returns the membership that from_environment would use, without joining. Local. \throws as from_environment if variables
  /// are missing or malformed.
  static Membership find_in_environment();

  /// Joins this process as rank `rank` of `world` at `store`: "unix:/path", "unix:@name" (abstract) or "tcp://host:port". Rank
  /// 0 hosts the store. `token` (any string, identical on all ranks) excludes processes from other jobs. Blocks until all ranks
  /// have joined. Several threads of a process may each join as a rank, for example with one process per host.
  static Group connect(int rank, int world, const std::string& store, const std::string& token,
                       const GroupOptions& options = {});

  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;
  ~Group();

  int rank() const;
  int size() const;
  /// Number of hosts. Hosts are numbered in order of their lowest ranks.
  int hosts() const;
  int host() const;  ///< host of this rank
  /// \throws Error(invalid_argument) if the rank does not exist.
  int host_of(int rank) const;
  const GroupOptions& options() const;

  /// Sets GroupOptions::timeout for later calls. Local. Captured graphs keep the deadline set when they were captured, and
  /// calls already enqueued keep theirs. \throws Error(invalid_argument) if less than 1 ms.
  void set_timeout(std::chrono::milliseconds timeout);

  /// Collective. Waits until all ranks have called it. \throws PeerTimeout, PeerFailed, Error(mismatch).
  void barrier();
  /// Collective. Gathers `bytes` bytes from every rank, in rank order, into `all` (size() * bytes). Neither pointer may be null
  /// unless `bytes` is 0.
  void all_gather(const void* mine, size_t bytes, void* all);

  /// GPUs: declares that `stream` (cudaStream_t) uses `memory`, library memory created by this rank's objects (rows, outputs,
  /// handles). The memory is not reused until all work enqueued on `stream` before its release has finished. A graph being
  /// captured on `stream` keeps the memory alive. Library calls declare their own streams. Local; no effect on the CPU. \throws
  /// Error(invalid_argument) if the library did not allocate memory at that address.
  void used_by(const void* memory, void* stream);

  /// Collective. Performs one step in the construction of an object that consists of several objects of the group, between
  /// which a rank may fail. `share` performs this rank's part. agree() waits up to GroupOptions::rendezvous_timeout, then
  /// gathers `bytes` bytes of `mine`, which `share` may fill, into `all`, like all_gather(). If `share` throws on some ranks,
  /// all ranks throw the error of the lowest such rank, with its code and message, and the group stays usable. Peers in another
  /// agree() call, or constructing an exchange, throw the error there. If no rank fails but the subjects differ, all ranks
  /// throw Error(mismatch). \throws PeerTimeout, PeerFailed.
  void agree(const char* subject, const std::function<void()>& share, const void* mine = nullptr, size_t bytes = 0,
             void* all = nullptr);

  /// Throws the pending fault of this rank, if any. CUDA: invalid ids in objects with InvalidIds::raise are a fault,
  /// Error(invalid_argument), whose message gives the objects and the counts since the last check(); the group stays usable.
  /// Local; does not wait for kernels.
  void check() const;
  /// Ends all waits on all ranks with PeerFailed(this rank, reason). Local, idempotent; does nothing in a forked child or on a
  /// moved-from object.
  void abort(int32_t reason) noexcept;
  /// Leaves the group: peers' calls that still depend on this rank fail with PeerFailed(left) as after destruction of the
  /// Group, but immediately, even though objects, handles and rows of the group stay alive. Local, idempotent. CUDA: waits for
  /// this rank's GPU. All later collective calls on the group and its objects, and check(), throw Error(invalid_argument);
  /// destruction, the host-memory contents of handles, and statistics remain available. Does nothing in a forked child or on a
  /// moved-from object.
  void leave() noexcept;

  /// One entry per peer rank. Local. The counters are always active and cost nothing if no wait occurs.
  std::vector<WaitStatistics> wait_statistics() const;
  /// Collective. Makes the `bytes` bytes at `memory` accessible to all ranks. Sizes may differ; a rank without a buffer passes
  /// null and 0. At most kMaxRegistered registrations at a time, which may overlap. CPU: any memory if the ranks are threads;
  /// processes cannot access each other's ordinary memory. CUDA: memory from cudaMalloc, or from cuMemCreate with POSIX file
  /// descriptors, on the rank's GPU, with the range in one allocation. \throws, on all ranks, Error(unsupported or
  /// invalid_argument); the message gives the kind of memory and the allowed kinds.
  RegisteredMemory register_memory(void* memory, size_t bytes);
  static constexpr int kMaxRegistered = 64;

  /// Collective. Releases the physical memory of the symmetric heap to the system (CUDA: to the GPU) until wake(). Exchange
  /// objects, handles and captured graphs stay valid, addresses do not change, and calls can resume after wake(). Other
  /// contents of the heap, the rows of Dispatched::x and of RowBuffers (direct staging), are lost and are zero after wake().
  /// Contents outside the heap are unaffected: registered memory, rows with ring staging and, on the CPU, the memory referenced
  /// by the spans of Dispatched. On CUDA, the spans that belong to the handle are preserved too (they are saved in host
  /// memory). All calls on all ranks must have returned (CUDA: sleep() waits for the GPU). While the group is asleep, nothing
  /// may access the heap: calls that require it throw Error(invalid_argument) and change nothing, and graphs must not be
  /// replayed. Objects and the group may be destroyed. \throws, on all ranks, Error(unsupported) if the memory cannot be
  /// released (cudaIpc heap; ranks as processes before Linux 5.14). \throws Error(invalid_argument) if the group is already
  /// asleep.
  void sleep();
  /// Collective. \throws Error(system) on all ranks if memory is insufficient; the group then remains asleep, and wake() may be
  /// retried. \throws Error(invalid_argument) if the group is awake.
  void wake();
  bool asleep() const;

  /// Used and total bytes of the symmetric heap on this rank.
  size_t heap_used() const;
  size_t heap_size() const;

  /// Starts recording this rank's calls in `trace`, which must be created for this group's size; null stops recording. Local.
  /// The trace must outlive the recording. CPU: the trace must be created for the group's number of workers. CUDA: each of the
  /// first num_blocks x num_warps warps of a kernel records up to events_per_track events of 32 bytes in device memory; other
  /// warps record nothing. Stopping waits for the GPU and copies the records to the host, so all ranks must have enqueued the
  /// same calls. Timestamps are within Trace::clock_error_ns(), a few microseconds, of the host's clock. \throws
  /// Error(invalid_argument) if the trace was created for a different shape.
  void set_trace(Trace* trace);

  struct Impl;
  Impl& impl() const { return *impl_; }  ///< library internal
  explicit Group(std::unique_ptr<Impl> impl) noexcept;

 private:
  detail::Held<std::unique_ptr<Impl>, detail::kGroupObject> impl_;
};

}  // namespace switchyard
