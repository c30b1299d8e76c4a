// SPDX-License-Identifier: Apache-2.0
// Telling rows on the CPU (arch/ops.hpp), in words of 8 bytes. A word is released and acquired: what a row's memory becomes
// later is ordered behind its reading, which costs nothing here.
#pragma once

#include <cstddef>
#include <cstring>

#include "arch/cpu/order_table.hpp"

namespace switchyard::detail {

/// Copies `bytes` bytes to n telling rows.
inline void tell_rows(void* const* dsts, int n, const void* src, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(src) + at, bytes - at < 8 ? bytes - at : 8);
    if (word == 0) word = uint64_t{1} << 63;
    for (int i = 0; i < n; ++i)
      store_flag(reinterpret_cast<uint64_t*>(static_cast<std::byte*>(dsts[i]) + at), word, release_order(Site::returned));
  }
}

/// True if all words of the row have come, and are acquired.
inline bool row_has_come(const void* row, size_t bytes) {
  const auto* words = static_cast<const uint64_t*>(row);
  for (size_t i = 0; i * 8 < bytes; ++i)
    if (load_flag(words + i, acquire_order(Site::returned)) == 0) return false;
  return true;
}

inline void clear_row(void* row, size_t bytes) { std::memset(row, 0, (bytes + 7) / 8 * 8); }

}  // namespace switchyard::detail
