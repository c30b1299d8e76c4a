// SPDX-License-Identifier: Apache-2.0
// Rendezvous side of every rank except rank 0.
#include <algorithm>
#include <cerrno>
#include <new>
#include <optional>

#include "bootstrap/net/connection.hpp"
#include "bootstrap/rank_list.hpp"
#include "bootstrap/store/store.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr Milliseconds kFirstRetry{10};
constexpr Milliseconds kLastRetry{200};
constexpr size_t kMaxStrangerText = 200;

/// Retries until admitted, because rank 0 may start later or may first listen for another group.
class StoreClient final : public Store {
 public:
  StoreClient(const Member& me, const Deadline& deadline)
      : me_(me), deadline_(deadline), addresses_(resolve(me.store, deadline)), next_step_(Milliseconds{0}) {
    own_name_ = is_own_name(me.store, addresses_);
  }

  void prepare(std::vector<pollfd>& polls) const override {
    if (!connection_) return;
    const bool output = stage_ == Stage::connecting || connection_->has_output();
    polls.push_back(
        {connection_->fd(), static_cast<short>((stage_ == Stage::connecting ? 0 : POLLIN) | (output ? POLLOUT : 0)), 0});
  }

  /// Before admission: the time until the next attempt or, during an attempt, until it times out.
  Milliseconds until_wake() const override {
    return stage_ < Stage::admitted ? std::min(deadline_.remaining(), next_step_.remaining()) : deadline_.remaining();
  }

  void step() override {
    if (stage_ == Stage::away && next_step_.passed()) start();
    if (stage_ == Stage::connecting) continue_connecting();
    if (stage_ < Stage::greeted) {
      if (next_step_.passed() && stage_ != Stage::away)
        lose("no answer within " + std::to_string(kHandshakeTime.count()) + " ms");
      if (stage_ != Stage::connected) return;
    }
    const bool sent = connection_->flush();  // on failure, messages that rank 0 sent before it ended can still be read
    const bool open = connection_->receive() && sent;
    while (stage_ != Stage::away) {
      const auto frame = connection_->take();
      if (!frame) break;
      take_frame(*frame);
    }
    if (stage_ == Stage::away || stage_ == Stage::done) return;
    if (!connection_->error().empty()) return lose(connection_->error());
    if (!open) return lose("it closed the connection");
    if (stage_ < Stage::admitted && next_step_.passed())
      return lose("no answer within " + std::to_string(kHandshakeTime.count()) + " ms");
    connection_->flush();
  }

  const Roster* roster() const override { return stage_ >= Stage::meeting ? &roster_ : nullptr; }
  std::vector<std::optional<SocketAddress>> peer_addresses() const override {
    return peer_addresses_of(roster_, me_.rank, numeric_host(peer_address(connection_->fd())));
  }
  Listener take_network() override { return std::move(network_); }
  void report_ready() override {
    connection_->queue(FrameKind::ready);
    connection_->flush();
  }
  bool finished() const override { return stage_ == Stage::done; }

  void throw_timeout(const std::vector<int>& unconnected, const std::string& why) override {
    const std::string prefix = "rank " + std::to_string(me_.rank) + ": ";
    const std::string waited = " within " + std::to_string(deadline_.budget().count()) + " ms";
    if (stage_ >= Stage::meeting) {
      // Without its own list, this rank was waiting for the others' connections; only rank 0 can name the missing ranks.
      if (unconnected.empty()) {
        send_failure({-1, 0, "rank " + std::to_string(me_.rank) + " waited for the others to connect to each other" + waited});
        throw RendezvousError(
            prefix + "rank 0 of " + std::to_string(me_.world) + " did not report that all ranks are connected" + waited, {0});
      }
      const std::string text = "rank " + std::to_string(me_.rank) + " has no connection with " + describe_ranks(unconnected) +
                               " of " + std::to_string(me_.world) + waited + why;
      send_failure({-1, mask_of(unconnected), text});
      throw RendezvousError(text, unconnected);
    }
    if (stage_ == Stage::admitted) {
      const Absence absence = describe_absence(me_, progress_, deadline_);
      throw RendezvousError(prefix + absence.text, absence.ranks);
    }
    throw RendezvousError(prefix + "rank 0 of " + std::to_string(me_.world) + " did not come to " + me_.store.text + waited +
                              " (last attempt" + tried_ + ": " + problem_ + refusal_ + ")",
                          {0});
  }

