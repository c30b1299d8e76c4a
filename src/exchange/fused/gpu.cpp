// SPDX-License-Identifier: Apache-2.0
// The fused layer on a GPU: memory, tensor maps, stream order, launches. The kernel is in layer.cu; the plan is that of normal
// mode.
#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "exchange/fused/impl.hpp"
#include "exchange/fused/launch.hpp"
#include "exchange/gpu/call_order.hpp"
#include "exchange/normal/plan/launch.hpp"
#include "gemm/gpu/fp8/wide_tiles.hpp"
#include "gemm/product_maps.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

constexpr const char* kObject = "MoeLayer";

/// One of the two products: multiplies `rows` rows from `in` by an expert's `n` weights of `k` elements each, into `out`.
struct Product {
  int experts;
  int64_t n, k;
  bool gated;
  const void* weights;
  const std::byte* in;
  int64_t in_pitch;  ///< bytes
  std::byte* out;
  int64_t rows;
};

gemm::GroupedParams unmapped_params(const Product& d, const Tables& tables, int64_t stage) {
  gemm::GroupedParams g;
  g.num_experts = d.experts;
  g.columns = static_cast<int>(d.gated ? d.n / 2 : d.n);
  const int in_tile = d.gated ? kUpColumns : kDownColumns;
  g.column_tiles = (g.columns + in_tile - 1) / in_tile;
  g.inner_blocks = static_cast<int>((d.k + stage - 1) / stage);
  g.gating = {std::numeric_limits<float>::infinity(), 1.F, 0.F};
  g.ranges.num_rows = tables.kept;
  g.ranges.wide = true;
  g.ranges.first_row = tables.first_row;
  g.ranges.end = d.rows;
  return g;
}

gemm::ProductMaps maps_of(const Product& d, DType type) {
  return {kObject, type, DType::bf16, d.experts, d.n, d.k, d.gated, false};
}

gemm::GroupedParams bf16_params(const Product& d, const Tables& tables) {
  gemm::GroupedParams g = unmapped_params(d, tables, gemm::kInner);
  g.inner_blocks = std::max(3, g.inner_blocks);
  g.out = reinterpret_cast<uint16_t*>(d.out);
  if (d.experts == 0 || d.rows == 0) return g;
  const gemm::ProductMaps maps = maps_of(d, DType::bf16);
  maps.set_weights(g, d.weights);
  maps.set_rows(g, d.in, d.rows, kFusedRows, static_cast<uint64_t>(d.in_pitch));
  maps.set_outputs(g, d.out, d.rows);
  return g;
}

/// Operands are loaded as in gemm/gpu/fp8/wide_roles.cuh. The outputs of the gated product have scales too.
/// `shared_base`: see GroupedParams.
gemm::GroupedParams fp8_params(const Product& d, const Tables& tables, const FusedMemory& m, uint32_t shared_base) {
  gemm::GroupedParams g = unmapped_params(d, tables, gemm::kFp8Inner);
  g.shared_base = shared_base;
  if (d.gated)
    g.quantised = {d.out, reinterpret_cast<std::byte*>(m.h_scales), 4, m.scale_pitch * 4, false};
  else
    g.out = reinterpret_cast<uint16_t*>(d.out);
  if (d.experts == 0 || d.rows == 0) return g;
  const gemm::ProductMaps maps = maps_of(d, DType::fp8_e4m3);
  maps.set_many_weights(g, d.weights, gemm::kTileColumns / 2);
  maps.set_rows(g, d.in, d.rows, kWideSharedRows, static_cast<uint64_t>(d.in_pitch));
  return g;
}
/// Tensor map for the row scales of a product.
CUtensorMap scales_map(const float* scales, const FusedMemory& m, int64_t rows, int blocks) {
  CUtensorMap map;
  gemm::make_map(&map,
                 {scales,
                  gpu::ElementType::f32,
                  {{static_cast<uint64_t>(rows), 0, kFusedScaleBox},
                   {static_cast<uint64_t>(blocks), static_cast<uint64_t>(m.scale_pitch) * 4, 1}},
                  gpu::Swizzle::none},
                 kObject, "scales");
  return map;
}

