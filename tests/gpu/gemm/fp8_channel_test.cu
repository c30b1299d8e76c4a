// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM of fp8 rows and weights with scales per channel, with every form of row scales and of outputs. Every output bit
// is known for integers with power-of-two scales; random data is compared with float64 results from the dequantized operands.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "gemm/gpu/quantise_rows.hpp"
#include "gpu/gemm/fp8_reference.cuh"
#include "oracle/rows.hpp"

namespace gemm_test {
namespace {

using switchyard::DType;
using switchyard::Epilogue;
using switchyard::OutputScaling;
using switchyard::ScaleGranularity;
using switchyard::ScaleKind;

/// Places of row scales: as one float per row, as rows of a dispatch, or as columns of a low-latency dispatch.
enum class Place { dense, rows, columns };

struct ChannelShape {
  std::vector<int64_t> rows;
  int64_t n, k;
  ScaleGranularity scaling = ScaleGranularity::per_channel;
  Epilogue epilogue = Epilogue::none;
  Place place = Place::dense;
  std::optional<OutputScaling> output = {};
  ScaleKind output_kind = ScaleKind::f32;

  bool gated() const { return epilogue == Epilogue::swiglu; }
  int64_t columns() const { return gated() ? n / 2 : n; }
  int experts() const { return static_cast<int>(rows.size()); }
  bool by_groups() const { return scaling == ScaleGranularity::group_channel; }
  int64_t groups() const { return (k + 127) / 128; }
  int64_t capacity() const { return *std::max_element(rows.begin(), rows.end()) + 3; }
  int64_t total() const { return capacity() * experts(); }
  int64_t columns_apart() const { return (capacity() + 3) / 4 * 4; }
  /// Words between the scales of consecutive rows.
  int64_t row_words() const {
    return place == Place::columns ? 1 : place == Place::dense && !by_groups() ? 1 : (groups() + 3) / 4 * 4;
  }
  int64_t scale_words() const {
    return place == Place::columns ? experts() * groups() * columns_apart() : total() * row_words();
  }
  int64_t scale_at(int64_t row, int64_t group) const {
    if (place == Place::columns) return (row / capacity() * groups() + group) * columns_apart() + row % capacity();
    return row * row_words() + group;
  }
};

std::vector<float> scales(int64_t count, bool powers, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint64_t h = mix(seed + i);
    values[i] = powers ? std::exp2(static_cast<float>(h % 5) - 8.F) : 0.0001F + static_cast<float>(h % 1000) * 1e-6F;
  }
  return values;
}

/// One scale per output.
struct ChannelScales {
  const float* scales;
  int64_t n;
  __device__ float of(int64_t expert, int64_t output, int64_t) const { return scales[expert * n + output]; }
};

switchyard::GroupedGemmConfig config_of(const ChannelShape& s) {
  switchyard::GroupedGemmConfig c;
  c.num_experts = s.experts();
  c.n = s.n;
  c.k = s.k;
  c.dtype = DType::fp8_e4m3;
  c.epilogue = s.epilogue;
  c.scaling = s.scaling;
  if (s.output) {
    c.quantize = s.output_kind;
    c.output_scaling = *s.output;
  }
  return c;
}

/// Experts with equal room for rows, as in low-latency mode.
class ChannelRig {
 public:
  ChannelRig(const ChannelShape& s, bool exact, float fixed = 1)
      : s_(s),
        x_(s.total() * s.k),
        w_(s.experts() * s.n * s.k),
        x_table_(s.total() * s.groups() * 4),
        x_scales_(s.scale_words() * 4),
        w_scales_(s.experts() * s.n * 4),
        out_(s.total() * s.columns() * 2),
        out_scales_(s.total() * scale_row()),
        scratch_(s.total() * s.columns() * 2),
        fixed_(4),
        num_rows_(s.experts() * 8) {
    num_rows_.set(s.rows);
    fixed_.set(std::vector<float>{fixed});
    fill_fp8<<<512, 256>>>(x_.as<Fp8>(), s.total() * s.k, exact, 1);
    fill_fp8<<<512, 256>>>(w_.as<Fp8>(), s.experts() * s.n * s.k, exact, 2);
    table_ = scales(s.total() * s.groups(), exact, 3);
    const auto groups = static_cast<size_t>(s.groups());
    if (!s.by_groups())
      for (size_t i = 0; i < table_.size(); ++i) table_[i] = table_[i / groups * groups];
    place();
    w_scales_.set(scales(s.experts() * s.n, exact, 4));
    gemm_.emplace(config_of(s), w_.as(), w_scales_.as());
    forget();
  }

