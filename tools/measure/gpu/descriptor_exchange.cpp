// SPDX-License-Identifier: Apache-2.0
#include "measure/gpu/descriptor_exchange.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/net/connection.hpp"
#include "heap/gpu/device_guard.hpp"
#include "heap/gpu/device_memory.hpp"

namespace switchyard::measure {
namespace {

using detail::DeviceGuard;
using detail::PhysicalMemory;
using detail::UniqueFd;
using detail::VmmSegment;

/// The descriptor received at the other end of a Unix socket.
UniqueFd passed(const UniqueFd& fd) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    throw std::runtime_error(std::string("socketpair: ") + std::strerror(errno));
  const UniqueFd from(ends[0]);
  detail::Connection to(UniqueFd(ends[1]), 0);
  const std::byte one{0};
  std::deque<UniqueFd> received;
  const bool sent = detail::send_some(from.get(), {&one, 1}, fd.get()) == 1;
  if (sent) (void)to.receive_all(received);
  if (received.size() != 1) throw std::runtime_error("a Unix socket did not pass the file descriptor of GPU memory");
  return std::move(received.front());
}

std::vector<uint32_t> pattern(uint32_t first) {
  std::vector<uint32_t> words(1024);
  for (size_t i = 0; i < words.size(); ++i) words[i] = first + static_cast<uint32_t>(i) * 2654435761u;
  return words;
}

/// Writes through one mapping and reads through the other.
void check(const VmmSegment& to, int writer, const VmmSegment& from, int reader, uint32_t first) {
  const std::vector<uint32_t> written = pattern(first);
  std::vector<uint32_t> read(written.size());
  const size_t bytes = written.size() * sizeof written[0];
  {
    const DeviceGuard guard(writer);
    detail::copy_to_device(to.data(), written.data(), bytes);
  }
  const DeviceGuard guard(reader);
  detail::copy_to_host(read.data(), from.data(), bytes);
  if (read != written)
    throw std::runtime_error("GPU " + std::to_string(reader) + " does not read what GPU " + std::to_string(writer) +
                             " wrote into memory passed as a file descriptor");
}

}  // namespace

void exchange_descriptor(int owner, int user) {
  const size_t bytes = std::max(detail::vmm_granularity(owner), detail::vmm_granularity(user));
  const PhysicalMemory mine = PhysicalMemory::create(owner, bytes);
  VmmSegment here(owner, bytes, bytes), there(user, bytes, bytes);
  here.map(mine, std::vector<int>{owner});
  PhysicalMemory imported;
  {
    const DeviceGuard guard(user);
    imported = PhysicalMemory::import_from(passed(mine.export_fd()).get());
  }
  there.map(imported, owner == user ? std::vector<int>{user} : std::vector<int>{user, owner});
  check(here, owner, there, user, 1);
  check(there, user, here, owner, 7);
}

}  // namespace switchyard::measure