/// `max_rows`: maximum rows per round.
CopyPlan copy_plan_of(int64_t row_bytes, int max_rows) {
  CopyPlan plan;
  const int64_t pieces = (row_bytes + kPieceBytes - 1) / kPieceBytes;
  plan.whole = pieces == 1;
  plan.piece = static_cast<uint32_t>(round_up((row_bytes + pieces - 1) / pieces, 16));
  plan.pitch = static_cast<uint32_t>(round_up(plan.piece, 128));
  plan.slots = static_cast<int>(kPieceStorageBytes / plan.pitch);
  if (plan.whole) plan.slots = std::min({plan.slots, kMaxSlots, max_rows});
  plan.at_once = static_cast<int>(std::clamp<int64_t>(kBytesAtOnce / row_bytes, 8, 32));
  return plan;
}

/// Call parameters that depend on the weight set.
struct WeightSet {
  gemm::GroupedParams up, down;
  FusedFp8Scales up_scales, down_scales;                   ///< fp8
  DeviceMemory scales;                                     ///< fp8: weight_scales_bytes(), or none without experts or rows
  const void *w13_scales = nullptr, *w2_scales = nullptr;  ///< fp8: the caller's
  Point ready;  ///< fp8: when they are ready; null: they were ready when the set was created
};

class CudaFused final : public FusedImpl {
 public:
  CudaFused(Group& group, CudaRank& gpu, const FusedMoeConfig& c, const MoeWeights& weights) : FusedImpl(group, c), gpu_(gpu) {
    construct("MoeLayer", "MoeLayer::heap_bytes(...)", [&] {
      check_config(config, world());
      const DeviceGuard guard(gpu_.device());
      check_gpu();
      check_weights(weights);
      layout_ = layout_of(config, world());
      layout_.base = take_heap(static_cast<size_t>(layout_.bytes()), static_cast<size_t>(layout_.flags_bytes()));
      make_memory();
      sets_.emplace(next_set_++, make_set(weights));
      order_.emplace(gpu_, "MoeLayer", object_, config.invalid_ids);
      return agreed_fields(config);
    });
  }

  ~CudaFused() override {
    try {
      const DeviceGuard guard(gpu_.device());
      if (!order_) return;
      for (auto& [number, set] : sets_) end_set(set);
      state_.end_after(order_->uses());
      memory_.end_after(order_->uses());
      gpu_.end_block(give_up_heap(), order_->uses());
      order_.reset();
    } catch (const Error&) {
      // Without a context, there is nothing left to free.
    }
  }

  void forward(const void* x, const ExpertIds& ids, const float* weights, void* out, const FusedMoeCall& o) override {
    call({true, true}, x, ids, weights, out, o);
  }
  void dispatch_up(const void* x, const ExpertIds& ids, const float* weights, const FusedMoeCall& o) override {
    call({true, false}, x, ids, weights, nullptr, o);
  }
  void down_combine(const float* weights, void* out, const FusedMoeCall& o) override {
    if (o.device_tokens) invalid("MoeLayerCall::device_tokens", " is not null: T is that of dispatch_up");
    call({false, true}, nullptr, {nullptr, last_tokens_, config.topk}, weights, out, o);
  }
  FusedMoeRows rows() const override {
    const FusedMemory& m = params_.memory;
    return {m.h, m.h_scales, m.scale_pitch, tables_.first_row, tables_.kept, layout_.rows};
  }

  int add_weights(const MoeWeights& weights) override {
    const DeviceGuard guard(gpu_.device());
    check_weights(weights);
    sets_.emplace(next_set_, make_set(weights));
    return next_set_++;
  }
  int add_products(std::shared_ptr<FusedProducts>) override {
    throw Error(ErrorCode::unsupported, "FusedMoe::add_products: the group is of GPUs, which multiply themselves: add_weights");
  }
  void remove_weights(int set) override {
    const auto found = sets_.find(set);
    if (found == sets_.end()) return;
    const DeviceGuard guard(gpu_.device());
    end_set(found->second);
    sets_.erase(found);
  }

