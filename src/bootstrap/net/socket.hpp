// SPDX-License-Identifier: Apache-2.0
// Non-blocking stream sockets: addresses, listening, connecting. Only resolve() and listen_at() wait (with deadlines).
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

/// A parsed store: "unix:/path", "unix:@name" (abstract: a name without a file), "tcp://host:port" or "tcp://[v6]:port".
struct Endpoint {
  enum class Kind { unix_path, unix_abstract, tcp };
  Kind kind = Kind::tcp;
  std::string name;  ///< path, abstract name or host
  uint16_t port = 0;
  std::string text;  ///< original text

  bool is_unix() const noexcept { return kind != Kind::tcp; }
};
/// Throws Error(invalid_argument); `argument` is the name used in the error text.
Endpoint parse_endpoint(const std::string& text, const std::string& argument = "store");
Endpoint abstract_endpoint(const std::string& name);

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
  int family() const noexcept { return storage.ss_family; }
};
/// "127.0.0.1:4711", "[::1]:4711" or "a Unix socket".
std::string describe(const SocketAddress& address);

/// "127.0.0.1" or "::1"; "" for a Unix socket.
std::string numeric_host(const SocketAddress& address);
/// Builds an address from numeric_host() text and a port. Throws RendezvousError if the text is not numeric.
SocketAddress numeric_address(const std::string& host, uint16_t port);
/// Address of the local or the remote end of a socket.
SocketAddress local_address(int fd);
SocketAddress peer_address(int fd);

/// True for 127.0.0.0/8 and ::1, which are reachable only from this machine.
bool is_loopback(const SocketAddress& address);
/// True if a name resolves to loopback addresses because it is this machine's own name. This is common in /etc/hosts; on other
/// machines, the name resolves to a reachable address.
bool is_own_name(const Endpoint& endpoint, const std::vector<SocketAddress>& addresses);
/// Wildcard address of this machine in the address family and with the port of `address`.
SocketAddress any_address(const SocketAddress& address);

/// All addresses of an endpoint in order of preference; addresses that other machines can reach come first. Throws
/// RendezvousError if the host is unknown or the deadline has passed.
std::vector<SocketAddress> resolve(const Endpoint& endpoint, const Deadline& deadline);

/// A listening socket; removes its path when destroyed.
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
    std::string origin;  ///< for error messages
  };
  /// Returns the next waiting connection, if any. Throws Error(system) if the process has run out of descriptors.
  std::optional<Accepted> accept();

 private:
  friend Listener listen_at(const Endpoint& endpoint, const Deadline& deadline, const std::function<void(Milliseconds)>& pause);
  friend Listener listen_on_same_address(const SocketAddress& address);
  UniqueFd fd_;
  std::string path_;  // empty: nothing to remove
  uint64_t inode_ = 0;
};

/// Retries until the deadline while another process is listening there. Replaces a socket file that no process serves, under a
/// lock (flock) of its folder: of several processes, exactly one listens. If the endpoint is this machine's own name and it
/// resolves to loopback here (is_own_name), listens on all addresses, because the name resolves differently on other machines.
/// Throws RendezvousError naming the obstacle. `pause`, if set, is called between attempts and waits up to the given time.
Listener listen_at(const Endpoint& endpoint, const Deadline& deadline, const std::function<void(Milliseconds)>& pause = {});

/// TCP: listens at this address, but on a port chosen by the system. Returns a non-listening object on failure.
Listener listen_on_same_address(const SocketAddress& address);
/// Returns the port, or 0 if the listener is not listening or does not use TCP.
uint16_t port_of(const Listener& listener);

/// Starts to connect. `error` is 0, EINPROGRESS (wait for POLLOUT, then connect_result) or the error number.
UniqueFd start_connect(const SocketAddress& address, int& error);
/// Returns EINPROGRESS while connecting, 0 once connected, or the error number.
int connect_result(int fd);

/// The process at the other end of a Unix socket.
struct PeerIdentity {
  uint32_t user = UINT32_MAX;
  int process = 0;  ///< 0 if it is not visible from here
};
std::optional<PeerIdentity> peer_identity(int fd);
/// Returns the reason why the peer's user is not trusted, or "" if trusted. Always empty for TCP.
std::string check_peer_user(int fd);

HostIdentity this_host();
/// Uses the kernel's generator. Throws Error(system).
void fill_random(std::span<std::byte> bytes);
/// "Connection refused".
std::string describe_errno(int error);

}  // namespace switchyard::detail
