// SPDX-License-Identifier: Apache-2.0
// Rank 0's side of the rendezvous.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <list>
#include <map>

#include "bootstrap/net/connection.hpp"
#include "bootstrap/rank_list.hpp"
#include "bootstrap/store/store.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {
namespace {

/// Maximum number of unidentified connections. Beyond this, the oldest connection is dropped: a genuine rank identifies itself
/// immediately, and reconnects if dropped.
constexpr size_t kMaxNewcomers = 256;
/// Maximum number of connections accepted per step, so that an endless stream of foreign connections cannot starve the others.
constexpr int kMaxAccepted = 64;
/// Maximum number of refusals quoted in full in the final error.
constexpr size_t kMaxRefusals = 8;

/// While another process is listening at the store, checks whether it is a rank 0 of the same job; if so, both throw.
Listener listen_at_store(const Member& me, const Deadline& deadline) {
  std::unique_ptr<Store> visitor;
  Listener listener = listen_at(me.store, deadline, [&](Milliseconds pause) {
    if (!visitor) visitor = make_store_client(me, deadline);
    visitor->step();
    std::vector<pollfd> polls;
    visitor->prepare(polls);
    const Milliseconds wait = std::min(pause, visitor->until_wake());
    ::poll(polls.data(), static_cast<nfds_t>(polls.size()), static_cast<int>(wait.count()));
  });
  // The other rank 0 sends its refusal before it stops listening; if this rank can listen now, the refusal has already arrived.
  if (visitor) visitor->step();
  return listener;
}

class StoreServer final : public Store {
 public:
  StoreServer(const Member& me, const Deadline& deadline)
      : me_(me), deadline_(deadline), listener_(listen_at_store(me, deadline)) {
    if (!me.store.is_unix()) {
      at_ = local_address(listener_.fd());
      network_ = listen_on_same_address(at_);
      is_any_address_ = numeric_host(at_) == numeric_host(any_address(at_));
    } else if (!me.host.place.empty()) {
      network_ = listen_on_same_address(numeric_address(kLoopback, 0));
    }
  }

  void prepare(std::vector<pollfd>& polls) const override {
    if (listener_) polls.push_back({listener_.fd(), POLLIN, 0});
    for (const Newcomer& newcomer : newcomers_) add(polls, newcomer.connection);
    for (const auto& [rank, joined] : joined_ranks_) add(polls, joined.connection);
  }

  Milliseconds until_wake() const override {
    Milliseconds least = deadline_.remaining();
    for (const Newcomer& newcomer : newcomers_) least = std::min(least, newcomer.deadline.remaining());
    return least;
  }

  void step() override {
    if (listener_) accept_newcomers();
    for (auto newcomer = newcomers_.begin(); newcomer != newcomers_.end();) {
      newcomer = serve(*newcomer) ? std::next(newcomer) : newcomers_.erase(newcomer);
    }
    serve_ranks();
    if (!roster_sent_ && arrived() == all_ranks(me_.world)) send_roster();
    if (roster_sent_ && !go_sent_ && ready_ &&
        std::all_of(joined_ranks_.begin(), joined_ranks_.end(), [](auto& g) { return g.second.ready; })) {
      broadcast(FrameKind::go, {});
      go_sent_ = true;
    }
    for (auto& [rank, joined] : joined_ranks_) joined.connection.flush();
  }

  const Roster* roster() const override { return roster_sent_ ? &roster_ : nullptr; }
  std::vector<std::optional<SocketAddress>> peer_addresses() const override {
    return peer_addresses_of(roster_, 0, at_.family() == AF_INET6 ? "::1" : kLoopback);
  }
  Listener take_network() override { return std::move(network_); }
  void report_ready() override { ready_ = true; }
  bool finished() const override {
    return go_sent_ &&
           std::none_of(joined_ranks_.begin(), joined_ranks_.end(), [](auto& g) { return g.second.connection.has_output(); });
  }