  void* tokens() const override { return config.dtype == DType::fp8_e4m3 ? nullptr : group_.heap->view().local(layout_.x(0)); }
  std::span<const uint8_t> dropped() const override {
    if (config.overflow != Overflow::drop_and_report) return {};
    return {tables_.dropped, static_cast<size_t>(last_tokens_ * config.topk)};
  }
  CallStatistics last_call() override {
    const DeviceGuard guard(gpu_.device());
    return order_->statistics();
  }
  int64_t invalid_ids() override { return order_->invalid_ids(); }

 private:
  void call(const FusedParts& parts, const void* x, const ExpertIds& ids, const float* weights, void* out,
            const FusedMoeCall& o) {
    group_.check_usable("MoE layer");
    const DeviceGuard guard(gpu_.device());
    check_turn(parts, o);
    check_call(parts, x, ids, weights, out, o);
    FusedParams p = params_;
    const WeightSet& set = find_set(sets_, o);
    p.up = set.up;
    p.down = set.down;
    p.up_scales = set.up_scales;
    p.down_scales = set.down_scales;
    p.call = gpu_.context(bounded_ns(group_.options.timeout), Operation::layer);
    order_->set_counters(p.call);
    p.parts = parts;
    p.max_tokens = ids.num_tokens;
    p.x = x == tokens() ? nullptr : static_cast<const std::byte*>(x);
    p.weights = weights;
    p.out = static_cast<std::byte*>(out);
    p.add = o.add;
    const CallStream at = order_->begin(static_cast<gpu::Stream>(o.stream));
    for (const void* used : {x, static_cast<const void*>(out)})
      if (const std::shared_ptr<MemoryHolder> holder = used ? gpu_.holders().find(used) : nullptr)
        holder->used_on(at.stream, at.capture);
    if (set.ready && !at.capture.active && !StreamPoints::reached(*set.ready))
      StreamPoints::order(at.stream, at.id, *set.ready);
    if (o.read_scales) read_scales(set, at.stream);
    const bool fp8 = config.dtype == DType::fp8_e4m3;
    int blocks = gpu_.blocks(o.num_sms, 0, gpu_.max_blocks());
    if (fp8) blocks = blocks / 2 * 2;  // clusters of two blocks
    PlanParams plan;
    if (parts.up) {
      ExpertIds slots = ids;
      if (o.selector) select_slots(o, slots, selected_slots());
      plan = plan_params(parts, slots, weights, o);
      if (o.selector) plan.map_version = selected_slots().version;
      plan.call = p.call;
      plan.words = gpu_.words(at.capture.active);
      launch_plan(plan, plan_blocks(ids.num_tokens, gpu_.max_blocks()), at.stream);
    }
    const auto launch = fp8 ? launch_fused_fp8 : launch_fused;
    launch(p, blocks, gpu_.limits(), at.stream);
    for (int pass = 1; pass <= passes_.count; ++pass) {
      const PlanParams part = plan_of_pass(plan, pass);
      launch_plan(part, plan_blocks(part.tokens, gpu_.max_blocks()), at.stream, false, gpu_.limits().dependent_launches);
      launch(layer_of_pass(p, pass), blocks, gpu_.limits(), at.stream);
    }
    order_->end(at, blocks);
    end_turn(parts, o);
  }

  // Overflow::split. Every call enqueues all passes. The plan of the whole call decides on the device, identically on all
  // ranks, whether the call is split and how many passes run; the others exit at once. The kernel of the whole call stages the
  // tokens of all passes.

