// SPDX-License-Identifier: Apache-2.0
// One rank with a MoeLayer and the same layer composed of separate calls (dispatch, ExpertMlp and combine), which must produce
// the same bits. Both are compared with float64. The code is shared by both backends: the tests for each backend supply a Rig
// (unit/expert/expert_layer.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "layer/known_memory.hpp"
#include "switchyard/layer.hpp"
#include "unit/expert/expert_layer.hpp"

namespace switchyard::testing {

/// A LayerCase with more settings.
struct MoeCase {
  LayerCase c;  ///< `masked`: low latency
  CombineOrder order = CombineOrder::per_route;
  bool fp8 = false;                       ///< tokens are c.type, bf16, and quantized to fp8 for transport; weights are fp8
  ScaleKind row_scales = ScaleKind::f32;  ///< of fp8
  WeightStorage storage = WeightStorage::view;
  int64_t capacity = 0;
  Overflow overflow = Overflow::fail;
  MoeForm form = MoeForm::separate;
  ScaleGranularity scaling = ScaleGranularity::block;  ///< of fp8
  OutputScaling between = OutputScaling::per_group;    ///< of fp8; of the rows between the products
  ScaleOrder by_hand = ScaleOrder::row_major;          ///< of fp8 with low latency: scales that separate calls receive

  bool per_channel() const { return scaling == ScaleGranularity::per_channel; }
  DType type() const { return fp8 ? DType::fp8_e4m3 : c.type; }
  MoeLayerConfig moe() const {
    MoeLayerConfig m;
    m.hidden = c.hidden;
    m.intermediate = c.intermediate;
    m.num_experts = c.experts;
    m.topk = c.topk;
    m.max_tokens = c.max_tokens();
    m.dtype = type();
    m.row_scales = row_scales;
    m.scaling = scaling;
    m.intermediate_scaling = between;
    m.order = order;
    m.exchange = c.masked ? MoeExchange::low_latency : MoeExchange::normal;
    m.capacity = capacity;
    m.overflow = overflow;
    m.form = form;
    m.storage = storage;
    return m;
  }
  NormalConfig normal() const {
    NormalConfig n = c.normal();
    n.expert_alignment = 1;
    return n;
  }
  LowLatencyConfig low_latency() const {
    LowLatencyConfig l = c.low_latency();
    if (fp8) l.scales = row_scales;
    l.scale_order = by_hand;
    return l;
  }
  /// With fp8, the codes of rows, weights and intermediate rows have three fractional bits. Their errors are independent.
  double tolerance() const { return fp8 ? 0.12 : c.tolerance(); }
  /// Heap size for the separate calls and `layers` layers.
  size_t heap_bytes(Backend backend, size_t layers = 1) const {
    return layers * MoeLayer::heap_bytes(moe(), c.world(), backend) +
           (c.masked ? LowLatencyExchange::heap_bytes(low_latency(), c.world())
                     : NormalExchange::heap_bytes(normal(), c.world(), backend));
  }
};

inline void PrintTo(const MoeCase& c, std::ostream* out) { *out << c.c.name; }

/// The cases for separate calls, for all tokens sent to one expert, and for per_rank.
inline std::vector<MoeCase> moe_cases() {
  std::vector<MoeCase> all;
  for (const LayerCase& c : layer_cases()) all.push_back({.c = c});
  for (const bool masked : {false, true}) {
    const std::string mode = masked ? "masked_" : "normal_";
    all.push_back({.c = {.name = mode + "one_expert", .masked = masked, .tokens = {30, 21}, .only = 4}});
    all.push_back({.c = {.name = mode + "per_rank", .masked = masked, .tokens = {35, 50}}, .order = CombineOrder::per_rank});
  }
  return all;
}

/// A fused case, followed by the same in order per_rank if it is in order per_route.
inline void add_fused(std::vector<MoeCase>& to, MoeCase m) {
  m.form = MoeForm::fused;
  to.push_back(m);
  if (m.order == CombineOrder::per_rank) return;
  m.c.name += "_sums";
  m.order = CombineOrder::per_rank;
  to.push_back(m);
}
/// Those of `all` that MoeForm::fused supports in bf16, in that form and in both orders.
inline std::vector<MoeCase> fused_of(const std::vector<MoeCase>& all) {
  std::vector<MoeCase> fused;
  for (MoeCase m : all) {
    if (m.c.masked || m.type() != DType::bf16) continue;
    m.c.name = "fused_" + m.c.name;
    add_fused(fused, m);
  }
  return fused;
}
/// `all`, followed by fused_of(all).
inline std::vector<MoeCase> in_both_forms(const std::vector<MoeCase>& all) {
  std::vector<MoeCase> both = all;
  for (const MoeCase& m : fused_of(all)) both.push_back(m);
  return both;
}

/// Weights of all experts on a rank, in its memory.
struct RankWeights {
  std::byte *w13 = nullptr, *w2 = nullptr;
  float *w13_scales = nullptr, *w2_scales = nullptr, *between_scale = nullptr;

