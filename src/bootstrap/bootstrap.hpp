// SPDX-License-Identifier: Apache-2.0
// Rendezvous: brings the ranks of a group together and carries the few bytes that set it up. Never on a hot path.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "bootstrap/host_map.hpp"

namespace switchyard::detail {

using Milliseconds = std::chrono::milliseconds;

/// What ranks of other hosts are told of this one, and what they tell of themselves. Called by threads of the bootstrap; must
/// not block.
class FarSide {
 public:
  virtual ~FarSide() = default;
  /// Words of this rank's calls after number `known`, as far as they are kept, up to number `last`.
  virtual std::vector<uint64_t> calls_after(uint64_t known, uint64_t& last) const = 0;
  /// `rank` has made `last` calls; `words` are those of the last of them.
  virtual void heard_calls(int rank, uint64_t last, std::span<const uint64_t> words) = 0;
  virtual void heard_abort(uint64_t word) = 0;
  virtual void heard_leave(int rank) = 0;
};

/// One rank's link to the others. All collective calls must be made in the same order by all ranks. A rank whose call threw is
/// out of step: it can only leave. Destruction leaves too. One thread at a time per object; leave() never blocks.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  int rank() const noexcept { return rank_; }
  int world() const noexcept { return hosts_.world(); }
  /// Which ranks map each other's memory.
  const HostMap& host_map() const noexcept { return hosts_; }
  /// True if all ranks are threads of this process (memory is shared by pointer, not by file descriptor).
  virtual bool same_process() const noexcept = 0;

  /// Collective. `all` receives world() * bytes. Throws RendezvousError with the missing ranks at the deadline, PeerFailed as
  /// soon as a peer that has not contributed is gone, or Error(mismatch) if the ranks do not agree on `bytes`.
  virtual void all_gather(const void* mine, size_t bytes, void* all, Milliseconds deadline) = 0;
  /// Collective, processes only: passes `fd` to every rank of this host; element r is a descriptor for rank r's (own: a
  /// duplicate), none for ranks of other hosts.
  virtual std::vector<UniqueFd> exchange_fds(int fd, Milliseconds deadline) = 0;
  /// Collective, threads only: element r is what rank r passed.
  virtual std::vector<std::shared_ptr<void>> exchange_objects(std::shared_ptr<void> mine, Milliseconds deadline) = 0;
  /// Collective. Connects the ranks between which rows go: element r is a stream socket to rank r, without blocking, for rows
  /// only, if HostMap::exchange_rows holds for this rank and r, else none. Its end is no news of a death: watch() tells. Each
  /// call makes new ones.
  virtual std::vector<UniqueFd> connect_rails(Milliseconds deadline) = 0;
  /// Calls `on_death(rank)` at most once per peer, from a thread of the bootstrap, when that peer's process has ended or its
  /// connection broke outside an orderly leave (threads: never). Call at most once, after setup. The callback must not block,
  /// and runs no more once leave() has returned.
  virtual void watch(std::function<void(int)> on_death) = 0;
  /// Processes: `side` speaks for this rank to those of other hosts until leave() has returned, ten times a second and with
  /// every collective call. Call at most once, after setup, before watch().
  virtual void watch_far(FarSide*) {}
  /// Passes an abort word on to all ranks of other hosts that are processes. Any thread; never blocks.
  virtual void tell_abort(uint64_t) noexcept {}
  /// How long nothing has come from a rank of another host that is a process; negative for other ranks. Any thread.
  virtual Milliseconds silence(int) const noexcept { return Milliseconds{-1}; }
  /// Whether the process of a rank is seen to stand still: it is stopped, or nothing has come from its host for half a second.
  /// False for this rank. Any thread.
  virtual bool stands_still(int) const noexcept { return false; }
  /// For whom a wait for `awaited` is in the end, as far as can be seen. A rank that stands still in a call keeps others from
  /// what they owe their peers: where `awaited` itself runs, it is the first rank that does not. Any thread.
  int cause_of_wait(int awaited) const noexcept {
    if (awaited < 0 || stands_still(awaited)) return awaited;
    for (int r = 0; r < world(); ++r)
      if (stands_still(r)) return r;
    return awaited;
  }
  /// A rank of another host that is silent for longer counts as dead from now on. Any thread.
  virtual void set_silence(Milliseconds) noexcept {}
  /// `asked` is called every few milliseconds while a collective call waits; true ends the call as its deadline does, but not
  /// before what peers sent until then has had time to arrive. Call at most once, after setup. Must not block.
  void set_interrupt(std::function<bool()> asked) { interrupt_ = std::move(asked); }
  /// Local, idempotent: tells the peers that this rank leaves in order and stops watching them.
  virtual void leave() noexcept = 0;

  void barrier(Milliseconds deadline) {
    char byte = 0;
    std::vector<char> all(static_cast<size_t>(world()));
    all_gather(&byte, 1, all.data(), deadline);
  }

 protected:
  Bootstrap(int rank, HostMap hosts) : hosts_(std::move(hosts)), rank_(rank) {}
  const std::function<bool()>& interrupt() const noexcept { return interrupt_; }

 private:
  std::function<bool()> interrupt_;
  HostMap hosts_;
  int rank_;
};

/// Where and as whom a process joins.
struct JoinSpec {
  int rank = -1;
  int world = 0;
  std::string store;  ///< "unix:/path" or "tcp://host:port"; rank 0 listens there
  std::string token;  ///< job secret; a connection with another token is refused and does not count
  /// Not empty: rank 0 makes sure that this folder is there and that nobody else can use it before it listens in it.
  std::string private_folder = {};
  std::string host = {};  ///< where this rank says it is, or ""
};

/// Reads SWITCHYARD_*, torchrun, Open MPI or Slurm variables through `getenv_fn`. Throws Error(invalid_argument) that lists
/// what was looked for if nothing is set, and names the variable and its value if one is malformed.
JoinSpec join_spec_from_environment(const std::function<const char*(const char*)>& getenv_fn);

/// True if `folder` is one (no link) that belongs to this user and is closed to all others.
bool is_private_folder(const std::string& folder);

/// Processes. Blocks until all ranks have come.
std::unique_ptr<Bootstrap> connect_processes(const JoinSpec& spec, Milliseconds deadline);
/// Threads of one process: element r belongs to rank r. `host` (place_of_rank) may divide them into hosts by name.
std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(int world, const std::string& host = {});
/// 128 random bits in hexadecimal, for a job token.
std::string random_token();

}  // namespace switchyard::detail