  int64_t first_of_pass(int pass, int64_t tokens) const { return std::min((pass - 1) * passes_.tokens, tokens); }
  PlanParams plan_of_pass(const PlanParams& whole, int pass) const {
    PlanParams p = whole;
    const int64_t first = first_of_pass(pass, whole.tokens), routes = first * config.topk;
    p.pass = pass;
    p.split_tokens = 0;
    p.fail_on_overflow = true;
    p.first_token = first;
    p.tokens = std::min(whole.tokens - first, passes_.tokens);
    if (p.tokens == 0) return p;
    p.ids = static_cast<const std::byte*>(whole.ids) + routes * (whole.ids64 ? 8 : 4);
    if (whole.weights != nullptr) p.weights = whole.weights + routes;
    return p;
  }
  FusedParams layer_of_pass(const FusedParams& whole, int pass) const {
    FusedParams p = whole;
    const int64_t first = first_of_pass(pass, whole.max_tokens);
    p.pass = pass;
    p.layout.first_token = (pass - 1) * passes_.tokens;
    p.x = nullptr;
    p.max_tokens = std::min(whole.max_tokens - first, passes_.tokens);
    if (p.max_tokens == 0) return p;
    if (whole.weights != nullptr) p.weights = whole.weights + first * config.topk;
    p.out = whole.out + first * layout_.row_bytes;
    return p;
  }

  void check_gpu() {
    gpu::DeviceTraits traits;
    check_cuda(gpu::traits_of(&traits, gpu_.device()), "properties of the GPU");
    shared_base_ = static_cast<uint32_t>(traits.reserved_bytes);
    if (traits.generation != 9)
      throw Error(ErrorCode::unsupported, "MoeForm::fused: GPU " + std::to_string(gpu_.device()) + " (" + traits.name +
                                              ") has compute capability " + std::to_string(traits.generation) +
                                              ".x: it needs 9.0 (H100, H200)");
    if (const int64_t max = kMaxTokensPerPlanBlock * gpu_.max_blocks(); config.max_tokens > max)
      invalid_value("MoeLayerConfig::max_tokens", std::to_string(config.max_tokens),
                    "at most " + std::to_string(max) + " on this GPU");
    if (config.dtype == DType::fp8_e4m3 && gpu_.max_blocks() < 2)
      throw Error(ErrorCode::unsupported, "MoeForm::fused: fp8_e4m3 needs two multiprocessors, and the rank has one");
  }
  void check_weights(const MoeWeights& weights) const {
    const auto check = [&](const char* name, const void* given, size_t alignment) {
      if (local_experts() > 0 && given == nullptr) invalid(name, " is null");
      gpu_.check_pointer(name, given, alignment);
    };
    check("w13", weights.w13, 16);
    check("w2", weights.w2, 16);
    if (config.dtype != DType::fp8_e4m3) return;
    const size_t scale = config.weight_scales == ScaleKind::f32 ? 4 : 1;
    check("w13_scales", weights.w13_scales, scale);
    check("w2_scales", weights.w2_scales, scale);
  }
  void check_call(const FusedParts& parts, const void* x, const ExpertIds& ids, const float* weights, const void* out,
                  const FusedMoeCall& o) const {
    check_arguments(parts, x, ids, weights, out);
    check_selector(o);
    gpu_.check_sms("MoeLayerCall", o.num_sms);
    if (config.dtype == DType::fp8_e4m3 && o.num_sms == 1)
      invalid("MoeLayerCall::num_sms", " = 1: must be 0 or at least 2 for fp8_e4m3");
    gpu_.check_pointer("x", x, 16, o.known_memory);
    gpu_.check_pointer("topk_ids.data", ids.data, ids.is_int64 ? 8 : 4, o.known_memory);
    gpu_.check_pointer("topk_weights", weights, 4, o.known_memory);
    gpu_.check_pointer("out", out, 16, o.known_memory);
    gpu_.check_pointer("MoeLayerCall::device_tokens", o.device_tokens, 4, o.known_memory);
  }

