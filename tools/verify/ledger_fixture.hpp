// SPDX-License-Identifier: Apache-2.0
// The published fixture of the ledger combine for the given options, and the golden ledger for its routing.
#pragma once

#include <cstdint>

#include "oracle/ledger.hpp"
#include "switchyard/ledger.hpp"
#include "verify/ledger.hpp"

namespace switchyard::tool {

struct LedgerFixture : oracle::LedgerFixture {
  explicit LedgerFixture(const LedgerVerifyOptions& options);

  int64_t hidden;
  DType type;
  size_t row_bytes() const { return dtype_bytes(type, hidden); }
  void fill_row(int rank, int64_t t, void* row) const;

  LedgerConfig config() const;
  LedgerTables tables(int rank) const;
};

}  // namespace switchyard::tool