  void forget() {
    ok(cudaMemset(out_.as(), 0xcd, static_cast<size_t>(s_.total() * s_.columns() * 2)));
    ok(cudaMemset(out_scales_.as(), 0xcd, static_cast<size_t>(s_.total() * scale_row())));
  }
  void run(int num_sms = 0) {
    switchyard::ExpertRows rows;
    rows.num_rows = num_rows_.as<int64_t>();
    rows.rows_per_expert = s_.capacity();
    rows.scale_rows = s_.place == Place::columns ? s_.columns_apart() : 0;
    rows.scale_stride = s_.place == Place::rows ? s_.row_words() : 0;
    switchyard::GroupedGemmOptions options;
    options.num_sms = num_sms;
    if (s_.output == OutputScaling::fixed) options.output_scale = fixed_.as<float>();
    if (s_.output == OutputScaling::per_row) options.scratch = scratch_.as();
    gemm_->run({x_.as(), s_.total(), s_.k, DType::fp8_e4m3, x_scales_.as(), ScaleKind::f32}, rows,
               {out_.as(), s_.total(), s_.columns(), gemm_->config().out_dtype(), s_.output ? out_scales_.as() : nullptr,
                s_.output ? s_.output_kind : ScaleKind::none},
               options);
  }
  void set_counts(const std::vector<int64_t>& counts) { num_rows_.set(counts); }
  void zero_row(int64_t row) { ok(cudaMemset(x_.as<uint8_t>() + row * s_.k, 0, static_cast<size_t>(s_.k))); }

  Difference difference() const {
    return difference_of(Fp8Operands<ChannelScales>{x_.as<Fp8>(),
                                                    w_.as<Fp8>(),
                                                    x_table_.as<float>(),
                                                    {w_scales_.as<float>(), s_.n},
                                                    s_.n,
                                                    s_.k,
                                                    s_.capacity(),
                                                    s_.epilogue},
                         s_.rows, out_.as<uint16_t>());
  }
  std::vector<uint8_t> outputs() const { return bytes_of(out_, s_.total() * s_.columns() * (s_.output ? 1 : 2)); }
  std::vector<uint8_t> output_scales() const { return bytes_of(out_scales_, s_.total() * scale_row()); }
  /// Bytes of a row of output scales.
  int64_t scale_row() const {
    if (s_.output && *s_.output != OutputScaling::per_group) return 4;
    return std::max<int64_t>(4, static_cast<int64_t>(switchyard::scale_row_bytes(s_.columns(), s_.output_kind)));
  }

 private:
  /// With one scale per row, words that the kernel must not use are NaN.
  void place() {
    std::vector<float> placed(static_cast<size_t>(s_.scale_words()), std::nanf(""));
    for (int64_t row = 0; row < s_.total(); ++row)
      for (int64_t g = 0; g < (s_.by_groups() ? s_.groups() : 1); ++g)
        placed[static_cast<size_t>(s_.scale_at(row, g))] = table_[static_cast<size_t>(row * s_.groups() + g)];
    x_table_.set(table_);
    x_scales_.set(placed);
  }

  ChannelShape s_;
  std::vector<float> table_;
  DeviceBytes x_, w_, x_table_, x_scales_, w_scales_, out_, out_scales_, scratch_, fixed_, num_rows_;
  std::optional<switchyard::GroupedGemm> gemm_;
};

const std::vector<int64_t> kCounts = {1, 15, 16, 17, 0, 64, 65, 127, 128, 129, 255, 256, 257, 0, 33, 700};
constexpr ScaleGranularity kBoth[] = {ScaleGranularity::per_channel, ScaleGranularity::group_channel};

TEST(Fp8Channel, IntegersAreExact) {
  for (const ScaleGranularity scaling : kBoth) {
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>{256, 128}, {512, 1024}, {264, 256}, {1000, 384}, {128, 400}, {8, 16}}) {
      for (const Epilogue epilogue : {Epilogue::none, Epilogue::relu}) {
        ChannelRig rig({kCounts, n, k, scaling, epilogue}, true);
        for (int i = 0; i < 2; ++i) rig.run();
        const Difference d = rig.difference();
        EXPECT_EQ(d.unequal, 0) << "of " << d.elements << ", n " << n << ", k " << k << ", " << to_string(scaling);
      }
    }
  }
}

