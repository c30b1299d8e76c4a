// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/forked.hpp"
#include "bootstrap/bootstrap.hpp"
#include "bootstrap/mesh/remote_ranks.hpp"
#include "bootstrap/net/connection.hpp"
#include "bootstrap/deadline.hpp"
#include "bootstrap/store/store.hpp"

namespace switchyard::detail {

/// State of a process after the rendezvous.
struct Formed {
  Member me;
  HostMap hosts;
  std::vector<std::optional<Connection>> links;                   ///< by rank, empty for this one
  std::vector<std::optional<SocketAddress>> peer_addresses = {};  ///< by rank, for ranks on other hosts
  SocketAddress own_address = {};  ///< address at which this rank accepts connections of other hosts
};

/// Full mesh of connections from one process. A dedicated thread receives all frames, so a death is noticed even while the
/// caller computes.
class ProcessBootstrap final : public Bootstrap {
 public:
  explicit ProcessBootstrap(Formed formed);
  ~ProcessBootstrap() override;

  bool same_process() const noexcept override { return false; }
  void all_gather(const void* mine, size_t bytes, void* all, Milliseconds deadline) override;
  std::vector<UniqueFd> exchange_fds(int fd, Milliseconds deadline) override;
  std::vector<std::shared_ptr<void>> exchange_objects(std::shared_ptr<void> mine, Milliseconds deadline) override;
  std::vector<UniqueFd> connect_rails(Milliseconds deadline) override;
  void watch(std::function<void(int)> on_death) override;
  void watch_remote(RemoteObserver* side) override;
  void announce_abort(uint64_t word) noexcept override;
  Milliseconds silence(int rank) const noexcept override { return remote_.silence(rank); }
  bool is_stalled(int rank) const noexcept override;
  void set_silence(Milliseconds limit) noexcept override { remote_.set_limit(limit); }
  void leave() noexcept override;

 private:
  enum class State { present, left, dead };
  struct Arrival {
    Frame frame;
    UniqueFd fd;  // frames of kind descriptor
  };
  struct Peer {
    std::optional<Connection> connection;  // none: this rank itself
    UniqueFd process;  // pidfd: readable once the process has ended, even if a child still holds its sockets
    int pid = 0;       // of a rank on this host, if visible
    bool cut = false;  // this side sent part of a frame and gave up; used only by the caller's thread
    // Receiving thread only.
    std::deque<UniqueFd> passed;  // descriptors whose frames are not complete yet
    uint64_t received = 0;        // bytes at the last count
    bool closed = false;
    // Below: guarded by mutex_.
    State state = State::present;
    bool reported = false;
    std::deque<Arrival> inbox;
  };
  /// Result of polling a socket.
  struct News {
    std::vector<Arrival> arrivals;
    std::vector<Frame> remote_frames;  // from ranks on other hosts
    bool left = false;
    bool closed = false;
  };

  void receive_all() noexcept;
  bool wait_for_news();
  void look_at_all();
  void look_at(Peer& peer, News& news) const;
  void give_up_on(const std::vector<int>& silent);
  void report_ends();
  void wake() const noexcept;

  /// True for the ranks that take part in a collective step: descriptors are sent only to ranks on this host.
  bool takes_part(int r, FrameKind kind) const {
    return r != rank() && (kind != FrameKind::descriptor || host_map().together(r, rank()));
  }
  void send_to_all(FrameKind kind, ByteSpan payload, int pass, const Deadline& deadline);
  std::vector<Arrival> collect(FrameKind kind, const char* operation, const Deadline& deadline);
  /// Returns a dead rank if there is one, else a departed rank, else -1.
  int find_lost_rank(bool& left);
  /// " (its host has been silent for 1034 ms)", or an empty string.
  std::string describe_silence(int rank) const;
  /// Throws Error(invalid_argument) if this rank has left, or in a forked child.
  void check_member(const char* operation) const;
  Arrival take_checked(int rank, FrameKind kind, const char* operation);

  const HomeProcess home_;
  const Member me_;
  const std::vector<std::optional<SocketAddress>> peer_addresses_;
  const SocketAddress own_address_;
  std::vector<Peer> peers_;
  RemoteRanks remote_;
  UniqueFd wake_;  // eventfd
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::function<void(int)> on_death_;
  uint64_t sequence_ = 0;
  bool left_ = false;
  std::thread receiver_;
};

}  // namespace switchyard::detail
