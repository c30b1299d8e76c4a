// SPDX-License-Identifier: Apache-2.0
// The published fixture of the ledger combine: identity experts on closed-form rows, and the golden ledger of its routing.
// Shares no code with the library.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/ledger.hpp"
#include "verify/ledger.hpp"

namespace switchyard::tool {

class LedgerFixture {
 public:
  explicit LedgerFixture(const LedgerVerifyOptions& options);

  const int world, experts, topk;
  const int64_t tokens, hidden;
  const DType type;
  int64_t routes() const { return tokens * topk; }
  size_t row_bytes() const { return static_cast<size_t>(hidden) * dtype_bytes(type); }

  float input(int rank, int64_t t, int64_t c) const {
    const uint64_t n =
        kSeed + 131u * static_cast<uint64_t>(rank) + 17u * static_cast<uint64_t>(t) + 3u * static_cast<uint64_t>(c);
    return static_cast<float>(n % 251) / 32.0f;
  }
  /// -1: no expert.
  int expert(int rank, int64_t f) const {
    const uint64_t bits = (static_cast<uint64_t>(f) * 977 + static_cast<uint64_t>(rank) * 131 + 7) * 0x9E3779B97F4A7C15u >> 32;
    return bits % 100 < drop_percent_ ? -1 : static_cast<int>((f + rank) % experts);
  }
  std::vector<float> probs(int rank) const;
  void fill_row(int rank, int64_t t, void* row) const;

  LedgerConfig config() const;
  LedgerTables tables(int rank) const;

 private:
  static constexpr uint64_t kSeed = 1234;
  uint64_t drop_percent_;
};

}  // namespace switchyard::tool
