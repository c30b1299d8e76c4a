// SPDX-License-Identifier: Apache-2.0
// Launches the layer's kernels with all available shared memory.
#pragma once

#include "exchange/fused/launch.hpp"

namespace switchyard::detail {

/// Dynamic shared memory per block; a tracing kernel also needs space for tracks.
inline int max_layer_shared(const DeviceLimits& limits) { return static_cast<int>(limits.shared_bytes); }
inline int max_traced_layer_shared(const DeviceLimits& limits) {
  return max_layer_shared(limits) - static_cast<int>(kTrackBytes);
}
/// The kernel of an order, without and with tracing.
struct LayerKernels {
  Kernel<const FusedParams> plain, traced;
};
/// Launches whichever of the two kernels the call requires.
inline void launch_layer(const LayerKernels& of, int threads, const FusedParams& given, int blocks, const DeviceLimits& limits,
                         gpu::Stream stream) {
  FusedParams p = given;
  const bool traces = p.call.device_trace.records != nullptr;
  p.up.shared_bytes = static_cast<uint32_t>(traces ? max_traced_layer_shared(limits) : max_layer_shared(limits));
  if (traces) {  // the tracks precede the dynamic shared memory
    p.up.shared_base += kTrackBytes;
    p.down.shared_base += kTrackBytes;
  }
  (traces ? of.traced : of.plain).launch({blocks, threads, p.up.shared_bytes, limits.dependent_launches}, stream, p);
}

}  // namespace switchyard::detail
