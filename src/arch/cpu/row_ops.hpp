// SPDX-License-Identifier: Apache-2.0
// The CPU operations on whole rows: moving, reducing and quantizing. The vector code is selected at run time for the machine;
// the results do not depend on the selection. Any size, any alignment. The sources and destinations of a call must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arch/ops.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

// Each copy or reduction returns true if it used non-temporal stores. In that case, the caller must call flush_streams() before
// the release that covers the stores.

[[nodiscard]] bool copy_row(void* dst, const void* src, size_t bytes);
[[nodiscard]] bool multicast_row(void* const* dsts, int n, const void* src, size_t bytes);
[[nodiscard]] bool zero_row(void* dst, size_t bytes);
[[nodiscard]] bool reduce_rows(const ReduceSpec& spec, bool may_stream = true);
void quantize_row(uint8_t* q, void* scales, const void* src, DType type, int64_t hidden, ScaleKind kind,
                  int group = kScaleGroup);

/// Copies `bytes` bytes to a sentinel row (arch/ops.hpp), in words of 8 bytes. The stores may still be incomplete on return.
void write_sentinel_row(void* row, const void* src, size_t bytes, const Sentinel& as);
/// Returns true if all words of a sentinel row have arrived; they are then acquired.
[[nodiscard]] bool row_has_arrived(const void* row, size_t bytes, const Sentinel& as);

/// Orders all earlier non-temporal stores by this thread before its later stores.
void flush_streams();

/// Enables or disables non-temporal stores for large rows (enabled by default where they are faster; never used under
/// ThreadSanitizer). Returns the previous setting. Process-wide; for measurements.
bool set_streaming(bool enabled);

/// The vector instruction sets in this build that this machine supports, best first, and the one that row ops currently use.
struct SimdTarget {
  int64_t id;
  const char* name;
};
std::vector<SimdTarget> simd_targets();
SimdTarget current_simd_target();
/// Makes all row ops of the process use the given one of simd_targets(), or the best one (id 0). For tests; must not be called
/// while row ops run.
void force_simd_target(int64_t id);

}  // namespace switchyard::detail
