// SPDX-License-Identifier: Apache-2.0
#include "carrier/sockets.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>

#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

/// Precedes the bytes of each leg. Both ends count a connection's legs, so that mismatched calls are detected.
struct TransferHead {
  uint64_t number;
  uint64_t bytes;
  bool operator==(const TransferHead&) const = default;
};

/// One direction of a leg.
template <class Byte>
struct Transfer {
  uint64_t round;
  TransferHead head;
  Byte* data;
  TransferHead seen{};  ///< receiving: bytes of the head so far
  size_t done = 0;      ///< bytes of the head and of the data

  size_t size() const { return sizeof(TransferHead) + head.bytes; }
};

struct Link {
  int peer;
  UniqueFd fd;
  uint64_t sent = 0, received = 0;  ///< legs started
  std::deque<Transfer<const std::byte>> sends;
  std::deque<Transfer<std::byte>> receives;

  bool waits_for(uint64_t round) const {
    return (!receives.empty() && receives.front().round <= round) || (!sends.empty() && sends.front().round <= round);
  }
};

/// The rest of a transfer, split into pieces for the system call.
int pieces_of(std::byte* head, std::byte* data, size_t done, size_t size, iovec (&out)[2]) {
  int n = 0;
  if (done < sizeof(TransferHead)) out[n++] = {head + done, sizeof(TransferHead) - done};
  const size_t of_data = done > sizeof(TransferHead) ? done - sizeof(TransferHead) : 0;
  if (size > sizeof(TransferHead) + of_data) out[n++] = {data + of_data, size - sizeof(TransferHead) - of_data};
  return n;
}

bool would_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

class SocketCarrier final : public Carrier {
 public:
  explicit SocketCarrier(std::vector<CarrierSocket> sockets) {
    for (CarrierSocket& socket : sockets) {
      const int flags = ::fcntl(socket.fd.get(), F_GETFL);
      if (flags < 0 || ::fcntl(socket.fd.get(), F_SETFL, flags | O_NONBLOCK) < 0)
        throw Error(ErrorCode::system,
                    "carrier: the socket to rank " + std::to_string(socket.peer) + " cannot be used: " + std::strerror(errno));
      links_.push_back({socket.peer, std::move(socket.fd), 0, 0, {}, {}});
    }
  }

  void post(uint64_t round, std::span<const PeerTransfer> transfers, void*) override {
    for (const PeerTransfer& transfer : transfers) {
      Link* const link = find(transfer.peer);
      if (link == nullptr) {
        fail(RoundState::broken, transfer.peer);
        continue;
      }
      if (!transfer.send.empty()) link->sends.push_back({round, {link->sent++, transfer.send.size()}, transfer.send.data()});
      if (!transfer.receive.empty())
        link->receives.push_back({round, {link->received++, transfer.receive.size()}, transfer.receive.data()});
    }
    for (Link& link : links_) send_some(link);
  }

  RoundStatus advance(uint64_t round) override {
    for (Link& link : links_) {
      if (failure_.state != RoundState::done) break;
      send_some(link);
      receive_some(link);
    }
    if (aborted_.load(std::memory_order_acquire)) fail(RoundState::broken, -1);
    if (failure_.state != RoundState::done) return failure_;
    for (const Link& link : links_)
      if (link.waits_for(round)) return {RoundState::in_progress, link.peer};
    return {};
  }

  void abort() noexcept override {
    aborted_.store(true, std::memory_order_release);
    for (const Link& link : links_) ::shutdown(link.fd.get(), SHUT_RDWR);
  }

 private:
  Link* find(int peer) {
    const auto it = std::find_if(links_.begin(), links_.end(), [&](const Link& link) { return link.peer == peer; });
    return it == links_.end() ? nullptr : &*it;
  }

  /// Records only the first failure.
  void fail(RoundState state, int peer) {
    if (failure_.state == RoundState::done) failure_ = {state, peer};
  }

  void send_some(Link& link) {
    while (!link.sends.empty()) {
      Transfer<const std::byte>& t = link.sends.front();
      iovec pieces[2];
      msghdr message{};
      message.msg_iov = pieces;
      message.msg_iovlen = static_cast<size_t>(
          pieces_of(reinterpret_cast<std::byte*>(&t.head), const_cast<std::byte*>(t.data), t.done, t.size(), pieces));
      const ssize_t n = ::sendmsg(link.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && would_wait(errno)) return;
      if (n < 0) return fail(RoundState::broken, link.peer);
      t.done += static_cast<size_t>(n);
      if (t.done == t.size()) link.sends.pop_front();
    }
  }

  void receive_some(Link& link) {
    while (!link.receives.empty()) {
      Transfer<std::byte>& t = link.receives.front();
      iovec pieces[2];
      // Receive only the head at first: it shows whether the bytes that follow are the expected ones.
      const size_t end = t.done < sizeof(TransferHead) ? sizeof(TransferHead) : t.size();
      msghdr message{};
      message.msg_iov = pieces;
      message.msg_iovlen = static_cast<size_t>(pieces_of(reinterpret_cast<std::byte*>(&t.seen), t.data, t.done, end, pieces));
      const ssize_t n = ::recvmsg(link.fd.get(), &message, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && would_wait(errno)) return;
      if (n <= 0) return fail(RoundState::broken, link.peer);
      t.done += static_cast<size_t>(n);
      if (t.done == sizeof(TransferHead) && !(t.seen == t.head)) return fail(RoundState::unlike, link.peer);
      if (t.done == t.size()) link.receives.pop_front();
    }
  }

  std::vector<Link> links_;
  RoundStatus failure_;  ///< `done`: none
  std::atomic<bool> aborted_{false};
};

}  // namespace

std::unique_ptr<Carrier> make_socket_carrier(std::vector<CarrierSocket> sockets) {
  return std::make_unique<SocketCarrier>(std::move(sockets));
}

}  // namespace switchyard::detail
