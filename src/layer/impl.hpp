// SPDX-License-Identifier: Apache-2.0
// Implementation of MoeLayer: one weight set in a form. The form combines the parts of a layer; layers that differ only in
// their weights share a form.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/forked.hpp"
#include "exchange/group/step_trace.hpp"
#include "gemm/cpu/fused_products.hpp"
#include "layer/setup.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

namespace detail {

/// Settings of one call of a form.
struct FormCall : MoeLayerCall {
  bool known_memory = false;  ///< layer/known_memory.hpp
};

/// After an error of this rank outside of the exchange: `call`, a call of the exchange that fails because of its arguments,
/// ends the calls of the other ranks. Its error is dropped, because the first one is the cause.
template <class Call>
void end_calls_of_peers(Call&& call) {
  try {
    call();
  } catch (const Error&) {
  }
}

/// Holds a layer's weight sets and all its other parts. Sets are numbered from 0 in the order in which they are added.
class LayerForm {
 public:
  explicit LayerForm(const LayerSetup& setup) : config(setup.config), backend(setup.backend), gpu(setup.gpu) {}
  virtual ~LayerForm() = default;
  LayerForm(const LayerForm&) = delete;
  LayerForm& operator=(const LayerForm&) = delete;

  /// Local part of construction, after the collective part; it may fail on this rank alone.
  virtual void make_rows() {}
  /// Collective; uses the weights in `set`. On the CPU, `call` has no device_tokens: the host has already read the value.
  virtual void forward(int set, const ConstRows& x, const ExpertIds& ids, const float* weights, void* out,
                       const FormCall& call) = 0;
  /// Local. \returns the number of the new set. Throws Error(invalid_argument) naming the argument.
  virtual int add_weights(const MoeWeights& weights) = 0;
  virtual void remove_weights(int set) = 0;
  virtual std::span<const uint8_t> dropped() const { return {}; }
  virtual int64_t invalid_ids() const = 0;
  virtual std::string implementation() const = 0;

  const MoeLayerConfig config;
  const Backend backend;
  const int gpu;  ///< current in all functions that perform work; -1: none
};

/// A rank's experts, by weight set, in a layer made of separate calls.
class LayerExperts {
 public:
  LayerExperts(Group& group, ExpertMlp first, int max_sms) : num_sms(max_sms), trace_(std::make_unique<StepTrace>(group)) {
    observe_steps(first, trace_.get());
    sets_.emplace(next_++, std::move(first));
  }

  const int num_sms;  ///< CUDA: maximum multiprocessors of a product, unless a call sets it; 0: all
  ExpertMlp& of(int set) { return sets_.at(set); }
  int add(const MoeWeights& weights) {
    sets_.emplace(next_, sets_.begin()->second.with_weights(weights));
    return next_++;
  }
  void remove(int set) { sets_.erase(set); }
  ExpertCall call(const MoeLayerCall& call) const { return {call.stream, call.num_sms > 0 ? call.num_sms : num_sms}; }
  std::string implementation() const { return sets_.begin()->second.implementation(); }

 private:
  std::unique_ptr<StepTrace> trace_;
  std::map<int, ExpertMlp> sets_;  ///< at least one while a layer is alive
  int next_ = 0;
};

// Collective.
std::unique_ptr<LayerForm> make_normal_layer(Group& group, const LayerSetup& setup, LayerExperts experts);
std::unique_ptr<LayerForm> make_low_latency_layer(Group& group, const LayerSetup& setup, LayerExperts experts);
/// CPU: creates products for this rank's experts with weights of the layer's sizes. Throws Error(invalid_argument).
using MakeProducts = std::function<std::shared_ptr<ExpertProducts>(const MoeWeights& weights)>;
/// `products`, and `make` for additional weight sets, are used on the CPU only.
std::unique_ptr<LayerForm> make_fused_layer(Group& group, const LayerSetup& setup, const MoeWeights& weights,
                                            std::shared_ptr<ExpertProducts> products, MakeProducts make);

}  // namespace detail

struct MoeLayer::Impl {
  Impl(std::shared_ptr<detail::LayerForm> form_in, int set_in) : form(std::move(form_in)), set(set_in) {}
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  const detail::HomeProcess home;
  const std::shared_ptr<detail::LayerForm> form;
  const int set;  ///< number of the form's weight set
};

}  // namespace switchyard
