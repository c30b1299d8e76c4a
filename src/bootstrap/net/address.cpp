// SPDX-License-Identifier: Apache-2.0
// Endpoints, host names, and the identity of this machine.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <future>
#include <thread>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/net/socket.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr size_t kMaxUnixName = sizeof(sockaddr_un::sun_path) - 1;

[[noreturn]] void throw_endpoint(const std::string& argument, const std::string& text, const std::string& why) {
  throw Error(ErrorCode::invalid_argument,
              argument + " = \"" + text + "\": " + why + "; allowed are unix:/path, unix:@name and tcp://host:port");
}

SocketAddress unix_address(const Endpoint& endpoint) {
  SocketAddress address;
  sockaddr_un un = {};
  un.sun_family = AF_UNIX;
  const size_t first = endpoint.kind == Endpoint::Kind::unix_abstract ? 1 : 0;  // an abstract name starts with a zero byte
  std::memcpy(un.sun_path + first, endpoint.name.data(), endpoint.name.size());
  std::memcpy(&address.storage, &un, sizeof un);
  // An abstract name is terminated by its length, a path by a zero byte.
  address.length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + first + endpoint.name.size() + (first == 0 ? 1 : 0));
  return address;
}

struct Lookup {
  int error = 0;
  std::vector<SocketAddress> addresses;
};

Lookup look_up(const std::string& host, uint16_t port, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  Lookup result;
  result.error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (result.error != 0) return result;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress& address = result.addresses.emplace_back();
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.length = entry->ai_addrlen;
  }
  ::freeaddrinfo(list);
  return result;
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

Endpoint abstract_endpoint(const std::string& name) { return {Endpoint::Kind::unix_abstract, name, 0, "unix:@" + name}; }

Endpoint parse_endpoint(const std::string& text, const std::string& argument) {
  if (text.find('\0') != std::string::npos) throw_endpoint(argument, text.c_str(), "contains a zero byte");
  Endpoint endpoint;
  endpoint.text = text;
  if (text.starts_with("unix:")) {
    std::string name = text.substr(5);
    if (name.starts_with("///")) name.erase(0, 2);  // unix:///path
    const bool abstract = name.starts_with("@");
    endpoint.kind = abstract ? Endpoint::Kind::unix_abstract : Endpoint::Kind::unix_path;
    endpoint.name = abstract ? name.substr(1) : name;
    if (endpoint.name.empty() || (!abstract && name.front() != '/')) throw_endpoint(argument, text, "names no absolute path");
    if (endpoint.name.size() > kMaxUnixName - 1) {
      throw_endpoint(argument, text,
                     "has a name of " + std::to_string(endpoint.name.size()) + " bytes, at most " +
                         std::to_string(kMaxUnixName - 1) + " are possible");
    }
    return endpoint;
  }
  if (!text.starts_with("tcp://")) throw_endpoint(argument, text, "has no known scheme");
  const std::string rest = text.substr(6);
  const size_t colon = rest.rfind(':');
  if (colon == std::string::npos) throw_endpoint(argument, text, "has no port");
  std::string host = rest.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    throw_endpoint(argument, text, "has an IPv6 address without brackets");
  }
  if (host.empty()) throw_endpoint(argument, text, "has no host");
  const std::string port = rest.substr(colon + 1);
  unsigned number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number < 1 || number > 65535) {
    throw_endpoint(argument, text, "has no port from 1 to 65535");
  }
  endpoint.kind = Endpoint::Kind::tcp;
  endpoint.name = host;
  endpoint.port = static_cast<uint16_t>(number);
  return endpoint;
}

std::string describe(const SocketAddress& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.family() == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, &address.storage, sizeof in);
    ::inet_ntop(AF_INET, &in.sin_addr, text, sizeof text);
    return std::string(text) + ":" + std::to_string(ntohs(in.sin_port));
  }
  if (address.family() == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, &address.storage, sizeof in);
    ::inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof text);
    return std::string("[").append(text).append("]:").append(std::to_string(ntohs(in.sin6_port)));
  }
  return "a Unix socket";
}