  void give_up(int rank, const std::string& why) noexcept override {
    try {
      send_failure({rank, 0, why});
    } catch (const std::bad_alloc&) {  // rank 0 will observe the end of the connection
    }
  }

 private:
  enum class Stage {
    away,        ///< no connection
    connecting,  ///< TCP connect in progress
    connected,   ///< waiting for the greeting
    greeted,     ///< has sent its identity; nothing is trusted before the welcome
    admitted,    ///< counted by rank 0; waiting for the others
    meeting,     ///< all have arrived; connecting to the other ranks
    done,
  };

  void send_failure(const Failure& failure) {
    if (!connection_ || stage_ < Stage::meeting) return;
    connection_->queue(FrameKind::failure, encode(failure));
    connection_->flush();
  }

  void start() {
    const SocketAddress& address = addresses_[attempt_++ % addresses_.size()];
    tried_ = me_.store.is_unix() ? "" : ", at " + describe(address);
    int error = 0;
    UniqueFd fd = start_connect(address, error);
    if (!fd || (error != 0 && error != EINPROGRESS)) return lose(describe_errno(error));
    connection_.emplace(std::move(fd), kMaxHandshakeBytes);
    stage_ = Stage::connecting;
    next_step_ = Deadline(kHandshakeTime);
  }

  void continue_connecting() {
    const int error = connect_result(connection_->fd());
    if (error == EINPROGRESS) return;
    if (error != 0) return lose(describe_errno(error));
    if (const std::string why = check_peer_user(connection_->fd()); !why.empty()) return lose(why);
    stage_ = Stage::connected;
  }

  /// Before all ranks have arrived, another attempt may succeed; after that, losing rank 0 is fatal.
  void lose(const std::string& why) {
    if (stage_ >= Stage::meeting) {
      throw PeerFailed(0, ErrorCode::system,
                       "rank " + std::to_string(me_.rank) + ", rendezvous at " + me_.store.text + " (" + why + ")");
    }
    problem_ = why;
    connection_.reset();
    stage_ = Stage::away;
    const bool another = attempt_ % addresses_.size() != 0;  // the host has more addresses: retry at once
    if (!another) retry_ = std::min(retry_ * 2, kLastRetry);
    next_step_ = Deadline(another ? Milliseconds{0} : retry_);
  }

  void take_frame(const Frame& frame) {
    switch (frame.kind) {
      case FrameKind::greeting:
        if (const auto greeting = decode_greeting(frame.payload); greeting && stage_ == Stage::connected)
          return answer(*greeting);
        break;
      case FrameKind::welcome:
        if (const auto welcome = decode_welcome(frame.payload); welcome && stage_ == Stage::greeted)
          return accept_welcome(*welcome);
        break;
      case FrameKind::progress:
        if (const auto progress = decode_progress(frame.payload); progress && stage_ == Stage::admitted) {
          progress_ = *progress;
          return;
        }
        break;
      case FrameKind::refusal:
        if (const auto refusal = decode_refusal(frame.payload); refusal && stage_ <= Stage::greeted)
          return take_refusal(*refusal);
        break;
      case FrameKind::failure:
        if (const auto failure = decode_failure(frame.payload); failure && stage_ >= Stage::admitted) return end(*failure);
        break;
      case FrameKind::roster:
        if (auto roster = decode_roster(frame.payload); roster && stage_ == Stage::admitted)
          return accept_roster(std::move(*roster));
        break;
      case FrameKind::go:
        if (stage_ == Stage::meeting) {
          stage_ = Stage::done;
          return;
        }
        break;
      case FrameKind::hello:
      case FrameKind::ready:
      case FrameKind::mesh_hello:
      case FrameKind::data:
      case FrameKind::descriptor:
      case FrameKind::leave:
      case FrameKind::pulse:
      case FrameKind::aborted: break;
    }
    lose("it broke the protocol (frame kind " + std::to_string(static_cast<int>(frame.kind)) + ")");
  }

