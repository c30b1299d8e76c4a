// SPDX-License-Identifier: Apache-2.0
// ExpertMlp in fp8 produces the same bits as its two products called separately, for both kinds of weight scales.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gpu/gemm/gemm_rig.hpp"
#include "switchyard/expert.hpp"

namespace gemm_test {
namespace {

using switchyard::DType;
using switchyard::ScaleKind;

constexpr int kExperts = 4;
constexpr int64_t kHidden = 272, kIntermediate = 400, kRows = 300;

/// e4m3 codes with magnitudes up to 15, without NaNs.
std::vector<uint8_t> codes(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> v(static_cast<size_t>(count));
  for (uint8_t& c : v) c = static_cast<uint8_t>((random() & 0x80) | random() % 0x58);
  return v;
}
/// Each value is `around`, half of it, or twice it.
std::vector<float> powers(int64_t count, uint64_t seed, float around) {
  std::mt19937_64 random(seed);
  std::vector<float> v(static_cast<size_t>(count));
  for (float& f : v) f = std::ldexp(around, static_cast<int>(random() % 3) - 1);
  return v;
}
void give_scales(const DeviceBytes& to, const std::vector<float>& scales, ScaleKind kind) {
  if (kind == ScaleKind::f32) return to.set(scales);
  std::vector<uint8_t> bytes;
  for (const float f : scales) bytes.push_back(static_cast<uint8_t>(127 + std::ilogb(f)));
  to.set(bytes);
}

/// Inputs, and memory for the outputs.
struct Layer {
  static constexpr int64_t kBetweenScales = 16;  // bytes of a row: four float32

  explicit Layer(ScaleKind kind_in) : kind(kind_in) {
    const int64_t groups = switchyard::num_scales(kHidden) * switchyard::num_scales(kIntermediate);
    x.set(codes(kRows * kHidden, 1));
    x_scales.set(powers(kRows * 4, 2, 0.25F));
    w13.set(codes(kExperts * 2 * kIntermediate * kHidden, 3));
    w2.set(codes(kExperts * kHidden * kIntermediate, 4));
    give_scales(s13, powers(kExperts * 2 * groups, 5, 1.F / 64), kind);
    give_scales(s2, powers(kExperts * groups, 6, 1.F / 64), kind);
    counts.set(std::vector<int64_t>{5, 0, 130, 129});
    first.set(std::vector<int64_t>{1, 8, 10, 150});
  }
  switchyard::ExpertRows rows() const {
    switchyard::ExpertRows r;
    r.num_rows = counts.as<int64_t>();
    r.first_row = first.as<int64_t>();
    return r;
  }
  switchyard::ConstRows in() const { return {x.as(), kRows, kHidden, DType::fp8_e4m3, x_scales.as(), ScaleKind::f32}; }

