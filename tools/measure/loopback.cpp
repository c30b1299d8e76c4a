// SPDX-License-Identifier: Apache-2.0
#include "measure/loopback.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace switchyard::measure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kChunk = size_t{4} << 20;
constexpr size_t kMessage = 64;
constexpr int kAnswers = 2000;
constexpr int kPollMs = 10'000;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

int checked(int result, const char* what) {
  if (result < 0) throw std::runtime_error(std::string("loopback: ") + what + ": " + std::strerror(errno));
  return result;
}

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

Socket open_socket() { return Socket(checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket")); }

void without_delay(const Socket& socket) {
  const int on = 1;
  checked(::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), "TCP_NODELAY");
}

/// Both ends of a connection.
std::pair<Socket, Socket> connected() {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  Socket listener = open_socket();
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  checked(::bind(listener.fd(), address, size), "bind");
  checked(::listen(listener.fd(), 1), "listen");
  checked(::getsockname(listener.fd(), address, &size), "getsockname");
  Socket one = open_socket();
  checked(::connect(one.fd(), address, size), "connect");
  Socket other(checked(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC), "accept"));
  without_delay(one);
  without_delay(other);
  return {std::move(one), std::move(other)};
}

/// What send or recv did: bytes, or 0 if it would wait.
size_t moved(ssize_t n, const char* what) {
  if (n > 0) return static_cast<size_t>(n);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n == 0) throw std::runtime_error(std::string("loopback: ") + what + ": the connection has ended");
  checked(-1, what);
  return 0;
}

/// Sends and receives `bytes` at the same time, as a round of an exchange does.
void swap_bytes(const Socket& socket, const std::byte* send, std::byte* receive, size_t bytes) {
  for (size_t sent = 0, received = 0; sent < bytes || received < bytes;) {
    size_t now = 0;
    if (sent < bytes) {
      const size_t n = moved(::send(socket.fd(), send + sent, bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL), "send");
      sent += n;
      now += n;
    }
    if (received < bytes) {
      const size_t n = moved(::recv(socket.fd(), receive + received, bytes - received, MSG_DONTWAIT), "recv");
      received += n;
      now += n;
    }
    if (now > 0) continue;
    pollfd wait{socket.fd(), static_cast<short>((sent < bytes ? POLLOUT : 0) | (received < bytes ? POLLIN : 0)), 0};
    if (checked(::poll(&wait, 1, kPollMs), "poll") == 0) throw std::runtime_error("loopback: nothing moves");
  }
}

/// Threads that each do `work` with their end of a connection; the first error is thrown here.
template <class Work>
void on_both_ends(int pairs, const Work& work) {
  std::vector<std::pair<Socket, Socket>> links;
  for (int i = 0; i < pairs; ++i) links.push_back(connected());
  std::exception_ptr problem;
  std::atomic_flag told;
  std::vector<std::thread> threads;
  const auto start = [&](const Socket& socket, bool first) {
    threads.emplace_back([&, first] {
      try {
        work(socket, first);
      } catch (...) {
        if (!told.test_and_set()) problem = std::current_exception();
        for (const auto& link : links) ::shutdown(link.first.fd(), SHUT_RDWR);  // the others end, too
      }
    });
  };
  for (const auto& link : links) {
    start(link.first, true);
    start(link.second, false);
  }
  for (std::thread& t : threads) t.join();
  if (problem) std::rethrow_exception(problem);
}

/// Bytes of one direction of one pair, 1e9 a second, while all pairs swap.
double swap_rate(int pairs, double seconds) {
  std::vector<double> rates(static_cast<size_t>(pairs));
  std::atomic<size_t> next{0};
  on_both_ends(pairs, [&](const Socket& socket, bool first) {
    const std::vector<std::byte> send(kChunk, std::byte{1});
    std::vector<std::byte> receive(kChunk);
    const auto chunk = [&] { swap_bytes(socket, send.data(), receive.data(), kChunk); };
    chunk();
    // The first end decides how many there are: the other one is told by a byte after each.
    const Clock::time_point begin = Clock::now();
    int64_t count = 0;
    for (std::byte more{1}; more == std::byte{1}; ++count) {
      chunk();
      std::byte heard{};
      more = first && seconds_since(begin) < seconds ? std::byte{1} : std::byte{0};
      swap_bytes(socket, &more, &heard, 1);
      if (!first) more = heard;
    }
    if (first) rates[next++] = static_cast<double>(count) * static_cast<double>(kChunk) / seconds_since(begin) * 1e-9;
  });
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum / pairs;
}

/// One way, and the part of it that the sender's call takes, microseconds.
std::pair<double, double> answer_times() {
  double us = 0, post_us = 0;
  on_both_ends(1, [&](const Socket& socket, bool first) {
    std::byte message[kMessage]{};
    double posting = 0;
    const auto send = [&] {
      const Clock::time_point begin = Clock::now();
      for (size_t n = 0; n < kMessage;) n += moved(::send(socket.fd(), message + n, kMessage - n, MSG_NOSIGNAL), "send");
      posting += seconds_since(begin);
    };
    const auto receive = [&] {
      for (size_t n = 0; n < kMessage;) n += moved(::recv(socket.fd(), message + n, kMessage - n, 0), "recv");
    };
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kAnswers; ++i) {
      if (first) send();
      receive();
      if (!first) send();
    }
    if (!first) return;
    us = seconds_since(begin) * 1e6 / (2.0 * kAnswers);
    post_us = posting * 1e6 / kAnswers;
  });
  return {us, post_us};
}

}  // namespace

NetworkRates measure_loopback(int workers, double seconds) {
  NetworkRates out;
  out.chunk_bytes = kChunk;
  out.gbs = swap_rate(1, seconds / 2);
  const int pairs = std::max(1, workers / 2);
  out.host_gbs = 2 * pairs * (pairs == 1 ? out.gbs : swap_rate(pairs, seconds / 2));
  std::tie(out.us, out.post_us) = answer_times();
  return out;
}

}  // namespace switchyard::measure
