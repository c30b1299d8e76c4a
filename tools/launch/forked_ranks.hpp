// SPDX-License-Identifier: Apache-2.0
// Ranks as forked processes: starts them, exchanges messages with them, kills them, and returns the outcome of each.
//
//   ForkedRanks ranks(3, [&](ChildRank& me) {
//     auto group = Group::connect(me.rank(), me.world(), store, token);
//     me.say("joined");
//     me.await("go");                                  // a message that the parent sends
//     me.require(group.size() == 3, "size");           // throws; so may anything else
//   });
//   ranks.wait_until_said(2, "joined", 20s);
//   ranks.kill(2);
//   ranks.send_to_all("go");
//   const auto ends = ranks.finish(30s);               // kills what still runs at the deadline
//
// Fork before the parent creates any threads. A child is killed if the thread that started it ends.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace switchyard::launch {

using Milliseconds = std::chrono::milliseconds;
inline constexpr Milliseconds kNoDeadline = std::chrono::hours(24 * 365);

/// Connection of a rank's body to the parent. Messages are any bytes and arrive in order.
class ChildRank {
 public:
  ChildRank(int rank, int world, int parent) : rank_(rank), world_(world), parent_(parent) {}
  int rank() const { return rank_; }
  int world() const { return world_; }

  /// Sends a message to the parent. Ends the process if the parent has ended; so does await.
  void say(const std::string& message) const;
  /// Waits until the parent has sent exactly this message. \throws std::runtime_error on any other message
  void await(const std::string& expected) const;
  /// \throws std::runtime_error that names `what` if the condition is false
  static void require(bool condition, const std::string& what);

 private:
  int rank_, world_, parent_;
};

/// Outcome of a rank.
struct RankEnd {
  int rank = -1;
  int exit_code = -1;     ///< with `returned` 0: the body returned, 1: it threw; -1: ended by a signal
  int signal = 0;         ///< signal that ended it, or 0
  bool overdue = false;   ///< was still running at the deadline and was killed
  bool returned = false;  ///< the body returned or threw; false if it ended the process
  std::string error;      ///< what() of the exception that left the body
  std::vector<std::string> said;
  bool ok() const { return exit_code == 0 && returned && !overdue; }
};
std::ostream& operator<<(std::ostream& out, const RankEnd& end);

class ForkedRanks {
 public:
  using Body = std::function<void(ChildRank&)>;
  using OnMessage = std::function<void(int rank, std::string&& message)>;

  /// \throws std::system_error if a process cannot be started; those already started are killed.
  ForkedRanks(int world, const Body& body);
  ~ForkedRanks();
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  int world() const { return static_cast<int>(children_.size()); }
  pid_t pid(int rank) const { return at(rank).pid; }
  void kill(int rank, int signal = SIGKILL) { ::kill(at(rank).pid, signal); }

  /// Messages to ranks that have ended are dropped.
  void send(int rank, const std::string& message);
  void send_to_all(const std::string& message);

  /// Returns false if the rank ended or the deadline passed before that.
  bool wait_until_said(int rank, const std::string& message, Milliseconds deadline);
  /// Like wait_until_said, but for any message with this prefix.
  bool wait_until_said_first(int rank, const std::string& beginning, Milliseconds deadline);

  /// Returns true once the rank has ended, and false if the deadline passes first.
  bool wait_until_ended(int rank, Milliseconds deadline);

  /// Waits until all ranks have ended and kills those still running at the deadline. Element r of the result belongs to rank r.
  /// Messages not yet read are passed to `on_message` when they arrive or, without it, kept in RankEnd::said.
  std::vector<RankEnd> finish(Milliseconds deadline, const OnMessage& on_message = {});

 private:
  using Clock = std::chrono::steady_clock;
  struct Child {
    pid_t pid = -1;
    int socket = -1;
    std::string unread;  ///< the beginning of a message
    bool ended = true;   ///< false while the process runs
    RankEnd end;
  };

  Child& at(int rank) { return children_.at(static_cast<size_t>(rank)); }
  const Child& at(int rank) const { return children_.at(static_cast<size_t>(rank)); }
  bool any_running() const;
  void close_sockets();
  void start(int rank, const Body& body);
  [[noreturn]] void be_child(int rank, int socket, const Body& body);
  bool wait_until_said(int rank, Milliseconds deadline, const std::function<bool(const std::string&)>& matches);
  void pump(Clock::time_point end);
  bool read_messages(Child& child);
  void reap(Child& child, int flags);

  std::vector<Child> children_;
  OnMessage on_message_;
};

/// Runs `body` on every rank and returns the result of each.
inline std::vector<RankEnd> run_ranks(int world, const ForkedRanks::Body& body, Milliseconds deadline = Milliseconds{60000},
                                      const ForkedRanks::OnMessage& on_message = {}) {
  return ForkedRanks(world, body).finish(deadline, on_message);
}

}  // namespace switchyard::launch
