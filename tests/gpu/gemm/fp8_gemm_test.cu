// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM of fp8 rows and weights with every form of scales, including requantized outputs. Every output bit is known for
// integers with power-of-two scales; normally distributed data is compared with float64 results from the dequantized operands.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "gpu/gemm/fp8_reference.cuh"
#include "oracle/rows.hpp"

namespace gemm_test {
namespace {

using switchyard::Accumulate;
using switchyard::DType;
using switchyard::Epilogue;
using switchyard::ScaleKind;

struct Shape {
  std::vector<int64_t> rows;
  int64_t n, k;
  Epilogue epilogue = Epilogue::none;
  ScaleKind x_scales = ScaleKind::f32, w_scales = ScaleKind::f32;
  bool by_columns = false;  ///< scales of rows in the form of low latency, ScaleOrder::column_major
  ScaleKind quantize = ScaleKind::none;
  Accumulate accumulate = Accumulate::exact;

  bool gated() const { return epilogue == Epilogue::swiglu; }
  int64_t columns() const { return gated() ? n / 2 : n; }
  int experts() const { return static_cast<int>(rows.size()); }
  int64_t groups() const { return (k + 127) / 128; }
  /// Number of scale rows for an expert's weights; gated: those of the gate half, then those of the up half.
  int64_t weight_rows() const { return gated() ? 2 * ((n / 2 + 127) / 128) : (n + 127) / 128; }
  /// Number of rows per expert in memory if all experts have equal room.
  int64_t capacity() const { return *std::max_element(rows.begin(), rows.end()) + 3; }
  int64_t total() const { return capacity() * experts(); }
};

__global__ void fill_scales(float* p, int64_t count, bool powers, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const uint64_t h = mix(seed + static_cast<uint64_t>(i));
    p[i] = powers ? exp2f(static_cast<float>(h % 5) - 8.F) : 0.0001F + static_cast<float>(h % 1000) * 1e-6F;
  }
}

/// Location of scale (row, block) of expert `expert` in the GEMM's input, computed independently from the formulas in
/// docs/concepts.
struct ScalePlace {
  int64_t capacity, groups, columns_apart;
  bool by_columns, bytes;
  __host__ __device__ int64_t of(int64_t expert, int64_t row, int64_t block) const {
    if (!by_columns) {
      const int64_t in_row = (groups * (bytes ? 1 : 4) + 15) / 16 * 16;
      return (expert * capacity + row) * in_row + block * (bytes ? 1 : 4);
    }
    if (bytes) return ((expert * ((groups + 3) / 4) + block / 4) * columns_apart + row) * 4 + block % 4;
    return ((expert * groups + block) * columns_apart + row) * 4;
  }
  int64_t total(int64_t experts) const {
    const int64_t columns = bytes ? (groups + 3) / 4 : groups;
    return by_columns ? experts * columns * columns_apart * 4 : experts * capacity * ((groups * 4 + 15) / 16 * 16);
  }
};
/// Copies scales from a table [rows, groups].
__global__ void place_scales(const float* table, uint8_t* to, ScalePlace place, int64_t experts) {
  const int64_t count = experts * place.capacity * place.groups;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const int64_t row = i / place.groups, block = i % place.groups;
    uint8_t* const at = to + place.of(row / place.capacity, row % place.capacity, block);
    if (place.bytes)
      *at = static_cast<uint8_t>(__float_as_uint(table[i]) >> 23);
    else
      *reinterpret_cast<float*>(at) = table[i];
  }
}

/// One scale per 128 x 128 weights.
struct BlockScales {
  const float* scales;
  int64_t n, groups, rows;  ///< rows: Shape::weight_rows()
  bool gated;
  __device__ float of(int64_t expert, int64_t output, int64_t group) const {
    const bool up = gated && output >= n / 2;
    const int64_t row = up ? rows / 2 + (output - n / 2) / 128 : output / 128;
    return scales[(expert * rows + row) * groups + group];
  }
};

switchyard::GroupedGemmConfig config_of(const Shape& s) {
  switchyard::GroupedGemmConfig c;
  c.num_experts = s.experts();
  c.n = s.n;
  c.k = s.k;
  c.dtype = DType::fp8_e4m3;
  c.epilogue = s.epilogue;
  c.weight_scales = s.w_scales;
  c.quantize = s.quantize;
  c.accumulate = s.accumulate;
  return c;
}