  void throw_timeout(const std::vector<int>& unconnected, const std::string& why) override {
    if (roster_sent_) throw_unconnected(mask_of(unconnected), why);
    const Absence absence = describe_absence(me_, progress(), deadline_);
    fail_all(absence.text + describe_refusals(), mask_of(absence.ranks));
  }

  void give_up(int rank, const std::string& why) noexcept override {
    try {
      broadcast(FrameKind::failure, encode(Failure{rank, 0, why}));
    } catch (const std::bad_alloc&) {  // the others will observe the end of the connection
    }
  }

 private:
  struct Newcomer {
    Connection connection;
    std::string origin;
    Nonce nonce;
    Deadline deadline;
    bool refused = false;
  };
  struct Refused {
    std::string origin, why;
    size_t times = 0;
  };
  struct JoinedRank {
    Connection connection;
    Nonce nonce;
    std::string mesh_name;
    HostIdentity host;
    Reach reach;
    bool ready = false;
  };

  static void add(std::vector<pollfd>& polls, const Connection& connection) {
    polls.push_back({connection.fd(), static_cast<short>(POLLIN | (connection.has_output() ? POLLOUT : 0)), 0});
  }

  uint64_t arrived() const {
    uint64_t mask = 1;
    for (const auto& [rank, joined] : joined_ranks_) mask |= uint64_t{1} << rank;
    return mask;
  }

  Progress progress() const { return {arrived(), departed_ & ~arrived()}; }

  void evict_oldest() {
    if (!newcomers_.front().refused) note_refusal(newcomers_.front().origin, "it did not say who it is, and others came");
    newcomers_.pop_front();
  }

  /// The next waiting connection. If the process has run out of descriptors, closes unidentified connections.
  std::optional<Listener::Accepted> accept_next() {
    try {
      return listener_.accept();
    } catch (const Error&) {
      if (newcomers_.empty()) throw;
      evict_oldest();
      return listener_.accept();
    }
  }

  void accept_newcomers() {
    for (int i = 0; i < kMaxAccepted; ++i) {
      auto accepted = accept_next();
      if (!accepted) return;
      if (newcomers_.size() == kMaxNewcomers) evict_oldest();
      if (const std::string problem = check_peer_user(accepted->fd.get()); !problem.empty()) {
        note_refusal(accepted->origin, problem);
        continue;
      }
      Greeting greeting;
      fill_random(greeting.nonce);
      Newcomer& newcomer = newcomers_.emplace_back(Newcomer{Connection(std::move(accepted->fd), kMaxHandshakeBytes),
                                                            accepted->origin, greeting.nonce, Deadline(kHandshakeTime)});
      newcomer.connection.queue(FrameKind::greeting, encode(greeting));
    }
  }

  /// Returns false when this connection is finished.
  bool serve(Newcomer& newcomer) {
    const bool open = newcomer.connection.flush() && newcomer.connection.receive();
    if (newcomer.refused) {  // keeps reading until it is read: closing a socket with unread bytes discards the refusal
      while (newcomer.connection.take()) continue;
      return open && !newcomer.deadline.passed();
    }
    if (const auto frame = newcomer.connection.take()) {
      const auto hello = frame->kind == FrameKind::hello ? decode_hello(frame->payload) : std::nullopt;
      return hello ? admit(newcomer, *hello) : refuse(newcomer, "it sent something else than its name");
    }
    if (!newcomer.connection.error().empty()) return refuse(newcomer, newcomer.connection.error());
    if (!open) return false;
    if (newcomer.deadline.passed()) {
      return refuse(newcomer, "it did not say who it is within " + std::to_string(kHandshakeTime.count()) + " ms");
    }
    return true;
  }

