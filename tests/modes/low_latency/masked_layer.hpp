// SPDX-License-Identifier: Apache-2.0
// A decoding layer in closed form: a dispatch, a masked grouped product that reads rows, scales and counts as delivered and
// writes to make_rows(), and a combine of the result. Values are exact in float32, so the sums must equal those of plain
// arithmetic on the host, bit by bit. Runs on a Rig as defined in streamed_calls.hpp. Finds the delivered arrays only through
// LowLatencyOutput, and shares no code with src/.
#pragma once

#include <string>
#include <vector>

#include "modes/low_latency/streamed_calls.hpp"
#include "oracle/rows.hpp"

namespace harness {

/// The experts: matrices [H out, H in] of -1, 0 and 1 as fp8, with a factor for each block of kBlock x kBlock elements.
struct Matrices {
  static constexpr int kBlock = 128;
  SWITCHYARD_FN static int blocks(int hidden) { return (hidden + kBlock - 1) / kBlock; }
  SWITCHYARD_FN static int element(int e, int n, int c) { return (e + 2 * n + 3 * c + c / 7) % 3 - 1; }
  SWITCHYARD_FN static float factor(int e, int n_block, int c_block) {
    const int kind = (e + n_block + 2 * c_block) % 3;
    return kind == 0 ? 0.5f : static_cast<float>(kind);
  }
  uint8_t* codes = nullptr;  ///< [local experts, H, H]
  float* factors = nullptr;  ///< [local experts, blocks, blocks]
};

/// Fills the matrices of this rank's experts.
struct MakeMatrices {
  Form f;
  int rank;
  Matrices m;
  SWITCHYARD_FN int64_t size() const { return int64_t{f.experts_of(rank)} * f.hidden * f.hidden; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const int c = static_cast<int>(i % f.hidden), n = static_cast<int>(i / f.hidden % f.hidden);
    const int local = static_cast<int>(i / f.hidden / f.hidden), e = f.first_expert(rank) + local;
    const int blocks = Matrices::blocks(f.hidden);
    m.codes[i] = static_cast<uint8_t>(exact_bits(DType::fp8_e4m3, static_cast<float>(Matrices::element(e, n, c))));
    if (n < blocks && c < blocks) m.factors[(local * blocks + n) * blocks + c] = Matrices::factor(e, n, c);
  }
};

/// Sets each valid row i of y to the product of its expert's matrix and row i of x. When the job runs, it reads counts from the
/// memory to which dispatch wrote them.
struct MaskedProduct {
  Form f;
  int experts = 0;
  const uint8_t* x = nullptr;  ///< LowLatencyOutput: fp8 e4m3 [experts, rows_per_expert, H]
  const void* scales = nullptr;
  const int32_t* rows_of_expert = nullptr;
  int64_t rows_per_expert = 0, scale_rows = 0;
  Matrices m;
  void* y = nullptr;  ///< [experts, rows_per_expert, H] of f.type: bf16 or f32

