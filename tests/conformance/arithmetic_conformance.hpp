// SPDX-License-Identifier: Apache-2.0
// The arithmetic half of the conformance suite: compares reduce_rows and quantize_row bitwise with
// tests/conformance/reference.hpp (any NaN equals any NaN). Included by arch_conformance.hpp.
#pragma once

#include <cmath>
#include <limits>

#include "conformance/arch_conformance.hpp"
#include "conformance/reference.hpp"

namespace switchyard::conformance {

inline const char* type_name(DType type) { return type == DType::bf16 ? "bf16" : type == DType::f16 ? "f16" : "f32"; }
inline constexpr DType kRowTypes[] = {DType::bf16, DType::f16, DType::f32};

/// Content of random rows.
enum class Content {
  any_bits,  ///< every pattern, including NaN, infinities and subnormals
  tame,      ///< magnitudes between 2^-4 and 2^4: sums that require rounding, cancel and tie
  tiny,      ///< around the smallest normal number
};

inline void fill_row(void* row, DType type, int64_t hidden, Content content, std::mt19937& random) {
  for (int64_t i = 0; i < hidden; ++i) {
    if (content == Content::any_bits) {
      const auto bits = static_cast<uint32_t>(random());
      const size_t bytes = dtype_bytes(type, 1);
      std::memcpy(static_cast<char*>(row) + static_cast<size_t>(i) * bytes, &bits, bytes);
      continue;
    }
    const int smallest = type == DType::f16 ? -16 : -128;
    const int exponent =
        content == Content::tame ? static_cast<int>(random() % 8) - 4 : smallest - static_cast<int>(random() % 6);
    const double mantissa = 1.0 + static_cast<double>(random() % 4096) / 4096.0;
    const double value = std::ldexp(random() % 2 == 0 ? mantissa : -mantissa, exponent);
    reference_store(row, type, i, static_cast<float>(value));
  }
}

/// Whether the bits are equal or both values are NaN.
inline ::testing::AssertionResult same_element(const void* got, const void* want, DType type, int64_t i) {
  const float a = reference_load(got, type, i);
  const float b = reference_load(want, type, i);
  if (std::isnan(a) && std::isnan(b)) return ::testing::AssertionSuccess();
  const size_t bytes = dtype_bytes(type, 1);
  const auto at = static_cast<size_t>(i) * bytes;
  if (std::memcmp(static_cast<const char*>(got) + at, static_cast<const char*>(want) + at, bytes) == 0) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << type_name(type) << " element " << i << ": got " << a << ", want " << b;
}

/// `offset`, rounded down to a multiple of the element size if the arch requires aligned elements.
template <class A>
constexpr size_t element_offset(size_t offset, size_t element_bytes) {
  return ArchDriver<A>::kUnalignedElements ? offset : offset / element_bytes * element_bytes;
}

/// One reduction: rows, biases and weights in arch memory, each with its own alignment.
template <class A>
struct Reduction {
  Reduction(DType type_, int64_t hidden_, int n_, int num_biases_, bool weighted, size_t misalignment)
      : type(type_),
        hidden(hidden_),
        n(n_),
        num_biases(num_biases_),
        bytes(dtype_bytes(type_, hidden_)),
        out(bytes, element_offset<A>(misalignment, dtype_bytes(type_, 1))),
        weights(static_cast<size_t>(n_) * 4),
        is_weighted(weighted) {
    for (int i = 0; i < n + num_biases; ++i) {
      rows.push_back(std::make_unique<Guarded<A>>(
          bytes, element_offset<A>((misalignment * static_cast<size_t>(i + 2)) % 64, dtype_bytes(type, 1))));
      if (i < n) pointers.push_back(rows.back()->data());
    }
  }

  void fill(Content content, std::mt19937& random) {
    for (auto& row : rows) fill_row(row->data(), type, hidden, content, random);
    for (int i = 0; i < n; ++i) set_weight(i, static_cast<float>(static_cast<double>(random() % 20001) / 10000.0 - 1.0));
  }
  float weight(int i) { return reference_load(weights.data(), DType::f32, i); }
  void set_weight(int i, float value) { reference_store(weights.data(), DType::f32, i, value); }
  float term(int i, int64_t c) { return reference_load(rows[static_cast<size_t>(i)]->data(), type, c); }
  float bias(int i, int64_t c) { return term(n + i, c); }

