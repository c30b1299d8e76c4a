// SPDX-License-Identifier: Apache-2.0
// Rendezvous: connects the ranks of a group and exchanges the few bytes of setup data. Not used on any hot path.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "bootstrap/host_map.hpp"

namespace switchyard::detail {

using Milliseconds = std::chrono::milliseconds;

/// This rank's interface to ranks on other hosts: the calls that it publishes to them, and the calls and aborts that they
/// report. Called from bootstrap threads; must not block.
class RemoteObserver {
 public:
  virtual ~RemoteObserver() = default;
  /// Returns the words of this rank's calls after number `known`, up to number `last`, except those no longer stored.
  virtual std::vector<uint64_t> calls_after(uint64_t known, uint64_t& last) const = 0;
  /// Reports that `rank` has made `last` calls; `words` are the words of the most recent ones.
  virtual void heard_calls(int rank, uint64_t last, std::span<const uint64_t> words) = 0;
  virtual void heard_abort(uint64_t word) = 0;
  virtual void heard_leave(int rank) = 0;
};

/// One rank's connections to the others. All ranks must make the collective calls in the same order. A rank whose call threw is
/// out of step and can only leave. Destruction also leaves. Use an object from one thread at a time. leave() never blocks.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  int rank() const noexcept { return rank_; }
  int world() const noexcept { return hosts_.world(); }
  /// Mapping of ranks to hosts; ranks on one host map each other's memory.
  const HostMap& host_map() const noexcept { return hosts_; }
  /// True if all ranks are threads in this process (memory is shared by pointer, not by file descriptor).
  virtual bool same_process() const noexcept = 0;

  /// Collective. `all` receives world() * `bytes` bytes. Throws RendezvousError naming the missing ranks at the deadline,
  /// PeerFailed as soon as a peer has died or left without contributing, or Error(mismatch) if the ranks disagree on `bytes`.
  virtual void all_gather(const void* mine, size_t bytes, void* all, Milliseconds deadline) = 0;
  /// all_gather() of one value; element r is that of rank r.
  template <class T>
  std::vector<T> gather(const T& mine, Milliseconds deadline) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(world()));
    all_gather(&mine, sizeof mine, all.data(), deadline);
    return all;
  }
  /// Collective, processes only: passes `fd` to every rank on this host. Element r is a descriptor from rank r (own rank: a
  /// duplicate); it is empty for ranks on other hosts.
  virtual std::vector<UniqueFd> exchange_fds(int fd, Milliseconds deadline) = 0;
  /// Collective, threads only: element r is the object passed by rank r.
  virtual std::vector<std::shared_ptr<void>> exchange_objects(std::shared_ptr<void> mine, Milliseconds deadline) = 0;
  /// Collective. Connects the ranks that exchange rows. Element r is a non-blocking stream socket to rank r, used only for
  /// rows; it is empty unless HostMap::exchange_rows holds for this rank and r. The end of such a stream does not indicate a
  /// death; deaths are reported by watch(). Each call creates new sockets.
  virtual std::vector<UniqueFd> connect_rails(Milliseconds deadline) = 0;
  /// Calls `on_death(rank)` at most once per peer, from a bootstrap thread, when that peer's process has ended or its
  /// connection has broken without an orderly leave (never for threads). Call at most once, after setup. The callback must not
  /// block and does not run after leave() has returned.
  virtual void watch(std::function<void(int)> on_death) = 0;
  /// Processes: `side` represents this rank to ranks on other hosts. It is called ten times a second and in every collective
  /// call, until leave() has returned. Call at most once, after setup, before watch().
  virtual void watch_remote(RemoteObserver*) {}
  /// Forwards an abort word to all ranks on other hosts that are processes. Any thread; never blocks.
  virtual void announce_abort(uint64_t) noexcept {}
  /// Time since the last bytes arrived from a process on another host; negative for other ranks. Any thread.
  virtual Milliseconds silence(int) const noexcept { return Milliseconds{-1}; }
  /// True if the process of a rank appears to be stalled: it is stopped, or its host has been silent for half a second. False
  /// for this rank. Any thread.
  virtual bool is_stalled(int) const noexcept { return false; }
  /// Returns the probable cause of a wait for `awaited`. A stalled rank cannot serve its peers: if `awaited` itself is running,
  /// the cause is the first stalled rank. Any thread.
  int cause_of_wait(int awaited) const noexcept {
    if (awaited < 0 || is_stalled(awaited)) return awaited;
    for (int r = 0; r < world(); ++r)
      if (is_stalled(r)) return r;
    return awaited;
  }
  /// Sets how long a rank on another host may be silent before it counts as dead. Any thread.
  virtual void set_silence(Milliseconds) noexcept {}
  /// `asked` is called every few milliseconds while a collective call waits. If it returns true, the call ends as it would at
  /// its deadline, but data that peers have already sent is first given time to arrive. Call at most once, after setup. Must
  /// not block.
  void set_interrupt(std::function<bool()> asked) { interrupt_ = std::move(asked); }
  /// Local, idempotent: announces an orderly leave to the peers and stops watching them.
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

/// Identity of a joining process, and the rendezvous address.
struct JoinSpec {
  int rank = -1;
  int world = 0;
  std::string store;  ///< "unix:/path" or "tcp://host:port"; rank 0 listens there
  std::string token;  ///< job secret; a connection with a different token is refused and ignored
  /// If not empty, rank 0 ensures that this folder exists and is private before it listens there.
  std::string private_folder = {};
  std::string host = {};  ///< user-specified host of this rank, or ""
};

/// Reads SWITCHYARD_*, torchrun, Open MPI or Slurm variables through `getenv_fn`. Throws Error(invalid_argument). If no
/// variable is set, the error text lists the expected ones; if one is malformed, it gives the variable and its value.
JoinSpec join_spec_from_environment(const std::function<const char*(const char*)>& getenv_fn);

/// True if `folder` is a folder (not a link) that this user owns and no one else can access.
bool is_private_folder(const std::string& folder);

/// Processes. Blocks until all ranks have joined.
std::unique_ptr<Bootstrap> connect_processes(const JoinSpec& spec, Milliseconds deadline);
/// Threads of one process: element r belongs to rank r. `host` (place_of_rank) may assign them to named hosts.
std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(int world, const std::string& host = {});
/// 128 random bits in hexadecimal, used as a job token.
std::string random_token();

}  // namespace switchyard::detail
