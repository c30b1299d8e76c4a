// SPDX-License-Identifier: Apache-2.0
// The only interface to oneDNN: multiplies bf16 rows by bf16 weights of one size on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "switchyard/expert.hpp"

namespace switchyard::detail {

/// `C[m, n] = A[m, k] * B[n, k]^T` for fixed n and k and few different values of m. A and B are bf16, C and the sums float32,
/// and all are row-major.
///
/// If oneDNN has a block-wise bf16 kernel for this machine (AMX, AVX512-BF16), operands are passed unconverted. Otherwise
/// (AVX2, or AVX-512 without bf16, where emulated bf16 is three times slower than float32), they are first widened to float32.
///
/// There is one kernel per distinct m, created when that m is first used (0.2 to 0.6 ms), so callers should use few different
/// values. Not thread-safe: use an object from one thread at a time. oneDNN's errors are rethrown as Error(system).
class OnednnGemm {
 public:
  OnednnGemm(int64_t n, int64_t k, int64_t max_rows, WeightStorage storage);
  ~OnednnGemm();
  OnednnGemm(const OnednnGemm&) = delete;
  OnednnGemm& operator=(const OnednnGemm&) = delete;

  /// Number of bytes that pack() writes; 0 with WeightStorage::view. About 2 n k bytes; 4 n k for AVX-512 without bf16.
  size_t packed_bytes() const;
  /// Fixed at construction, except that oneDNN may require more for certain values of m (not observed in tests).
  size_t scratch_bytes() const;
  std::string implementation() const;

  /// Converts `b` (bf16 [n, k]) to the layout that run() expects. `packed` is 64-byte aligned.
  void pack(const uint16_t* b, std::byte* packed);
  /// `b` is the output of pack() or, with WeightStorage::view, bf16 [n, k]. 1 <= m <= max_rows. Operands need no alignment.
  void run(const void* b, const uint16_t* a, int64_t m, float* c);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard::detail
