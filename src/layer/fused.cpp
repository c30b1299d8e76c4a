// SPDX-License-Identifier: Apache-2.0
// A layer in one kernel, or in one run of a CPU group's workers.
#include <string>
#include <utility>

#include "layer/impl.hpp"
#include "switchyard/fused.hpp"

namespace switchyard::detail {
namespace {

class FusedLayer final : public MoeLayer::Impl {
 public:
  FusedLayer(const LayerSetup& setup, std::string products, FusedMoe layer)
      : Impl(setup), products_(std::move(products)), layer_(std::move(layer)) {}

  void forward(const ConstRows& x, const ExpertIds& ids, const float* weights, void* out, const MoeLayerCall& call) override {
    layer_.forward(x.data, ids, weights, out,
                   {.stream = call.stream, .num_sms = call.num_sms, .device_tokens = call.device_tokens, .add = call.add});
  }
  std::span<const uint8_t> dropped() const override { return layer_.dropped(); }
  std::string implementation() const override { return "fused, normal, " + products_; }

 private:
  const std::string products_;
  FusedMoe layer_;
};

}  // namespace

std::unique_ptr<MoeLayer::Impl> make_fused_layer(Group& group, const LayerSetup& setup, const void* w13, const void* w2,
                                                 std::shared_ptr<ExpertProducts> products) {
  if (setup.backend == Backend::cuda)
    return std::make_unique<FusedLayer>(setup, std::string(to_string(setup.config.type)) + " wgmma:sm_90a",
                                        FusedMoe(group, setup.fused(), w13, w2));
  std::string text = products->implementation();
  return std::make_unique<FusedLayer>(setup, std::move(text), FusedMoe(group, setup.fused(), std::move(products)));
}

}  // namespace switchyard::detail