TEST(Fp8Channel, EveryPlaceOfRowScales) {
  for (const ScaleGranularity scaling : kBoth) {
    for (const Place place : {Place::dense, Place::rows, Place::columns}) {
      ChannelRig rig({kCounts, 384, 1664, scaling, Epilogue::none, place}, true);
      rig.run();
      EXPECT_EQ(rig.difference().unequal, 0) << static_cast<int>(place) << ", " << to_string(scaling);
    }
  }
}

/// The bounds in docs/gemm.md: sums of tensor cores, and sums in float32 beyond 128 elements.
TEST(Fp8Channel, ErrorsAreBounded) {
  for (const ScaleGranularity scaling : kBoth) {
    for (const Epilogue epilogue : {Epilogue::none, Epilogue::silu, Epilogue::swiglu}) {
      for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1024, 2048}, {960, 2880}, {512, 7168}, {256, 16384}}) {
        ChannelRig rig({{65, 0, 130, 300, 17}, n, k, scaling, epilogue}, false);
        rig.run();
        const double norm = rig.difference().norm;
        EXPECT_LE(norm, scaling == ScaleGranularity::per_channel ? 1e-2 : 5e-3)
            << to_string(epilogue) << ", n " << n << ", k " << k << ", " << to_string(scaling);
        std::printf("  %s, K %lld, %s: error %.2e\n", to_string(scaling), static_cast<long long>(k), to_string(epilogue), norm);
      }
    }
  }
}

/// Few and many rows, with one multiprocessor and with several.
TEST(Fp8Channel, BitsDependOnTheRowAlone) {
  for (const ScaleGranularity scaling : kBoth) {
    for (const std::optional<OutputScaling> output :
         {std::optional<OutputScaling>{}, {OutputScaling::per_group}, {OutputScaling::fixed}, {OutputScaling::per_row}}) {
      ChannelShape s{{300, 128, 77}, 512, 1024, scaling, Epilogue::swiglu};
      s.output = output;
      ChannelRig rig(s, false, 1e-3F);
      rig.run();
      const std::vector<uint8_t> all = rig.outputs();
      const size_t row_bytes = static_cast<size_t>(s.columns() * (output ? 1 : 2));
      int sms = 0;
      for (const std::vector<int64_t>& counts :
           {std::vector<int64_t>{1, 17, 76}, {299, 0, 5}, {0, 128, 0}, {150, 100, 50}, {0, 0, 0}}) {
        rig.forget();
        rig.set_counts(counts);
        rig.run(++sms);
        const std::vector<uint8_t> some = rig.outputs();
        for (size_t e = 0; e < counts.size(); ++e) {
          const size_t from = e * static_cast<size_t>(s.capacity()) * row_bytes,
                       bytes = static_cast<size_t>(counts[e]) * row_bytes;
          EXPECT_EQ(std::memcmp(&all[from], &some[from], bytes), 0)
              << "expert " << e << " with " << counts[e] << " rows, " << to_string(scaling);
          EXPECT_EQ(some[from + bytes], 0xcd) << "a row behind the last one was written";
        }
      }
    }
  }
}

float value_of(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}
/// Largest magnitude of bf16 outputs, except those of rows without an expert.
float largest(const std::vector<uint8_t>& bf16) {
  float amax = 0;
  for (size_t i = 0; i < bf16.size(); i += 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, &bf16[i], 2);
    if (bits != 0xcdcd) amax = std::max(amax, std::fabs(value_of(bits)));
  }
  return amax;
}
/// One row as fp8 with one scale. `fixed`: the given scale, or null.
void quantise_row(const uint8_t* bf16, int64_t columns, const float* fixed, uint8_t* to, float* scale) {
  std::vector<float> x(static_cast<size_t>(columns));
  float amax = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bf16 + 2 * i, 2);
    x[i] = value_of(bits);
    amax = std::max(amax, std::fabs(x[i]));
  }
  *scale = fixed != nullptr ? *fixed : amax / 448;
  const float inverse = 1.F / *scale;
  for (size_t i = 0; i < x.size(); ++i) {
    const float scaled = fixed != nullptr ? x[i] * inverse : *scale == 0 ? 0 : x[i] / *scale;
    to[i] = __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
  }
}