  operator MoeWeights() const {  // NOLINT(google-explicit-constructor): the same
    return {w13, w2, w13_scales, w2_scales, nullptr, between_scale};
  }
};

/// Weights as e4m3 codes, with a power-of-two scale for each 128 x 128 block.
struct ScaledCodes {
  std::vector<std::byte> codes;
  std::vector<float> scales;
};
/// `bf16` has the shape [halves, rows, columns].
inline ScaledCodes scaled_codes(const std::vector<std::byte>& bf16, int halves, int64_t rows, int64_t columns, int seed) {
  ScaledCodes to{std::vector<std::byte>(bf16.size() / 2), {}};
  const int64_t across = num_scales(columns), down = num_scales(rows);
  for (int64_t b = 0; b < halves * down * across; ++b)
    to.scales.push_back(std::ldexp(1.0f, -5 - static_cast<int>((seed + b * 5 + b / across) % 4)));
  for (int64_t at = 0; at < static_cast<int64_t>(to.codes.size()); ++at) {
    const int64_t row = at / columns % rows, half = at / columns / rows;
    const float scale = to.scales[static_cast<size_t>((half * down + row / 128) * across + at % columns / 128)];
    oracle::store(DType::fp8_e4m3, to.codes.data(), at, oracle::load(DType::bf16, bf16.data(), at) / scale);
  }
  return to;
}

/// `bf16` has the shape [rows, columns]; one scale per row.
inline ScaledCodes channel_codes(const std::vector<std::byte>& bf16, int64_t columns, int seed) {
  ScaledCodes to{std::vector<std::byte>(bf16.size() / 2), {}};
  for (int64_t at = 0; at < static_cast<int64_t>(to.codes.size()); ++at) {
    if (at % columns == 0) to.scales.push_back(std::ldexp(1.0f, -5 - static_cast<int>((seed + at / columns * 5) % 4)));
    oracle::store(DType::fp8_e4m3, to.codes.data(), at, oracle::load(DType::bf16, bf16.data(), at) / to.scales.back());
  }
  return to;
}

template <class Rig>
RankWeights make_weights(Rig& rig, const MoeCase& m, int first, int end) {
  const LayerCase& c = m.c;
  const auto here = static_cast<size_t>(end - first);
  const size_t bytes = dtype_bytes(m.type(), c.hidden * c.intermediate);
  const bool block = m.scaling == ScaleGranularity::block;
  const auto blocks = static_cast<size_t>(num_scales(c.hidden) * num_scales(c.intermediate));
  const size_t up_scales = block ? 2 * blocks : static_cast<size_t>(2 * c.intermediate),
               down_scales = block ? blocks : static_cast<size_t>(c.hidden);
  RankWeights w{static_cast<std::byte*>(rig.allocate(2 * here * bytes)), static_cast<std::byte*>(rig.allocate(here * bytes))};
  if (m.fp8) {
    w.w13_scales = static_cast<float*>(rig.allocate(here * up_scales * 4));
    w.w2_scales = static_cast<float*>(rig.allocate(here * down_scales * 4));
  }
  if (m.between == OutputScaling::fixed) {
    const float scale = 8.0f / 448;  // the few intermediate elements above 8 saturate
    w.between_scale = static_cast<float*>(rig.allocate(4));
    rig.write(w.between_scale, &scale, 4);
  }
  for (int e = first; e < end; ++e) {
    LayerWeights of(c, e);
    const auto index = static_cast<size_t>(e - first), at = index * bytes;
    if (m.fp8) {
      ScaledCodes up = block ? scaled_codes(of.w13, 2, c.intermediate, c.hidden, e) : channel_codes(of.w13, c.hidden, e);
      ScaledCodes down =
          block ? scaled_codes(of.w2, 1, c.hidden, c.intermediate, e + 1) : channel_codes(of.w2, c.intermediate, e + 1);
      rig.write(w.w13_scales + index * up_scales, up.scales.data(), up_scales * 4);
      rig.write(w.w2_scales + index * down_scales, down.scales.data(), down_scales * 4);
      of.w13 = std::move(up.codes);
      of.w2 = std::move(down.codes);
    }
    rig.write(w.w13 + 2 * at, of.w13.data(), 2 * bytes);
    rig.write(w.w2 + at, of.w2.data(), bytes);
  }
  return w;
}

/// Arguments of a call on one rank.
struct MoeArguments {
  ConstRows x;
  ExpertIds ids;
  const float* weights = nullptr;
};

/// The separate calls of a layer.
class MoeByHand {
 public:
  MoeByHand(Group& group, const MoeCase& m, const RankWeights& w) : m_(m) {
    const int first = first_expert(m.c.experts, m.c.world(), group.rank());
    const int end = first_expert(m.c.experts, m.c.world(), group.rank() + 1);
    ExpertOptions options;
    options.backend = group.options().backend;
    options.dtype = m.type();
    options.storage = m.storage;
    options.w13_scales = w.w13_scales;
    options.w2_scales = w.w2_scales;
    options.scaling = m.scaling;
    options.intermediate_scaling = m.between;
    options.intermediate_scale = w.between_scale;
    if (m.c.masked) {
      low_latency_.emplace(group, m.low_latency());
      received_ = low_latency_->make_output();
      made_ = low_latency_->make_rows(m.c.type);
      options.max_rows = received_.x.rows;
    } else {
      normal_.emplace(group, m.normal());
      options.max_rows = max_rows(m.normal(), m.c.world());
    }
    mlp_.emplace(ExpertShape{m.c.hidden, m.c.intermediate, end - first}, w.w13, w.w2, options);
  }