  detail::ReduceSpec spec() {
    detail::ReduceSpec s{};
    s.out = out.data();
    s.rows = pointers.data();
    s.weights = is_weighted ? reinterpret_cast<const float*>(weights.data()) : nullptr;
    s.n = n;
    for (int i = 0; i < num_biases; ++i) s.bias[i] = rows[static_cast<size_t>(n + i)]->data();
    s.type = type;
    s.hidden = hidden;
    return s;
  }

  std::vector<std::byte> expected() {
    std::vector<std::byte> want(bytes);
    std::vector<float> terms(static_cast<size_t>(n));
    std::vector<float> factors(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) factors[static_cast<size_t>(i)] = weight(i);
    for (int64_t c = 0; c < hidden; ++c) {
      float biases[2] = {};
      for (int i = 0; i < n; ++i) terms[static_cast<size_t>(i)] = term(i, c);
      for (int i = 0; i < num_biases; ++i) biases[i] = bias(i, c);
      const float sum = reference_sum(terms.data(), is_weighted ? factors.data() : nullptr, n, biases, num_biases);
      reference_store(want.data(), type, c, sum);
    }
    return want;
  }

  ::testing::AssertionResult matches(const std::vector<std::byte>& want) {
    if (!out.guards_intact()) return ::testing::AssertionFailure() << "wrote outside of the output row";
    for (int64_t c = 0; c < hidden; ++c) {
      if (auto result = same_element(out.data(), want.data(), type, c); !result) {
        return result << " (hidden " << hidden << ", n " << n << ", biases " << num_biases << ", weights " << is_weighted
                      << ")";
      }
    }
    return ::testing::AssertionSuccess();
  }