  bool refuse(Newcomer& newcomer, const std::string& why, const Nonce& hello = {}) {
    note_refusal(newcomer.origin, why);
    newcomer.refused = true;
    newcomer.deadline = Deadline(kHandshakeTime);
    Refusal refusal{why, {}};
    refusal.proof = prove(refusal, me_.token, hello);
    newcomer.connection.queue(FrameKind::refusal, encode(refusal));
    return newcomer.connection.flush();
  }

  /// Returns the address at which other hosts reach the rank at the other end of the connection. A rank that used loopback for
  /// this machine's own name is on rank 0's machine.
  std::string reach_of(int fd) const {
    if (me_.store.is_unix()) return kLoopback;
    const SocketAddress there = peer_address(fd);
    return is_any_address_ && is_loopback(there) ? "" : numeric_host(there);
  }

  /// Adds an authenticated connection to the guests. Returns false or the result of refuse().
  bool admit(Newcomer& newcomer, const Hello& hello) {
    serve_ranks();  // a rank that died may rejoin; its end is processed before its successor
    if (const std::string why = judge_hello(hello, {me_.token, me_.world, arrived()}, newcomer.nonce); !why.empty()) {
      if (hello.rank != 0 || !token_matches(hello, newcomer.nonce)) return refuse(newcomer, why, hello.nonce);
      const std::string twice =
          "rank 0 is taken twice, by process " + std::to_string(::getpid()) + " and by " + newcomer.origin;
      refuse(newcomer, twice, hello.nonce);
      fail_all(twice + ": each process needs a rank of its own");
    }
    JoinedRank joined = {std::move(newcomer.connection), hello.nonce, hello.mesh_name, hello.host, {}};
    joined.reach = {reach_of(joined.connection.fd()), hello.port, 0};
    joined.connection.queue(FrameKind::welcome, encode(Welcome{prove(Welcome{}, me_.token, hello.nonce)}));
    joined_ranks_.emplace(hello.rank, std::move(joined));
    if (const std::string why = find_misplaced(hello); !why.empty()) fail_all(why);
    broadcast(FrameKind::progress, encode(progress()));
    return false;
  }

  bool token_matches(const Hello& hello, const Nonce& greeting) const {
    return equal_in_constant_time(hello.proof, prove(hello, me_.token, greeting));
  }

  /// Returns the reason why this rank's specified host conflicts with those of ranks that have arrived, or "".
  std::string find_misplaced(const Hello& hello) const {
    std::string why = describe_place_conflict(0, me_.host, hello.rank, hello.host);
    for (const auto& [rank, joined] : joined_ranks_)
      if (why.empty()) why = describe_place_conflict(rank, joined.host, hello.rank, hello.host);
    if (why.empty() && me_.store.is_unix()) why = describe_host_mismatch(hello.rank, me_.host, hello.host);
    return why;
  }

  /// Fails without a rank to blame: all ranks throw RendezvousError, with `missing` as the missing ranks.
  [[noreturn]] void fail_all(const std::string& why, uint64_t missing = 0) {
    broadcast(FrameKind::failure, encode(Failure{-1, missing, why}));
    throw RendezvousError("rank 0: " + why, ranks_in(missing));
  }

  /// `missing` contains the ranks that are not connected to this one.
  [[noreturn]] void throw_unconnected(uint64_t missing, const std::string& why) {
    for (const auto& [rank, joined] : joined_ranks_) missing |= uint64_t{!joined.ready} << rank;
    fail_all(describe_ranks(ranks_in(missing)) + " of " + std::to_string(me_.world) + " came to " + me_.store.text +
                 " but did not connect to all others within " + std::to_string(deadline_.budget().count()) + " ms" + why,
             missing);
  }

