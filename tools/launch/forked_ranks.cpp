// SPDX-License-Identifier: Apache-2.0
#include "launch/forked_ranks.hpp"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <ostream>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace switchyard::launch {
namespace {

constexpr int kOrphan = 98;  ///< exit code of a child whose parent has ended

// A message is its length in 4 bytes and its content. The first byte that a child sends tells what it is.
constexpr char kSaid = '.', kReturned = 'R', kThrew = 'E';

/// Returns false if the other side has ended.
bool send_message(int socket, const std::string& content) {
  const auto length = static_cast<uint32_t>(content.size());
  const std::string bytes = std::string(reinterpret_cast<const char*>(&length), sizeof length) + content;
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::send(socket, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) done += static_cast<size_t>(n);
  }
  return true;
}

/// Removes a complete message from the front of `unread`, if there is one.
bool take_message(std::string& unread, std::string& content) {
  uint32_t length = 0;
  if (unread.size() < sizeof length) return false;
  std::memcpy(&length, unread.data(), sizeof length);
  if (unread.size() - sizeof length < length) return false;
  content = unread.substr(sizeof length, length);
  unread.erase(0, sizeof length + length);
  return true;
}

}  // namespace

void ChildRank::say(const std::string& message) const {
  if (!send_message(parent_, kSaid + message)) ::_exit(kOrphan);
}

void ChildRank::await(const std::string& expected) const {
  std::string unread, content;
  while (!take_message(unread, content)) {  // byte by byte: what follows belongs to the next call
    char byte = 0;
    const ssize_t n = ::recv(parent_, &byte, 1, 0);
    if (n == 0 || (n < 0 && errno != EINTR)) ::_exit(kOrphan);
    if (n > 0) unread += byte;
  }
  if (content != expected) throw std::runtime_error("received '" + content + "', expected '" + expected + "'");
}

void ChildRank::require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not true: " + what);
}

std::ostream& operator<<(std::ostream& out, const RankEnd& end) {
  out << "rank " << end.rank << ": ";
  if (end.overdue) return out << "did not end in time";
  if (end.signal != 0) return out << "ended by signal " << end.signal << " (" << ::strsignal(end.signal) << ")";
  if (!end.returned) out << "did not return, ";
  return out << "exit code " << end.exit_code << (end.error.empty() ? "" : ": ") << end.error;
}

ForkedRanks::ForkedRanks(int world, const Body& body) : children_(static_cast<size_t>(world)) {
  std::fflush(nullptr);
  try {
    for (int r = 0; r < world; ++r) start(r, body);
  } catch (const std::system_error&) {
    finish(Milliseconds{0});
    close_sockets();
    throw;
  }
}

ForkedRanks::~ForkedRanks() {
  finish(Milliseconds{0});
  close_sockets();
}

void ForkedRanks::close_sockets() {
  for (Child& child : children_)
    if (child.socket >= 0) ::close(std::exchange(child.socket, -1));
}

void ForkedRanks::start(int rank, const Body& body) {
  const auto cannot_start = [&](const char* call) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot start a process for rank " + std::to_string(rank) + ": " + call);
  };
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) cannot_start("socketpair");
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(kOrphan);
    ::close(ends[0]);
    close_sockets();
    be_child(rank, ends[1], body);
  }
  ::close(ends[1]);
  Child& child = at(rank);
  child.socket = ends[0];
  if (pid < 0) cannot_start("fork");
  child.pid = pid;
  child.end.rank = rank;
  child.ended = false;
}

void ForkedRanks::be_child(int rank, int socket, const Body& body) {
  std::string last(1, kReturned);
  int code = 0;
  try {
    ChildRank me(rank, world(), socket);
    body(me);
  } catch (const std::exception& error) {
    last = kThrew + std::string(error.what());
    code = 1;
  }
  send_message(socket, last);
  std::fflush(nullptr);
  ::_exit(code);
}

void ForkedRanks::send(int rank, const std::string& message) { send_message(at(rank).socket, message); }

void ForkedRanks::send_to_all(const std::string& message) {
  for (int r = 0; r < world(); ++r) send(r, message);
}

bool ForkedRanks::wait_until_said(int rank, const std::string& message, Milliseconds deadline) {
  return wait_until_said(rank, deadline, [&](const std::string& said) { return said == message; });
}

bool ForkedRanks::wait_until_said_first(int rank, const std::string& beginning, Milliseconds deadline) {
  return wait_until_said(rank, deadline, [&](const std::string& said) { return said.starts_with(beginning); });
}

bool ForkedRanks::wait_until_said(int rank, Milliseconds deadline, const std::function<bool(const std::string&)>& matches) {
  const auto end = Clock::now() + deadline;
  const Child& child = at(rank);
  for (;;) {
    if (std::any_of(child.end.said.begin(), child.end.said.end(), matches)) return true;
    if (child.ended || Clock::now() >= end) return false;
    pump(end);
  }
}

bool ForkedRanks::wait_until_ended(int rank, Milliseconds deadline) {
  const auto end = Clock::now() + deadline;
  while (!at(rank).ended && Clock::now() < end) pump(end);
  return at(rank).ended;
}

std::vector<RankEnd> ForkedRanks::finish(Milliseconds deadline, const OnMessage& on_message) {
  on_message_ = on_message;
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
  return ends;
}

bool ForkedRanks::any_running() const {
  return std::any_of(children_.begin(), children_.end(), [](const Child& child) { return !child.ended; });
}

/// Reads the children's messages and records ended children; waits for at most 50 ms.
void ForkedRanks::pump(Clock::time_point end) {
  std::vector<pollfd> polls;
  for (const Child& child : children_)
    if (!child.ended) polls.push_back({child.socket, POLLIN, 0});
  const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
  ::poll(polls.data(), static_cast<nfds_t>(polls.size()), static_cast<int>(std::clamp<Milliseconds::rep>(left.count(), 0, 50)));
  bool quiet = true;
  for (Child& child : children_) {
    if (child.ended) continue;
    while (read_messages(child)) quiet = false;
    reap(child, WNOHANG);
  }
  if (quiet) ::usleep(1000);  // a socket at its end is always ready, but its process ends a moment later
}

/// Returns false if there is nothing to read at the moment.
bool ForkedRanks::read_messages(Child& child) {
  char data[1 << 16];
  const ssize_t n = ::recv(child.socket, data, sizeof data, MSG_DONTWAIT);
  if (n <= 0) return n < 0 && errno == EINTR;
  child.unread.append(data, static_cast<size_t>(n));
  for (std::string content; take_message(child.unread, content);) {
    const char kind = content.front();
    content.erase(0, 1);
    child.end.returned = kind != kSaid;
    if (kind == kThrew)
      child.end.error = content;
    else if (kind == kSaid && on_message_)
      on_message_(child.end.rank, std::move(content));
    else if (kind == kSaid)
      child.end.said.push_back(content);
  }
  return true;
}

/// Records a child's end. Its socket may stay open longer, in a process forked by the child.
void ForkedRanks::reap(Child& child, int flags) {
  int status = 0;
  pid_t pid = 0;
  do {
    pid = ::waitpid(child.pid, &status, flags);
  } while (pid < 0 && errno == EINTR);
  if (pid != child.pid) return;
  child.ended = true;
  if (WIFEXITED(status)) child.end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) child.end.signal = WTERMSIG(status);
  while (read_messages(child)) continue;
}

}  // namespace switchyard::launch
