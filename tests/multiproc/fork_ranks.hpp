// SPDX-License-Identifier: Apache-2.0
// Ranks as forked processes, for tests: start them, communicate with them, kill them, and get the outcome of each.
//
//   ForkedRanks ranks(3, [&](ChildRank& me) {
//     auto group = Group::connect(me.rank(), me.world(), store, token);
//     me.say("joined");
//     me.await("go");                                  // a line that the parent sends
//     me.require(group.size() == 3, "size");           // throws; so may anything else
//   });
//   ranks.wait_until_said(2, "joined", 20s);
//   ranks.kill(2);
//   ranks.send_line_to_all("go");
//   const auto ends = ranks.finish(30s);               // kills what still runs at the deadline
//   EXPECT_TRUE(ends[0].ok()) << ends[0];
//
// Fork before the parent creates any threads. GoogleTest assertions inside a child are not reported: use me.require or throw.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace switchyard::test {

using Milliseconds = std::chrono::milliseconds;

/// The parent, as seen by a rank's body.
class ChildRank {
 public:
  ChildRank(int rank, int world, int to_parent, int from_parent)
      : rank_(rank), world_(world), to_parent_(to_parent), from_parent_(from_parent) {}
  int rank() const { return rank_; }
  int world() const { return world_; }

  /// Sends a line to the parent.
  void say(std::string line) const {
    line += '\n';
    for (size_t done = 0; done < line.size();) {
      const ssize_t n = ::write(to_parent_, line.data() + done, line.size() - done);
      if (n < 0 && errno != EINTR) ::_exit(98);  // the parent has ended
      if (n > 0) done += static_cast<size_t>(n);
    }
  }
  /// Waits until the parent has sent exactly this line; lines arrive in order.
  void await(const std::string& expected) const {
    std::string line;
    for (char c = 0;;) {
      const ssize_t n = ::read(from_parent_, &c, 1);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) ::_exit(98);
      if (c == '\n') break;
      line += c;
    }
    if (line != expected) throw std::runtime_error("told '" + line + "', expected '" + expected + "'");
  }
  static void require(bool condition, const std::string& what) {
    if (!condition) throw std::runtime_error("not true: " + what);
  }

 private:
  int rank_, world_, to_parent_, from_parent_;
};

/// Outcome of a rank.
struct RankEnd {
  int rank = -1;
  int exit_code = -1;    ///< 0: the body returned; 1: it threw; -1: ended by a signal
  int signal = 0;        ///< signal that ended it, or 0
  bool overdue = false;  ///< was still running at the deadline and was killed
  std::string error;     ///< what() of the exception that left the body
  std::vector<std::string> said;
  bool ok() const { return exit_code == 0 && !overdue; }
};
inline std::ostream& operator<<(std::ostream& out, const RankEnd& end) {
  out << "rank " << end.rank << ": ";
  if (end.overdue) return out << "did not end in time";
  if (end.signal != 0) return out << "ended by signal " << end.signal << " (" << ::strsignal(end.signal) << ")";
  return out << "exit code " << end.exit_code << (end.error.empty() ? "" : ": ") << end.error;
}

class ForkedRanks {
 public:
  using Body = std::function<void(ChildRank&)>;
  using Clock = std::chrono::steady_clock;

