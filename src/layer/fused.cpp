// SPDX-License-Identifier: Apache-2.0
// A layer that runs as one kernel, or as one run of a CPU group's workers.
#include <string>
#include <utility>

#include "exchange/fused/fused_moe.hpp"
#include "layer/gpu/gpu_place.hpp"
#include "layer/impl.hpp"

namespace switchyard::detail {
namespace {

class FusedLayer final : public LayerForm {
 public:
  FusedLayer(const LayerSetup& setup, std::string products, FusedMoe layer, MakeProducts make)
      : LayerForm(setup), products_(std::move(products)), layer_(std::move(layer)), make_(std::move(make)) {}

  void forward(int set, const ConstRows& x, const ExpertIds& ids, const float* weights, void* out,
               const FormCall& call) override {
    order_after(call.stream, call.weights_ready);  // the kernel starts after the weights are complete
    layer_.forward(x.data, ids, weights, out,
                   {call.stream, call.num_sms, call.device_tokens, call.add, set, call.known_memory, call.selector,
                    call.weights_ready != nullptr});
  }
  int add_weights(const MoeWeights& weights) override {
    return backend == Backend::cuda ? layer_.add_weights(weights) : layer_.add_products(make_(weights));
  }
  void remove_weights(int set) override { layer_.remove_weights(set); }
  std::span<const uint8_t> dropped() const override { return layer_.dropped(); }
  int64_t invalid_ids() const override { return layer_.invalid_ids(); }
  std::string implementation() const override { return "fused, normal, " + products_; }

 private:
  const std::string products_;
  FusedMoe layer_;
  const MakeProducts make_;
};

}  // namespace

std::unique_ptr<LayerForm> make_fused_layer(Group& group, const LayerSetup& setup, const MoeWeights& weights,
                                            std::shared_ptr<ExpertProducts> products, MakeProducts make) {
  if (setup.backend == Backend::cuda)
    return std::make_unique<FusedLayer>(setup, std::string(to_string(setup.config.dtype)) + " wgmma:sm_90a",
                                        FusedMoe(group, setup.fused(), weights.w13, weights.w2, weights.stream),
                                        std::move(make));
  std::string text = products->implementation();
  return std::make_unique<FusedLayer>(setup, std::move(text), FusedMoe(group, setup.fused(), std::move(products)),
                                      std::move(make));
}

}  // namespace switchyard::detail
