// SPDX-License-Identifier: Apache-2.0
// Shared buffers of the ledger combine, defined once for host and device. Each rank has one region at the same heap offset.
#pragma once

#include <cstdint>

#include "arch/ops.hpp"
#include "layout/heap_view.hpp"
#include "layout/addressing.hpp"

namespace switchyard::detail {

/// Each flag has its own cache line. Other data written by peers is replicated (protocol/ledger/combine.hpp explains why the
/// copies suffice): signatures, per writer and parity of the call, and return buffers with dense rows in ledger order, used in
/// turn.
struct LedgerLayout {
  static constexpr int64_t kLine = 64;

  uint64_t base = 0;  ///< heap offset
  int world = 1;
  int64_t rows = 0;  ///< of one return buffer: max_tokens * K
  int64_t row_bytes = 0;
  uint64_t first_epoch = 1;

  /// True if returned rows are sentinel rows (arch/ops.hpp). Otherwise, they are followed by a flag that the sender sets.
  SWITCHYARD_FN bool has_sentinel_rows() const { return row_bytes % 16 == 0; }
  SWITCHYARD_FN int buffers() const { return has_sentinel_rows() ? 3 : 2; }
  SWITCHYARD_FN int64_t flags_bytes() const { return world * kLine; }
  SWITCHYARD_FN int64_t signatures_bytes() const { return round_up(2 * world * 8, kLine); }
  SWITCHYARD_FN int64_t buffer_bytes() const { return round_up(rows * row_bytes, 128); }
  SWITCHYARD_FN int64_t control_bytes() const { return round_up(flags_bytes() + signatures_bytes(), 4096); }
  SWITCHYARD_FN int64_t bytes() const { return control_bytes() + buffers() * buffer_bytes(); }

  /// Site::ledger_rows, in the reader's segment, set by rank `writer`.
  SWITCHYARD_FN SymPtr<uint64_t> flag(int writer) const { return {base + static_cast<uint64_t>(writer * kLine)}; }
  SWITCHYARD_FN SymPtr<uint64_t> signature(uint64_t epoch, int writer) const {
    const int64_t index = static_cast<int64_t>(epoch & 1) * world + writer;
    return {base + static_cast<uint64_t>(flags_bytes() + 8 * index)};
  }
  SWITCHYARD_FN SymPtr<std::byte> buffer(uint64_t epoch) const {
    const uint64_t calls = epochs_since(first_epoch, epoch);  // before this one
    const auto index = static_cast<int64_t>(has_sentinel_rows() ? calls % 3 : calls & 1);
    return {base + static_cast<uint64_t>(control_bytes() + index * buffer_bytes())};
  }
};

}  // namespace switchyard::detail
