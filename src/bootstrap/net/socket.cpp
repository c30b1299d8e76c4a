// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/net/socket.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr int kBacklog = 256;
constexpr Milliseconds kListenRetry{50};

UniqueFd make_socket(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (fd && family != AF_UNIX) ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

const sockaddr* as_sockaddr(const SocketAddress& address) { return reinterpret_cast<const sockaddr*>(&address.storage); }

bool is_socket(const std::string& path, uint64_t* inode = nullptr) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode)) return false;
  if (inode != nullptr) *inode = info.st_ino;
  return true;
}

/// Excludes other listeners from the folder of a socket file. Between bind() and listen(), a socket file looks like one that
/// no process serves; only the holder of this lock creates or replaces one. A folder that cannot be opened or locked (no read
/// permission, some network file systems) is used without a lock.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path) {
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    fd_ = UniqueFd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd_ && ::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) busy_ = errno == EWOULDBLOCK;
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() {
    if (fd_ && !busy_) ::flock(fd_.get(), LOCK_UN);  // a child process forked meanwhile holds a copy of the descriptor
  }
  bool busy() const { return busy_; }

 private:
  UniqueFd fd_;
  bool busy_ = false;
};

/// Frees a path that another process has bound: removes its socket file if no process serves it any more, left behind when a
/// process was killed while listening. The caller holds the folder's lock. Returns 0 if the path is free, also when its
/// listener has just removed the file; else EADDRINUSE, or EEXIST for a file that is not a socket.
int free_path(const std::string& path, const SocketAddress& address) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) return errno == ENOENT ? 0 : EADDRINUSE;
  if (!S_ISSOCK(info.st_mode)) return EEXIST;
  int error = 0;
  const UniqueFd probe = start_connect(address, error);
  if (error == ENOENT) return 0;
  return error == ECONNREFUSED && (::unlink(path.c_str()) == 0 || errno == ENOENT) ? 0 : EADDRINUSE;
}

/// Makes one attempt. Returns 0 or the error number: EADDRINUSE while another process listens there, EWOULDBLOCK while another
/// process has locked the folder.
int try_listen(const Endpoint& endpoint, const SocketAddress& address, UniqueFd& fd) {
  std::optional<FolderLock> lock;
  if (endpoint.kind == Endpoint::Kind::unix_path && lock.emplace(endpoint.name).busy()) return EWOULDBLOCK;
  fd = make_socket(address.family());
  if (!fd) return errno;
  const int on = 1;
  if (endpoint.kind == Endpoint::Kind::tcp) {
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address.family() == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  }
  if (endpoint.kind == Endpoint::Kind::unix_path) ::fchmod(fd.get(), 0600);  // mode of the socket file
  if (::bind(fd.get(), as_sockaddr(address), address.length) != 0) {
    const int error = errno;
    if (error != EADDRINUSE || endpoint.kind != Endpoint::Kind::unix_path) return error;
    if (const int occupied = free_path(endpoint.name, address); occupied != 0) return occupied;
    if (::bind(fd.get(), as_sockaddr(address), address.length) != 0) return errno;
  }
  return ::listen(fd.get(), kBacklog) == 0 ? 0 : errno;
}

[[noreturn]] void throw_cannot_listen(const Endpoint& endpoint, int error, const Deadline& deadline) {
  std::string text = "rank 0 cannot listen at " + endpoint.text + ": ";
  if (error == EADDRINUSE) {
    text += "another process still listens there after " + std::to_string(deadline.budget().count()) + " ms";
  } else if (error == EWOULDBLOCK) {
    text += "another process has locked its folder (flock) for " + std::to_string(deadline.budget().count()) + " ms";
  } else if (error == EADDRNOTAVAIL) {
    text += "'" + endpoint.name + "' is not an address of this machine; rank 0 must run on the host that the store names";
  } else if (error == EEXIST) {
    text += "the file exists and is not a socket";
  } else {
    text += describe_errno(error);
  }
  throw RendezvousError(text);
}

}  // namespace

std::string describe_errno(int error) { return std::generic_category().message(error); }

Listener& Listener::operator=(Listener&& other) noexcept {
  if (this == &other) return *this;
  close();
  fd_ = std::move(other.fd_);
  path_ = std::exchange(other.path_, {});
  inode_ = other.inode_;
  return *this;
}