  void make_memory() {
    const gpu::Stream copies = gpu_.copy_stream();
    const int64_t rows = layout_.rows;
    const TablesShape shape{world(), config.num_experts, local_experts(), config.topk, config.max_tokens, true};
    const int64_t own = carve_fused(nullptr, config, rows, local_experts(), params_.memory);
    memory_ = DeviceMemory(static_cast<size_t>(own + carve_tables(nullptr, shape).bytes), copies);
    carve_fused(memory_.as<std::byte>(), config, rows, local_experts(), params_.memory);
    tables_ = carve_tables(memory_.as<std::byte>(static_cast<size_t>(own)), shape);
    const auto columns = static_cast<size_t>(world() + config.num_experts);
    slots_at_ = kObjectStateBytes + (static_cast<size_t>(gpu_.max_blocks()) + 1) * columns * 4;
    slots_at_ = (slots_at_ + 7) / 8 * 8;
    state_ = DeviceMemory(slots_at_ + static_cast<size_t>(SelectedSlots::bytes(max_routes())), copies);
    ObjectState initial{};
    initial.epoch = epoch_before(first_epoch_);
    check_cuda(gpu::copy_to_device(state_.as<void>(), &initial, sizeof initial, copies), "state");
    const auto set_flags = [&](void* flags, int64_t bytes) {
      set_device_flags(flags, bytes, flag_word(initial.epoch), copies);
    };
    set_flags(group_.heap->view().base[rank()] + layout_.base, layout_.flags_bytes());
    set_flags(params_.memory.arrived,
              params_.memory.flags - (reinterpret_cast<std::byte*>(params_.memory.arrived) - memory_.as<std::byte>()));
    params_.state = state_.as<ObjectState>();
    params_.header = tables_.header;
    params_.layout = layout_;
    params_.map = ExpertRanges{config.num_experts, world()};
    params_.lag = std::min(layout_.per_rank ? kSumLag : kLag, local_experts());
    params_.ids = tables_.ids;
    params_.route_row = tables_.route_row;
    params_.pulled = copy_plan_of(layout_.x_bytes, 32 / static_cast<int>(std::bit_ceil(static_cast<unsigned>(config.topk))));
    params_.returned = copy_plan_of(layout_.row_bytes, 32);
    if (layout_.per_rank) plan_sums();
    params_.ue8m0 = config.row_scales == ScaleKind::ue8m0;
  }
  /// per_rank: divides rows into the smallest number of equal pieces that fit.
  void plan_sums() {
    const int64_t row = layout_.row_bytes;
    params_.returned.at_once = static_cast<int>(std::clamp<int64_t>(kSummedBytesAtOnce / row, 4, 32));
    for (int n = 1; n <= config.topk; ++n) {
      const int64_t max = kPieceBytes / n / 16 * 16, pieces = (row + max - 1) / max;
      params_.summed_bytes[n] = static_cast<uint16_t>(round_up((row + pieces - 1) / pieces, 16));
    }
  }
  /// Creates a weight set from checked weights.
  WeightSet make_set(const MoeWeights& weights) {
    const FusedMemory& m = params_.memory;
    const int64_t rows = layout_.rows;
    const int64_t h_pitch = config.intermediate * fused_type_sizes(config).element;
    const Product up{local_experts(), 2 * config.intermediate, config.hidden, true, weights.w13,
                     m.x_rows,        layout_.row_bytes,       m.h,           rows},
        down{local_experts(), config.hidden, config.intermediate, false, weights.w2, m.h, h_pitch, m.y, rows};
    WeightSet set;
    if (config.dtype != DType::fp8_e4m3) {
      set.up = bf16_params(up, tables_);
      set.down = bf16_params(down, tables_);
      return set;
    }
    set.up = fp8_params(up, tables_, m, shared_base_);
    set.down = fp8_params(down, tables_, m, shared_base_);
    if (local_experts() == 0 || rows == 0) return set;
    set.scales = DeviceMemory(weight_scales_bytes(config, local_experts()), gpu_.copy_stream());
    auto* const spread_up = set.scales.as<float4>();
    set.up_scales = {scales_map(m.x_scales, m, rows, set.up.inner_blocks), spread_up};
    set.down_scales = {scales_map(m.h_scales, m, rows, set.down.inner_blocks),
                       spread_up + local_experts() * weight_scales_of(config).up};
    // The scales are spread on the caller's stream, after the work that produces them. Work on a captured stream does not run
    // now, so the scales must already exist.
    auto* const stream = static_cast<gpu::Stream>(weights.stream);
    const bool captured = capture_of(stream).active;
    const gpu::Stream on = captured ? gpu_.copy_stream() : stream;
    set.w13_scales = weights.w13_scales;
    set.w2_scales = weights.w2_scales;
    read_scales(set, on);
    if (captured)
      check_cuda(gpu::wait_for_stream(on), "scales of the weights");
    else
      set.ready = gpu_.points().mark(on, stream_id(on));
    return set;
  }
  void read_scales(const WeightSet& set, gpu::Stream stream) {
    if (set.w13_scales == nullptr) return;
    spread(set.up, set.w13_scales, 2 * config.intermediate, true, set.up_scales, stream);
    spread(set.down, set.w2_scales, config.hidden, false, set.down_scales, stream);
  }
  void end_set(WeightSet& set) { set.scales.end_after(order_->uses().until(set.ready)); }
  void spread(const gemm::GroupedParams& g, const void* given, int64_t weights, bool gated, const FusedFp8Scales& to,
              gpu::Stream stream) {
    WeightScales s;
    s.given = given;
    s.ue8m0 = config.weight_scales == ScaleKind::ue8m0;
    s.experts = local_experts();
    s.rows = static_cast<int>(weights / kFusedScaled);
    s.blocks = g.inner_blocks;
    s.gated = gated;
    s.column_tiles = g.column_tiles;
    s.spread = const_cast<float4*>(to.weights);
    spread_scales(s, stream);
  }