std::string numeric_host(const SocketAddress& address) {
  char text[NI_MAXHOST] = {};
  if (address.family() != AF_INET && address.family() != AF_INET6) return "";
  const auto* raw = reinterpret_cast<const sockaddr*>(&address.storage);
  return ::getnameinfo(raw, address.length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

SocketAddress numeric_address(const std::string& host, uint16_t port) {
  const Lookup result = look_up(host, port, AI_NUMERICHOST);
  if (result.error != 0 || result.addresses.empty()) throw RendezvousError("\"" + host + "\" is not an address");
  return result.addresses.front();
}

SocketAddress local_address(int fd) {
  SocketAddress address;
  address.length = sizeof address.storage;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length);
  return address;
}

SocketAddress peer_address(int fd) {
  SocketAddress address;
  address.length = sizeof address.storage;
  ::getpeername(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length);
  return address;
}

bool is_loopback(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, &address.storage, sizeof in);
    return ntohl(in.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  if (address.family() != AF_INET6) return false;
  sockaddr_in6 in;
  std::memcpy(&in, &address.storage, sizeof in);
  return IN6_IS_ADDR_LOOPBACK(&in.sin6_addr);
}

bool is_own_name(const Endpoint& endpoint, const std::vector<SocketAddress>& addresses) {
  if (endpoint.is_unix() || !std::all_of(addresses.begin(), addresses.end(), is_loopback)) return false;
  const auto first_label = [](const std::string& name) { return name.substr(0, name.find('.')); };
  const std::string own = first_label(this_host().name), theirs = first_label(endpoint.name);
  return own != "localhost" && own.size() == theirs.size() && ::strcasecmp(own.c_str(), theirs.c_str()) == 0;
}

SocketAddress any_address(const SocketAddress& address) {
  SocketAddress all = address;
  if (all.family() == AF_INET) reinterpret_cast<sockaddr_in*>(&all.storage)->sin_addr.s_addr = htonl(INADDR_ANY);
  if (all.family() == AF_INET6) reinterpret_cast<sockaddr_in6*>(&all.storage)->sin6_addr = in6addr_any;
  return all;
}

std::vector<SocketAddress> resolve(const Endpoint& endpoint, const Deadline& deadline) {
  if (endpoint.is_unix()) return {unix_address(endpoint)};
  Lookup result = look_up(endpoint.name, endpoint.port, AI_NUMERICHOST);
  if (result.error != 0) {
    // A name service may take longer than the caller's deadline; the thread then ends on its own.
    std::promise<Lookup> promise;
    std::future<Lookup> future = promise.get_future();
    std::thread([host = endpoint.name, port = endpoint.port, promise = std::move(promise)]() mutable {
      promise.set_value(look_up(host, port, 0));
    }).detach();
    if (future.wait_until(deadline.time()) != std::future_status::ready) {
      throw RendezvousError("the name service did not answer for host '" + endpoint.name + "' of " + endpoint.text +
                            " within " + std::to_string(deadline.budget().count()) + " ms");
    }
    result = future.get();
  }
  if (result.error != 0 || result.addresses.empty()) {
    throw RendezvousError("host '" + endpoint.name + "' of " + endpoint.text +
                          " is not known: " + (result.error == 0 ? "no address" : ::gai_strerror(result.error)));
  }
  std::stable_partition(result.addresses.begin(), result.addresses.end(),
                        [](const SocketAddress& address) { return !is_loopback(address); });
  return result.addresses;
}

HostIdentity this_host() {
  HostIdentity host;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  host.name = name;
  host.boot = first_line("/proc/sys/kernel/random/boot_id");
  if (host.boot.empty()) host.boot = host.name;
  char network[64] = {};
  if (::readlink("/proc/self/ns/net", network, sizeof network - 1) > 0) host.network = network;
  return host;
}

void fill_random(std::span<std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::getrandom(bytes.data() + done, bytes.size() - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw Error(ErrorCode::system, "getrandom: " + describe_errno(errno));
    done += static_cast<size_t>(n);
  }
}

std::string random_token() {
  std::byte bytes[16];
  fill_random(bytes);
  return to_hex(bytes);
}

}  // namespace switchyard::detail