  void answer(const Greeting& greeting) {
    Hello hello;
    hello.rank = me_.rank;
    hello.world = me_.world;
    fill_random(hello.nonce);
    hello.host = me_.host;
    hello.mesh_name = me_.mesh_name;
    if (!me_.store.is_unix()) {
      const SocketAddress here = local_address(connection_->fd());
      network_ = listen_on_same_address(own_name_ ? any_address(here) : here);
    } else if (!me_.host.place.empty()) {
      network_ = listen_on_same_address(numeric_address(kLoopback, 0));
    }
    hello.port = port_of(network_);
    hello.proof = prove(hello, me_.token, greeting.nonce);
    nonce_ = hello.nonce;
    connection_->queue(FrameKind::hello, encode(hello));
    stage_ = Stage::greeted;
  }

  void accept_welcome(const Welcome& welcome) {
    if (!equal_in_constant_time(welcome.proof, prove(welcome, me_.token, nonce_)))
      return lose("it does not know the job token");
    stage_ = Stage::admitted;
  }

  /// A peer that proves the token is rank 0, and its refusal is final. On a Unix socket, a refusal by a process of this user is
  /// final too. Any other peer, including a rank 0 with another token, may merely be occupying the address: the next attempt
  /// may reach the right one.
  void take_refusal(const Refusal& refusal) {
    const bool proved = stage_ == Stage::greeted && equal_in_constant_time(refusal.proof, prove(refusal, me_.token, nonce_));
    // A rank 0 connects here only if it cannot listen itself: another job may occupy the store until its own ranks have met.
    if (proved || (me_.store.is_unix() && me_.rank != 0))
      throw RendezvousError("rank " + std::to_string(me_.rank) + " was refused by rank 0 at " + me_.store.text + ": " +
                            refusal.text);
    std::string text = refusal.text.substr(0, kMaxStrangerText);
    for (char& c : text)
      if (c < ' ' || c > '~') c = '?';
    refusal_ = "; turned away before, without proof of the job token: \"" + text + "\"";
    lose("it was turned away");
  }

  void accept_roster(Roster roster) {
    const bool genuine = equal_in_constant_time(roster.proof, prove(roster, me_.token, nonce_));
    const bool whole = roster.mesh_names.size() == static_cast<size_t>(me_.world) &&
                       (roster.reach.empty() || roster.reach.size() == roster.mesh_names.size());
    if (!genuine || !whole) return lose("it does not know the job token");
    roster_ = std::move(roster);
    stage_ = Stage::meeting;
  }

  [[noreturn]] void end(const Failure& failure) const {
    const std::string subject = "rank " + std::to_string(me_.rank);
    if (failure.rank < 0)
      throw RendezvousError(subject + ": " + failure.text, ranks_in(failure.missing & all_ranks(me_.world)));
    throw PeerFailed(failure.rank, ErrorCode::system,
                     subject + ", rendezvous at " + me_.store.text + " (" + failure.text + ")");
  }

  Member me_;
  Deadline deadline_;
  std::vector<SocketAddress> addresses_;
  bool own_name_ = false;  ///< the store's host name is this machine's own: other ranks resolve it to addresses unknown here
  size_t attempt_ = 0;
  Milliseconds retry_ = kFirstRetry;
  Deadline next_step_;
  Stage stage_ = Stage::away;
  std::optional<Connection> connection_;
  Nonce nonce_{};
  Listener network_;
  Progress progress_;
  Roster roster_;
  std::string tried_, problem_ = "none";  // address and result of the last attempt
  std::string refusal_;                   // the last untrusted refusal
};

}  // namespace

std::unique_ptr<Store> make_store_client(const Member& me, const Deadline& deadline) {
  return std::make_unique<StoreClient>(me, deadline);
}

}  // namespace switchyard::detail
