// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/net/wire.hpp"

namespace switchyard::detail {

/// One rank's view of the ranks on other hosts: outgoing frames, the times of their last messages, and the pulse. Thread-safe,
/// except where noted.
class RemoteRanks {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr Milliseconds kBeat{100};

  explicit RemoteRanks(int world) : peers_(static_cast<size_t>(world)) {}

  /// Call before all other members. The caller keeps ownership of the socket.
  void add(int rank, int fd);
  bool any() const noexcept { return any_; }
  bool has(int rank) const noexcept { return peers_[static_cast<size_t>(rank)] != nullptr; }

  /// Sends a frame, preceded by the pending report of this rank's calls. Sends only as much as the socket accepts now; flush()
  /// sends the rest.
  void post(int rank, ByteSpan frame);
  /// True if no data is left to send, or the connection is broken.
  bool flush(int rank) noexcept;
  void post_to_all(FrameKind kind, ByteSpan payload) noexcept;
  /// Stops sending. Data that is already in the sockets arrives, unless a socket is closed while it has unread input.
  void close() noexcept;

  /// Sets the observer and immediately delivers any earlier frames to it, in order.
  void set_side(RemoteObserver* side);
  void set_limit(Milliseconds limit) noexcept { limit_ms_.store(limit.count()); }
  /// Time since the last bytes arrived from `rank`.
  Milliseconds silence(int rank) const noexcept;

  // Receiving thread.
  /// Records that bytes arrived from `rank`.
  void heard(int rank) noexcept { peers_[static_cast<size_t>(rank)]->heard.store(Clock::now().time_since_epoch().count()); }
  /// Handles a frame of kind pulse or aborted. Returns false if it is malformed.
  bool take(int rank, const Frame& frame);
  void announce_left(int rank);
  /// Sends due frames. Returns the ranks that have been silent for longer than the limit.
  std::vector<int> beat();
  Milliseconds until_beat() const noexcept;

 private:
  struct Peer {
    std::mutex mutex;
    int fd = -1;                   // -1: broken, or left
    Bytes rest;                    // frames that the socket did not accept
    uint64_t announced_calls = 0;  // number of the last call announced to it
    std::atomic<Clock::rep> heard{Clock::now().time_since_epoch().count()};
  };
  struct EarlyFrame {
    int rank;
    Frame frame;
  };
  void post_locked(Peer& peer, ByteSpan frame);
  static bool flush_locked(Peer& peer) noexcept;
  void pulse_locked(Peer& peer);
  bool deliver(int rank, const Frame& frame);

  std::vector<std::unique_ptr<Peer>> peers_;
  bool any_ = false;
  std::atomic<Milliseconds::rep> limit_ms_{Milliseconds::max().count()};
  std::atomic<RemoteObserver*> side_{nullptr};
  std::mutex delivery_mutex_;      // serializes deliveries in order of arrival
  std::vector<EarlyFrame> early_;  // frames that arrived before a side was set
  // Receiving thread.
  Clock::time_point last_beat_ = Clock::now();
};

}  // namespace switchyard::detail
