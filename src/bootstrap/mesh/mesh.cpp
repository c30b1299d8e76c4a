// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/mesh/mesh.hpp"

#include <algorithm>
#include <cerrno>

#include "bootstrap/rank_list.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr size_t kMaxPending = 256;  // beyond this the oldest is dropped, because ranks identify themselves at once
constexpr int kMaxAccepted = 64;     // per step
constexpr Milliseconds kFullBacklogRetry{10};
constexpr Milliseconds kUnreachableRetry{100};

}  // namespace

MeshBuilder::MeshBuilder(Listeners listeners, const Member& me, const Roster& roster,
                         std::vector<std::optional<SocketAddress>> peer_addresses, uint64_t wanted)
    : listeners_(std::move(listeners)),
      me_(me),
      roster_(roster),
      peer_addresses_(std::move(peer_addresses)),
      wanted_(wanted & ~(uint64_t{1} << me.rank)),
      links_(static_cast<size_t>(me.world)) {}

void MeshBuilder::prepare(std::vector<pollfd>& polls) const {
  if (complete()) return;
  for (const Listener* listener : {&listeners_.host, &listeners_.network})
    if (*listener) polls.push_back({listener->fd(), POLLIN, 0});
  for (const Pending& pending : pending_) polls.push_back({pending.connection.fd(), POLLIN, 0});
  for (const auto& [rank, attempt] : attempts_) {
    const short events = attempt.connected ? POLLIN : POLLOUT;
    if (attempt.connection) polls.push_back({attempt.connection->fd(), events, 0});
  }
}

Milliseconds MeshBuilder::until_wake() const {
  Milliseconds least = std::chrono::hours{1};
  for (int r = 0; r < me_.rank; ++r) {
    if (!is_missing(r)) continue;
    const auto attempt = attempts_.find(r);
    least = std::min(least, attempt != attempts_.end() ? attempt->second.until.remaining() : kFullBacklogRetry);
  }
  for (const Pending& pending : pending_) least = std::min(least, pending.deadline.remaining());
  return least;
}

void MeshBuilder::step() {
  if (complete()) return;
  for (int r = 0; r < me_.rank; ++r) {
    if (!is_missing(r)) continue;
    if (peer_addresses_[static_cast<size_t>(r)])
      connect_remote(r);
    else
      connect_local(r);
  }
  accept_higher(listeners_.host, false);
  accept_higher(listeners_.network, true);
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    pending = serve(*pending) ? std::next(pending) : pending_.erase(pending);
  }
  if (complete()) {
    listeners_.host.close();
    listeners_.network.close();
    pending_.clear();
  }
}

std::vector<int> MeshBuilder::missing() const {
  std::vector<int> ranks;
  for (int r = 0; r < me_.world; ++r) {
    if (is_missing(r)) ranks.push_back(r);
  }
  return ranks;
}

std::string MeshBuilder::describe_network() const {
  constexpr size_t kMaxNamedReasons = 4;
  std::vector<int> absent_ranks;
  std::vector<std::string> reasons;
  for (const int r : missing()) {
    const auto& address = peer_addresses_[static_cast<size_t>(r)];
    if (!address) continue;
    if (r > me_.rank) {
      absent_ranks.push_back(r);
      continue;
    }
    const auto attempt = attempts_.find(r);
    reasons.push_back("rank " + std::to_string(r) + " at " + describe(*address) + ": " +
                      (attempt != attempts_.end() ? attempt->second.problem : "not tried"));
  }
  if (reasons.size() > kMaxNamedReasons) {
    reasons.resize(kMaxNamedReasons);
    reasons.push_back("and others");
  }
  if (!absent_ranks.empty())
    reasons.push_back(describe_ranks(absent_ranks) + " did not come to " + describe(local_address(listeners_.network.fd())));
  if (reasons.empty()) return "";
  std::string text = " (";
  for (size_t i = 0; i < reasons.size(); ++i) text += (i > 0 ? "; " : "") + reasons[i];
  return text +
         "). Ranks of different hosts connect at ports that the system chooses: a firewall between them must let these through";
}

void MeshBuilder::connect_local(int rank) {
  int error = 0;
  UniqueFd fd = start_connect(
      resolve(abstract_endpoint(roster_.mesh_names[static_cast<size_t>(rank)]), Deadline(kHandshakeTime))[0], error);
  if (error == EAGAIN || error == EINPROGRESS) return;  // its backlog is full: retry later
  if (error == EMFILE || error == ENFILE)
    throw Error(ErrorCode::system, context() + ": " + describe_errno(error) + " (see ulimit -n)");
  if (!fd || error != 0) throw PeerFailed(rank, ErrorCode::system, context() + " (" + describe_errno(error) + ")");
  if (const std::string why = check_peer_user(fd.get()); !why.empty()) {
    throw RendezvousError(context() + ": rank " + std::to_string(rank) + " cannot be one of them: " + why);
  }
  Connection connection(std::move(fd), kMaxFrameBytes);
  MeshHello hello = {me_.rank, rank, roster_.session, {}};
  hello.proof = prove(hello, me_.token);
  connection.queue(FrameKind::mesh_hello, encode(hello));
  connection.flush();  // a hundred bytes into an empty socket; a failure shows as a closed connection
  links_[static_cast<size_t>(rank)] = std::move(connection);
}

