// SPDX-License-Identifier: Apache-2.0
// Connections among ranks that are processes.
#include "bootstrap/mesh/processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>
#include <system_error>

#include "bootstrap/deadline.hpp"
#include "bootstrap/rank_list.hpp"
#include "bootstrap/net/socket.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

/// Without pidfds (Linux before 5.3, or a filter), a death still appears as the end of the connection.
UniqueFd open_process(int pid) {
#ifdef SYS_pidfd_open
  if (pid > 0) return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
  return UniqueFd();
}

/// Process at the other end of a Unix socket; 0 if it is this process or is not visible from here.
int process_of_peer(int fd) {
  const auto peer = peer_identity(fd);
  return peer && peer->process > 0 && peer->process != ::getpid() ? static_cast<int>(peer->process) : 0;
}

/// True if the process is stopped by a signal or a debugger. /proc/PID/stat: "PID (name) state ...".
bool is_stopped(int pid) noexcept {
  char path[32], text[256];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t n = file ? ::read(file.get(), text, sizeof text) : 0;
  const std::string_view all(text, n > 0 ? static_cast<size_t>(n) : 0);
  const size_t end = all.rfind(") ");
  return end != std::string_view::npos && end + 2 < all.size() && (all[end + 2] == 'T' || all[end + 2] == 't');
}

bool is_readable(int fd) {
  pollfd entry = {fd, POLLIN, 0};
  return fd >= 0 && ::poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

/// Minimum duration of silence that is reported.
constexpr Milliseconds kNoticeable{500};

/// Time allowed for frames sent before an interrupt to arrive; a call that they complete counts as complete.
constexpr Milliseconds kDeliveryTime{1000};

const char* name_of(FrameKind kind) { return kind == FrameKind::data ? "all_gather" : "exchange_fds"; }

/// Starts a thread with all signals blocked, so that the program's threads handle them.
template <class Body>
std::thread start_quiet_thread(const Body& body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(body);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(ErrorCode::system, std::string("cannot start the thread that watches the peers: ") + error.what());
  }
}

}  // namespace

ProcessBootstrap::ProcessBootstrap(Formed formed)
    : Bootstrap(formed.me.rank, std::move(formed.hosts)),
      me_(std::move(formed.me)),
      peer_addresses_(std::move(formed.peer_addresses)),
      own_address_(formed.own_address),
      peers_(static_cast<size_t>(me_.world)),
      remote_(me_.world) {
  for (int r = 0; r < world(); ++r) {
    auto& link = formed.links[static_cast<size_t>(r)];
    if (!link) continue;
    Peer& peer = peers_[static_cast<size_t>(r)];
    if (host_map().together(r, rank()))
      peer.process = open_process(peer.pid = process_of_peer(link->fd()));
    else
      remote_.add(r, link->fd());
    peer.connection = std::move(link);
  }
  if (world() == 1) return;
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw Error(ErrorCode::system, "eventfd: " + describe_errno(errno));
  receiver_ = start_quiet_thread([this] { receive_all(); });
}

ProcessBootstrap::~ProcessBootstrap() {
  if (!home_.here()) {
    for (Peer& peer : peers_) peer.connection.reset();
    keep_forever(new (std::nothrow) std::thread(std::move(receiver_)));
    return;
  }
  ProcessBootstrap::leave();
  if (receiver_.joinable()) receiver_.join();
}