  /// Records which ranks share a host and how hosts reach each other; records nothing if all ranks share one host.
  void place_ranks() {
    std::vector<std::string> keys = {me_.host.key()};
    roster_.reach = {Reach{me_.store.is_unix() ? kLoopback : "", port_of(network_), 0}};
    for (const auto& [rank, joined] : joined_ranks_) {
      keys.push_back(joined.host.key());
      roster_.reach.push_back(joined.reach);
    }
    const HostMap hosts{keys};
    if (hosts.one_host()) return roster_.reach.clear();
    for (int r = 0; r < me_.world; ++r) {
      Reach& reach = roster_.reach[static_cast<size_t>(r)];
      reach.host = static_cast<uint8_t>(hosts.host_of(r));
      if (reach.port == 0)
        fail_all("the ranks are on " + std::to_string(hosts.hosts()) + " hosts (" + hosts.text() + "), and rank " +
                 std::to_string(r) + " listens nowhere for those of others: let all ranks meet at a tcp:// store" +
                 (me_.store.is_unix() ? ", or name the hosts of all (SWITCHYARD_HOST)" : ""));
    }
  }

  void serve_ranks() {
    for (auto entry = joined_ranks_.begin(); entry != joined_ranks_.end();) {
      auto& [rank, joined] = *entry;
      const bool open = joined.connection.receive();
      while (const auto frame = joined.connection.take()) take_rank_frame(rank, joined, *frame);
      if (open && joined.connection.error().empty()) {
        ++entry;
      } else if (go_sent_) {  // it has its go and left; or it died, which the mesh will report
        entry = joined_ranks_.erase(entry);
      } else if (roster_sent_) {
        fail(rank, "its process ended or it gave up while the ranks connected to each other");
      } else {
        departed_ |= uint64_t{1} << rank;
        entry = joined_ranks_.erase(entry);
        broadcast(FrameKind::progress, encode(progress()));
      }
    }
  }

  void take_rank_frame(int rank, JoinedRank& joined, const Frame& frame) {
    if (frame.kind == FrameKind::ready && roster_sent_) {
      joined.ready = true;
    } else if (frame.kind == FrameKind::failure) {
      const auto failure = decode_failure(frame.payload);
      const bool valid = failure && failure->rank >= 0 && failure->rank < me_.world;
      if (failure && failure->rank < 0 && roster_sent_) {  // the deadline of that rank has passed
        const uint64_t missing = failure->missing & all_ranks(me_.world);
        if (missing != 0) fail_all(failure->text, missing);
        throw_unconnected(0, "; " + failure->text);
      }
      fail(valid ? failure->rank : rank, valid ? failure->text : "it gave up");
    } else {
      fail(rank, "it broke the protocol (frame kind " + std::to_string(static_cast<int>(frame.kind)) + ")");
    }
  }

  [[noreturn]] void fail(int rank, const std::string& why) {
    give_up(rank, why);
    throw PeerFailed(rank, ErrorCode::system, "rank 0, rendezvous at " + me_.store.text + " (" + why + ")");
  }

  void send_roster() {
    listener_.close();  // before any rank can use the same store for the next rendezvous
    newcomers_.clear();
    fill_random(roster_.session);
    roster_.mesh_names.assign(static_cast<size_t>(me_.world), me_.mesh_name);
    for (const auto& [rank, joined] : joined_ranks_) roster_.mesh_names[static_cast<size_t>(rank)] = joined.mesh_name;
    place_ranks();
    for (auto& [rank, joined] : joined_ranks_) {
      Roster copy = roster_;
      copy.proof = prove(copy, me_.token, joined.nonce);
      joined.connection.queue(FrameKind::roster, encode(copy));
    }
    roster_sent_ = true;
  }

  void broadcast(FrameKind kind, const Bytes& payload) {
    for (auto& [rank, joined] : joined_ranks_) {
      joined.connection.queue(kind, payload);
      joined.connection.flush();
    }
  }

  /// A peer that returns from a different port is the same peer.
  void note_refusal(const std::string& origin, const std::string& why) {
    const std::string host = me_.store.is_unix() ? origin : origin.substr(0, origin.rfind(':'));
    for (Refused& refused : refusals_)
      if (refused.origin == host && refused.why == why) {
        ++refused.times;
        return;
      }
    if (refusals_.size() < kMaxRefusals)
      refusals_.push_back({host, why, 1});
    else
      ++more_refusals_;
  }