/// Schedules a retry, because the network may recover. A refusal may come from a firewall; if the rank has ended, rank 0
/// detects and announces it.
void MeshBuilder::try_later(int error, Attempt& attempt) const {
  if (error == EMFILE || error == ENFILE)
    throw Error(ErrorCode::system, context() + ": " + describe_errno(error) + " (see ulimit -n)");
  attempt = Attempt{};
  attempt.until = Deadline(kUnreachableRetry);
  attempt.problem = describe_errno(error);
}

void MeshBuilder::start(int rank, Attempt& attempt) {
  int error = 0;
  UniqueFd fd = start_connect(*peer_addresses_[static_cast<size_t>(rank)], error);
  if (!fd || (error != 0 && error != EINPROGRESS)) return try_later(error, attempt);
  attempt.connection.emplace(std::move(fd), kMaxHandshakeBytes);
  attempt.until = Deadline(kHandshakeTime);
}

void MeshBuilder::connect_remote(int rank) {
  Attempt& attempt = attempts_[rank];
  if (!attempt.connection) {
    if (!attempt.until.passed()) return;
    start(rank, attempt);
    if (!attempt.connection) return;
  }
  if (!attempt.connected) {
    const int error = connect_result(attempt.connection->fd());
    attempt.connected = error == 0;
    if (error != 0 && error != EINPROGRESS) return try_later(error, attempt);
  }
  if (attempt.connected) {
    const bool open = attempt.connection->receive();
    take_frames(rank, attempt);
    if (!is_missing(rank)) {
      attempts_.erase(rank);
      return;
    }
    if (attempt.connection && (!open || !attempt.connection->error().empty())) return try_later(EPIPE, attempt);
  }
  if (attempt.connection && attempt.until.passed()) try_later(ETIMEDOUT, attempt);
}

/// Handles the frames that a connecting rank receives from a rank on another host: a greeting, then a welcome once its hello
/// has arrived.
void MeshBuilder::take_frames(int rank, Attempt& attempt) {
  const auto frame = attempt.connection->take();
  if (!frame) return;
  if (!attempt.greeted) {
    const auto greeting = frame->kind == FrameKind::greeting ? decode_greeting(frame->payload) : std::nullopt;
    if (!greeting) return try_later(EPROTO, attempt);
    MeshHello hello = {me_.rank, rank, roster_.session, {}};
    fill_random(hello.nonce);
    hello.proof = prove(hello, me_.token, greeting->nonce);
    attempt.nonce = hello.nonce;
    attempt.greeted = true;
    attempt.connection->queue(FrameKind::mesh_hello, encode(hello));
    attempt.connection->flush();
    return take_frames(rank, attempt);
  }
  const auto welcome = frame->kind == FrameKind::welcome ? decode_welcome(frame->payload) : std::nullopt;
  if (!welcome || !equal_in_constant_time(welcome->proof, prove(*welcome, me_.token, attempt.nonce)))
    return try_later(EPROTO, attempt);
  attempt.connection->set_max_payload(kMaxFrameBytes);
  links_[static_cast<size_t>(rank)] = std::move(attempt.connection);
}

void MeshBuilder::accept_higher(Listener& listener, bool greets) {
  if (!listener) return;
  for (int i = 0; i < kMaxAccepted; ++i) {
    auto accepted = listener.accept();
    if (!accepted) return;
    if (!check_peer_user(accepted->fd.get()).empty()) continue;
    if (pending_.size() == kMaxPending) pending_.pop_front();
    Pending& pending =
        pending_.emplace_back(Pending{Connection(std::move(accepted->fd), kMaxHandshakeBytes), Deadline(kHandshakeTime), {}});
    if (!greets) continue;
    fill_random(pending.greeting.emplace());
    pending.connection.queue(FrameKind::greeting, encode(Greeting{*pending.greeting}));
    pending.connection.flush();
  }
}

/// Returns false when this connection is finished: it has become a link, or it is foreign.
bool MeshBuilder::serve(Pending& pending) {
  const bool open = pending.connection.receive();
  if (const auto frame = pending.connection.take()) {
    const auto hello = frame->kind == FrameKind::mesh_hello ? decode_mesh_hello(frame->payload) : std::nullopt;
    uint64_t linked = ~wanted_;
    for (int r = me_.rank + 1; r < me_.world; ++r) linked |= uint64_t{links_[static_cast<size_t>(r)].has_value()} << r;
    const Gate gate = {me_.token, me_.world, linked};
    if (!hello || !judge_mesh_hello(*hello, gate, roster_.session, me_.rank, pending.greeting.value_or(Nonce{})).empty())
      return false;
    const bool there = peer_addresses_[static_cast<size_t>(hello->from)].has_value();
    if (there != pending.greeting.has_value()) return false;
    if (there) {
      pending.connection.queue(FrameKind::welcome, encode(Welcome{prove(Welcome{}, me_.token, hello->nonce)}));
      pending.connection.flush();  // a hundred bytes into an empty socket; a failure shows as a closed connection
    }
    pending.connection.set_max_payload(kMaxFrameBytes);
    links_[static_cast<size_t>(hello->from)] = std::move(pending.connection);
    return false;
  }
  return open && pending.connection.error().empty() && !pending.deadline.passed();
}

}  // namespace switchyard::detail
