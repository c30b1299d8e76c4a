// SPDX-License-Identifier: Apache-2.0
#include "switchyard/layer.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/as_error.hpp"
#include "layer/gpu/gpu_place.hpp"
#include "layer/impl.hpp"
#include "layer/known_memory.hpp"

namespace switchyard {
namespace {

constexpr const char* kClass = "MoeLayer";

using detail::CurrentGpu;
using detail::GpuPlace;
using detail::is_captured;
using detail::LayerExperts;
using detail::LayerSetup;

/// A rank's message to its peers during construction.
struct Share {
  detail::AgreedProposal agreed;
  GpuPlace place;
};

/// Maximum number of multiprocessors for a product on this rank; 0: all. Other ranks may share the GPU: their kernels occupy
/// some multiprocessors while they wait for this rank's next step, and a product ends only when all its blocks have run.
int product_sms(const std::vector<Share>& all, const GpuPlace& mine, const GroupOptions& options) {
  const auto here = std::count_if(all.begin(), all.end(), [&](const Share& share) { return share.place.uuid == mine.uuid; });
  int max = here > 1 ? std::max(1, mine.multiprocessors / static_cast<int>(here)) : 0;
  if (options.num_sms > 0) max = max > 0 ? std::min(max, options.num_sms) : options.num_sms;
  return std::min(max, mine.multiprocessors);
}

/// CPU. Local.
detail::MakeProducts fused_products(const Group& group, const LayerSetup& setup) {
  (void)detail::FusedMoe::heap_bytes(setup.fused(),
                                     setup.world);  // checks fields that no other code checks, before weights are packed
  const int workers = group.options().num_blocks * group.options().num_warps;
  return [shape = setup.shape_of(group.rank()), storage = setup.config.storage, workers](const MoeWeights& weights) {
    return detail::make_expert_products(kClass, shape, weights.w13, weights.w2, storage, workers);
  };
}

std::unique_ptr<detail::LayerForm> make(Group& group, const MoeLayerConfig& config, const void* w13, const void* w2,
                                        void* stream) {
  LayerSetup setup;
  std::optional<ExpertMlp> mlp;
  detail::MakeProducts make_products;
  std::shared_ptr<detail::ExpertProducts> products;
  const MoeWeights weights{w13, w2, config.w13_scales, config.w2_scales, stream, config.intermediate_scale};
  Share mine;
  std::vector<Share> all(static_cast<size_t>(group.size()));
  detail::AgreedFields fields;
  const Backend backend = group.options().backend;
  const auto prepare = [&] {
    MoeLayerConfig wanted = config;
    if (wanted.form == MoeForm::automatic && group.hosts() > 1) wanted.form = MoeForm::separate;  // one kernel needs one host
    setup = detail::set_up(wanted, group.size(), backend);
    fields = setup.agreed_fields();
    mine.agreed = detail::AgreedProposal(kClass, fields);
    if (backend == Backend::cuda) mine.place = detail::gpu_place_of(group);
    setup.gpu = mine.place.device;
    const CurrentGpu current(setup.gpu);
    if (setup.config.form == MoeForm::fused) {
      if (backend == Backend::cuda) return;
      make_products = fused_products(group, setup);
      products = make_products(weights);
      return;
    }
    mlp.emplace(setup.shape_of(group.rank()), w13, w2, setup.expert_options());
  };
  group.agree(kClass, prepare, &mine, sizeof mine, all.data());
  const auto differs =
      detail::find_difference(fields, all.size(), [&](size_t r) -> const detail::AgreedProposal& { return all[r].agreed; });
  if (!differs.text.empty()) throw Error(ErrorCode::mismatch, differs.text, differs.field != nullptr ? differs.field : "");
  if (setup.config.form == MoeForm::fused)
    return detail::make_fused_layer(group, setup, weights, std::move(products), std::move(make_products));
  LayerExperts experts(group, std::move(*mlp), backend == Backend::cuda ? product_sms(all, mine.place, group.options()) : 0);
  auto made = setup.config.exchange == MoeExchange::normal ? detail::make_normal_layer(group, setup, std::move(experts))
                                                           : detail::make_low_latency_layer(group, setup, std::move(experts));
  group.agree(kClass, [&] {
    const CurrentGpu current(setup.gpu);
    made->make_rows();
  });
  return made;
}

}  // namespace

MoeLayer::Impl::~Impl() {
  if (!home.here() || form.use_count() == 1) return;  // the whole form is destroyed, or it belongs to the parent process
  try {
    const CurrentGpu current(form->gpu);
    form->remove_weights(set);
  } catch (const Error&) {
    // Without a context, there is nothing left to free.
  }
}

MoeLayer::MoeLayer(Group& group, const MoeLayerConfig& config, const void* w13, const void* w2, void* stream)
    : MoeLayer(std::make_unique<Impl>(make(group, config, w13, w2, stream), 0)) {}
MoeLayer::MoeLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeLayer MoeLayer::with_weights(const MoeWeights& weights) const {
  return detail::as_error("MoeLayer::with_weights", [&] {
    const Impl& impl = *impl_;
    if (weights.intermediate_scale != nullptr && impl.form->config.intermediate_scaling != OutputScaling::fixed)
      throw Error(ErrorCode::invalid_argument,
                  "MoeLayer::with_weights: intermediate_scale is given; allowed: null unless intermediate_scaling is fixed");
    const CurrentGpu current(impl.form->gpu);
    return MoeLayer(std::make_unique<Impl>(impl.form, impl.form->add_weights(weights)));
  });
}
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;
MoeLayer::~MoeLayer() = default;

MoeLayerMemory MoeLayer::memory_required(const MoeLayerConfig& config, int world, Backend backend) {
  return detail::set_up(config, world, backend).memory();
}
size_t MoeLayer::heap_bytes(const MoeLayerConfig& config, int world, Backend backend) {
  return detail::set_up(config, world, backend).heap_bytes();
}

namespace {

/// Throws if the options of a call are invalid in every form and type.
void check_call(const MoeLayerCall& call) {
  if (call.weights_ready != nullptr && is_captured(call.stream))
    throw Error(ErrorCode::invalid_argument,
                "MoeLayerCall::weights_ready: the stream is being captured; a graph cannot wait for weights that move");
}

}  // namespace

void MoeLayer::forward(const void* x, const ExpertIds& ids, const float* weights, void* out, const MoeLayerCall& call) {
  detail::LayerCalls::forward(*this, x, ids, weights, out, call, false);
}
void detail::LayerCalls::forward(MoeLayer& layer, const void* x, const ExpertIds& ids, const float* weights, void* out,
                                 const MoeLayerCall& call, bool known_memory) {
  const int set = layer.impl_->set;
  LayerForm& form = *layer.impl_->form;
  ExpertIds some = ids;
  FormCall now{call, known_memory};
  const CurrentGpu current(form.gpu);
  if (form.backend == Backend::cpu) {
    now.device_tokens = nullptr;
    now.weights_ready = nullptr;
    const bool allowed = ids.num_tokens >= 0 && ids.num_tokens <= form.config.max_tokens;  // the exchange rejects other values
    if (call.device_tokens && allowed) some.num_tokens = std::clamp<int64_t>(*call.device_tokens, 0, ids.num_tokens);
  }
  const ConstRows rows{x, some.num_tokens, form.config.hidden, form.config.token_dtype()};
  try {
    check_call(now);
  } catch (const Error&) {  // a failing call ends those of the other ranks, whose arguments may be valid
    some.topk = 0;
    now.weights_ready = nullptr;  // an event outside a capture would invalidate it
    end_calls_of_peers([&] { form.forward(set, rows, some, weights, out, now); });
    throw;
  }
  form.forward(set, rows, some, weights, out, now);
}

std::span<const uint8_t> MoeLayer::dropped() const { return impl_->form->dropped(); }
int64_t MoeLayer::invalid_ids() const { return impl_->form->invalid_ids(); }
const MoeLayerConfig& MoeLayer::config() const { return impl_->form->config; }
std::string MoeLayer::implementation() const { return impl_->form->implementation(); }

}  // namespace switchyard
