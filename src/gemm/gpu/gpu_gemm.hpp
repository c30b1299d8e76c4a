// SPDX-License-Identifier: Apache-2.0
// Implementation of GroupedGemm: gpu_gemm.cpp, or no_gpu.cpp in a library built without CUDA.
#pragma once

#include <memory>

#include "switchyard/gemm.hpp"

namespace switchyard {

struct GroupedGemm::Impl {
  virtual ~Impl() = default;
  /// Arguments have been checked.
  virtual void run(const ConstRows& x, const ExpertRows& rows, const Rows& out, const GroupedGemmOptions& options) = 0;

  GroupedGemmConfig config;
};

namespace detail::gemm {

/// `config` has been checked. Throws like the public constructor.
std::unique_ptr<GroupedGemm::Impl> make_grouped_gemm(const GroupedGemmConfig& config, const void* weights,
                                                     const void* weight_scales);

}  // namespace detail::gemm
}  // namespace switchyard
