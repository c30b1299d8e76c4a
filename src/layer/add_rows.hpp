// SPDX-License-Identifier: Apache-2.0
// Adds a layer's rows to the contents of `out`, for cases in which combine cannot start its sums from those contents: out =
// round(float32(out) + float32(sum)), per element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "layer/setup.hpp"

namespace switchyard::detail {

/// Holds the sums of a call, [max_tokens, H], in the rank's memory.
class RowAdder {
 public:
  virtual ~RowAdder() = default;
  virtual void* sums() = 0;
  /// True if rows can be added to `out`, i.e. it is non-null and aligned.
  virtual bool takes(const void* out) const = 0;
  /// Adds the first T rows of sums(), where T is `tokens` or the value of call.device_tokens. `num_sms` limits the kernel's
  /// multiprocessors; 0: all.
  virtual void add(void* out, int64_t tokens, const MoeLayerCall& call, int num_sms) = 0;
};

/// Throw Error(system) if memory is insufficient.
std::unique_ptr<RowAdder> make_row_adder(const LayerSetup& setup);
std::unique_ptr<RowAdder> make_gpu_row_adder(const LayerSetup& setup);

}  // namespace switchyard::detail