/// Experts with equal room for rows, as in low-latency mode.
class Fp8Rig {
 public:
  Fp8Rig(const Shape& s, bool exact)
      : s_(s),
        place_{s.capacity(), s.groups(), (s.capacity() + 3) / 4 * 4, s.by_columns, s.x_scales == ScaleKind::ue8m0},
        x_(s.total() * s.k),
        w_(s.experts() * s.n * s.k),
        x_table_(s.total() * s.groups() * 4),
        w_table_(s.experts() * s.weight_rows() * s.groups() * 4),
        x_scales_(place_.total(s.experts())),
        w_scales_(s.experts() * s.weight_rows() * s.groups() * 4),
        out_(s.total() * s.columns() * 2),
        out_scales_(s.total() * scale_row()),
        num_rows_(s.experts() * 8) {
    num_rows_.set(s.rows);
    const bool powers = exact || s.x_scales == ScaleKind::ue8m0 || s.w_scales == ScaleKind::ue8m0;
    fill_fp8<<<512, 256>>>(x_.as<Fp8>(), s.total() * s.k, exact, 1);
    fill_fp8<<<512, 256>>>(w_.as<Fp8>(), s.experts() * s.n * s.k, exact, 2);
    fill_scales<<<512, 256>>>(x_table_.as<float>(), s.total() * s.groups(), powers, 3);
    fill_scales<<<512, 256>>>(w_table_.as<float>(), s.experts() * s.weight_rows() * s.groups(), powers, 4);
    place_scales<<<512, 256>>>(x_table_.as<float>(), x_scales_.as<uint8_t>(), place_, s.experts());
    const ScalePlace dense{s.weight_rows(), s.groups(), 0, false, s.w_scales == ScaleKind::ue8m0};
    place_weights(dense);
    gemm_.emplace(config_of(s), w_.as(), w_scales_.as());
    forget();
  }

  void forget() {
    ok(cudaMemset(out_.as(), 0xcd, static_cast<size_t>(s_.total() * s_.columns() * 2)));
    ok(cudaMemset(out_scales_.as(), 0xcd, static_cast<size_t>(s_.total() * scale_row())));
  }
  void run(const switchyard::GroupedGemmOptions& options = {}) {
    switchyard::ExpertRows rows;
    rows.num_rows = num_rows_.as<int64_t>();
    rows.rows_per_expert = s_.capacity();
    rows.scale_rows = s_.by_columns ? place_.columns_apart : 0;
    gemm_->run({x_.as(), s_.total(), s_.k, DType::fp8_e4m3, x_scales_.as(), s_.x_scales}, rows,
               {out_.as(), s_.total(), s_.columns(), gemm_->config().out_dtype(),
                s_.quantize == ScaleKind::none ? nullptr : out_scales_.as(), s_.quantize},
               options);
  }
  /// Sets one group of every row, and its scale, to 0.
  void zero_group(int64_t group) {
    const auto width = static_cast<size_t>(std::min<int64_t>(128, s_.k - group * 128));
    ok(cudaMemset2D(x_.as<uint8_t>() + group * 128, static_cast<size_t>(s_.k), 0, width, static_cast<size_t>(s_.total())));
    ok(cudaMemset2D(x_table_.as<float>() + group, static_cast<size_t>(s_.groups()) * 4, 0, 4, static_cast<size_t>(s_.total())));
    place_scales<<<512, 256>>>(x_table_.as<float>(), x_scales_.as<uint8_t>(), place_, s_.experts());
  }
  void set_counts(const std::vector<int64_t>& counts) { num_rows_.set(counts); }

  Difference difference() const {
    const BlockScales w_scales{w_table_.as<float>(), s_.n, s_.groups(), s_.weight_rows(), s_.gated()};
    return difference_of(Fp8Operands<BlockScales>{x_.as<Fp8>(), w_.as<Fp8>(), x_table_.as<float>(), w_scales, s_.n, s_.k,
                                                  s_.capacity(), s_.epilogue},
                         s_.rows, out_.as<uint16_t>());
  }

  std::vector<uint8_t> outputs() const { return bytes_of(out_, s_.total() * s_.columns() * (quantised() ? 1 : 2)); }
  std::vector<uint8_t> scales() const { return bytes_of(out_scales_, s_.total() * scale_row()); }
  int64_t scale_row() const { return static_cast<int64_t>(switchyard::scale_row_bytes(s_.columns(), s_.quantize)); }