  ForkedRanks(int world, const Body& body) : children_(static_cast<size_t>(world)) {
    std::fflush(nullptr);
    for (int r = 0; r < world; ++r) start(r, body);
  }
  ~ForkedRanks() {
    if (!finished_) finish(Milliseconds{0});
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  int world() const { return static_cast<int>(children_.size()); }
  pid_t pid(int rank) const { return at(rank).pid; }
  void kill(int rank, int signal = SIGKILL) { ::kill(at(rank).pid, signal); }

  void send_line(int rank, std::string line) {
    line += '\n';
    if (::write(at(rank).to_child.get(), line.data(), line.size()) < 0 && errno != EPIPE) std::perror("ForkedRanks::tell");
  }
  void send_line_to_all(const std::string& line) {
    for (int r = 0; r < world(); ++r) send_line(r, line);
  }

  /// Returns false if the rank ended or the deadline passed before that.
  bool wait_until_said(int rank, const std::string& line, Milliseconds deadline) {
    return wait_until_said(rank, deadline, [&](const std::string& said) { return said == line; });
  }
  /// Like wait_until_said, but for any line with this prefix.
  bool wait_until_said_first(int rank, const std::string& beginning, Milliseconds deadline) {
    return wait_until_said(rank, deadline, [&](const std::string& said) { return said.starts_with(beginning); });
  }
  template <class Matches>
  bool wait_until_said(int rank, Milliseconds deadline, const Matches& matches) {
    const auto end = Clock::now() + deadline;
    for (;;) {
      const Child& child = at(rank);
      for (const std::string& said : child.end.said) {
        if (matches(said)) return true;
      }
      if (child.ended || Clock::now() >= end) return false;
      pump(end);
    }
  }

  /// Returns false if the deadline passed before that.
  bool wait_until_ended(int rank, Milliseconds deadline) {
    const auto end = Clock::now() + deadline;
    while (!at(rank).ended && Clock::now() < end) pump(end);
    return at(rank).ended;
  }

  /// Waits until all ranks have ended and kills those still running at the deadline. Element r of the result belongs to rank r.
  std::vector<RankEnd> finish(Milliseconds deadline) {
    const auto end = Clock::now() + deadline;
    while (any_running() && Clock::now() < end) pump(end);
    std::vector<RankEnd> ends;
    for (Child& child : children_) {
      if (!child.ended) {
        child.end.overdue = true;
        ::kill(child.pid, SIGKILL);
        reap(child, 0);
      }
      ends.push_back(child.end);
    }
    finished_ = true;
    return ends;
  }

 private:
  struct Child {
    pid_t pid = -1;
    detail::UniqueFd to_child, from_child;
    std::string partial;
    bool ended = false;
    RankEnd end;
  };

  Child& at(int rank) { return children_.at(static_cast<size_t>(rank)); }
  const Child& at(int rank) const { return children_.at(static_cast<size_t>(rank)); }

  bool any_running() const {
    return std::any_of(children_.begin(), children_.end(), [](const Child& child) { return !child.ended; });
  }

  /// Records a child's end. The pipe may stay open longer in a process forked by the child.
  static void reap(Child& child, int flags) {
    int status = 0;
    pid_t pid = 0;
    do {
      pid = ::waitpid(child.pid, &status, flags);
    } while (pid < 0 && errno == EINTR);
    if (pid != child.pid) return;
    child.ended = true;
    if (WIFEXITED(status)) child.end.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) child.end.signal = WTERMSIG(status);
    while (read_lines(child)) continue;
  }

  void start(int rank, const Body& body) {
    int up[2], down[2];
    if (::pipe2(up, O_CLOEXEC) != 0 || ::pipe2(down, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(98);
      ::close(up[0]);
      ::close(down[1]);
      for (Child& earlier : children_) earlier = Child();  // closes their pipes
      run(ChildRank(rank, world(), up[1], down[0]), body);
    }
    Child& child = at(rank);
    child.pid = pid;
    child.end.rank = rank;
    child.from_child.reset(up[0]);
    child.to_child.reset(down[1]);
    ::close(up[1]);
    ::close(down[0]);
    ::fcntl(up[0], F_SETFL, O_NONBLOCK);
    std::signal(SIGPIPE, SIG_IGN);  // for a child that ended early
  }

  [[noreturn]] static void run(ChildRank me, const Body& body) {
    std::signal(SIGPIPE, SIG_DFL);  // the library must not raise SIGPIPE
    int code = 0;
    try {
      body(me);
    } catch (const std::exception& error) {
      std::string text = error.what();
      for (char& c : text) c = c == '\n' ? ' ' : c;
      me.say("!" + text);
      code = 1;
    }
#if defined(__SANITIZE_ADDRESS__)
    if (__lsan_do_recoverable_leak_check() != 0) code = 97;
#endif
    std::fflush(nullptr);
    ::_exit(code);
  }

  /// Reads the children's output and records ended children; waits for at most 50 ms.
  void pump(Clock::time_point end) {
    std::vector<pollfd> polls;
    for (const Child& child : children_) {
      if (!child.ended) polls.push_back({child.from_child.get(), POLLIN, 0});
    }
    const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
    ::poll(polls.data(), static_cast<nfds_t>(polls.size()),
           static_cast<int>(std::clamp<Milliseconds::rep>(left.count(), 0, 50)));
    bool quiet = true;
    for (Child& child : children_) {
      if (child.ended) continue;
      while (read_lines(child)) quiet = false;
      reap(child, WNOHANG);
    }
    if (quiet) ::usleep(1000);  // a pipe at its end is always ready, but its process ends a moment later
  }

  /// Returns false if there is nothing to read at the moment.
  static bool read_lines(Child& child) {
    char data[4096];
    const ssize_t n = ::read(child.from_child.get(), data, sizeof data);
    if (n <= 0) return n < 0 && errno == EINTR;
    for (ssize_t i = 0; i < n; ++i) {
      if (data[i] != '\n') {
        child.partial += data[i];
        continue;
      }
      if (child.partial.starts_with("!")) {
        child.end.error = child.partial.substr(1);
      } else {
        child.end.said.push_back(child.partial);
      }
      child.partial.clear();
    }
    return true;
  }

  std::vector<Child> children_;
  bool finished_ = false;
};

/// Runs `body` on every rank and returns the result of each.
inline std::vector<RankEnd> run_ranks(int world, const ForkedRanks::Body& body, Milliseconds deadline = Milliseconds{60000}) {
  return ForkedRanks(world, body).finish(deadline);
}

}  // namespace switchyard::test
