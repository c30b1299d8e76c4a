// SPDX-License-Identifier: Apache-2.0
// The CPU's operations on whole rows: moving, reducing, quantizing. The vector code is chosen at run time for the machine; the
// results do not depend on the choice. Any size, any alignment. Sources and destinations of one call must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arch/ops.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

// Each mover returns true if it used non-temporal stores. The caller must then call flush_streams() before the release that
// covers them.

[[nodiscard]] bool copy_row(void* dst, const void* src, size_t bytes);
[[nodiscard]] bool multicast_row(void* const* dsts, int n, const void* src, size_t bytes);
[[nodiscard]] bool zero_row(void* dst, size_t bytes);
[[nodiscard]] bool reduce_rows(const ReduceSpec& spec, bool may_stream = true);
void quantize_row(uint8_t* q, void* scales, const void* src, DType type, int64_t hidden, ScaleKind kind,
                  int group = kScaleGroup);

/// Copies `bytes` bytes to a sentinel row (arch/ops.hpp), in words of 8 bytes. The stores may still be incomplete on return.
void write_sentinel_row(void* row, const void* src, size_t bytes, const Sentinel& as);
/// True if all words of a sentinel row have arrived; they are then acquired.
[[nodiscard]] bool row_has_arrived(const void* row, size_t bytes, const Sentinel& as);

/// Orders all earlier non-temporal stores of this thread before its later stores.
void flush_streams();

/// Sets whether large rows are written with non-temporal stores (the default where it is faster; never under ThreadSanitizer).
/// Returns the previous setting. Process-wide; for measurements.
bool set_streaming(bool enabled);

/// The vector instruction sets of this build that this machine supports, best first; and the set that row ops currently use.
struct SimdTarget {
  int64_t id;
  const char* name;
};
std::vector<SimdTarget> simd_targets();
SimdTarget current_simd_target();
/// Makes all row ops of the process use one of simd_targets(), or the best one again (id 0). For tests; must not be called
/// while row ops run.
void force_simd_target(int64_t id);

}  // namespace switchyard::detail
