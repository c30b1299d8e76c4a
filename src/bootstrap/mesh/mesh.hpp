// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <list>
#include <map>
#include <optional>
#include <vector>

#include "bootstrap/net/connection.hpp"
#include "bootstrap/store/store.hpp"

namespace switchyard::detail {

/// A rank's listening sockets.
struct Listeners {
  Listener host;     ///< ranks on this host: a Unix socket
  Listener network;  ///< ranks on other hosts: TCP
};

/// Connects this rank to the others: it connects to lower ranks and accepts connections from higher ranks. Over TCP, the
/// accepting side sends the first greeting, and both sides prove knowledge of the token.
class MeshBuilder final : public Pollable {
 public:
  /// `peer_addresses` is indexed by rank; ranks reached through their Unix sockets have no address. If bit r of `wanted` is
  /// set, connects to rank r.
  MeshBuilder(Listeners listeners, const Member& me, const Roster& roster,
              std::vector<std::optional<SocketAddress>> peer_addresses, uint64_t wanted);

  void prepare(std::vector<pollfd>& polls) const override;
  Milliseconds until_wake() const override;
  /// Throws PeerFailed if a rank in the roster no longer listens.
  void step() override;

  bool complete() const { return missing().empty(); }
  std::vector<int> missing() const;
  /// For missing ranks on other hosts: the addresses attempted and their results, and the address at which this rank awaits
  /// them; "" if there are none.
  std::string describe_network() const;
  /// Once complete: links by rank; none for this rank and for ranks not in `wanted`.
  std::vector<std::optional<Connection>> take() { return std::move(links_); }

 private:
  struct Pending {
    Connection connection;
    Deadline deadline;
    std::optional<Nonce> greeting;  // TCP
  };
  /// A connection in progress to a rank on another host, or the time of the next attempt.
  struct Attempt {
    std::optional<Connection> connection;
    bool connected = false, greeted = false;
    Nonce nonce{};
    Deadline until{Milliseconds{0}};
    std::string problem = "no answer";  ///< of the last failed attempt
  };
  bool is_missing(int rank) const { return (wanted_ >> rank & 1) != 0 && !links_[static_cast<size_t>(rank)]; }
  void connect_local(int rank);
  void connect_remote(int rank);
  void start(int rank, Attempt& attempt);
  void take_frames(int rank, Attempt& attempt);
  void try_later(int error, Attempt& attempt) const;
  void accept_higher(Listener& listener, bool greets);
  bool serve(Pending& pending);
  std::string context() const { return "rank " + std::to_string(me_.rank) + " connecting to its peers"; }

  Listeners listeners_;
  Member me_;
  Roster roster_;
  std::vector<std::optional<SocketAddress>> peer_addresses_;
  uint64_t wanted_;
  std::vector<std::optional<Connection>> links_;
  std::list<Pending> pending_;
  std::map<int, Attempt> attempts_;
};

}  // namespace switchyard::detail