  /// `base` contains the rows from which the sums start, or is null; normal mode only.
  void call(const MoeArguments& a, void* out, const void* base, void* stream) {
    const ExpertCall experts{.stream = stream, .num_sms = 32};  // GPUs may be shared; the bits do not depend on num_sms
    if (m_.c.masked) {
      low_latency_->dispatch(a.x, a.ids, received_, {.topk_weights = a.weights, .stream = stream});
      mlp_->forward(received_.x, ExpertRows::of(received_), made_, experts);
      return low_latency_->combine(made_, received_, out, {.order = m_.order, .stream = stream});
    }
    DispatchOptions send;
    send.stream = stream;
    const bool bounded =
        m_.capacity > 0 && m_.overflow != Overflow::split;  // which gives the bits of a call without a capacity
    if (bounded) send.overflow = m_.overflow;
    if (m_.fp8 && !m_.per_channel()) send.quantize = m_.row_scales;
    if (bounded) send.size = SizePolicy::capacity;
    if (bounded) send.capacity = m_.capacity;
    CombineOptions back;
    back.stream = stream;
    back.order = m_.order;
    back.bias[0] = base;
    const Dispatched d = normal_->dispatch(a.x, a.ids, a.weights, send);
    const RowBuffer y = normal_->allocate_rows(d.handle, m_.c.type, stream);
    mlp_->forward(d.x, ExpertRows::of(d), y.rows(), experts);
    normal_->combine(y.rows(), d.handle, out, back);
  }

 private:
  MoeCase m_;
  std::optional<NormalExchange> normal_;
  std::optional<LowLatencyExchange> low_latency_;
  LowLatencyOutput received_;
  LowLatencyRows made_;
  std::optional<ExpertMlp> mlp_;
};

/// A rank's memory, a MoeLayer and a MoeByHand. Construction and destruction are collective: all ranks are idle at those
/// points.
template <class Rig>
class MoeRank {
 public:
  MoeRank(Rig& rig, Group& group, const MoeCase& m) : rig_(rig), m_(m), rank_(group.rank()) {
    const auto tokens = static_cast<size_t>(m.c.max_tokens()), routes = tokens * static_cast<size_t>(m.c.topk);
    for (void** rows : {&x_, &out_, &base_, &expected_}) *rows = rig.allocate(tokens * m.c.row_bytes());
    ids_ = static_cast<int32_t*>(rig.allocate(routes * 4));
    weights_ = static_cast<float*>(rig.allocate(routes * 4));
    tokens_ = static_cast<int32_t*>(rig.allocate(4));
    if (m.per_channel()) {
      codes_ = rig.allocate(tokens * static_cast<size_t>(m.c.hidden));
      scales_ = rig.allocate(tokens * scale_row_bytes(m.c.hidden, ScaleKind::f32));
    }
    const RankWeights w =
        make_weights(rig, m, first_expert(m.c.experts, m.c.world(), rank_), first_expert(m.c.experts, m.c.world(), rank_ + 1));
    layer_.emplace(made(group, w));
    by_hand_.emplace(group, m, w);
  }

