// SPDX-License-Identifier: Apache-2.0
// Implementation of the gradient classes: gpu_gradients.cpp, or no_gpu.cpp in a library built without CUDA.
#pragma once

#include <memory>

#include "switchyard/gemm_gradients.hpp"

namespace switchyard {

// The arguments of run() have been checked, except for num_sms and the current GPU.

struct WeightGradient::Impl {
  virtual ~Impl() = default;
  virtual void run(const ConstRows& dy, const ConstRows& x, const ExpertRows& rows, void* dw,
                   const GroupedGemmOptions& options) = 0;

  WeightGradientConfig config;
};
struct SwigluGradient::Impl {
  virtual ~Impl() = default;
  virtual void run(const ConstRows& h, const ConstRows& da, const ExpertRows& rows, const Rows& dh, const Rows& a,
                   const GroupedGemmOptions& options) = 0;

  SwigluGradientConfig config;
};
struct RoutingGradient::Impl {
  virtual ~Impl() = default;
  virtual void run(const ConstRows& dy, const ConstRows& y, const ExpertRows& rows, float* dweight,
                   const GroupedGemmOptions& options) = 0;

  RoutingGradientConfig config;
};

namespace detail::gemm {

/// `config` has been checked. These functions throw like the public constructors.
std::unique_ptr<WeightGradient::Impl> make_weight_gradient(const WeightGradientConfig& config);
std::unique_ptr<SwigluGradient::Impl> make_swiglu_gradient(const SwigluGradientConfig& config);
std::unique_ptr<RoutingGradient::Impl> make_routing_gradient(const RoutingGradientConfig& config);

}  // namespace detail::gemm
}  // namespace switchyard
