// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "base/unique_fd.hpp"
#include "bootstrap/net/wire.hpp"

namespace switchyard::detail {

/// Sends and receives frames over one connected non-blocking socket. Never waits. Sending and receiving share only the socket,
/// so one thread may receive while another sends through fd().
class Connection {
 public:
  Connection(UniqueFd fd, uint64_t max_payload) : fd_(std::move(fd)), reader_(max_payload) {}

  int fd() const noexcept { return fd_.get(); }
  /// Releases the descriptor; received frames that were not taken are lost.
  UniqueFd take_fd() noexcept { return std::move(fd_); }

  /// Appends a frame to the output of flush().
  void queue(FrameKind kind, ByteSpan payload = {}, uint64_t sequence = 0);
  /// Sends as much as the socket accepts. Returns false once the connection is broken.
  bool flush();
  bool has_output() const noexcept { return !output_.empty(); }

  /// Reads only once, so that an endless sender cannot exhaust memory; the remaining data stays in the socket. Refuses passed
  /// descriptors. Returns false once the other side has closed or the connection is broken; frames received earlier can still
  /// be taken.
  bool receive();
  /// Reads all available bytes, along with any descriptors passed.
  bool receive_all(std::deque<UniqueFd>& fds);
  /// The next frame. Returns nullopt once the stream is malformed; see error().
  std::optional<Frame> take() { return reader_.take(); }
  /// Bytes received so far.
  uint64_t received() const noexcept { return received_; }
  const std::string& error() const noexcept { return reader_.error(); }
  void set_max_payload(uint64_t bytes) noexcept { reader_.set_max_payload(bytes); }

 private:
  enum class Read { some, nothing, end };
  Read read_once(std::deque<UniqueFd>* fds);

  UniqueFd fd_;
  FrameReader reader_;
  Bytes output_;
  uint64_t received_ = 0;
};

/// send(2) without SIGPIPE. Returns the number of bytes sent, 0 if the socket is full, -1 if the connection is broken. `pass`
/// is a descriptor sent with the first byte, or -1.
ssize_t send_some(int fd, ByteSpan bytes, int pass = -1);

}  // namespace switchyard::detail
