// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/mesh/mesh.hpp"

#include <algorithm>
#include <cerrno>

#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr size_t kMaxPending = 256;  // when there are more, the oldest makes room: a rank says at once who it is
constexpr int kMaxAccepted = 64;     // in one step
constexpr Milliseconds kFullBacklogRetry{10};

}  // namespace

MeshBuilder::MeshBuilder(Listener listener, const Member& me, const Roster& roster)
    : listener_(std::move(listener)), me_(me), roster_(roster), links_(static_cast<size_t>(me.world)) {}

void MeshBuilder::prepare(std::vector<pollfd>& polls) const {
  if (complete()) return;
  polls.push_back({listener_.fd(), POLLIN, 0});
  for (const Pending& pending : pending_) polls.push_back({pending.connection.fd(), POLLIN, 0});
}

Milliseconds MeshBuilder::until_wake() const {
  Milliseconds least = std::chrono::hours{1};
  for (int r = 0; r < me_.rank; ++r) {
    if (!links_[static_cast<size_t>(r)]) least = kFullBacklogRetry;
  }
  for (const Pending& pending : pending_) least = std::min(least, pending.deadline.remaining());
  return least;
}

void MeshBuilder::step() {
  if (complete()) return;
  for (int r = 0; r < me_.rank; ++r) {
    if (!links_[static_cast<size_t>(r)]) connect_to(r);
  }
  accept_higher();
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    pending = serve(*pending) ? std::next(pending) : pending_.erase(pending);
  }
  if (complete()) {
    listener_.close();
    pending_.clear();
  }
}

std::vector<int> MeshBuilder::missing() const {
  std::vector<int> ranks;
  for (int r = 0; r < me_.world; ++r) {
    if (r != me_.rank && !links_[static_cast<size_t>(r)]) ranks.push_back(r);
  }
  return ranks;
}

void MeshBuilder::connect_to(int rank) {
  int error = 0;
  UniqueFd fd = start_connect(
      resolve(abstract_endpoint(roster_.mesh_names[static_cast<size_t>(rank)]), Deadline(kHandshakeTime))[0], error);
  if (error == EAGAIN || error == EINPROGRESS) return;  // its backlog is full: later
  const std::string context = "rank " + std::to_string(me_.rank) + " connecting to its peers";
  if (error == EMFILE || error == ENFILE)
    throw Error(ErrorCode::system, context + ": " + describe_errno(error) + " (see ulimit -n)");
  if (!fd || error != 0) throw PeerFailed(rank, ErrorCode::system, context + " (" + describe_errno(error) + ")");
  if (const std::string why = check_peer_user(fd.get()); !why.empty()) {
    throw RendezvousError(context + ": rank " + std::to_string(rank) + " cannot be one of them: " + why);
  }
  Connection connection(std::move(fd), kMaxFrameBytes);
  MeshHello hello = {me_.rank, rank, roster_.session, {}};
  hello.proof = prove(hello, me_.token);
  connection.queue(FrameKind::mesh_hello, encode(hello));
  connection.flush();  // a hundred bytes into an empty socket; a failure shows as a closed connection
  links_[static_cast<size_t>(rank)] = std::move(connection);
}

void MeshBuilder::accept_higher() {
  for (int i = 0; i < kMaxAccepted; ++i) {
    auto accepted = listener_.accept();
    if (!accepted) return;
    if (!check_peer_user(accepted->fd.get()).empty()) continue;
    if (pending_.size() == kMaxPending) pending_.pop_front();
    pending_.push_back({Connection(std::move(accepted->fd), kMaxHandshakeBytes), Deadline(kHandshakeTime)});
  }
}

/// False when this connection is done with: it became a link, or it is none of ours.
bool MeshBuilder::serve(Pending& pending) {
  const bool open = pending.connection.receive();
  if (const auto frame = pending.connection.take()) {
    const auto hello = frame->kind == FrameKind::mesh_hello ? decode_mesh_hello(frame->payload) : std::nullopt;
    uint64_t linked = 0;
    for (int r = me_.rank + 1; r < me_.world; ++r) linked |= uint64_t{links_[static_cast<size_t>(r)].has_value()} << r;
    if (!hello || !judge_mesh_hello(*hello, {me_.token, me_.world, linked}, roster_.session, me_.rank).empty()) return false;
    pending.connection.set_max_payload(kMaxFrameBytes);
    links_[static_cast<size_t>(hello->from)] = std::move(pending.connection);
    return false;
  }
  return open && pending.connection.error().empty() && !pending.deadline.passed();
}

}  // namespace switchyard::detail
