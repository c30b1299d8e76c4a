// SPDX-License-Identifier: Apache-2.0
// Telling rows on the CPU (arch/ops.hpp), in words of 8 bytes. A word is released and acquired: what a row's memory becomes
// later is ordered behind its reading, which costs nothing here.
#pragma once

#include <cstddef>
#include <cstring>

#include "arch/cpu/order_table.hpp"

namespace switchyard::detail {

inline uint64_t blank_word(const Telling& as) { return uint64_t{as.blank} << 32 | as.blank; }

/// Copies `bytes` bytes to n telling rows.
inline void tell_rows(void* const* dsts, int n, const void* src, size_t bytes, const Telling& as) {
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(src) + at, bytes - at < 8 ? bytes - at : 8);
    if (word == blank_word(as)) word = uint64_t{as.instead} << 32 | as.blank;
    for (int i = 0; i < n; ++i)
      store_flag(reinterpret_cast<uint64_t*>(static_cast<std::byte*>(dsts[i]) + at), word, release_order(Site::returned));
  }
}

/// True if all words of the row have come, and are acquired.
inline bool row_has_come(const void* row, size_t bytes, const Telling& as) {
  const auto* words = static_cast<const uint64_t*>(row);
  for (size_t i = 0; i * 8 < bytes; ++i)
    if (load_flag(words + i, acquire_order(Site::returned)) == blank_word(as)) return false;
  return true;
}

inline void blank_row(void* row, size_t bytes, const Telling& as) {
  std::memset(row, static_cast<int>(as.blank & 0xffu), (bytes + 7) / 8 * 8);
}

}  // namespace switchyard::detail
