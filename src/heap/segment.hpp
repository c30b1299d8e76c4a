// SPDX-License-Identifier: Apache-2.0
// Memory of one rank's segment, and mappings of it.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <memory>

#include "base/unique_fd.hpp"

namespace switchyard::detail {

/// One mapping of one segment, aligned to kHeapSegmentAlignment, readable and writable; unmapped on destruction. Not inherited
/// across fork().
class Mapping {
 public:
  /// Private, zero-initialized memory of this process, committed page by page on first touch. Throws Error(system).
  static std::shared_ptr<Mapping> anonymous(size_t bytes);
  /// A segment created by create_segment_fd in this or another process. Checks its size and seals. Throws Error(system).
  static std::shared_ptr<Mapping> shared(int fd, size_t bytes);

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  std::byte* data() const noexcept { return data_; }

  /// Throws Error(unsupported) if the system cannot discard and commit pages.
  void check_can_discard() const;
  /// Returns whole pages to the system, for all mappings of the segment: they are zero when next touched. Touching a page of a
  /// shared segment before commit() may fault. Throws Error(system).
  void discard(size_t offset, size_t bytes);
  /// Shared segments: reallocates memory for these pages, or throws Error(system). Private segments allocate on first touch.
  void commit(size_t offset, size_t bytes);

 private:
  Mapping(std::byte* data, size_t bytes, bool shared) : data_(data), bytes_(bytes), shared_(shared) {}
  static std::shared_ptr<Mapping> map(int flags, int fd, size_t bytes);
  std::byte* data_;
  size_t bytes_;
  bool shared_;
};

/// Creates an unnamed in-memory file with every page committed, sealed so that no process can change its size: accesses to its
/// mappings cannot fault. Throws Error(system) if memory is insufficient.
UniqueFd create_segment_fd(size_t bytes);

/// Bytes in one page.
size_t page_bytes();

/// Calls step(offset, bytes), which returns 0 or an errno, for consecutive parts of [0, bytes). A signal may undo the progress
/// of a system call (EINTR), and a profiler's timer sends signals periodically. The size of the parts is therefore halved each
/// time, down to a page, so that a part can complete between two signals. Bounded: returns EINTR if not even a single page
/// completes within kMaxInterrupts calls.
template <class Step>
int in_parts(size_t bytes, const Step& step) {
  constexpr int kMaxInterrupts = 10'000;
  size_t part = bytes;
  int interrupts = 0;
  for (size_t done = 0; done < bytes;) {
    const size_t now = std::min(part, bytes - done);
    const int error = step(done, now);
    if (error == 0) {
      done += now;
      interrupts = 0;
      continue;
    }
    if (error != EINTR || ++interrupts > kMaxInterrupts) return error;
    part = std::max(page_bytes(), now / 2 / page_bytes() * page_bytes());
  }
  return 0;
}

}  // namespace switchyard::detail
