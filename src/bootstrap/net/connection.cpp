// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/net/connection.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace switchyard::detail {
namespace {

constexpr size_t kReadBytes = 65536;
constexpr size_t kMaxPassed = 8;  // descriptors in one message; this protocol sends one

void collect_descriptors(msghdr& message, std::deque<UniqueFd>& fds) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      fds.emplace_back(fd);
    }
  }
}

}  // namespace

void Connection::queue(FrameKind kind, ByteSpan payload, uint64_t sequence) {
  const Bytes frame = encode_frame(kind, sequence, payload);
  output_.insert(output_.end(), frame.begin(), frame.end());
}

bool Connection::flush() {
  size_t done = 0;
  while (done < output_.size()) {
    const ssize_t n = send_some(fd_.get(), ByteSpan(output_).subspan(done));
    if (n < 0) return false;
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  output_.erase(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(done));
  return true;
}

Connection::Read Connection::read_once(std::deque<UniqueFd>* fds) {
  std::byte data[kReadBytes];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxPassed)];
  iovec part = {data, sizeof data};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = fds == nullptr ? nullptr : control;
  message.msg_controllen = fds == nullptr ? 0 : sizeof control;
  ssize_t n = 0;
  do {
    n = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Read::nothing : Read::end;
  if (fds != nullptr) collect_descriptors(message, *fds);
  received_ += static_cast<uint64_t>(n);
  reader_.append(ByteSpan(data, static_cast<size_t>(n)));
  return n == 0 ? Read::end : Read::some;
}

bool Connection::receive() { return read_once(nullptr) != Read::end; }

bool Connection::receive_all(std::deque<UniqueFd>& fds) {
  for (;;) {
    const Read result = read_once(&fds);
    if (result != Read::some) return result == Read::nothing;
  }
}

ssize_t send_some(int fd, ByteSpan bytes, int pass) {
  iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (pass >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &pass, sizeof pass);
  }
  for (;;) {
    const ssize_t n = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) return n;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
  }
}

}  // namespace switchyard::detail
