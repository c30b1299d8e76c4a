// SPDX-License-Identifier: Apache-2.0
// Implementation of ExpertMlp: experts on the CPU or on a GPU. Arguments common to both are checked by ExpertMlp.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "gemm/expert_steps.hpp"
#include "switchyard/expert.hpp"

namespace switchyard {

struct ExpertMlp::Impl {
  Impl(const ExpertShape& shape_in, const ExpertOptions& options_in)
      : shape(shape_in), options(options_in), type(options_in.dtype) {}
  virtual ~Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Called only if there are experts and rows.
  virtual void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall& call) = 0;
  /// Throw Error(unsupported) unless the experts run on the host.
  virtual void forward_on_host(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows,
                               uint16_t* y);
  virtual void forward_rank_major(const uint16_t* x, const ExpertIds& ids, const float* weights, uint16_t* y);
  /// Experts with the same shape and options but different weights and weight scales. On a GPU, they share the intermediate
  /// rows. The weights have been checked.
  virtual std::unique_ptr<Impl> with_weights(const MoeWeights& weights) const = 0;
  virtual ExpertMemory memory() const = 0;
  virtual std::string implementation() const = 0;

  /// Runs `step`, between calls to `steps` if they are set.
  template <class Run>
  void in_step(detail::ExpertStep step, int64_t rows, void* stream, const Run& run) const {
    if (steps) steps->begin(step, rows, stream);
    run();
    if (steps) steps->end(step, rows, stream);
  }

  /// Set by detail::observe_steps, which must outlive these experts and those made by with_weights(); or null.
  detail::ExpertSteps* steps = nullptr;
  const ExpertShape shape;
  const ExpertOptions options;
  const DType type;
};

namespace detail {

// All arguments have been checked.
using ExpertImpl = std::unique_ptr<ExpertMlp::Impl>;
ExpertMemory cpu_experts_memory(const ExpertShape& shape, const ExpertOptions& options);
/// Takes the weights from memory or from a source that writes them.
ExpertImpl make_cpu_experts(const ExpertShape& shape, const void* w13, const void* w2, const ExpertOptions& options);
ExpertImpl make_cpu_experts(const ExpertShape& shape, const ExpertMlp::Source& source, const ExpertOptions& options);

/// GPU memory for the scales of the intermediate rows, a multiple of 16 bytes.
inline size_t intermediate_scale_bytes(const ExpertShape& shape, const ExpertOptions& options) {
  const auto rows = static_cast<size_t>(options.max_rows);
  if (!dtype_has_scales(options.dtype)) return 0;
  if (options.intermediate_scaling == OutputScaling::per_group)
    return rows * scale_row_bytes(shape.intermediate, ScaleKind::f32);
  return (rows * sizeof(float) + 15) / 16 * 16;
}
/// GPU memory for the intermediate rows: their scales, the rows and, for OutputScaling::per_row, the rows in bf16.
inline size_t intermediate_bytes(const ExpertShape& shape, const ExpertOptions& options) {
  if (shape.num_local_experts == 0) return 0;
  const auto rows = static_cast<size_t>(options.max_rows);
  const bool twice = options.intermediate_scaling == OutputScaling::per_row;
  return intermediate_scale_bytes(shape, options) +
         rows * (dtype_bytes(options.dtype, shape.intermediate) + (twice ? dtype_bytes(DType::bf16, shape.intermediate) : 0));
}
ExpertImpl make_gpu_experts(const ExpertShape& shape, const void* w13, const void* w2, const ExpertOptions& options);

}  // namespace detail
}  // namespace switchyard