 private:
  bool quantised() const { return s_.quantize != ScaleKind::none; }
  /// Dense: no padding after a row of scales.
  void place_weights(const ScalePlace& place) {
    const auto count = static_cast<size_t>(s_.experts() * s_.weight_rows() * s_.groups());
    std::vector<float> table(count);
    ok(cudaMemcpy(table.data(), w_table_.as(), count * 4, cudaMemcpyDeviceToHost));
    if (!place.bytes) return w_scales_.set(table);
    std::vector<uint8_t> bytes(count);
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &table[i], 4);
      bytes[i] = static_cast<uint8_t>(bits >> 23);
    }
    w_scales_.set(bytes);
  }

  Shape s_;
  ScalePlace place_;
  DeviceBytes x_, w_, x_table_, w_table_, x_scales_, w_scales_, out_, out_scales_, num_rows_;
  std::optional<switchyard::GroupedGemm> gemm_;
};

const std::vector<int64_t> kCounts = {1, 15, 16, 17, 0, 127, 128, 129, 255, 256, 257, 0, 33, 700};

TEST(Fp8Gemm, IntegersAreExact) {
  for (const auto& [n, k] :
       {std::pair<int64_t, int64_t>{256, 128}, {512, 1024}, {264, 256}, {1000, 384}, {128, 400}, {8, 16}}) {
    for (const Epilogue epilogue : {Epilogue::none, Epilogue::relu}) {
      Fp8Rig rig({kCounts, n, k, epilogue}, true);
      for (int i = 0; i < 2; ++i) rig.run();
      const Difference d = rig.difference();
      EXPECT_EQ(d.unequal, 0) << "of " << d.elements << ", n " << n << ", k " << k;
    }
  }
}

TEST(Fp8Gemm, EveryFormOfTheScales) {
  for (const bool by_columns : {false, true}) {
    for (const ScaleKind x : {ScaleKind::f32, ScaleKind::ue8m0}) {
      for (const ScaleKind w : {ScaleKind::f32, ScaleKind::ue8m0}) {
        Fp8Rig rig({kCounts, 384, 1664, Epilogue::none, x, w, by_columns}, true);
        rig.run();
        EXPECT_EQ(rig.difference().unequal, 0) << by_columns << " x " << to_string(x) << ", w " << to_string(w);
      }
    }
  }
}

TEST(Fp8Gemm, NormOfNormalShapes) {
  for (const Epilogue epilogue : {Epilogue::none, Epilogue::silu, Epilogue::swiglu}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1024, 2048}, {960, 2880}, {4096, 7168}}) {
      Fp8Rig rig({n < 4096 ? kCounts : std::vector<int64_t>{1, 0, 130}, n, k, epilogue}, false);
      rig.run();
      EXPECT_LE(rig.difference().norm, 5e-3) << to_string(epilogue) << ", n " << n << ", k " << k;
    }
  }
}

/// The bound in docs/gemm.md for the error of fast sums, and exact sums for experts with up to 64 rows. The scales of a row
/// differ by up to a factor of 11.
TEST(Fp8Gemm, FastSumsHaveABoundedError) {
  for (const Epilogue epilogue : {Epilogue::none, Epilogue::swiglu}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1024, 2048}, {960, 2880}, {512, 7168}, {256, 16384}}) {
      Shape s{{65, 0, 130, 700, 256}, n, k, epilogue};
      s.accumulate = Accumulate::fast;
      Fp8Rig fast(s, false);
      fast.run();
      EXPECT_LE(fast.difference().norm, 1e-2) << to_string(epilogue) << ", n " << n << ", k " << k;
      s.accumulate = Accumulate::exact;
      Fp8Rig exact(s, false);
      exact.run();
      EXPECT_NE(fast.outputs(), exact.outputs()) << "the option has no effect";
      std::printf("  K %lld, %s: error %.2e, exact %.2e\n", static_cast<long long>(k), to_string(epilogue),
                  fast.difference().norm, exact.difference().norm);
    }
  }
  Shape few{{1, 17, 64}, 512, 1024, Epilogue::none};
  Fp8Rig exact(few, true);
  exact.run();
  few.accumulate = Accumulate::fast;
  Fp8Rig fast(few, true);
  fast.run();
  EXPECT_EQ(fast.outputs(), exact.outputs());
}

/// Groups of zeros, whose scale is 0 or the smallest power of two, change neither the sums nor their unit.
TEST(Fp8Gemm, FastSumsOfZeros) {
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    Shape s{{300, 70}, 384, 1024, Epilogue::none, kind};
    s.accumulate = Accumulate::fast;
    Fp8Rig rig(s, true);
    for (const int64_t group : {0, 3, 4, 5, 7}) rig.zero_group(group);
    rig.run();
    EXPECT_LE(rig.difference().norm, 5e-3) << to_string(kind);
    for (int64_t group = 0; group < s.groups(); ++group) rig.zero_group(group);
    rig.run();
    EXPECT_EQ(rig.difference().unequal, 0) << "all outputs are 0, " << to_string(kind);
  }
}