  /// Weights for a layer with different experts, whose results differ.
  MoeWeights other_weights() {
    const int first = first_expert(m_.c.experts, m_.c.world(), rank_);
    const int end = first_expert(m_.c.experts, m_.c.world(), rank_ + 1);
    return make_weights(rig_, m_, first + m_.c.experts, end + m_.c.experts);
  }
  /// Collective: a separate layer.
  MoeLayer made(Group& group, const MoeWeights& w) const {
    MoeLayerConfig config = m_.moe();
    config.w13_scales = w.w13_scales;
    config.w2_scales = w.w2_scales;
    config.intermediate_scale = w.intermediate_scale;
    return {group, config, w.w13, w.w2};
  }

  /// Sets the inputs of subsequent calls, the token count T in device_tokens(), and the rows in `out` that the call adds to.
  void write(uint32_t call) {
    const LayerInput input(m_.c, call, rank_);
    rig_.write(x_, input.x.data(), input.x.size());
    if (m_.per_channel()) write_codes(input.x);
    rig_.write(ids_, input.ids.data(), input.ids.size() * 4);
    rig_.write(weights_, input.weights.data(), input.weights.size() * 4);
    const std::vector<std::byte> base = base_of(call);
    for (void* to : {base_, out_, expected_}) rig_.write(to, base.data(), base.size());
    const auto t = static_cast<int32_t>(tokens());
    rig_.write(tokens_, &t, 4);
  }
  /// Collective, like by_hand().
  void forward(MoeLayerCall call = {}, bool known_memory = false) { forward_by(*layer_, call, known_memory); }
  void forward_by(MoeLayer& layer, MoeLayerCall call = {}, bool known_memory = false) {
    call.stream = rig_.stream();
    detail::LayerCalls::forward(layer, x_, arguments().ids, weights_, out_, call, known_memory);
  }
  void by_hand(bool add) {
    by_hand_->call(arguments_by_hand(), expected_, add && !m_.c.masked ? base_ : nullptr, rig_.stream());
  }

  /// Call while idle. Returns an empty string, or how the bits of call `call` differ from those of the separate calls. On GPUs,
  /// `rows` is the token count of the call if the separate calls processed all tokens; rows beyond it must be unchanged.
  std::string judge_bits(uint32_t call, bool add, int64_t rows = -1) {
    const std::vector<std::byte> got = read(out_), base = base_of(call);
    std::vector<std::byte> expected = read(expected_);
    if (add && m_.c.masked) {
      for (int64_t i = 0; i < tokens() * m_.c.hidden; ++i)
        oracle::store(m_.c.type, expected.data(), i,
                      oracle::load(m_.c.type, base.data(), i) + oracle::load(m_.c.type, expected.data(), i));
    }
    if (rows >= 0 && rows < tokens()) {
      const auto behind = static_cast<std::ptrdiff_t>(static_cast<size_t>(rows) * m_.c.row_bytes());
      std::copy(base.begin() + behind, base.end(), expected.begin() + behind);
    }
    return got == expected ? "" : name_of(call) + "other bits than by hand: " + distance(got, expected);
  }
  /// Like judge_bits(), but for a call with all tokens, also checks the distance from float64.
  std::string judge(uint32_t call, bool add, int64_t rows = -1) {
    if (const std::string wrong = judge_bits(call, add, rows); !wrong.empty()) return wrong;
    if (rows >= 0 && rows < tokens()) return "";
    const std::vector<std::byte> got = read(out_), base = base_of(call);
    std::vector<double> exact = layer_reference(m_.c, call, rank_, dropped());
    double error = 0, norm = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      if (add) exact[i] += static_cast<double>(oracle::load(m_.c.type, base.data(), at));
      const double d = static_cast<double>(oracle::load(m_.c.type, got.data(), at)) - exact[i];
      error += d * d;
      norm += exact[i] * exact[i];
    }
    if (exact.empty() || (norm > 0 && std::sqrt(error / norm) <= m_.tolerance())) return "";
    return name_of(call) + "off by " + std::to_string(std::sqrt(error)) + ", the reference has a norm of " +
           std::to_string(std::sqrt(norm));
  }

