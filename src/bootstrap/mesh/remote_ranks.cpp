// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/mesh/remote_ranks.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <new>
#include <utility>

#include "bootstrap/net/connection.hpp"

namespace switchyard::detail {

void RemoteRanks::add(int rank, int fd) {
  auto peer = std::make_unique<Peer>();
  peer->fd = fd;
  peers_[static_cast<size_t>(rank)] = std::move(peer);
  any_ = true;
}

bool RemoteRanks::flush_locked(Peer& peer) noexcept {
  size_t done = 0;
  while (peer.fd >= 0 && done < peer.rest.size()) {
    const ssize_t n = send_some(peer.fd, ByteSpan(peer.rest).subspan(done));
    if (n < 0) peer.fd = -1;  // the receiving thread detects it
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  peer.rest.erase(peer.rest.begin(), peer.rest.begin() + static_cast<std::ptrdiff_t>(done));
  return peer.fd < 0 || peer.rest.empty();
}

void RemoteRanks::post_locked(Peer& peer, ByteSpan frame) {
  if (peer.fd < 0) return;
  peer.rest.insert(peer.rest.end(), frame.begin(), frame.end());
  flush_locked(peer);
}

void RemoteRanks::pulse_locked(Peer& peer) {
  Pulse pulse;
  if (const RemoteObserver* const side = side_.load()) pulse.words = side->calls_after(peer.announced_calls, pulse.last);
  post_locked(peer, encode_frame(FrameKind::pulse, 0, encode(pulse)));
  peer.announced_calls = pulse.last;
}

void RemoteRanks::post(int rank, ByteSpan frame) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  const std::lock_guard lock(peer.mutex);
  pulse_locked(peer);
  post_locked(peer, frame);
}

bool RemoteRanks::flush(int rank) noexcept {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  const std::lock_guard lock(peer.mutex);
  return flush_locked(peer);
}

void RemoteRanks::post_to_all(FrameKind kind, ByteSpan payload) noexcept {
  try {
    const Bytes frame = encode_frame(kind, 0, payload);
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
      if (has(r)) post(r, frame);
  } catch (const std::bad_alloc&) {  // peers notice when this rank's connections end
  }
}

void RemoteRanks::close() noexcept {
  for (auto& peer : peers_) {
    if (!peer) continue;
    const std::lock_guard lock(peer->mutex);
    if (peer->fd < 0) continue;
    ::shutdown(peer->fd, SHUT_WR);
    std::byte unread[4096];
    while (::recv(peer->fd, unread, sizeof unread, MSG_DONTWAIT) > 0) continue;
    peer->fd = -1;
  }
}

void RemoteRanks::set_side(RemoteObserver* side) {
  const std::lock_guard lock(delivery_mutex_);
  side_.store(side);
  if (side == nullptr) return;
  for (const EarlyFrame& early : std::exchange(early_, {})) deliver(early.rank, early.frame);
}

Milliseconds RemoteRanks::silence(int rank) const noexcept {
  const auto& peer = peers_[static_cast<size_t>(rank)];
  if (!peer) return Milliseconds{-1};
  const Clock::duration since = Clock::now().time_since_epoch() - Clock::duration(peer->heard.load());
  return std::chrono::duration_cast<Milliseconds>(since);
}

bool RemoteRanks::deliver(int rank, const Frame& frame) {
  RemoteObserver* const side = side_.load();
  if (frame.kind == FrameKind::pulse) {
    const auto pulse = decode_pulse(frame.payload);
    if (pulse) side->heard_calls(rank, pulse->last, pulse->words);
    return pulse.has_value();
  }
  const auto word = decode_word(frame.payload);
  if (word) side->heard_abort(*word);
  return word.has_value();
}

bool RemoteRanks::take(int rank, const Frame& frame) {
  const std::lock_guard lock(delivery_mutex_);
  if (side_.load() == nullptr) {
    early_.push_back({rank, frame});
    return true;
  }
  return deliver(rank, frame);
}

void RemoteRanks::announce_left(int rank) {
  if (RemoteObserver* const side = side_.load()) side->heard_leave(rank);
}

std::vector<int> RemoteRanks::beat() {
  std::vector<int> silent;
  if (!any_) return silent;
  const Clock::time_point now = Clock::now();
  // A rank that was itself suspended must not mistake the missing messages for silence of its peers.
  const bool overslept = now - last_beat_ > 10 * kBeat;
  const bool due = now - last_beat_ >= kBeat;
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r]) continue;
    Peer& peer = *peers_[r];
    if (overslept) peer.heard.store(now.time_since_epoch().count());
    if (silence(static_cast<int>(r)).count() > limit_ms_.load()) silent.push_back(static_cast<int>(r));
    const std::lock_guard lock(peer.mutex);
    if (flush_locked(peer) && due) pulse_locked(peer);
  }
  if (due) last_beat_ = now;
  return silent;
}

Milliseconds RemoteRanks::until_beat() const noexcept {
  const auto left = std::chrono::ceil<Milliseconds>(last_beat_ + kBeat - Clock::now());
  return std::clamp(left, Milliseconds{0}, kBeat);
}

}  // namespace switchyard::detail