void ProcessBootstrap::leave() noexcept {
  if (left_ || !home_.here()) return;
  left_ = true;
  const Bytes frame = encode_frame(FrameKind::leave, 0, {});
  remote_.post_to_all(FrameKind::leave, {});
  for (Peer& peer : peers_) {
    if (&peer == &peers_[static_cast<size_t>(rank())] || remote_.has(static_cast<int>(&peer - peers_.data()))) continue;
    // A full socket indicates a stalled peer; once that peer runs again, it treats the end of the connection as a death.
    if (peer.connection && !peer.cut) send_some(peer.connection->fd(), frame);
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  if (receiver_.joinable() && receiver_.get_id() != std::this_thread::get_id()) receiver_.join();
  if (receiver_.joinable()) return;  // called by the callback: the destructor closes
  remote_.close();
  for (Peer& peer : peers_) peer.connection.reset();
}

void ProcessBootstrap::wake() const noexcept {
  const uint64_t one = 1;
  if (wake_) (void)!::write(wake_.get(), &one, sizeof one);
}

// ---- receiving thread ----

void ProcessBootstrap::receive_all() noexcept {
  while (wait_for_news()) {
    look_at_all();
    give_up_on(remote_.beat());
    changed_.notify_all();
    report_ends();
  }
}

/// Returns false when the thread must end.
bool ProcessBootstrap::wait_for_news() {
  std::vector<pollfd> polls = {{wake_.get(), POLLIN, 0}};
  for (int r = 0; r < world(); ++r) {
    const Peer& peer = peers_[static_cast<size_t>(r)];
    if (!peer.connection || peer.closed) continue;
    const bool waits = remote_.has(r) && !remote_.flush(r);
    polls.push_back({peer.connection->fd(), static_cast<short>(POLLIN | (waits ? POLLOUT : 0)), 0});
    if (peer.process) polls.push_back({peer.process.get(), POLLIN, 0});
  }
  ::poll(polls.data(), static_cast<nfds_t>(polls.size()), remote_.any() ? static_cast<int>(remote_.until_beat().count()) : -1);
  uint64_t count = 0;
  (void)!::read(wake_.get(), &count, sizeof count);
  const std::lock_guard lock(mutex_);
  return !stop_;
}

/// A peer may have left because it observed the death of a third rank. Polling all peers twice before publishing ensures that a
/// departure is never reported without the death that caused it.
void ProcessBootstrap::look_at_all() {
  std::vector<News> news(peers_.size());
  for (int look = 0; look < 2; ++look) {
    for (size_t r = 0; r < peers_.size(); ++r) look_at(peers_[r], news[r]);
  }
  for (int r = 0; r < world(); ++r) {  // before its contributions are published
    Peer& peer = peers_[static_cast<size_t>(r)];
    if (remote_.has(r) && peer.connection->received() != std::exchange(peer.received, peer.connection->received()))
      remote_.heard(r);
    for (const Frame& frame : news[static_cast<size_t>(r)].remote_frames)
      if (!remote_.has(r) || !remote_.take(r, frame)) news[static_cast<size_t>(r)].closed = peer.closed = true;
  }
  const std::lock_guard lock(mutex_);
  for (size_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    for (Arrival& arrival : news[r].arrivals) peer.inbox.push_back(std::move(arrival));
    if (peer.state == State::present && news[r].closed) peer.state = news[r].left ? State::left : State::dead;
  }
}

void ProcessBootstrap::look_at(Peer& peer, News& news) const {
  if (!peer.connection || peer.closed) return;
  const bool ended = is_readable(peer.process.get());  // queried first: all data sent before the end is then in the socket
  const bool open = peer.connection->receive_all(peer.passed);
  while (auto frame = peer.connection->take()) {
    if (frame->kind == FrameKind::leave) {
      news.left = true;
      continue;
    }
    if (frame->kind == FrameKind::pulse || frame->kind == FrameKind::aborted) {
      news.remote_frames.push_back(std::move(*frame));
      continue;
    }
    Arrival arrival = {std::move(*frame), UniqueFd()};
    if (arrival.frame.kind == FrameKind::descriptor && !peer.passed.empty()) {
      arrival.fd = std::move(peer.passed.front());
      peer.passed.pop_front();
    }
    news.arrivals.push_back(std::move(arrival));
  }
  news.closed = !open || ended || news.left || !peer.connection->error().empty();
  peer.closed = news.closed;
}

void ProcessBootstrap::give_up_on(const std::vector<int>& silent) {
  const std::lock_guard lock(mutex_);
  for (const int r : silent) {
    Peer& peer = peers_[static_cast<size_t>(r)];
    if (peer.state == State::present) peer.state = State::dead;
    peer.closed = true;
  }
}

void ProcessBootstrap::report_ends() {
  std::vector<int> deaths, departures;
  std::function<void(int)> callback;
  {
    const std::lock_guard lock(mutex_);
    if (!on_death_ || stop_) return;
    callback = on_death_;
    for (int r = 0; r < world(); ++r) {
      Peer& peer = peers_[static_cast<size_t>(r)];
      if (peer.state == State::present || std::exchange(peer.reported, true)) continue;
      (peer.state == State::dead ? deaths : departures).push_back(r);
    }
  }
  for (const int r : departures)
    if (remote_.has(r)) remote_.announce_left(r);
  for (const int r : deaths) callback(r);
}

// ---- caller's thread ----

void ProcessBootstrap::watch(std::function<void(int)> on_death) {
  {
    const std::lock_guard lock(mutex_);
    on_death_ = std::move(on_death);
  }
  wake();  // reports earlier deaths too
}

void ProcessBootstrap::watch_remote(RemoteObserver* side) {
  remote_.set_side(side);
  wake();  // delivers earlier frames too
}

void ProcessBootstrap::announce_abort(uint64_t word) noexcept {
  if (!home_.here() || !remote_.any()) return;
  remote_.post_to_all(FrameKind::aborted, encode(word));
  wake();
}

bool ProcessBootstrap::is_stalled(int r) const noexcept {
  const int pid = peers_[static_cast<size_t>(r)].pid;
  return pid > 0 ? is_stopped(pid) : remote_.silence(r) >= kNoticeable;
}

std::string ProcessBootstrap::describe_silence(int r) const {
  const Milliseconds silent = remote_.silence(r);
  return silent < kNoticeable ? "" : " (its host has been silent for " + std::to_string(silent.count()) + " ms)";
}

/// Sends one frame to every peer. Skips departed peers and stops at the deadline; collect() reports both.
void ProcessBootstrap::send_to_all(FrameKind kind, ByteSpan payload, int pass, const Deadline& deadline) {
  const Bytes frame = encode_frame(kind, ++sequence_, payload);
  std::vector<size_t> done(peers_.size(), 0);
  for (size_t r = 0; r < peers_.size(); ++r) {
    const int peer = static_cast<int>(r);
    if (!takes_part(peer, kind) || !peers_[r].connection || peers_[r].cut || remote_.has(peer)) done[r] = frame.size();
    if (takes_part(peer, kind) && remote_.has(peer)) remote_.post(peer, frame);
  }
  for (;;) {
    std::vector<pollfd> polls;
    for (size_t r = 0; r < peers_.size(); ++r) {
      if (remote_.has(static_cast<int>(r)) && !remote_.flush(static_cast<int>(r)))
        polls.push_back({peers_[r].connection->fd(), POLLOUT, 0});
      while (done[r] < frame.size()) {
        const int fd = peers_[r].connection->fd();
        const ssize_t n = send_some(fd, ByteSpan(frame).subspan(done[r]), done[r] == 0 ? pass : -1);
        if (n == 0) {
          polls.push_back({fd, POLLOUT, 0});
          break;
        }
        done[r] = n < 0 ? frame.size() : done[r] + static_cast<size_t>(n);
      }
    }
    if (polls.empty()) return;
    if (deadline.passed()) break;
    ::poll(polls.data(), static_cast<nfds_t>(polls.size()), deadline.poll_ms());
  }
  for (size_t r = 0; r < peers_.size(); ++r) peers_[r].cut = peers_[r].cut || done[r] < frame.size();
}

/// Waits for one frame from every peer. Element rank() stays empty.
std::vector<ProcessBootstrap::Arrival> ProcessBootstrap::collect(FrameKind kind, const char* operation,
                                                                 const Deadline& deadline) {
  const std::string context =
      std::string(operation) + " (set-up step " + std::to_string(sequence_) + ") on rank " + std::to_string(rank());
  std::unique_lock lock(mutex_);
  std::optional<Deadline> until_explained, until_interrupted;
  for (;;) {
    std::vector<int> missing;
    int lost = -1;
    for (int r = 0; r < world(); ++r) {
      const Peer& peer = peers_[static_cast<size_t>(r)];
      if (!takes_part(r, kind) || !peer.inbox.empty()) continue;
      missing.push_back(r);
      // A death explains departures, so it is reported first.
      if (peer.state != State::present && (lost < 0 || peer.state == State::dead)) {
        const bool known_death = lost >= 0 && peers_[static_cast<size_t>(lost)].state == State::dead;
        if (!known_death) lost = r;
      }
    }
    if (lost >= 0) {
      // A peer that left may have observed a death before this rank did, so wait for that report.
      if (!until_explained) until_explained.emplace(kExplanationTime);
      const bool explained = peers_[static_cast<size_t>(lost)].state == State::dead;
      if (explained || until_explained->passed() || deadline.passed())
        throw PeerFailed(lost, ErrorCode::system, context + describe_silence(lost), !explained);
      changed_.wait_until(lock, std::min(until_explained->time(), deadline.time()));
      continue;
    }
    if (missing.empty()) break;
    if (!until_interrupted && interrupt() && interrupt()()) until_interrupted.emplace(kDeliveryTime);
    if (deadline.passed() || (until_interrupted && until_interrupted->passed())) {
      throw RendezvousError(context + ": " + describe_ranks(missing) + " of " + std::to_string(world()) +
                                " did not come within " + std::to_string(deadline.budget().count()) + " ms",
                            missing);
    }
    changed_.wait_until(lock, interrupt() ? deadline.next_look() : deadline.time());
  }
  std::vector<Arrival> arrivals(peers_.size());
  for (int r = 0; r < world(); ++r) {
    if (takes_part(r, kind)) arrivals[static_cast<size_t>(r)] = take_checked(r, kind, operation);
  }
  return arrivals;
}

ProcessBootstrap::Arrival ProcessBootstrap::take_checked(int r, FrameKind kind, const char* operation) {
  Peer& peer = peers_[static_cast<size_t>(r)];
  Arrival arrival = std::move(peer.inbox.front());
  peer.inbox.pop_front();
  if (arrival.frame.kind != kind || arrival.frame.sequence != sequence_) {
    throw Error(ErrorCode::mismatch, std::string(operation) + ": rank " + std::to_string(rank()) + " is at set-up step " +
                                         std::to_string(sequence_) + " and rank " + std::to_string(r) + " at " +
                                         name_of(arrival.frame.kind) + ", step " + std::to_string(arrival.frame.sequence) +
                                         "; all ranks must make the same calls in the same order");
  }
  return arrival;
}

void ProcessBootstrap::check_member(const char* operation) const {
  const std::string subject = std::string(operation) + " on rank " + std::to_string(rank()) + ": ";
  if (!home_.here())
    throw Error(ErrorCode::invalid_argument,
                subject + "this process was forked by the one that joined the group, and is no member of it");
  if (left_) throw Error(ErrorCode::invalid_argument, subject + "this rank has left the group");
}

void ProcessBootstrap::all_gather(const void* mine, size_t bytes, void* all, Milliseconds budget) {
  const Deadline deadline(budget);
  check_member("all_gather");
  if (bytes > kMaxFrameBytes) {
    throw Error(ErrorCode::invalid_argument,
                "all_gather: bytes = " + std::to_string(bytes) + ": must be at most " + std::to_string(kMaxFrameBytes));
  }
  send_to_all(FrameKind::data, ByteSpan(static_cast<const std::byte*>(mine), bytes), -1, deadline);
  const std::vector<Arrival> arrivals = collect(FrameKind::data, "all_gather", deadline);
  auto* out = static_cast<std::byte*>(all);
  for (int r = 0; r < world(); ++r) {
    const Bytes& theirs = arrivals[static_cast<size_t>(r)].frame.payload;
    if (r != rank() && theirs.size() != bytes) {
      throw Error(ErrorCode::mismatch, "all_gather: rank " + std::to_string(r) + " brought " + std::to_string(theirs.size()) +
                                           " bytes and rank " + std::to_string(rank()) + " " + std::to_string(bytes) +
                                           "; all ranks must bring the same number");
    }
    const void* from = r == rank() ? mine : theirs.data();
    if (bytes > 0) std::memmove(out + static_cast<size_t>(r) * bytes, from, bytes);
  }
}

std::vector<UniqueFd> ProcessBootstrap::exchange_fds(int fd, Milliseconds budget) {
  const Deadline deadline(budget);
  check_member("exchange_fds");
  UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) throw Error(ErrorCode::system, "exchange_fds: descriptor " + std::to_string(fd) + ": " + describe_errno(errno));
  send_to_all(FrameKind::descriptor, {}, fd, deadline);
  std::vector<Arrival> arrivals = collect(FrameKind::descriptor, "exchange_fds", deadline);
  std::vector<UniqueFd> fds;
  for (int r = 0; r < world(); ++r) {
    if (r != rank() && !takes_part(r, FrameKind::descriptor)) {
      fds.emplace_back();
      continue;
    }
    UniqueFd& slot = r == rank() ? own : arrivals[static_cast<size_t>(r)].fd;
    UniqueFd theirs = std::move(slot);
    if (!theirs) {
      throw Error(ErrorCode::system, "exchange_fds: the descriptor of rank " + std::to_string(r) +
                                         " was lost: too many open files (see ulimit -n)");
    }
    fds.push_back(std::move(theirs));
  }
  return fds;
}

std::vector<std::shared_ptr<void>> ProcessBootstrap::exchange_objects(std::shared_ptr<void>, Milliseconds) {
  throw Error(ErrorCode::unsupported, "exchange_objects: the ranks are processes and share no objects");
}

}  // namespace switchyard::detail