  int64_t tokens() const { return m_.c.tokens[static_cast<size_t>(rank_)]; }
  int32_t* device_tokens() { return tokens_; }
  /// Call while idle. Returns the routes dropped by the last forward call; empty if nothing is ever dropped.
  std::vector<uint8_t> dropped() {
    const std::span<const uint8_t> of = layer_->dropped();
    std::vector<uint8_t> copy(of.size());
    rig_.read(copy.data(), of.data(), copy.size());
    return copy;
  }
  std::vector<std::byte> result() { return read(out_); }
  std::vector<std::byte> base_of(uint32_t call) const {
    return normal_rows(m_.c.type, tokens() * m_.c.hidden, 1, 90000 + 100 * call + static_cast<uint32_t>(rank_));
  }
  MoeLayer& layer() { return *layer_; }

 private:
  std::string name_of(uint32_t call) const {
    return m_.c.name + ", call " + std::to_string(call) + ", rank " + std::to_string(rank_) + ": ";
  }
  MoeArguments arguments() const {
    return {{x_, tokens(), m_.c.hidden, m_.c.type}, ExpertIds::of(ids_, tokens(), m_.c.topk), weights_};
  }
  MoeArguments arguments_by_hand() const {
    MoeArguments a = arguments();
    if (m_.per_channel()) a.x = {codes_, tokens(), m_.c.hidden, DType::fp8_e4m3, scales_, ScaleKind::f32};
    return a;
  }
  /// Writes the tokens as fp8 with one scale per token, which is repeated in its row of scales.
  void write_codes(const std::vector<std::byte>& rows) {
    const auto hidden = static_cast<size_t>(m_.c.hidden), row_words = scale_row_bytes(m_.c.hidden, ScaleKind::f32) / 4;
    std::vector<std::byte> codes(static_cast<size_t>(tokens()) * hidden);
    std::vector<float> scales(static_cast<size_t>(tokens()) * row_words);
    for (size_t t = 0; t < static_cast<size_t>(tokens()); ++t) {
      const auto element = [&](size_t i) {
        return oracle::load(DType::bf16, rows.data(), static_cast<int64_t>(t * hidden + i));
      };
      float amax = 0;
      for (size_t i = 0; i < hidden; ++i) amax = std::max(amax, std::fabs(element(i)));
      const float scale = amax / 448;
      std::fill_n(&scales[t * row_words], row_words, scale);
      for (size_t i = 0; i < hidden; ++i)
        oracle::store(DType::fp8_e4m3, codes.data(), static_cast<int64_t>(t * hidden + i), element(i) / scale);
    }
    if (codes.empty()) return;
    rig_.write(codes_, codes.data(), codes.size());
    rig_.write(scales_, scales.data(), scales.size() * 4);
  }
  std::string distance(const std::vector<std::byte>& got, const std::vector<std::byte>& expected) const {
    double error = 0, norm = 0;
    int64_t others = 0, first = -1;
    for (int64_t i = 0; i < tokens() * m_.c.hidden; ++i) {
      const auto a = static_cast<double>(oracle::load(m_.c.type, got.data(), i)),
                 b = static_cast<double>(oracle::load(m_.c.type, expected.data(), i));
      error += (a - b) * (a - b);
      norm += b * b;
      if (a == b) continue;
      ++others;
      if (first < 0) first = i;
    }
    return std::to_string(others) + " elements, the first one is " + std::to_string(first % m_.c.hidden) + " of token " +
           std::to_string(first / m_.c.hidden) + "; off by " + std::to_string(std::sqrt(error)) + " of a norm of " +
           std::to_string(std::sqrt(norm));
  }
  std::vector<std::byte> read(const void* from) {
    std::vector<std::byte> rows(static_cast<size_t>(tokens()) * m_.c.row_bytes());
    rig_.read(rows.data(), from, rows.size());
    return rows;
  }

  Rig& rig_;
  MoeCase m_;
  int rank_;
  void *x_ = nullptr, *out_ = nullptr, *base_ = nullptr, *expected_ = nullptr;
  int32_t *ids_ = nullptr, *tokens_ = nullptr;
  float* weights_ = nullptr;
  void *codes_ = nullptr, *scales_ = nullptr;  ///< with ScaleGranularity::per_channel
  std::optional<MoeLayer> layer_;
  std::optional<MoeByHand> by_hand_;
};

}  // namespace switchyard::testing