  DType type;
  int64_t hidden;
  int n;
  int num_biases;
  size_t bytes;
  Guarded<A> out;
  Guarded<A> weights;
  bool is_weighted;
  std::vector<std::unique_ptr<Guarded<A>>> rows;
  std::vector<const void*> pointers;
};

TYPED_TEST_P(ArchConformance, ReduceMatchesTheReference) {
  const int64_t hiddens[] = {0,  1,  2,  3,   5,   8,   15,  16,  17,        31,       33,
                             63, 64, 65, 100, 127, 128, 129, 255, 1024 + 37, 2048 + 8, 7168};
  const int counts[] = {0, 1, 2, 3, 7, 8, 9, kMaxRanks};
  const size_t misalignments[] = {0, 16, 1, 2, 62};
  std::mt19937 shuffle(7);
  for (const DType type : kRowTypes) {
    for (const int64_t hidden : hiddens) {
      for (int pick = 0; pick < 12; ++pick) {
        if (hidden > 1000 && pick >= 3) break;
        const int n = counts[static_cast<size_t>(hidden > 1000 ? shuffle() % 7 : shuffle() % 8)];
        Reduction<TypeParam> work(type, hidden, n, pick % 3, shuffle() % 2 == 0, misalignments[shuffle() % 5]);
        work.fill(static_cast<Content>((pick + pick / 3) % 3), this->random_);
        const std::vector<std::byte> want = work.expected();
        this->for_each_variant([&] {
          work.out.refill();
          this->warp_.reduce_rows(work.spec());
          this->warp_.settle();
          ASSERT_TRUE(work.matches(want));
        });
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

// Adds half a step to every finite bf16 and f16 value: every sum is a tie between two codes.
TYPED_TEST_P(ArchConformance, ReduceRoundsTiesToEven) {
  for (const DType type : {DType::bf16, DType::f16}) {
    const Format& format = type == DType::bf16 ? bf16_format() : f16_format();
    const int mantissa_bits = type == DType::bf16 ? 7 : 10;
    std::vector<uint32_t> codes;
    std::vector<float> halves;
    for (uint32_t code = 0; code < 0x10000; ++code) {
      const double value = format.decode(code);
      if (!std::isfinite(value) || value == 0) continue;
      int exponent;
      std::frexp(value, &exponent);
      const double half = std::ldexp(value < 0 ? -1.0 : 1.0, exponent - 2 - mantissa_bits);
      if (format.decode(format.encode(half)) != half) continue;  // half a step is too small for the type: no tie
      codes.push_back(code);
      halves.push_back(static_cast<float>(half));
    }
    ASSERT_GT(codes.size(), 30000u);
    const auto hidden = static_cast<int64_t>(codes.size());
    Reduction<TypeParam> work(type, hidden, 2, 0, false, 0);
    int64_t ties = 0;
    for (int64_t c = 0; c < hidden; ++c) {
      const auto code = static_cast<uint16_t>(codes[static_cast<size_t>(c)]);
      std::memcpy(work.rows[0]->data() + c * 2, &code, 2);
      reference_store(work.rows[1]->data(), type, c, halves[static_cast<size_t>(c)]);
      const double sum = static_cast<double>(work.term(0, c)) + static_cast<double>(work.term(1, c));
      ties += format.decode(format.encode(sum)) != sum ? 1 : 0;
    }
    EXPECT_GT(ties, hidden / 2);
    const std::vector<std::byte> want = work.expected();
    this->for_each_variant([&] {
      work.out.refill();
      this->warp_.reduce_rows(work.spec());
      this->warp_.settle();
      ASSERT_TRUE(work.matches(want));
    });
  }
}

// Data for which a fused multiply-add, a double accumulator, or a different row order changes the bits.
TYPED_TEST_P(ArchConformance, ReduceAddsInOrderWithoutFusing) {
  constexpr int64_t kHidden = 4096;
  Reduction<TypeParam> work(DType::f32, kHidden, 5, 1, true, 0);
  work.fill(Content::tame, this->random_);
  const std::vector<std::byte> want = work.expected();
  int fused_differs = 0;
  int reversed_differs = 0;
  int wide_differs = 0;
  for (int64_t c = 0; c < kHidden; ++c) {
    float fused = work.bias(0, c);
    volatile float reversed = work.bias(0, c);
    double wide = static_cast<double>(work.bias(0, c));
    for (int i = 0; i < 5; ++i) {
      fused = std::fma(work.weight(i), work.term(i, c), fused);
      wide += static_cast<double>(work.weight(i)) * static_cast<double>(work.term(i, c));
      volatile float term = work.weight(4 - i) * work.term(4 - i, c);
      reversed = reversed + term;
    }
    const float contract = reference_load(want.data(), DType::f32, c);
    fused_differs += fused != contract ? 1 : 0;
    reversed_differs += reversed != contract ? 1 : 0;
    wide_differs += static_cast<float>(wide) != contract ? 1 : 0;
  }
  ASSERT_GT(fused_differs, 100);
  ASSERT_GT(reversed_differs, 100);
  ASSERT_GT(wide_differs, 100);
  this->for_each_variant([&] {
    work.out.refill();
    this->warp_.reduce_rows(work.spec());
    this->warp_.settle();
    ASSERT_TRUE(work.matches(want));
  });
}

TYPED_TEST_P(ArchConformance, ReduceKeepsEveryPattern) {
  for (const DType type : {DType::bf16, DType::f16}) {
    const Format& format = type == DType::bf16 ? bf16_format() : f16_format();
    constexpr int64_t kHidden = 65536;
    for (const int way : {0, 1, 2}) {  // a row unchanged, a row with weight 1, a bias
      const bool as_bias = way == 2;
      Reduction<TypeParam> work(type, kHidden, as_bias ? 0 : 1, as_bias ? 1 : 0, way == 1, 0);
      if (!as_bias) work.set_weight(0, 1.0f);
      for (uint32_t code = 0; code < 65536; ++code) {
        const auto bits = static_cast<uint16_t>(code);
        std::memcpy(work.rows[0]->data() + code * 2, &bits, 2);
      }
      this->for_each_variant([&] {
        work.out.refill();
        this->warp_.reduce_rows(work.spec());
        this->warp_.settle();
        for (uint32_t code = 0; code < 65536; ++code) {
          uint16_t got;
          std::memcpy(&got, work.out.data() + code * 2, 2);
          // The sum starts at +0, so -0 becomes +0; with a bias, it starts at the bias.
          const uint32_t want = code == 0x8000u && !as_bias ? 0 : code;
          if (format.is_nan(code)) {
            ASSERT_TRUE(format.is_nan(got)) << type_name(type) << " " << code;
          } else {
            ASSERT_EQ(got, want) << type_name(type);
          }
        }
      });
    }
  }
}

TYPED_TEST_P(ArchConformance, ReduceOfMinusZero) {
  for (const DType type : kRowTypes) {
    for (const int n : {0, 1, 2}) {
      for (const bool weighted : {false, true}) {
        Reduction<TypeParam> work(type, 2100, n, n == 0 ? 1 : 0, weighted, 16);
        for (auto& row : work.rows) {
          for (int64_t c = 0; c < work.hidden; ++c) reference_store(row->data(), type, c, -0.0f);
        }
        for (int i = 0; i < n; ++i) work.set_weight(i, 3.0f);
        this->for_each_variant([&] {
          work.out.refill();
          this->warp_.reduce_rows(work.spec());
          this->warp_.settle();
          for (int64_t c = 0; c < work.hidden; ++c) {
            const float got = reference_load(work.out.data(), type, c);
            ASSERT_TRUE(got == 0 && std::signbit(got) == (n == 0)) << type_name(type) << " " << c << ": " << got << ", n " << n;
          }
        });
      }
    }
  }
}

// The low bits of a float32 NaN must neither carry into the exponent nor vanish when the value is narrowed. They originate in
// the weights, because a NaN of a 16-bit type has no such bits.
TYPED_TEST_P(ArchConformance, ReduceKeepsNan) {
  for (const DType type : kRowTypes) {
    for (const uint32_t bits : {0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800001u, 0xFF800001u, 0x7FC00000u, 0x7F80FFFFu, 0xFFFF8000u}) {
      Reduction<TypeParam> work(type, 200, 2, 0, true, 0);
      work.fill(Content::tame, this->random_);
      std::memcpy(work.weights.data(), &bits, 4);
      this->for_each_variant([&] {
        work.out.refill();
        this->warp_.reduce_rows(work.spec());
        this->warp_.settle();
        for (int64_t c = 0; c < 200; ++c)
          ASSERT_TRUE(std::isnan(reference_load(work.out.data(), type, c))) << type_name(type) << " " << bits;
      });
    }
  }
}

TYPED_TEST_P(ArchConformance, ReduceOfNothing) {
  for (const DType type : kRowTypes) {
    Reduction<TypeParam> work(type, 3000, 0, 0, false, 16);
    const std::vector<std::byte> zero(work.bytes);
    this->for_each_variant([&] {
      work.out.refill();
      this->warp_.reduce_rows(work.spec());
      this->warp_.settle();
      EXPECT_TRUE(work.out.holds(zero.data()));
      EXPECT_TRUE(work.out.guards_intact());
    });
  }
}

TYPED_TEST_P(ArchConformance, ReduceArgumentsAreCopied) {
  Reduction<TypeParam> work(DType::bf16, 500, 4, 0, true, 0);
  work.fill(Content::tame, this->random_);
  const std::vector<std::byte> want = work.expected();
  this->for_each_variant([&] {
    work.out.refill();
    std::vector<const void*> pointers = work.pointers;
    std::vector<float> weights(4);
    for (int i = 0; i < 4; ++i) weights[static_cast<size_t>(i)] = work.weight(i);
    {
      detail::ReduceSpec spec = work.spec();
      spec.rows = pointers.data();
      spec.weights = weights.data();
      this->warp_.reduce_rows(spec);
    }
    std::fill(pointers.begin(), pointers.end(), nullptr);
    std::fill(weights.begin(), weights.end(), std::numeric_limits<float>::quiet_NaN());
    this->warp_.settle();
    EXPECT_TRUE(work.matches(want));
  });
}

// ---- Quantization ------------------------------

/// Quantizes `values` (rounded to `type` first) under every variant and both scale kinds and compares codes, scales and
/// padding.
template <class A, class ForEachVariant>
void check_quantize(ArchDriver<A>& warp, const std::vector<float>& values, DType type, size_t misalignment, ForEachVariant each,
                    int size = kScaleGroup) {
  const auto hidden = static_cast<int64_t>(values.size());
  Guarded<A> src(dtype_bytes(type, static_cast<int64_t>(values.size())), element_offset<A>(misalignment, dtype_bytes(type, 1)));
  std::vector<float> rounded(values.size());
  for (int64_t i = 0; i < hidden; ++i) {
    reference_store(src.data(), type, i, values[static_cast<size_t>(i)]);
    rounded[static_cast<size_t>(i)] = reference_load(src.data(), type, i);
  }
  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    std::vector<std::byte> want_scales(scale_row_bytes(hidden, kind, size));
    std::vector<uint8_t> want_codes;
    for (int64_t first = 0, group = 0; first < hidden; first += size, ++group) {
      const ReferenceGroup one =
          reference_quantize(&rounded[static_cast<size_t>(first)], std::min<int64_t>(size, hidden - first), kind);
      if (kind == ScaleKind::f32) {
        std::memcpy(want_scales.data() + group * 4, &one.scale, 4);
      } else {
        want_scales[static_cast<size_t>(group)] = std::byte{one.exponent};
      }
      want_codes.insert(want_codes.end(), one.codes.begin(), one.codes.end());
    }
    Guarded<A> q(values.size(), misalignment);
    Guarded<A> scales(want_scales.size(), element_offset<A>(misalignment, 4));
    each([&] {
      q.refill();
      scales.refill();
      warp.quantize_row(reinterpret_cast<uint8_t*>(q.data()), scales.data(), src.data(), type, hidden, kind, size);
      const auto* got = reinterpret_cast<const uint8_t*>(q.data());
      for (int64_t i = 0; i < hidden; ++i) {
        ASSERT_EQ(int{got[i]}, int{want_codes[static_cast<size_t>(i)]})
            << type_name(type) << " element " << i << " of " << hidden << " = " << rounded[static_cast<size_t>(i)]
            << ", scale kind " << static_cast<int>(kind) << ", groups of " << size;
      }
      ASSERT_TRUE(scales.holds(want_scales.data())) << type_name(type) << ", scale kind " << static_cast<int>(kind);
      ASSERT_TRUE(q.guards_intact() && scales.guards_intact());
      if (!quantises_to_places<A>(type, misalignment, hidden)) return;
      const size_t used = static_cast<size_t>(num_scales(hidden, size)) * (kind == ScaleKind::f32 ? 4 : 1);
      q.refill(), scales.refill();
      Guarded<A> other_q(values.size(), misalignment), other_scales(used, element_offset<A>(misalignment, 4));
      warp.quantize_to({{reinterpret_cast<uint8_t*>(q.data()), scales.data()},
                        {nullptr, nullptr},
                        {reinterpret_cast<uint8_t*>(other_q.data()), other_scales.data()}},
                       src.data(), type, hidden, kind, size);
      warp.settle();
      ASSERT_TRUE(q.holds(want_codes.data()) && other_q.holds(want_codes.data())) << type_name(type) << ", direct";
      ASSERT_TRUE(used == 0 || std::memcmp(scales.data(), want_scales.data(), used) == 0) << type_name(type) << ", direct";
      ASSERT_TRUE(other_scales.holds(want_scales.data()) && other_q.guards_intact() && other_scales.guards_intact());
    });
  }
}

TYPED_TEST_P(ArchConformance, QuantizeMatchesTheReference) {
  const size_t hiddens[] = {0, 1, 2, 3, 15, 16, 17, 64, 100, 127, 128, 129, 255, 256, 261, 1024, 7168};
  const auto each = [this](auto&& body) { this->for_each_variant(body); };
  for (const DType type : kRowTypes) {
    size_t misalignment = 0;
    for (const size_t hidden : hiddens) {
      for (int exponent : {-145, -60, -16, 0, 12, 118}) {
        if (hidden > 1000 && exponent != 0) continue;
        std::vector<float> values(hidden);
        for (float& value : values) {
          const double mantissa = static_cast<double>(this->random_()) / 4294967296.0 * 2.0 - 1.0;
          const int spread = static_cast<int>(this->random_() % 12);
          value = static_cast<float>(std::ldexp(mantissa, exponent - spread));
        }
        for (const int size : {32, 64, 128})
          check_quantize<TypeParam>(this->warp_, values, type, misalignment++ % 19, each, size);
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

// Groups with scale 1 (amax = 448) that contain every e4m3 value and every midpoint with its f32 neighbors.
TYPED_TEST_P(ArchConformance, QuantizeRoundsTiesToEven) {
  std::vector<float> points;
  for (uint32_t code = 0; code < 0x7E; ++code) {
    const double low = e4m3_format().decode(code);
    const double high = e4m3_format().decode(code + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    for (const float value : {static_cast<float>(low), middle, std::nextafter(middle, 1e9f), std::nextafter(middle, 0.0f)}) {
      points.push_back(value);
      points.push_back(-value);
    }
  }
  std::vector<float> values;
  for (const float point : points) {
    if (values.size() % 128 == 0) values.push_back(448.0f);
    values.push_back(point);
  }
  const auto each = [this](auto&& body) { this->for_each_variant(body); };
  for (const DType type : kRowTypes) check_quantize<TypeParam>(this->warp_, values, type, 0, each);
}

TYPED_TEST_P(ArchConformance, QuantizeSpecialGroups) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> groups = {
      {1.0f, kInf, -kInf, kNan, -0.0f, 0.0f},
      {1e-38f, -1e-38f, 3e-39f},
      {1e-38f, -0.0f, kNan, kInf},
      {kTiny, -kTiny, 0.0f},
      {kTiny * 223, kTiny * 224, -kTiny},
      {kTiny * 225, kTiny * 224, -kTiny, kInf, -0.0f},
      {kTiny * 671, kTiny * 300, -kTiny * 8},
      {kMax, -kMax, 1.0f, kNan},
      {kMax, kInf, -kInf, -kMax / 2},
      {65504.0f, -65504.0f, 1e-7f},
      {6e-8f, -6e-8f, 0.0f},
      {448.0f, 464.0f, -480.0f, 1.0f},
      {-3.5f, 1.0f, -0.0f},
  };
  const auto each = [this](auto&& body) { this->for_each_variant(body); };
  constexpr float kSome[] = {0.0f, -0.0f, kInf, -kInf, kNan, kTiny, kTiny * 225, 1.0f};
  for (const DType type : kRowTypes) {
    for (int i = 0; i < 512; ++i)
      check_quantize<TypeParam>(this->warp_, {kSome[i % 8], kSome[i / 8 % 8], kSome[i / 64]}, type, 0, each);
    std::vector<float> row;
    for (const std::vector<float>& group : groups) {
      check_quantize<TypeParam>(this->warp_, group, type, 0, each);  // the group alone: a short group
      for (size_t i = 0; i < 128; ++i) row.push_back(i < group.size() ? group[i] : 0.0f);
    }
    row.resize(row.size() - 100);
    check_quantize<TypeParam>(this->warp_, row, type, 2, each);
  }
}

// Tests amax on both sides of every power of two times 448, for the UE8M0 exponents and the rounding of the f32 scale.
TYPED_TEST_P(ArchConformance, QuantizeScaleBoundaries) {
  std::vector<float> row;
  for (int exponent = -149; exponent < 128; ++exponent) {
    const auto power = static_cast<float>(std::ldexp(1.75, exponent));  // 448 = 1.75 * 2^8
    for (const float amax :
         {power, std::nextafter(power, 0.0f), std::nextafter(power, std::numeric_limits<float>::infinity())}) {
      if (!std::isfinite(amax)) continue;
      row.push_back(amax);
      row.push_back(-amax / 3);
      row.insert(row.end(), 126, amax / 5);
    }
  }
  const auto each = [this](auto&& body) { this->for_each_variant(body); };
  check_quantize<TypeParam>(this->warp_, row, DType::f32, 0, each);
}

}  // namespace switchyard::conformance