  ScaleKind kind;
  DeviceBytes x{kRows * kHidden}, x_scales{kRows * 16}, w13{kExperts * 2 * kIntermediate * kHidden},
      w2{kExperts * kHidden * kIntermediate}, s13{4096}, s2{4096}, counts{kExperts * 8}, first{kExperts * 8};
};

/// Returns the content of y after `call`; unwritten elements are 0xcdcd.
template <class Call>
std::vector<uint16_t> outputs_of(Call&& call) {
  const DeviceBytes y(kRows * kHidden * 2);
  ok(cudaMemset(y.as(), 0xcd, kRows * kHidden * 2));
  call(switchyard::Rows{y.as(), kRows, kHidden, DType::bf16, nullptr, ScaleKind::none});
  std::vector<uint16_t> values(kRows * kHidden);
  ok(cudaDeviceSynchronize());
  ok(cudaMemcpy(values.data(), y.as(), values.size() * 2, cudaMemcpyDeviceToHost));
  return values;
}

std::vector<uint16_t> by_the_object(const Layer& l) {
  switchyard::ExpertOptions o;
  o.backend = switchyard::Backend::cuda;
  o.dtype = DType::fp8_e4m3;
  o.storage = switchyard::WeightStorage::view;
  o.max_rows = kRows + 7;
  o.w13_scales = l.s13.as();
  o.w2_scales = l.s2.as();
  o.weight_scales = l.kind;
  switchyard::ExpertMlp mlp({kHidden, kIntermediate, kExperts}, l.w13.as(), l.w2.as(), o);
  EXPECT_EQ(mlp.memory().scratch_bytes, static_cast<size_t>((kRows + 7) * (kIntermediate + Layer::kBetweenScales)));
  return outputs_of([&](const switchyard::Rows& y) { mlp.forward(l.in(), l.rows(), y); });
}

std::vector<uint16_t> by_two_products(const Layer& l) {
  switchyard::GroupedGemmConfig c;
  c.num_experts = kExperts;
  c.n = 2 * kIntermediate;
  c.k = kHidden;
  c.dtype = DType::fp8_e4m3;
  c.epilogue = switchyard::Epilogue::swiglu;
  c.weight_scales = l.kind;
  c.quantize = ScaleKind::f32;
  switchyard::GroupedGemm up(c, l.w13.as(), l.s13.as());
  c.n = kHidden;
  c.k = kIntermediate;
  c.epilogue = switchyard::Epilogue::none;
  c.quantize = ScaleKind::none;
  switchyard::GroupedGemm down(c, l.w2.as(), l.s2.as());
  const DeviceBytes between(kRows * kIntermediate), scales(kRows * Layer::kBetweenScales);
  const switchyard::Rows middle{between.as(), kRows, kIntermediate, DType::fp8_e4m3, scales.as(), ScaleKind::f32};
  return outputs_of([&](const switchyard::Rows& y) {
    up.run(l.in(), l.rows(), middle);
    down.run(middle, l.rows(), y);
  });
}

class Fp8Experts : public testing::TestWithParam<ScaleKind> {};
INSTANTIATE_TEST_SUITE_P(Fp8Gemm, Fp8Experts, testing::Values(ScaleKind::f32, ScaleKind::ue8m0),
                         [](const testing::TestParamInfo<ScaleKind>& i) { return std::string(to_string(i.param)); });

TEST_P(Fp8Experts, AreTheirTwoProducts) {
  const Layer layer(GetParam());
  const std::vector<uint16_t> got = by_the_object(layer), want = by_two_products(layer);
  EXPECT_TRUE(got == want);
  const auto of_nobody = [](uint16_t v) { return v == 0xcdcd; };
  EXPECT_TRUE(std::all_of(got.begin(), got.begin() + kHidden, of_nobody)) << "a row of no expert was written";
  EXPECT_LE(std::count_if(got.begin(), got.end(), of_nobody), (kRows - 264) * kHidden + 50);
}

using switchyard::OutputScaling;
using switchyard::ScaleGranularity;

/// Scales per channel and a fixed scale of the intermediate rows, in addition to the memory of Layer.
struct ChannelScales {
  ChannelScales() {
    up.set(powers(kExperts * 2 * kIntermediate, 7, 1.F / 64));
    down.set(powers(kExperts * kHidden, 8, 1.F / 64));
    fixed.set(std::vector<float>{4.F});
  }
  DeviceBytes up{kExperts * 2 * kIntermediate * 4}, down{kExperts * kHidden * 4}, fixed{4};
};

/// The rows of Layer have four scales each; with per_channel, the first one applies.
switchyard::ExpertRows channel_rows(const Layer& l) {
  switchyard::ExpertRows rows = l.rows();
  rows.scale_stride = 4;
  return rows;
}

std::vector<uint16_t> by_the_object(const Layer& l, const ChannelScales& s, ScaleGranularity scaling, OutputScaling between) {
  switchyard::ExpertOptions o;
  o.backend = switchyard::Backend::cuda;
  o.dtype = DType::fp8_e4m3;
  o.storage = switchyard::WeightStorage::view;
  o.max_rows = kRows + 7;
  o.w13_scales = s.up.as();
  o.w2_scales = s.down.as();
  o.scaling = scaling;
  o.intermediate_scaling = between;
  if (between == OutputScaling::fixed) o.intermediate_scale = s.fixed.as<float>();
  switchyard::ExpertMlp first({kHidden, kIntermediate, kExperts}, l.w13.as(), l.w2.as(), o);
  switchyard::ExpertMlp mlp =
      first.with_weights({l.w13.as(), l.w2.as(), s.up.as(), s.down.as(), nullptr, o.intermediate_scale});
  return outputs_of([&](const switchyard::Rows& y) { mlp.forward(l.in(), channel_rows(l), y); });
}

std::vector<uint16_t> by_two_products(const Layer& l, const ChannelScales& s, ScaleGranularity scaling, OutputScaling between) {
  switchyard::GroupedGemmConfig c;
  c.num_experts = kExperts;
  c.n = 2 * kIntermediate;
  c.k = kHidden;
  c.dtype = DType::fp8_e4m3;
  c.epilogue = switchyard::Epilogue::swiglu;
  c.quantize = ScaleKind::f32;
  c.scaling = scaling;
  c.output_scaling = between;
  switchyard::GroupedGemm up(c, l.w13.as(), s.up.as());
  c.n = kHidden;
  c.k = kIntermediate;
  c.epilogue = switchyard::Epilogue::none;
  c.quantize = ScaleKind::none;
  c.output_scaling = OutputScaling::per_group;
  c.scaling = between == OutputScaling::per_group ? ScaleGranularity::group_channel : ScaleGranularity::per_channel;
  switchyard::GroupedGemm down(c, l.w2.as(), s.down.as());
  const DeviceBytes middle(kRows * kIntermediate), scales(kRows * Layer::kBetweenScales), scratch(kRows * kIntermediate * 2);
  const switchyard::Rows rows{middle.as(), kRows, kIntermediate, DType::fp8_e4m3, scales.as(), ScaleKind::f32};
  switchyard::GroupedGemmOptions options;
  if (between == OutputScaling::fixed) options.output_scale = s.fixed.as<float>();
  if (between == OutputScaling::per_row) options.scratch = scratch.as();
  return outputs_of([&](const switchyard::Rows& y) {
    up.run(l.in(), channel_rows(l), rows, options);
    down.run(rows, l.rows(), y);
  });
}

TEST(Fp8ChannelExperts, AreTheirTwoProducts) {
  const Layer layer(ScaleKind::f32);
  const ChannelScales scales;
  std::vector<std::vector<uint16_t>> all;
  for (const auto scaling : {ScaleGranularity::per_channel, ScaleGranularity::group_channel}) {
    for (const auto between : {OutputScaling::per_group, OutputScaling::fixed, OutputScaling::per_row}) {
      all.push_back(by_the_object(layer, scales, scaling, between));
      EXPECT_TRUE(all.back() == by_two_products(layer, scales, scaling, between)) << to_string(scaling) << to_string(between);
      EXPECT_TRUE(std::all_of(all.back().begin(), all.back().begin() + kHidden, [](uint16_t v) { return v == 0xcdcd; }));
    }
  }
  for (size_t i = 1; i < all.size(); ++i) EXPECT_TRUE(all[i] != all[0]) << "the settings have no effect: " << i;
}

}  // namespace
}  // namespace gemm_test
