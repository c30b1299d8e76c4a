// SPDX-License-Identifier: Apache-2.0
// A layer that makes separate calls around normal mode. The rows of a call live until it returns; on GPUs, the pool reuses
// their memory in stream order.
#include <memory>
#include <utility>

#include "base/as_error.hpp"
#include "exchange/normal/known_memory.hpp"
#include "layer/gpu/gpu_place.hpp"
#include "layer/impl.hpp"
#include "layer/quantise_tokens.hpp"

namespace switchyard::detail {
namespace {

class NormalLayer final : public LayerForm {
 public:
  NormalLayer(Group& group, const LayerSetup& setup, LayerExperts experts)
      : LayerForm(setup), exchange_(group, setup.normal()), experts_(std::move(experts)), setup_(setup) {}

  void make_rows() override {
    NormalCalls::reserve_slots(exchange_);
    if (config.scaling == ScaleGranularity::per_channel) tokens_ = make_gpu_token_quantiser(setup_);
    // A layer's calls are sequential, so its graphs never run concurrently.
    if (backend == Backend::cuda && config.captured) exchange_.use_graph_memory(exchange_.make_graph_memory());
  }

  void forward(int set, const ConstRows& x, const ExpertIds& ids, const float* weights, void* out,
               const FormCall& call) override {
    last_ = {};
    Dispatched d = NormalCalls::dispatch(exchange_, tokens_ ? quantised(x, ids, weights, call) : x, ids, weights,
                                         dispatch_options(call), call.known_memory, call.selector);
    {
      const RowBuffer y = exchange_.allocate_rows(d.handle, config.token_dtype(), call.stream);
      order_after(call.stream, call.weights_ready);
      experts_.of(set).forward(d.x, ExpertRows::of(d), y.rows(), experts_.call(call));
      NormalCalls::combine(exchange_, y.rows(), d.handle, out, combine_options(call, out), nullptr, call.known_memory);
    }
    if (config.overflow != Overflow::drop_and_report) return;
    d.block.reset();  // keeps the tables but not the rows
    last_ = std::move(d);
  }
  std::span<const uint8_t> dropped() const override { return last_.dropped; }
  int add_weights(const MoeWeights& weights) override { return experts_.add(weights); }
  void remove_weights(int set) override { experts_.remove(set); }
  int64_t invalid_ids() const override { return exchange_.invalid_ids(); }
  std::string implementation() const override { return "separate, normal, " + experts_.implementation(); }

 private:
  /// The tokens as fp8. Errors end the peers' calls: a dispatch without rows, which fails, does that.
  ConstRows quantised(const ConstRows& x, const ExpertIds& ids, const float* weights, const FormCall& call) {
    try {
      return as_error("MoeLayer", [&] { return tokens_->quantise(x, call, experts_.call(call).num_sms); });
    } catch (const Error&) {
      ConstRows none = x;
      none.data = nullptr;
      end_calls_of_peers([&] { (void)exchange_.dispatch(none, ids, weights, dispatch_options(call)); });
      throw;
    }
  }
  DispatchOptions dispatch_options(const MoeLayerCall& call) const {
    DispatchOptions o;
    if (config.dtype == DType::fp8_e4m3 && !tokens_) o.quantize = config.row_scales;
    if (config.capacity > 0) o.size = SizePolicy::capacity;
    o.capacity = config.capacity;
    o.overflow = config.overflow;
    o.stream = call.stream;
    o.num_sms = call.num_sms;
    o.device_tokens = call.device_tokens;
    return o;
  }
  CombineOptions combine_options(const MoeLayerCall& call, const void* out) const {
    CombineOptions o;
    o.order = config.order;
    if (call.add) o.bias[0] = out;
    o.stream = call.stream;
    o.num_sms = call.num_sms;
    return o;
  }

  NormalExchange exchange_;
  LayerExperts experts_;
  const LayerSetup setup_;
  std::unique_ptr<TokenQuantiser> tokens_;  ///< ScaleGranularity::per_channel
  Dispatched last_;                         ///< drop_and_report: the last call's tables, without its rows
};

}  // namespace

std::unique_ptr<LayerForm> make_normal_layer(Group& group, const LayerSetup& setup, LayerExperts experts) {
  return std::make_unique<NormalLayer>(group, setup, std::move(experts));
}

}  // namespace switchyard::detail