/// The bytes and scales equal those from quantizing the same product's bf16 result on the host.
TEST(Fp8Gemm, QuantisedOutputsAreThoseOfBf16) {
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const int64_t n : {int64_t{512}, int64_t{960}, int64_t{3072}}) {
      Shape s{kCounts, n, 512, Epilogue::swiglu};
      Fp8Rig plain(s, false);
      s.quantize = kind;
      Fp8Rig rig(s, false);
      plain.run();
      for (int i = 0; i < 2; ++i) rig.run();
      const std::vector<uint8_t> bf16 = plain.outputs(), codes = rig.outputs(), scales = rig.scales();
      const size_t columns = static_cast<size_t>(s.columns()), row_bytes = static_cast<size_t>(rig.scale_row());
      const size_t used = static_cast<size_t>((s.columns() + 127) / 128) * (kind == ScaleKind::f32 ? 4 : 1);
      int64_t bad = 0;
      for (int64_t row = 0; row < s.total(); ++row) {
        const auto at = static_cast<size_t>(row);
        std::vector<uint8_t> want(columns, 0xcd), want_scales(row_bytes, 0xcd);
        if (row % s.capacity() < s.rows[static_cast<size_t>(row / s.capacity())])
          oracle::quantise(DType::bf16, &bf16[at * columns * 2], s.columns(), kind, want.data(), want_scales.data());
        bad += !std::equal(want.begin(), want.end(), &codes[at * columns]);
        bad +=
            !std::equal(want_scales.begin(), want_scales.begin() + static_cast<std::ptrdiff_t>(used), &scales[at * row_bytes]);
      }
      EXPECT_EQ(bad, 0) << "rows of " << s.total() << ", n " << n << ", " << to_string(kind);
    }
  }
}

TEST(Fp8Gemm, BitsDependOnTheRowAlone) {
  for (const ScaleKind quantize : {ScaleKind::none, ScaleKind::f32}) {
    Shape s{{300, 128, 77}, 512, 1024, Epilogue::swiglu};
    s.quantize = quantize;
    Fp8Rig rig(s, false);
    rig.run();
    const std::vector<uint8_t> all = rig.outputs();
    const size_t row_bytes = static_cast<size_t>(s.columns() * (quantize == ScaleKind::none ? 2 : 1));
    int sms = 0;  // 1: many rows also take the few-row path; an odd number: one multiprocessor is left over
    for (const std::vector<int64_t>& counts : {std::vector<int64_t>{1, 17, 76}, {299, 0, 5}, {0, 128, 0}, {150, 100, 50}}) {
      rig.forget();
      rig.set_counts(counts);
      rig.run({nullptr, ++sms});
      const std::vector<uint8_t> some = rig.outputs();
      for (size_t e = 0; e < counts.size(); ++e) {
        const size_t from = e * static_cast<size_t>(s.capacity()) * row_bytes,
                     bytes = static_cast<size_t>(counts[e]) * row_bytes;
        EXPECT_EQ(std::memcmp(&all[from], &some[from], bytes), 0) << "expert " << e << " with " << counts[e] << " rows";
        EXPECT_EQ(some[from + bytes], 0xcd) << "a row behind the last one was written";
      }
    }
  }
}

TEST(Fp8Gemm, ErrorsNameTheMember) {
  Fp8Rig rig({{8, 8}, 256, 128}, true);
  DeviceBytes memory(1 << 20);
  const auto says = [&](const char* part, auto&& change, bool with_scales = true) {
    auto c = config_of(Shape{{8, 8}, 256, 128});
    change(c);
    try {
      switchyard::GroupedGemm gemm(c, memory.as(), with_scales ? memory.as() : nullptr);
      ADD_FAILURE() << "no error that says " << part;
    } catch (const switchyard::Error& e) {
      EXPECT_EQ(e.code(), switchyard::ErrorCode::invalid_argument);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  says("k = 8", [](auto& c) { c.k = 8; });
  says("order = kn", [](auto& c) { c.order = switchyard::WeightOrder::kn; });
  says("weight_scales = none", [](auto& c) { c.weight_scales = ScaleKind::none; });
  says(
      "weight_scales is null", [](auto&) {}, false);
  says("quantize = f32", [](auto& c) { c.quantize = ScaleKind::f32; });
  says("n = 272", [](auto& c) { c.quantize = ScaleKind::f32, c.epilogue = Epilogue::swiglu, c.n = 272; });
  says("weight_scales is given", [](auto& c) { c.dtype = DType::bf16; });
  rig.run();
  EXPECT_EQ(rig.difference().unequal, 0) << "after errors";
}

}  // namespace
}  // namespace gemm_test