  SelectedSlots selected_slots() const { return SelectedSlots::in(state_.as<std::byte>(slots_at_), max_routes()); }

  PlanParams plan_params(const FusedParts& parts, const ExpertIds& ids, const float* weights, const FusedMoeCall& o) {
    last_tokens_ = ids.num_tokens;
    PlanParams p;
    p.control = layout_.control();
    p.state = state_.as<ObjectState>();
    p.totals = state_.as<int32_t>(kObjectStateBytes);
    p.block_counts = p.totals + world() + config.num_experts;
    p.ids = ids.data;
    p.ids64 = ids.is_int64;
    p.tokens = ids.num_tokens;
    p.device_tokens = o.device_tokens;
    p.weights = weights;
    p.topk = config.topk;
    p.map = params_.map;
    p.layout = Layout::expert_major;
    p.capacity = config.capacity > 0 ? layout_.rows : std::numeric_limits<int64_t>::max();
    p.fail_on_overflow = config.capacity > 0 && config.overflow == Overflow::fail;
    p.split_tokens = passes_.count > 0 ? passes_.tokens : 0;
    p.signature = fused_signature(hash(), parts, o);
    p.object = mix_hash(group_.nonce, object_);
    p.tables = tables_;
    p.soft = gpu_.device_soft_fault();
    return p;
  }

  /// Large enough for rows to have arrived, small enough for outputs to return early; see docs/design/0047-fused-layer.md.
  /// per_rank: sums become complete late, half of them in the last sixth of the experts if a token has four rows on a rank. The
  /// fewer steps with only down tiles remain at the end, the more of these sums are computed while products run.
  static constexpr int kLag = 16, kSumLag = 8;

  CudaRank& gpu_;
  uint32_t shared_base_ = 0;  ///< GroupedParams::shared_base
  const SplitPasses passes_ = split_passes(config, world());
  FusedLayout layout_;
  Tables tables_;
  FusedParams params_;  ///< the members that depend on neither the call nor the weights
  std::map<int, WeightSet> sets_;
  DeviceMemory state_;   ///< ObjectState, then the plan's scratch, then selected_slots()
  size_t slots_at_ = 0;  ///< in state_
  DeviceMemory memory_;  ///< FusedMemory, then tables
  int64_t last_tokens_ = 0;
  std::optional<CallOrder> order_;
};

}  // namespace

std::unique_ptr<FusedImpl> FusedImpl::make_on_gpu(Group& group, const FusedMoeConfig& config, const MoeWeights& weights) {
  return std::make_unique<CudaFused>(group, rank_of(group), config, weights);
}

}  // namespace switchyard::detail
