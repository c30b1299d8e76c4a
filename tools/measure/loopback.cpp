// SPDX-License-Identifier: Apache-2.0
#include "measure/loopback.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
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

#include "arch/cpu/polite_wait.hpp"
#include "base/unique_fd.hpp"
#include "carrier/sockets.hpp"
#include "measure/stopwatch.hpp"

namespace switchyard::measure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kChunk = size_t{4} << 20;
constexpr size_t kMessage = 64;
constexpr int kAnswers = 2000;
constexpr double kMaxSeconds = 10;

int checked(int result, const char* what) {
  if (result < 0) throw std::runtime_error(std::string("loopback: ") + what + ": " + std::strerror(errno));
  return result;
}

using Socket = detail::UniqueFd;

Socket open_socket() { return Socket(checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket")); }

void without_delay(const Socket& socket) {
  const int on = 1;
  checked(::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), "TCP_NODELAY");
}

/// Both ends of a connection.
std::pair<Socket, Socket> connected() {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  Socket listener = open_socket();
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  checked(::bind(listener.get(), address, size), "bind");
  checked(::listen(listener.get(), 1), "listen");
  checked(::getsockname(listener.get(), address, &size), "getsockname");
  Socket one = open_socket();
  checked(::connect(one.get(), address, size), "connect");
  Socket other(checked(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC), "accept"));
  without_delay(one);
  without_delay(other);
  return {std::move(one), std::move(other)};
}

/// Result of send or recv: the number of bytes, or 0 if the call would block.
size_t moved(ssize_t n, const char* what) {
  if (n > 0) return static_cast<size_t>(n);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n == 0) throw std::runtime_error(std::string("loopback: ") + what + ": the connection has ended");
  checked(-1, what);
  return 0;
}

/// One end of a connection, set up as in a rank, with the library's carrier and with as many chunks in each direction as there
/// are in a ring of rounds.
class RailEnd {
 public:
  explicit RailEnd(Socket socket) : memory_(2 * kSlots * kChunk, std::byte{1}) {
    std::vector<detail::CarrierSocket> sockets;
    sockets.push_back({0, std::move(socket)});
    carrier_ = detail::make_socket_carrier(std::move(sockets));
  }

  /// Runs at least one round with one chunk in each direction. After each round, `last(round)` returns the number of the final
  /// round. It must return the same number at both ends, at least kSlots after the round in which it is first returned.
  template <class Last>
  void rounds(const Last& last) {
    uint64_t posted = 0;
    for (; posted < kSlots; ++posted) post(posted);
    for (uint64_t round = 0; round < posted; ++round) {
      await(round);
      if (posted <= last(round)) post(posted++);
    }
  }

 private:
  static constexpr uint64_t kSlots = 3;

  void post(uint64_t round) {
    std::byte* const slot = memory_.data() + 2 * (round % kSlots) * kChunk;
    const detail::PeerTransfer transfer{0, {slot, kChunk}, {slot + kChunk, kChunk}};
    carrier_->post(round, {&transfer, 1}, nullptr);
  }
  /// Polls as often as a rank that waits for a round.
  void await(uint64_t round) {
    const Clock::time_point begin = Clock::now();
    for (int64_t polls = 0;; ++polls) {
      const detail::RoundState state = carrier_->advance(round).state;
      if (state == detail::RoundState::done) return;
      if (state != detail::RoundState::in_progress) throw std::runtime_error("loopback: the connection has ended");
      if (seconds_since(begin) > kMaxSeconds) throw std::runtime_error("loopback: nothing moves");
      detail::polite_wait(polls);
    }
  }

  std::vector<std::byte> memory_;
  std::unique_ptr<detail::Carrier> carrier_;
};

/// Runs `work` on one thread for each end of each connection; rethrows the first error.
template <class Work>
void on_both_ends(int pairs, const Work& work) {
  std::vector<std::pair<Socket, Socket>> links;
  for (int i = 0; i < pairs; ++i) links.push_back(connected());
  std::exception_ptr problem;
  std::atomic_flag reported;
  std::vector<std::thread> threads;
  const auto start = [&](Socket& socket, bool first, int pair) {
    threads.emplace_back([&, first, pair] {
      try {
        work(socket, first, pair);
      } catch (...) {
        if (!reported.test_and_set()) problem = std::current_exception();
        for (const auto& link : links) ::shutdown(link.first.get(), SHUT_RDWR);  // ends threads that wait for this thread
      }
    });
  };
  for (int i = 0; i < pairs; ++i) {
    start(links[static_cast<size_t>(i)].first, true, i);
    start(links[static_cast<size_t>(i)].second, false, i);
  }
  for (std::thread& t : threads) t.join();
  if (problem) std::rethrow_exception(problem);
}

/// Rate in one direction for one pair, in 1e9 bytes per second, while all pairs exchange data.
double swap_rate(int pairs, double seconds) {
  constexpr uint64_t kMore = 8;  ///< rounds after the decision to end; the other end has posted fewer
  struct Pair {
    std::atomic<uint64_t> last{UINT64_MAX};
  };
  std::vector<Pair> ends(static_cast<size_t>(pairs));
  std::atomic<double> sum{0};
  on_both_ends(pairs, [&](Socket& socket, bool first, int pair) {
    RailEnd end(std::move(socket));
    std::atomic<uint64_t>& last = ends[static_cast<size_t>(pair)].last;
    const Clock::time_point begin = Clock::now();
    uint64_t rounds = 0;
    end.rounds([&](uint64_t round) {
      rounds = round + 1;
      if (first && last.load() == UINT64_MAX && seconds_since(begin) > seconds) last.store(round + kMore);
      return last.load();
    });
    if (first) sum += static_cast<double>(rounds) * static_cast<double>(kChunk) / seconds_since(begin) * 1e-9;
  });
  return sum / pairs;
}

/// Time in one direction, and the part of it inside the sender's call, in microseconds.
std::pair<double, double> answer_times() {
  double us = 0, post_us = 0;
  on_both_ends(1, [&](Socket& socket, bool first, int) {
    std::byte message[kMessage]{};
    double posting = 0;
    const auto send = [&] {
      const Clock::time_point begin = Clock::now();
      for (size_t n = 0; n < kMessage;) n += moved(::send(socket.get(), message + n, kMessage - n, MSG_NOSIGNAL), "send");
      posting += seconds_since(begin);
    };
    const auto receive = [&] {
      for (size_t n = 0; n < kMessage;) n += moved(::recv(socket.get(), message + n, kMessage - n, 0), "recv");
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
  out.pairs = std::max(1, workers / 2);
  out.host_gbs = 2 * out.pairs * (out.pairs == 1 ? out.gbs : swap_rate(out.pairs, seconds / 2));
  std::tie(out.us, out.post_us) = answer_times();
  return out;
}

}  // namespace switchyard::measure