  std::string describe_refusals() const {
    if (refusals_.empty() && !me_.store.is_unix())
      return "; nobody was turned away: were they started with this store, and does a firewall let them come to " +
             describe(at_) + "?";
    std::string text;
    for (const Refused& refused : refusals_) {
      text += (text.empty() ? "; turned away: " : ", ") + refused.origin + " (" + refused.why + ")";
      if (refused.times > 1) text += ", " + std::to_string(refused.times) + " times";
    }
    if (more_refusals_ > 0) text += " and " + std::to_string(more_refusals_) + " more";
    return text;
  }

  Member me_;
  Deadline deadline_;
  Listener listener_, network_;
  SocketAddress at_;             ///< of a TCP listener
  bool is_any_address_ = false;  ///< it covers all addresses of this machine
  std::list<Newcomer> newcomers_;
  std::map<int, JoinedRank> joined_ranks_;
  uint64_t departed_ = 0;  // bit r: rank r arrived and departed; stays set if it returns
  Roster roster_;
  bool roster_sent_ = false;
  bool ready_ = false;
  bool go_sent_ = false;
  std::vector<Refused> refusals_;
  size_t more_refusals_ = 0;
};

}  // namespace

std::unique_ptr<Store> make_store_server(const Member& me, const Deadline& deadline) {
  return std::make_unique<StoreServer>(me, deadline);
}

Absence describe_absence(const Member& me, const Progress& progress, const Deadline& deadline) {
  const std::vector<int> never = ranks_in(all_ranks(me.world) & ~progress.arrived & ~progress.departed);
  const std::vector<int> went = ranks_in(all_ranks(me.world) & progress.departed);
  const std::string rest = " of " + std::to_string(me.world);
  const std::string where = me.store.text + " within " + std::to_string(deadline.budget().count()) + " ms";
  if (never.empty() && went.empty()) return {{0}, "rank 0" + rest + " did not send the list of ranks from " + where};
  if (never.empty()) return {went, describe_ranks(went) + rest + " ended or gave up before all had come to " + where};
  std::string text = describe_ranks(never) + rest + " did not come to " + where;
  if (!went.empty()) text += "; " + describe_ranks(went) + " came and went";
  return {never, text};
}

std::vector<std::optional<SocketAddress>> peer_addresses_of(const Roster& roster, int me, const std::string& first) {
  std::vector<std::optional<SocketAddress>> peer_addresses(roster.mesh_names.size());
  for (size_t r = 0; r < roster.reach.size(); ++r) {
    const Reach& reach = roster.reach[r];
    if (reach.host == roster.reach[static_cast<size_t>(me)].host) continue;
    peer_addresses[r] = numeric_address(reach.address.empty() ? first : reach.address, reach.port);
  }
  return peer_addresses;
}

HostMap hosts_in(const Roster& roster) {
  if (roster.reach.empty()) return HostMap(static_cast<int>(roster.mesh_names.size()));
  std::vector<std::string> keys;
  for (const Reach& reach : roster.reach) keys.push_back(std::to_string(reach.host));
  return HostMap{keys};
}

std::vector<int> ranks_in(uint64_t mask) {
  std::vector<int> ranks;
  for (int r = 0; r < kMaxRanks; ++r) {
    if ((mask >> r & 1) != 0) ranks.push_back(r);
  }
  return ranks;
}

uint64_t mask_of(const std::vector<int>& ranks) {
  uint64_t mask = 0;
  for (const int r : ranks) mask |= uint64_t{1} << r;
  return mask;
}

uint64_t all_ranks(int world) { return world >= 64 ? ~uint64_t{0} : (uint64_t{1} << world) - 1; }

}  // namespace switchyard::detail
