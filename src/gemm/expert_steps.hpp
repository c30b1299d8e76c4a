// SPDX-License-Identifier: Apache-2.0
// The steps of experts, for the traces of a layer.
#pragma once

#include <cstdint>

namespace switchyard::detail {

/// mlp: both products; the CPU's experts have only this step.
enum class ExpertStep : uint8_t { mlp, up, down };

/// Observer of ExpertMlp::forward, called on the calling thread directly before and after each step. `rows`: rows of the array
/// that the step reads. On GPUs, the step's kernels are enqueued on `stream` between the two calls.
class ExpertSteps {
 public:
  virtual ~ExpertSteps() = default;
  virtual void begin(ExpertStep step, int64_t rows, void* stream) = 0;
  virtual void end(ExpertStep step, int64_t rows, void* stream) = 0;
};

}  // namespace switchyard::detail
