// SPDX-License-Identifier: Apache-2.0
/// \file
/// Trace of the steps that a layer takes between the calls of its exchange. Internal: libswitchyard exports the class for
/// MoeLayer, whose library has no access to a group's recording.
#pragma once

#include <cstdint>

#include "gemm/expert_steps.hpp"
#include "switchyard/group.hpp"

namespace switchyard::detail {

/// Records each step as a span of the call track: expert_mlp, expert_up or expert_down. Does nothing unless the group records.
/// On a GPU, a span lasts from when the stream reaches the step to its end, also in each replay of a captured call.
class StepTrace final : public ExpertSteps {
 public:
  /// The group must outlive this object.
  explicit StepTrace(Group& group);
  ~StepTrace() override;
  void begin(ExpertStep step, int64_t rows, void* stream) override;
  void end(ExpertStep step, int64_t rows, void* stream) override;

 private:
  Group::Impl& group_;
  int64_t launch_ = 0;  ///< GPUs: identifies the current step
  uint64_t begin_ = 0;  ///< CPU: of the current step, in Tracer::ticks()
};

}  // namespace switchyard::detail
