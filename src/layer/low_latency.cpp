// SPDX-License-Identifier: Apache-2.0
// A layer that makes separate calls around low-latency mode. All rows are allocated once.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "exchange/low_latency/known_memory.hpp"
#include "layer/add_rows.hpp"
#include "layer/gpu/gpu_place.hpp"
#include "layer/impl.hpp"

namespace switchyard::detail {
namespace {

class LowLatencyLayer final : public LayerForm {
 public:
  LowLatencyLayer(Group& group, const LayerSetup& setup, LayerExperts experts)
      : LayerForm(setup), exchange_(group, setup.low_latency()), experts_(std::move(experts)), setup_(setup) {}

  void make_rows() override {
    received_ = exchange_.make_output();
    made_ = exchange_.make_rows(config.token_dtype());
    add_ = make_row_adder(setup_);
  }

  void forward(int set, const ConstRows& x, const ExpertIds& ids, const float* weights, void* out,
               const FormCall& call) override {
    LowLatencyDispatchOptions there;
    there.topk_weights = weights;
    there.stream = call.stream;
    there.num_sms = call.num_sms;
    there.device_tokens = call.device_tokens;
    there.selector = call.selector;
    LowLatencyCalls::dispatch(exchange_, x, ids, received_, there, call.known_memory);
    order_after(call.stream, call.weights_ready);
    experts_.of(set).forward(received_.x, ExpertRows::of(received_), made_, experts_.call(call));
    // An invalid `out` is passed to combine, which also reports it to the other ranks.
    const bool adds = call.add && add_->takes(out);
    LowLatencyCombineOptions back;
    back.order = config.order;
    back.stream = call.stream;
    back.num_sms = call.num_sms;
    LowLatencyCalls::combine(exchange_, made_, received_, adds ? add_->sums() : out, back, call.known_memory);
    if (adds) add_->add(out, ids.num_tokens, call, experts_.call(call).num_sms);
  }
  int add_weights(const MoeWeights& weights) override { return experts_.add(weights); }
  void remove_weights(int set) override { experts_.remove(set); }
  int64_t invalid_ids() const override { return exchange_.invalid_ids(); }
  std::string implementation() const override { return "separate, low_latency, " + experts_.implementation(); }

 private:
  LowLatencyExchange exchange_;
  LayerExperts experts_;
  LayerSetup setup_;
  LowLatencyOutput received_;
  LowLatencyRows made_;
  std::unique_ptr<RowAdder> add_;
};

}  // namespace

std::unique_ptr<LayerForm> make_low_latency_layer(Group& group, const LayerSetup& setup, LayerExperts experts) {
  return std::make_unique<LowLatencyLayer>(group, setup, std::move(experts));
}

}  // namespace switchyard::detail
