// SPDX-License-Identifier: Apache-2.0
// Non-blocking stream sockets: addresses, listening, connecting. Nothing here waits, except resolve() and listen_at()
// (deadlines).
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"
#include "bootstrap/deadline.hpp"
#include "bootstrap/net/wire.hpp"

namespace switchyard::detail {

/// A parsed store: "unix:/path", "unix:@name" (abstract: a name without a file) or "tcp://host:port", "tcp://[v6]:port".
struct Endpoint {
  enum class Kind { unix_path, unix_abstract, tcp };
  Kind kind = Kind::tcp;
  std::string name;  ///< path, abstract name or host
  uint16_t port = 0;
  std::string text;  ///< as it was written

  bool is_unix() const noexcept { return kind != Kind::tcp; }
};
/// Throws Error(invalid_argument) that calls the argument `argument`.
Endpoint parse_endpoint(const std::string& text, const std::string& argument = "store");
Endpoint abstract_endpoint(const std::string& name);

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
  int family() const noexcept { return storage.ss_family; }
};
/// "127.0.0.1:4711", "[::1]:4711" or "a Unix socket".
std::string describe(const SocketAddress& address);

/// "127.0.0.1" or "::1"; "" of a Unix socket.
std::string numeric_host(const SocketAddress& address);
/// What numeric_host said, with a port. Throws RendezvousError if it is none.
SocketAddress numeric_address(const std::string& host, uint16_t port);
/// Of this or the other end of a socket.
SocketAddress local_address(int fd);
SocketAddress peer_address(int fd);

/// 127.0.0.0/8 or ::1, which only processes of this machine reach.
bool is_loopback(const SocketAddress& address);
/// Whether a name stands for loopback addresses here because it is this machine's own, which many systems write so in
/// /etc/hosts: elsewhere it stands for an address that others reach.
bool is_own_name(const Endpoint& endpoint, const std::vector<SocketAddress>& addresses);
/// All addresses of this machine in the family of `address`, and its port.
SocketAddress everywhere(const SocketAddress& address);

/// All addresses of an endpoint, in the order of preference: of a name, those that other machines reach come first. Throws
/// RendezvousError if the host is unknown or the deadline passes.
std::vector<SocketAddress> resolve(const Endpoint& endpoint, const Deadline& deadline);

/// A listening socket; a path is removed with it.
class Listener {
 public:
  Listener() = default;
  Listener(Listener&& other) noexcept = default;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener() { close(); }
  void close() noexcept;
  int fd() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

  struct Accepted {
    UniqueFd fd;
    std::string who;  ///< for messages
  };
  /// The next connection that waits, if there is one. Throws Error(system) if the process has no descriptor left.
  std::optional<Accepted> accept();

 private:
  friend Listener listen_at(const Endpoint& endpoint, const Deadline& deadline, const std::function<void(Milliseconds)>& pause);
  friend Listener listen_beside(const SocketAddress& address);
  UniqueFd fd_;
  std::string path_;  // empty: nothing to remove
  uint64_t inode_ = 0;
};

/// While someone else listens there it tries again until the deadline; a socket file that no process serves is replaced. At
/// this machine's own name that stands for loopback here (is_own_name) it listens everywhere, because others know the name too.
/// Throws RendezvousError that says what is in the way.
/// `pause`, if any, waits between attempts for up to so long, while somebody else listens there.
Listener listen_at(const Endpoint& endpoint, const Deadline& deadline, const std::function<void(Milliseconds)>& pause = {});

/// TCP: at this address, whatever its port, and a port that the system chooses. Not listening if that is impossible.
Listener listen_beside(const SocketAddress& address);
/// 0 if it does not listen, or not on TCP.
uint16_t port_of(const Listener& listener);

/// Begins to connect. `error` is 0, EINPROGRESS (wait for POLLOUT, then connect_result) or the reason of failure.
UniqueFd start_connect(const SocketAddress& address, int& error);
/// EINPROGRESS, 0 once connected, or the reason of failure.
int connect_result(int fd);

/// The process at the other end of a Unix socket.
struct PeerIdentity {
  uint32_t user = UINT32_MAX;
  int process = 0;  ///< 0 if it is not visible from here
};
std::optional<PeerIdentity> peer_identity(int fd);
/// Empty if the other end may be trusted as far as its user goes, or why not. Always empty for TCP.
std::string check_peer_user(int fd);

HostIdentity this_host();
/// From the kernel's generator. Throws Error(system).
void fill_random(std::span<std::byte> bytes);
/// "Connection refused".
std::string describe_errno(int error);

}  // namespace switchyard::detail
