// SPDX-License-Identifier: Apache-2.0
// The rendezvous point: rank 0 serves it, and the other ranks connect. Each side is a state machine driven by one poll loop
// (connect.cpp).
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/deadline.hpp"
#include "bootstrap/host_map.hpp"
#include "bootstrap/net/socket.hpp"
#include "bootstrap/net/wire.hpp"

namespace switchyard::detail {

/// Identity of this process for the rendezvous.
struct Member {
  int rank = 0;
  int world = 1;
  std::string token;
  Endpoint store;
  HostIdentity host;
  std::string mesh_name;
};

/// A participant of a poll loop: step() performs all work that is possible without waiting.
class Pollable {
 public:
  virtual ~Pollable() = default;
  /// Adds the sockets on which step() waits.
  virtual void prepare(std::vector<pollfd>& polls) const = 0;
  /// Time until step() must be called even if no socket is ready.
  virtual Milliseconds until_wake() const = 0;
  /// Throws the error that ended the rendezvous.
  virtual void step() = 0;
};

class Store : public Pollable {
 public:
  /// Null until all ranks have arrived.
  virtual const Roster* roster() const = 0;
  /// Listening addresses by rank, once there is a roster, for ranks on other hosts; none for ranks on this host.
  virtual std::vector<std::optional<SocketAddress>> peer_addresses() const = 0;
  /// Listener for connections from other hosts; not listening if no address was announced.
  virtual Listener take_network() = 0;
  /// Announces that this rank is connected to all others.
  virtual void report_ready() = 0;
  /// True once all ranks are connected to each other.
  virtual bool finished() const = 0;
  /// Called when the deadline has passed: notifies the others and throws RendezvousError naming the missing ranks.
  /// `unconnected` contains the ranks that have no connection to this rank, once there is a roster; `why` is the mesh's
  /// explanation.
  [[noreturn]] virtual void throw_timeout(const std::vector<int>& unconnected, const std::string& why) = 0;
  /// Called when this rank fails: sends the reason to every rank that is still listening. `rank` is the rank to blame.
  virtual void give_up(int rank, const std::string& why) noexcept = 0;
};

/// Address used by ranks that meet at a Unix socket and specify several hosts.
inline constexpr const char* kLoopback = "127.0.0.1";
/// Time within which a connection must identify itself.
inline constexpr Milliseconds kHandshakeTime{5000};

std::unique_ptr<Store> make_store_server(const Member& me, const Deadline& deadline);
std::unique_ptr<Store> make_store_client(const Member& me, const Deadline& deadline);

/// The missing ranks at the deadline: "ranks 2, 5 of 8 did not come to <place> within 60000 ms; rank 1 came and went".
struct Absence {
  std::vector<int> ranks;  ///< ranks that never arrived; if all did, those that departed
  std::string text;
};
Absence describe_absence(const Member& me, const Progress& progress, const Deadline& deadline);

/// Store::ways for rank `me`, which first reached rank 0 at `first`.
std::vector<std::optional<SocketAddress>> peer_addresses_of(const Roster& roster, int me, const std::string& first);
/// Mapping of ranks to hosts. `roster.mesh_names` must have an entry for each rank.
HostMap hosts_in(const Roster& roster);

/// Ranks in a bit mask, in ascending order.
std::vector<int> ranks_in(uint64_t mask);
/// Inverse of ranks_in().
uint64_t mask_of(const std::vector<int>& ranks);
/// Bits [0, world).
uint64_t all_ranks(int world);

}  // namespace switchyard::detail