/// The bytes and scales equal those from quantizing the same product's bf16 result on the host.
TEST(Fp8Channel, QuantisedOutputsAreThoseOfBf16) {
  for (const ScaleGranularity scaling : kBoth) {
    for (const int64_t n : {int64_t{512}, int64_t{960}, int64_t{3072}, int64_t{24608}}) {
      ChannelShape s{n > 4096 ? std::vector<int64_t>{3, 70} : kCounts, n, 512, scaling, Epilogue::swiglu};
      ChannelRig plain(s, false);
      plain.zero_row(0);
      plain.run();
      const std::vector<uint8_t> bf16 = plain.outputs();
      const float fixed = largest(bf16) / 448 / 2;  // some outputs saturate
      for (const auto& [output, kind] : {std::pair{OutputScaling::per_group, ScaleKind::f32},
                                         {OutputScaling::per_group, ScaleKind::ue8m0},
                                         {OutputScaling::fixed, ScaleKind::f32},
                                         {OutputScaling::per_row, ScaleKind::f32}}) {
        s.output = output;
        s.output_kind = kind;
        ChannelRig rig(s, false, fixed);
        rig.zero_row(0);
        for (int i = 0; i < 2; ++i) rig.run();
        const std::vector<uint8_t> codes = rig.outputs(), scales = rig.output_scales();
        const size_t columns = static_cast<size_t>(s.columns()), row_bytes = static_cast<size_t>(rig.scale_row());
        const size_t used = output != OutputScaling::per_group
                                ? 4
                                : static_cast<size_t>((s.columns() + 127) / 128) * (kind == ScaleKind::f32 ? 4 : 1);
        int64_t bad = 0, saturated = 0;
        for (int64_t row = 0; row < s.total(); ++row) {
          const auto at = static_cast<size_t>(row);
          std::vector<uint8_t> want(columns, 0xcd), want_scales(row_bytes, 0xcd);
          if (row % s.capacity() < s.rows[static_cast<size_t>(row / s.capacity())]) {
            if (output == OutputScaling::per_group) {
              oracle::quantise(DType::bf16, &bf16[at * columns * 2], s.columns(), kind, want.data(), want_scales.data());
            } else {
              float scale = 0;
              quantise_row(&bf16[at * columns * 2], s.columns(), output == OutputScaling::fixed ? &fixed : nullptr, want.data(),
                           &scale);
              std::memcpy(want_scales.data(), &scale, 4);
            }
          }
          saturated += std::count(want.begin(), want.end(), 0x7e);
          bad += !std::equal(want.begin(), want.end(), &codes[at * columns]);
          bad += !std::equal(want_scales.begin(), want_scales.begin() + static_cast<std::ptrdiff_t>(used),
                             &scales[at * row_bytes]);
        }
        EXPECT_EQ(bad, 0) << "rows of " << s.total() << ", n " << n << ", " << to_string(output) << ", " << to_string(kind)
                          << ", " << to_string(scaling);
        EXPECT_GT(saturated, 0);
      }
    }
  }
}

