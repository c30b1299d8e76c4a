// SPDX-License-Identifier: Apache-2.0
// Sentinel rows on the CPU (arch/ops.hpp), in words of 8 bytes. Each word is released and acquired, so that later uses of the
// row's memory are ordered after its reads. ThreadSanitizer builds use this code; other builds use whole vectors of words
// (row_ops.cpp).
#pragma once

#include <cstddef>
#include <cstring>

#include "arch/cpu/order_table.hpp"

namespace switchyard::detail {

inline uint64_t blank_word(const Sentinel& as) { return uint64_t{as.blank} << 32 | as.blank; }
inline uint64_t substitute_word(const Sentinel& as) { return uint64_t{as.substitute} << 32 | as.blank; }

/// Writes words [first, ...) of a sentinel row that contains `bytes` bytes. The last word may contain fewer than 8 bytes.
inline void write_sentinel_words(void* row, const void* src, size_t first, size_t bytes, const Sentinel& as) {
  for (size_t at = first * 8; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(src) + at, bytes - at < 8 ? bytes - at : 8);
    if (word == blank_word(as)) word = substitute_word(as);
    store_flag(reinterpret_cast<uint64_t*>(static_cast<std::byte*>(row) + at), word, release_order(kSentinelSite));
  }
}

/// Returns true if words [first, end) of the row have arrived; they are then acquired.
inline bool words_have_arrived(const void* row, size_t first, size_t end, const Sentinel& as) {
  const auto* words = static_cast<const uint64_t*>(row);
  for (size_t i = first; i < end; ++i)
    if (load_flag(words + i, acquire_order(kSentinelSite)) == blank_word(as)) return false;
  return true;
}

inline void blank_row(void* row, size_t bytes, const Sentinel& as) {
  std::memset(row, static_cast<int>(as.blank & 0xffu), (bytes + 7) / 8 * 8);
}

}  // namespace switchyard::detail
