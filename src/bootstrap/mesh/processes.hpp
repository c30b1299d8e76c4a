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
#include "bootstrap/net/connection.hpp"
#include "bootstrap/deadline.hpp"

namespace switchyard::detail {

/// The full mesh of one process. One thread of its own receives everything, so that a death is noticed while the caller
/// computes.
class ProcessBootstrap final : public Bootstrap {
 public:
  /// `links` by rank, empty for this one.
  ProcessBootstrap(int rank, int world, std::vector<std::optional<Connection>> links);
  ~ProcessBootstrap() override;

  bool same_process() const noexcept override { return false; }
  void all_gather(const void* mine, size_t bytes, void* all, Milliseconds deadline) override;
  std::vector<UniqueFd> exchange_fds(int fd, Milliseconds deadline) override;
  std::vector<std::shared_ptr<void>> exchange_objects(std::shared_ptr<void> mine, Milliseconds deadline) override;
  std::vector<UniqueFd> connect_rails(Milliseconds deadline) override;
  void watch(std::function<void(int)> on_death) override;
  void leave() noexcept override;

 private:
  enum class State { present, left, dead };
  struct Arrival {
    Frame frame;
    UniqueFd fd;  // frames of kind descriptor
  };
  struct Peer {
    std::optional<Connection> connection;  // none: this rank itself
    UniqueFd process;             // pidfd: readable once the process has ended, also if a child still holds its sockets
    bool cut = false;             // this side sent a part of a frame and gave up; caller's thread only
    std::deque<UniqueFd> passed;  // descriptors whose frames are not complete yet; receiving thread only
    bool closed = false;          // receiving thread only
    // Below: guarded by mutex_.
    State state = State::present;
    bool reported = false;
    std::deque<Arrival> inbox;
  };
  /// What looking at a socket brought.
  struct News {
    std::vector<Arrival> arrivals;
    bool left = false;
    bool closed = false;
  };

  void receive_all() noexcept;
  bool wait_for_news();
  void look_at_all();
  void look_at(Peer& peer, News& news) const;
  void report_deaths();
  void wake() const noexcept;

  void send_to_all(FrameKind kind, ByteSpan payload, int pass, const Deadline& deadline);
  std::vector<Arrival> collect(FrameKind kind, const char* operation, const Deadline& deadline);
  /// Throws Error(invalid_argument) if this rank has left, or in a forked child.
  void check_member(const char* operation) const;
  Arrival take_checked(int rank, FrameKind kind, const char* operation);

  const HomeProcess home_;
  std::vector<Peer> peers_;
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
