// SPDX-License-Identifier: Apache-2.0
// Telling rows on the CPU (arch/ops.hpp), in words of 8 bytes. A word is released and acquired: what a row's memory becomes
// later is ordered behind its reading, which costs nothing here.
#pragma once

#include <cstddef>
#include <cstring>

#include "arch/cpu/order_table.hpp"

namespace switchyard::detail {

inline uint64_t blank_word(const Telling& as) { return uint64_t{as.blank} << 32 | as.blank; }

/// Writes one word to n telling rows, `at` bytes from their beginning.
inline void tell_word(void* const* dsts, int n, size_t at, uint64_t word, const Telling& as) {
  if (word == blank_word(as)) word = uint64_t{as.instead} << 32 | as.blank;
  for (int i = 0; i < n; ++i)
    store_flag(reinterpret_cast<uint64_t*>(static_cast<std::byte*>(dsts[i]) + at), word, release_order(Site::returned));
}

/// Copies `bytes` bytes to n telling rows.
inline void tell_rows(void* const* dsts, int n, const void* src, size_t bytes, const Telling& as) {
  const auto* from = static_cast<const std::byte*>(src);
  const size_t whole = bytes / 8 * 8;
  for (size_t at = 0; at < whole; at += 8) {
    uint64_t word;
    std::memcpy(&word, from + at, 8);
    tell_word(dsts, n, at, word, as);
  }
  if (whole == bytes) return;
  uint64_t word = 0;
  std::memcpy(&word, from + whole, bytes - whole);
  tell_word(dsts, n, whole, word, as);
}

/// True if all words of the row have come, and are acquired.
inline bool row_has_come(const void* row, size_t bytes, const Telling& as) {
  const auto* words = static_cast<const uint64_t*>(row);
  const size_t count = (bytes + 7) / 8;
  const uint64_t blank = blank_word(as);
  const auto come = [&](size_t i) { return load_flag(words + i, acquire_order(Site::returned)) != blank; };
  if (count > 0 && !come(count - 1)) return false;  // the last word comes last, usually
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const bool first = come(i), second = come(i + 1), third = come(i + 2), fourth = come(i + 3);
    if (!(first & second & third & fourth)) return false;
  }
  for (; i < count; ++i)
    if (!come(i)) return false;
  return true;
}

inline void blank_row(void* row, size_t bytes, const Telling& as) {
  std::memset(row, static_cast<int>(as.blank & 0xffu), (bytes + 7) / 8 * 8);
}

}  // namespace switchyard::detail