/// Whole rows of infinities, NaNs, zeros, subnormals and tiny scales. 128 columns repeat throughout a row, so the row has the
/// scale and the codes that the oracle gives these 128 columns.
TEST(Fp8Channel, SpecialValuesOfWholeRows) {
  constexpr int64_t kRows = 52, kGroup = 128, kWords = 4, kCopies = 3;
  for (const int64_t columns : {kGroup, 9 * kGroup, 72 * kGroup}) {
    std::vector<uint16_t> rows, part(kGroup);
    std::vector<uint8_t> want, codes(kGroup);
    std::vector<float> want_scales;
    for (int64_t row = 0; row < kRows; ++row) {
      float scale[4] = {};
      oracle::fill_row(oracle::Pattern::quantise_cases, 5, {static_cast<uint64_t>(row)}, DType::bf16, kGroup, part.data());
      oracle::quantise(DType::bf16, part.data(), kGroup, ScaleKind::f32, codes.data(), scale);
      for (int64_t c = 0; c < columns; c += kGroup) {
        rows.insert(rows.end(), part.begin(), part.end());
        want.insert(want.end(), codes.begin(), codes.end());
      }
      want_scales.push_back(scale[0]);
    }
    const DeviceBytes from(kRows * columns * 2), to(kRows * columns), scales(kRows * kWords * 4);
    from.set(rows);
    ok(cudaMemset(scales.as(), 0, kRows * kWords * 4));
    ok(switchyard::detail::gemm::quantise_rows({from.as(), kRows, columns, to.as(), scales.as<float>(), kWords, kCopies},
                                               nullptr, 3, nullptr));
    std::vector<uint8_t> got(want.size());
    std::vector<float> got_scales(kRows * kWords);
    ok(cudaMemcpy(got.data(), to.as(), got.size(), cudaMemcpyDeviceToHost));
    ok(cudaMemcpy(got_scales.data(), scales.as(), got_scales.size() * 4, cudaMemcpyDeviceToHost));
    EXPECT_TRUE(got == want) << columns;
    for (size_t i = 0; i < got_scales.size(); ++i)
      EXPECT_EQ(got_scales[i], i % kWords < kCopies ? want_scales[i / kWords] : 0) << i << " of " << columns << " columns";
  }
}

TEST(Fp8Channel, ErrorsNameTheMember) {
  DeviceBytes memory(1 << 20);
  const auto says = [&](const char* part, auto&& change) {
    auto c = config_of(ChannelShape{{8, 8}, 256, 128});
    change(c);
    try {
      switchyard::GroupedGemm gemm(c, memory.as(), memory.as());
      ADD_FAILURE() << "no error that says " << part;
    } catch (const switchyard::Error& e) {
      EXPECT_EQ(e.code(), switchyard::ErrorCode::invalid_argument);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  says("scaling = per_channel", [](auto& c) { c.dtype = DType::bf16; });
  says("weight_scales = ue8m0", [](auto& c) { c.weight_scales = ScaleKind::ue8m0; });
  says("accumulate = fast", [](auto& c) { c.accumulate = switchyard::Accumulate::fast; });
  says("output_scaling = fixed", [](auto& c) { c.output_scaling = OutputScaling::fixed; });
  says("output_scaling = per_row", [](auto& c) {
    c.scaling = ScaleGranularity::block;
    c.epilogue = Epilogue::swiglu;
    c.quantize = ScaleKind::f32;
    c.output_scaling = OutputScaling::per_row;
  });
  const auto fails = [&](const char* part, const std::optional<OutputScaling>& output, switchyard::GroupedGemmOptions options,
                         ScaleKind x_scales = ScaleKind::f32, int64_t stride = 0) {
    ChannelShape s{{8, 8}, 256, 128, ScaleGranularity::per_channel, Epilogue::swiglu};
    s.output = output;
    switchyard::GroupedGemm gemm(config_of(s), memory.as(), memory.as());
    switchyard::ExpertRows rows;
    rows.num_rows = memory.as<int64_t>();
    rows.scale_stride = stride;
    try {
      gemm.run({memory.as(), 4, 128, DType::fp8_e4m3, memory.as(), x_scales}, rows,
               {memory.as<uint8_t>() + 65536, 4, 128, gemm.config().out_dtype(), output ? memory.as() : nullptr,
                output ? ScaleKind::f32 : ScaleKind::none},
               options);
      ADD_FAILURE() << "no error that says " << part;
    } catch (const switchyard::Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  fails("output_scale is null", OutputScaling::fixed, {});
  fails("output_scale must begin at a multiple of 4 bytes", OutputScaling::fixed,
        {nullptr, 0, reinterpret_cast<float*>(memory.as<uint8_t>() + 2)});
  for (const int64_t stride : {-1, 2, 8}) fails("rows.scale_stride = ", {}, {}, ScaleKind::f32, stride);
  fails("output_scale is given", {}, {nullptr, 0, memory.as<float>()});
  fails("scratch is null", OutputScaling::per_row, {});
  fails("scratch is given", {}, {nullptr, 0, nullptr, memory.as()});
  fails("scales of ue8m0", {}, {}, ScaleKind::ue8m0);
}

}  // namespace
}  // namespace gemm_test