  SWITCHYARD_FN int64_t size() const { return experts * rows_per_expert * f.hidden; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const int64_t row = i / f.hidden, e = row / rows_per_expert, r = row % rows_per_expert;
    if (r >= rows_of_expert[e]) return;
    const int n = static_cast<int>(i % f.hidden), blocks = Matrices::blocks(f.hidden);
    const uint8_t* const codes = m.codes + (e * f.hidden + n) * f.hidden;
    const uint8_t* const elements = x + row * f.hidden;
    const float* const factors = m.factors + (e * blocks + n / Matrices::kBlock) * blocks;
    float sum = 0;
    for (int g = 0, c = 0; g < f.groups(); ++g) {
      const float group_scale = scale(e, r, g);
      for (const int end = c + f.group < f.hidden ? c + f.group : f.hidden; c < end; ++c) {
        const float element = from_fp8(elements[c]) * group_scale;
        sum += from_fp8(codes[c]) * factors[c / Matrices::kBlock] * element;
      }
    }
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    set_element(f.type, y, i, f.type == DType::f32 ? bits : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }

 private:
  SWITCHYARD_FN static float power_of_two(int exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  SWITCHYARD_FN static float from_fp8(uint8_t code) {
    const int exponent = code >> 3 & 15, digits = code & 7;
    const float magnitude =
        static_cast<float>(exponent == 0 ? digits : digits + 8) * power_of_two((exponent == 0 ? 1 : exponent) - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  /// Scale of group g of row r of local expert e.
  SWITCHYARD_FN float scale(int64_t e, int64_t r, int g) const {
    const int groups = f.groups(), words = (groups + 3) / 4;
    if (f.scales == ScaleKind::f32) {
      const auto* const at = static_cast<const float*>(scales);
      return f.column_major ? at[(e * groups + g) * scale_rows + r] : at[(e * rows_per_expert + r) * (words * 4) + g];
    }
    if (f.column_major)
      return power_of_two(
          static_cast<int>(static_cast<const uint32_t*>(scales)[(e * words + g / 4) * scale_rows + r] >> 8 * (g % 4) & 0xFF) -
          127);
    return power_of_two(static_cast<const uint8_t*>(scales)[(e * rows_per_expert + r) * ((words + 3) / 4 * 16) + g] - 127);
  }
};

struct LayerCase {
  StreamedCase what;
  switchyard::CombineOrder order = switchyard::CombineOrder::per_route;
};

/// All forms of scales, both row types, and both summation orders. R is not a multiple of 4 on 1, 2 and 3 ranks.
inline std::vector<LayerCase> layer_cases(int world) {
  std::vector<LayerCase> all;
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const bool column_major : {false, true}) {
      for (const DType type : {DType::bf16, DType::f32}) {
        LayerCase one;
        Form& f = one.what.form;
        f.seed = 500 + all.size();
        f.world = world;
        f.experts = 2 * world + 1;
        f.topk = 3;
        f.max_tokens = 5;
        f.hidden = 320;  // the last group is half full
        f.type = type;
        f.scales = kind;
        f.column_major = column_major;
        if (all.size() % 3 == 0) one.order = switchyard::CombineOrder::per_rank;
        all.push_back(one);
      }
    }
  }
  return all;
}

/// Expected output of token t of `rank` in call n.
inline std::vector<std::byte> layer_result(const LayerCase& layer, uint64_t n, int rank, int t) {
  const Form& f = layer.what.form;
  const size_t bytes = switchyard::dtype_bytes(f.type, f.hidden);
  std::vector<std::vector<std::byte>> rows;
  std::vector<oracle::Term> terms;
  for (int k = 0; k < f.topk; ++k) {
    const int e = f.id(n, rank, t, k);
    if (!f.is_expert(e)) continue;
    auto& row = rows.emplace_back(bytes);
    std::vector<double> x;
    for (int c = 0; c < f.hidden; ++c) x.push_back(static_cast<double>(f.x(n, rank, t, c)));
    for (int out = 0; out < f.hidden; ++out) {
      double sum = 0;
      for (int c = 0; c < f.hidden; ++c)
        sum += static_cast<double>(Matrices::factor(e, out / Matrices::kBlock, c / Matrices::kBlock)) *
               Matrices::element(e, out, c) * x[static_cast<size_t>(c)];
      oracle::store(f.type, row.data(), out, static_cast<float>(sum));
    }
    int owner = 0;
    while (f.first_expert(owner + 1) <= e) ++owner;
    terms.push_back({nullptr, f.weight(n, rank, t, k), owner});
  }
  for (size_t i = 0; i < rows.size(); ++i) terms[i].row = rows[i].data();
  oracle::SumSpec sum;
  sum.type = f.type;
  sum.hidden = f.hidden;
  sum.order = layer.order;
  sum.weighted = true;
  std::vector<std::byte> out(bytes);
  oracle::combine_row(sum, terms, out.data());
  return out;
}

/// The memory and calls of one rank. Collective.
template <class Rig>
class MaskedLayer {
 public:
  static constexpr uint64_t kFirst = 1000;

  MaskedLayer(Rig& rig, switchyard::LowLatencyExchange& exchange, const LayerCase& layer)
      : rig_(rig), exchange_(exchange), layer_(layer), f_(layer.what.form) {
    output_ = exchange_.make_output();
    y_ = exchange_.make_rows(f_.type);
    const auto choices = static_cast<size_t>(f_.max_tokens * f_.topk);
    a_.x = rig_.allocate(out_bytes());
    a_.out = rig_.allocate(out_bytes());
    a_.ids = rig_.allocate(choices * 4);
    a_.weights = static_cast<float*>(rig_.allocate(choices * 4));
    a_.factors = static_cast<float*>(rig_.allocate(static_cast<size_t>(f_.experts) * 4));
    a_.tokens = static_cast<int32_t*>(rig_.allocate(4));
    replays_ = static_cast<uint64_t*>(rig_.allocate(8));
    const int experts = f_.experts_of(rig_.rank()), blocks = Matrices::blocks(f_.hidden);
    Matrices m;
    m.codes = static_cast<uint8_t*>(rig_.allocate(static_cast<size_t>(experts * f_.hidden * f_.hidden)));
    m.factors = static_cast<float*>(rig_.allocate(static_cast<size_t>(experts * blocks * blocks) * 4));
    product_ = {f_,
                experts,
                static_cast<const uint8_t*>(output_.x.data),
                output_.x.scales,
                output_.rows_of_expert,
                output_.rows_per_expert,
                output_.scale_rows,
                m,
                y_.data};
    rig_.enqueue(MakeMatrices{f_, rig_.rank(), m}, rig_.stream(0));
    rig_.enqueue(Spoil{reinterpret_cast<uint32_t*>(replays_), 2, 0}, rig_.stream(0));
  }

  /// Enqueues call kFirst + the number of earlier runs, so the inputs differ each time, even in a graph.
  void enqueue() {
    void* const stream = rig_.stream(0);
    rig_.enqueue(MakeInputs{f_, {kFirst, replays_, 1}, rig_.rank(), a_}, stream);
    for (const switchyard::Rows& rows : {output_.x, switchyard::Rows(y_)})  // NaN in invalid rows, which must have no effect
      rig_.enqueue(Spoil{static_cast<uint32_t*>(rows.data),
                         static_cast<int64_t>(switchyard::dtype_bytes(rows.dtype, rows.rows * rows.cols)) / 4},
                   stream);
    switchyard::LowLatencyDispatchOptions send;
    send.topk_weights = a_.weights;
    send.stream = stream;
    send.device_tokens = a_.tokens;
    exchange_.dispatch({a_.x, f_.max_tokens, f_.hidden, f_.type}, {a_.ids, f_.max_tokens, f_.topk, false}, output_, send);
    rig_.enqueue(product_, stream);
    switchyard::LowLatencyCombineOptions back;
    back.order = layer_.order;
    back.stream = stream;
    exchange_.combine(y_, output_, a_.out, back);
    rig_.enqueue(CountReplay{replays_}, stream);
  }

  const void* out() const { return a_.out; }
  size_t out_bytes() const { return switchyard::dtype_bytes(f_.type, f_.max_tokens * f_.hidden); }
  const switchyard::LowLatencyOutput& output() const { return output_; }

  /// Returns "" or the error in the result of call n, which must already have been copied to the host.
  std::string judge(uint64_t n, const std::vector<std::byte>& out) const {
    for (int t = 0; t < f_.tokens(n, rig_.rank()); ++t) {
      const auto expected = layer_result(layer_, n, rig_.rank(), t);
      const std::byte* const got = out.data() + static_cast<size_t>(t) * expected.size();
      for (int64_t c = 0; c < f_.hidden; ++c)
        if (!oracle::same_element(f_.type, got, expected.data(), c))
          return "call " + std::to_string(n) + " token " + std::to_string(t) + " column " + std::to_string(c) + ": expected " +
                 std::to_string(oracle::load(f_.type, expected.data(), c)) + ", got " +
                 std::to_string(oracle::load(f_.type, got, c));
    }
    return "";
  }

 private:
  Rig& rig_;
  switchyard::LowLatencyExchange& exchange_;
  LayerCase layer_;
  Form f_;
  switchyard::LowLatencyOutput output_;
  switchyard::LowLatencyRows y_;
  MaskedProduct product_;
  CallArrays a_;
  uint64_t* replays_ = nullptr;
};

}  // namespace harness