void Listener::close() noexcept {
  uint64_t inode = 0;
  // If the file has since been replaced, it belongs to another process.
  if (fd_ && !path_.empty() && is_socket(path_, &inode) && inode == inode_) ::unlink(path_.c_str());
  path_.clear();
  fd_.reset();
}

std::optional<Listener::Accepted> Listener::accept() {
  constexpr int kAttempts = 64;  // limit on connections that end before they are accepted
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    SocketAddress address;
    address.length = sizeof address.storage;
    UniqueFd fd(
        ::accept4(fd_.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.length, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      const int on = 1;
      if (address.family() != AF_UNIX) ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      std::string origin = describe(address);
      if (const auto peer = peer_identity(fd.get()); peer && peer->process != 0)
        origin = "process " + std::to_string(peer->process);
      return Accepted{std::move(fd), std::move(origin)};
    }
    if (errno == EMFILE || errno == ENFILE) {
      throw Error(ErrorCode::system, "cannot accept a connection: " + describe_errno(errno) + " (see ulimit -n)");
    }
    if (errno != EINTR && errno != ECONNABORTED) break;
  }
  return std::nullopt;
}

Listener listen_at(const Endpoint& endpoint, const Deadline& deadline, const std::function<void(Milliseconds)>& pause) {
  std::vector<SocketAddress> addresses = resolve(endpoint, deadline);
  if (is_own_name(endpoint, addresses)) std::transform(addresses.begin(), addresses.end(), addresses.begin(), any_address);
  for (;;) {
    int worst = EADDRNOTAVAIL;
    for (const SocketAddress& address : addresses) {
      Listener listener;
      const int error = try_listen(endpoint, address, listener.fd_);
      if (error == 0) {
        if (endpoint.kind == Endpoint::Kind::unix_path && is_socket(endpoint.name, &listener.inode_))
          listener.path_ = endpoint.name;
        return listener;
      }
      if (worst == EADDRNOTAVAIL || error == EADDRINUSE) worst = error;
    }
    const bool occupied = worst == EADDRINUSE || worst == EWOULDBLOCK;
    if (!occupied || deadline.passed()) throw_cannot_listen(endpoint, worst, deadline);
    const Milliseconds until_retry = std::min(kListenRetry, deadline.remaining());
    if (pause)
      pause(until_retry);
    else
      std::this_thread::sleep_for(until_retry);
  }
}

Listener listen_on_same_address(const SocketAddress& address) {
  SocketAddress any_port = address;
  if (any_port.family() == AF_INET) reinterpret_cast<sockaddr_in*>(&any_port.storage)->sin_port = 0;
  if (any_port.family() == AF_INET6) reinterpret_cast<sockaddr_in6*>(&any_port.storage)->sin6_port = 0;
  Listener listener;
  const Endpoint tcp = {Endpoint::Kind::tcp, {}, 0, {}};
  if (address.family() == AF_UNIX || try_listen(tcp, any_port, listener.fd_) != 0) listener.fd_.reset();
  return listener;
}

uint16_t port_of(const Listener& listener) {
  if (!listener) return 0;
  const SocketAddress address = local_address(listener.fd());
  if (address.family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
  if (address.family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
  return 0;
}

UniqueFd start_connect(const SocketAddress& address, int& error) {
  UniqueFd fd = make_socket(address.family());
  if (!fd) {
    error = errno;
    return fd;
  }
  int result = 0;
  do {
    result = ::connect(fd.get(), as_sockaddr(address), address.length);
  } while (result != 0 && errno == EINTR && address.family() == AF_UNIX);
  error = result == 0 ? 0 : errno;
  if (error == EINTR) error = EINPROGRESS;
  return fd;
}

int connect_result(int fd) {
  pollfd entry = {fd, POLLOUT, 0};
  if (::poll(&entry, 1, 0) <= 0) return EINPROGRESS;
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

std::optional<PeerIdentity> peer_identity(int fd) {
  int domain = 0;
  socklen_t length = sizeof domain;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0 || domain != AF_UNIX) return std::nullopt;
  ucred peer = {};
  length = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
  return PeerIdentity{peer.uid, peer.pid};
}

std::string check_peer_user(int fd) {
  const auto peer = peer_identity(fd);
  if (!peer || peer->user == ::geteuid()) return "";
  return "it runs as user " + std::to_string(peer->user) + " and this rank as user " + std::to_string(::geteuid());
}

}  // namespace switchyard::detail
