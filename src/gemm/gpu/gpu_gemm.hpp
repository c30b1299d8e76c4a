// SPDX-License-Identifier: Apache-2.0
// What GroupedGemm stands for: gpu_gemm.cpp, or no_gpu.cpp in a library that was built without CUDA.
#pragma once

#include <memory>

#include "switchyard/gemm.hpp"

namespace switchyard {

struct GroupedGemm::Impl {
  virtual ~Impl() = default;
  /// Arguments are checked.
  virtual void run(const ConstRows& x, const ExpertRows& rows, const Rows& out, const GroupedGemmOptions& options) = 0;

  GroupedGemmConfig config;
};

namespace detail::gemm {

/// `config` is checked. Throws as the public constructor.
std::unique_ptr<GroupedGemm::Impl> make_grouped_gemm(const GroupedGemmConfig& config, const void* weights,
                                                     const void* weight_scales);

}  // namespace detail::gemm
}  // namespace switchyard
