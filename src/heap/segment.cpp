// SPDX-License-Identifier: Apache-2.0
#include "heap/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "heap/heap.hpp"
#include "heap/memory_limits.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_system(const std::string& what, int error) {
  throw Error(ErrorCode::system, what + ": " + std::generic_category().message(error));
}

}  // namespace

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::shared_ptr<Mapping> Mapping::map(int flags, int fd, size_t bytes) {
  // Reserve enough address space for an aligned start, map there, and release the remainder.
  const size_t reserved = bytes + kHeapSegmentAlignment;
  void* const start = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED)
    throw_system("cannot reserve " + describe_bytes(reserved) + " of address space (see ulimit -v)", errno);
  const auto address = reinterpret_cast<uintptr_t>(start);
  const uintptr_t aligned = (address + kHeapSegmentAlignment - 1) / kHeapSegmentAlignment * kHeapSegmentAlignment;
  void* const data = ::mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
  const int error = errno;
  if (data == MAP_FAILED) {
    ::munmap(start, reserved);
    throw_system("cannot map a heap segment of " + describe_bytes(bytes), error);
  }
  if (aligned > address) ::munmap(start, aligned - address);
  if (address + reserved > aligned + bytes) {
    ::munmap(reinterpret_cast<void*>(aligned + bytes), address + reserved - (aligned + bytes));
  }
  auto mapping = std::shared_ptr<Mapping>(new Mapping(static_cast<std::byte*>(data), bytes, (flags & MAP_SHARED) != 0));
  if (::madvise(data, bytes, MADV_DONTFORK) != 0) throw_system("madvise(MADV_DONTFORK) of a heap segment", errno);
  return mapping;
}

std::shared_ptr<Mapping> Mapping::anonymous(size_t bytes) {
  auto mapping = map(MAP_PRIVATE | MAP_ANONYMOUS, -1, bytes);
  ::madvise(mapping->data(), bytes, MADV_HUGEPAGE);  // a hint: fewer faults and TLB misses if the system grants it
  return mapping;
}

std::shared_ptr<Mapping> Mapping::shared(int fd, size_t bytes) {
  struct stat info;
  if (::fstat(fd, &info) != 0) throw_system("cannot inspect a heap segment", errno);
  if (info.st_size < 0 || static_cast<size_t>(info.st_size) != bytes) {
    throw Error(ErrorCode::system,
                "a heap segment has " + std::to_string(info.st_size) + " bytes instead of " + std::to_string(bytes));
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) throw Error(ErrorCode::system, "a heap segment is not sealed against resizing");
  return map(MAP_SHARED, fd, bytes);
}

Mapping::~Mapping() { ::munmap(data_, bytes_); }

namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/// Returns errno, or 0.
int advise(std::byte* at, size_t bytes, int advice) {
  return in_parts(bytes, [&](size_t offset, size_t part) { return ::madvise(at + offset, part, advice) == 0 ? 0 : errno; });
}

}  // namespace

void Mapping::check_can_discard() const {
  // The first page holds the header and is always resident.
  if (shared_ && advise(data_, page_bytes(), MADV_POPULATE_WRITE) != 0)
    throw Error(ErrorCode::unsupported,
                "sleep: ranks are processes, and this system cannot take the memory of a segment again without the risk of a "
                "signal (madvise(MADV_POPULATE_WRITE), Linux 5.14 and later)");
}

// Without MADV_NOHUGEPAGE, the system may rebuild a huge page around kept pages, including their discarded neighbors.
void Mapping::discard(size_t offset, size_t bytes) {
  if (!shared_) advise(data_ + offset, bytes, MADV_NOHUGEPAGE);
  if (const int error = advise(data_ + offset, bytes, shared_ ? MADV_REMOVE : MADV_DONTNEED))
    throw_system("cannot give back " + describe_bytes(bytes) + " of a heap segment", error);
}

void Mapping::commit(size_t offset, size_t bytes) {
  if (!shared_) {
    advise(data_ + offset, bytes, MADV_HUGEPAGE);
    return;
  }
  if (const int error = advise(data_ + offset, bytes, MADV_POPULATE_WRITE))
    throw_system("cannot commit " + describe_bytes(bytes) + " of a heap segment", error);
}

UniqueFd create_segment_fd(size_t bytes) {
  rlimit file_size;
  if (::getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY && bytes > file_size.rlim_cur) {
    throw Error(ErrorCode::system, "cannot create a heap segment of " + describe_bytes(bytes) + ": the file size limit is " +
                                       describe_bytes(file_size.rlim_cur) + " (see ulimit -f)");
  }
  UniqueFd fd(::memfd_create("switchyard-heap", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_system("cannot create a heap segment (memfd_create)", errno);
  const int error = in_parts(bytes, [&](size_t offset, size_t part) {
    return ::posix_fallocate(fd.get(), static_cast<off_t>(offset), static_cast<off_t>(part));
  });
  if (error != 0) throw_system("cannot commit a heap segment of " + describe_bytes(bytes), error);
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw_system("cannot seal a heap segment", errno);
  return fd;
}

}  // namespace switchyard::detail
