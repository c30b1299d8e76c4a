// SPDX-License-Identifier: Apache-2.0
// What MoeLayer stands for: the parts of a layer, put together in one of several forms.
#pragma once

#include <memory>
#include <span>

#include "gemm/cpu/fused_products.hpp"
#include "layer/setup.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

struct MoeLayer::Impl {
  explicit Impl(const detail::LayerSetup& setup) : config(setup.config), backend(setup.backend), gpu(setup.gpu) {}
  virtual ~Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// What follows the collective part of a construction and may fail on this rank alone. Local.
  virtual void make_rows() {}
  /// Collective. On the CPU `call` has no device_tokens: the host has read them.
  virtual void forward(const ConstRows& x, const ExpertIds& ids, const float* weights, void* out, const MoeLayerCall& call) = 0;
  virtual std::span<const uint8_t> dropped() const { return {}; }
  virtual std::string implementation() const = 0;

  const MoeLayerConfig config;
  const Backend backend;
  const int gpu;  ///< that is current in forward() and make_rows(); -1: none
};

namespace detail {

/// A rank's experts in a layer.
struct LayerExperts {
  ExpertMlp mlp;
  int num_sms = 0;  ///< CUDA: most multiprocessors of a product, unless a call says otherwise; 0: all

  ExpertCall call(const MoeLayerCall& call) const { return {call.stream, call.num_sms > 0 ? call.num_sms : num_sms}; }
};

// Collective.
std::unique_ptr<MoeLayer::Impl> make_normal_layer(Group& group, const LayerSetup& setup, LayerExperts experts);
std::unique_ptr<MoeLayer::Impl> make_low_latency_layer(Group& group, const LayerSetup& setup, LayerExperts experts);
/// `products`: on the CPU.
std::unique_ptr<MoeLayer::Impl> make_fused_layer(Group& group, const LayerSetup& setup, const void* w13, const void* w2,
                                                 std::shared_ptr<ExpertProducts> products);

}  // namespace detail
}  // namespace switchyard
