// SPDX-License-Identifier: Apache-2.0
// The meeting point: rank 0 serves, the others come. Each side is a state machine that one poll loop drives (processes.cpp).
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

/// Who this process is, for the rendezvous.
struct Member {
  int rank = 0;
  int world = 1;
  std::string token;
  Endpoint store;
  HostIdentity host;
  std::string mesh_name;
};

/// A party to a poll loop: step() does all that can be done without waiting.
class Party {
 public:
  virtual ~Party() = default;
  /// Adds the sockets that can make step() go on.
  virtual void prepare(std::vector<pollfd>& polls) const = 0;
  /// When step() wants to be called even if no socket is ready.
  virtual Milliseconds until_wake() const = 0;
  /// Throws what ends the rendezvous.
  virtual void step() = 0;
};

class Store : public Party {
 public:
  /// Null until all ranks have come.
  virtual const Roster* roster() const = 0;
  /// By rank, once there is a roster: where ranks of other hosts listen; nothing for those of this one.
  virtual std::vector<std::optional<SocketAddress>> ways() const = 0;
  /// Where this rank takes the connections of other hosts; not listening if it has told of no such place.
  virtual Listener take_network() = 0;
  /// This rank is connected to all others.
  virtual void report_ready() = 0;
  /// All ranks are connected to all others.
  virtual bool finished() const = 0;
  /// The deadline has passed: tells the others and throws RendezvousError naming who is missing. `unconnected` are the ranks
  /// with which this rank has no connection yet, once there is a roster, and `why` what the mesh says of them.
  [[noreturn]] virtual void throw_timeout(const std::vector<int>& unconnected, const std::string& why) = 0;
  /// This rank fails; tells the others why, as far as they listen. `rank` is the rank to blame.
  virtual void give_up(int rank, const std::string& why) noexcept = 0;
};

/// Of ranks that meet at a Unix socket and say that they are on several hosts.
inline constexpr const char* kLoopback = "127.0.0.1";
/// How long a connection may take to say who it is.
inline constexpr Milliseconds kHandshakeTime{5000};

std::unique_ptr<Store> make_store_server(const Member& me, const Deadline& deadline);
std::unique_ptr<Store> make_store_client(const Member& me, const Deadline& deadline);

/// Who is missing when the deadline passes: "ranks 2, 5 of 8 did not come to <place> within 60000 ms; rank 1 came and went".
struct Absence {
  std::vector<int> ranks;  ///< those that never came; if all did, those that went
  std::string text;
};
Absence describe_absence(const Member& me, const Progress& progress, const Deadline& deadline);

/// As Store::ways, for rank `me`, who reached rank 0 at `first`.
std::vector<std::optional<SocketAddress>> ways_of(const Roster& roster, int me, const std::string& first);
/// Which ranks share a host. Needs a name for each rank.
HostMap hosts_in(const Roster& roster);

/// Ranks of a bit mask, ascending.
std::vector<int> ranks_in(uint64_t mask);
/// The inverse.
uint64_t mask_of(const std::vector<int>& ranks);
/// Bits [0, world).
uint64_t all_ranks(int world);

}  // namespace switchyard::detail
