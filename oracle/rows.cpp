// SPDX-License-Identifier: Apache-2.0
#include "oracle/rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

namespace oracle {

uint64_t mix(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t h = seed;
  for (const uint64_t word : {a, b, c}) {
    h += word * 0xD6E8FEB86659FD93u + 0x632BE59BD9B4E019u;
    h ^= h >> 29;
    h *= 0xBF58476D1CE4E5B9u;
    h ^= h >> 32;
    h *= 0x94D049BB133111EBu;
    h ^= h >> 30;
  }
  return h;
}

namespace {

/// 2^e, -149 <= e <= 127.
[[gnu::always_inline]] inline float power(int e) { return static_cast<float>(power_of_two(e)); }

/// Exact unless it underflows.
[[gnu::always_inline]] inline float scaled(float value, int exponent) {
  return static_cast<float>(static_cast<double>(value) * power_of_two(exponent));
}

[[gnu::always_inline]] inline float random_value(uint64_t bits) {
  const auto mantissa = static_cast<float>(bits & 0xFFFFFF) / 16777216.0f + 1.0f;
  const int exponent = static_cast<int>(bits >> 24 & 0xFF) % 10 - 6;
  return (bits >> 63 ? -mantissa : mantissa) * power(exponent);
}

float wild_value(uint64_t bits, DType type) {
  const int lowest = type == DType::f16 ? -26 : -140, highest = type == DType::f16 ? 15 : 126;
  switch (bits >> 32 & 31) {
    case 0: return -0.0f;
    case 1: return std::numeric_limits<float>::infinity();
    case 2: return -std::numeric_limits<float>::infinity();
    case 3: return std::numeric_limits<float>::quiet_NaN();
    case 4: return 0.0f;
    default: break;
  }
  const auto mantissa = static_cast<float>(bits & 0xFFFFFF) / 16777216.0f + 1.0f;
  const int exponent = lowest + static_cast<int>((bits >> 40 & 0xFFFF) % static_cast<uint64_t>(highest - lowest));
  return scaled(bits >> 63 ? -mantissa : mantissa, exponent);
}

/// The cases vary with the row and the group, so a few rows are enough to cover all of them.
float quantise_case(uint64_t bits, RowKey key, int64_t column, DType type) {
  const uint64_t group = static_cast<uint64_t>(column / switchyard::kScaleGroup);
  const float ordinary = random_value(bits);
  const bool outlier = column % switchyard::kScaleGroup == static_cast<int64_t>(key.b % 97 % switchyard::kScaleGroup);
  const float largest = type == DType::f16 ? 65504.0f : 3.3895313892515355e38f;  // the largest bf16
  const int floor_exponent = type == DType::f16 ? -24 : -133;                    // smallest subnormals of f16 and bf16
  switch ((key.a + key.b + group) % 13) {
    case 0: return 0.0f;
    case 1: return bits & 1 ? -0.0f : 0.0f;
    case 2: return bits & 1 ? -0.0f : ordinary;
    case 3: return bits & 1 ? -power(floor_exponent) : power(floor_exponent);  // the scale may underflow
    case 4: return scaled(ordinary, floor_exponent + 4);                       // subnormal mixtures
    case 5: return scaled(ordinary, type == DType::f16 ? -14 : -120);          // scales near or below the smallest normal f32
    case 6: return outlier ? (bits & 1 ? -largest : largest) : ordinary;
    case 7: return outlier ? largest : largest / 1024 * static_cast<float>(bits % 1024);
    case 8: return outlier ? std::numeric_limits<float>::infinity() : ordinary;
    case 9: return outlier ? std::numeric_limits<float>::quiet_NaN() : ordinary;
    case 10: return scaled(static_cast<float>(bits % 897) / 2 - 224, static_cast<int>(bits >> 40 & 7) - 4);  // many ties
    case 11: return outlier ? std::numeric_limits<float>::infinity() * (bits & 1 ? -1.0f : 1.0f) : bits & 2 ? -0.0f : 0.0f;
    default: return ordinary;
  }
}

/// Like random_value, but as a code of `type` that needs no rounding: any mantissa, exponents -6 to 3.
[[gnu::always_inline]] inline uint64_t random_code(uint64_t bits, DType type) {
  const uint64_t exponent = (bits >> 32) % 10, sign = bits >> 63;
  switch (type) {
    case DType::bf16: return sign << 15 | (121 + exponent) << 7 | (bits & 0x7F);
    case DType::f16: return sign << 15 | (9 + exponent) << 10 | (bits & 0x3FF);
    case DType::f32: return sign << 31 | (121 + exponent) << 23 | (bits & 0x7FFFFF);
    case DType::fp8_e4m3: return sign << 7 | (1 + exponent) << 3 | (bits & 7);
  }
  return 0;
}

/// Fills a row with elements taken from the lower bits of `bits_of(column)`.
template <class T, class BitsOf>
void fill_codes(int64_t hidden, void* out, const BitsOf& bits_of) {
  std::vector<T> codes(static_cast<size_t>(hidden));
  T* const code = codes.data();
  for (int64_t c = 0; c < hidden; ++c) code[c] = static_cast<T>(bits_of(c));
  std::memcpy(out, code, codes.size() * sizeof(T));
}

/// Column `c` of a row whose pattern consists of values rather than bits.
[[gnu::always_inline]] inline float value_of(Pattern pattern, uint64_t seed, RowKey key, DType type, int64_t c, uint64_t bits) {
  switch (pattern) {
    case Pattern::unit_interval: return static_cast<float>(bits >> 40) * 0x1p-24f;
    case Pattern::wild_values: return wild_value(bits, type);
    case Pattern::quantise_cases: return quantise_case(bits, key, c, type);
    default: break;
  }
  const uint64_t n = seed + 131 * key.a + 17 * key.b + 7 * key.c + 3 * static_cast<uint64_t>(c);
  return static_cast<float>(static_cast<int>(n % 16) - 8);  // small_integers
}

}  // namespace

void fill_row(Pattern pattern, uint64_t seed, RowKey key, DType type, int64_t hidden, void* out) {
  const uint64_t row = mix(seed, key.a, key.b, key.c);
  const auto bits_of = [row](int64_t c) {
    uint64_t bits = (row + static_cast<uint64_t>(c)) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93u;
    return bits ^ bits >> 29;
  };
  if (pattern == Pattern::random_values || pattern == Pattern::raw_bits || pattern == Pattern::blank_words) {
    const auto code_of = [=](int64_t c) {
      if (pattern == Pattern::raw_bits ||
          (pattern == Pattern::blank_words && mix(row, 5, switchyard::dtype_bytes(type, c) / 4) % 3 == 0))
        return pattern == Pattern::raw_bits ? bits_of(c) : ~uint64_t{0};
      return random_code(bits_of(c), type);
    };
    switch (switchyard::dtype_bits(type)) {
      case 8: return fill_codes<uint8_t>(hidden, out, code_of);
      case 16: return fill_codes<uint16_t>(hidden, out, code_of);
      default: return fill_codes<uint32_t>(hidden, out, code_of);
    }
  }
  std::vector<float> values(static_cast<size_t>(hidden));
  float* const value = values.data();
  for (int64_t c = 0; c < hidden; ++c) value[c] = value_of(pattern, seed, key, type, c, bits_of(c));
  store_row(type, value, hidden, out);
}

void fill_scales(uint64_t seed, RowKey key, ScaleKind kind, int64_t hidden, void* out, int group) {
  const int64_t groups = switchyard::num_scales(hidden, group);
  std::memset(out, 0, switchyard::scale_row_bytes(hidden, kind, group));
  for (int64_t g = 0; g < groups; ++g) {
    const uint64_t bits = mix(seed ^ 0x5CA1E, key.a * 1000003 + key.b, key.c, static_cast<uint64_t>(g));
    if (kind == ScaleKind::ue8m0) static_cast<uint8_t*>(out)[g] = static_cast<uint8_t>(bits);
    if (kind == ScaleKind::f32) store(DType::f32, out, g, random_value(bits));
  }
}

void quantise(DType type, const void* row, int64_t hidden, ScaleKind kind, uint8_t* codes, void* scales, int group_size) {
  std::memset(scales, 0, switchyard::scale_row_bytes(hidden, kind, group_size));
  std::vector<float> values(static_cast<size_t>(hidden));
  load_row(type, row, hidden, values.data());
  const float* const value = values.data();
  for (int64_t begin = 0; begin < hidden; begin += group_size) {
    const int64_t end = std::min(hidden, begin + group_size), group = begin / group_size;
    float amax = 0;
    for (int64_t c = begin; c < end; ++c) {
      const float x = value[c];
      if (std::isfinite(x)) amax = std::max(amax, std::fabs(x));
    }
    float scale = amax / 448.0f;
    if (scale == 0 && std::any_of(value + begin, value + end, [](float x) { return std::isinf(x); })) scale = 1;
    const bool zero_group = scale == 0;
    if (kind == ScaleKind::ue8m0) {
      int exponent = -127;
      while (exponent < 127 && power(exponent) < scale) ++exponent;  // 2^exponent >= amax / 448
      static_cast<uint8_t*>(scales)[group] = static_cast<uint8_t>(exponent + 127);
      scale = power(exponent);
    } else {
      store(DType::f32, scales, group, scale);
    }
    for (int64_t c = begin; c < end; ++c) {
      const float x = value[c];
      if (std::isnan(x)) {
        codes[c] = 0x7F;
      } else if (zero_group) {
        codes[c] = 0;
      } else {
        const float quotient = x / scale;
        codes[c] = static_cast<uint8_t>(encode(kE4m3, quotient));
      }
    }
  }
}

float scale_value(ScaleKind kind, const void* scales, int64_t group) {
  if (kind == ScaleKind::f32) return load(DType::f32, scales, group);
  return std::ldexp(1.0f, static_cast<const uint8_t*>(scales)[group] - 127);
}

namespace {

/// Each product is rounded before it is added.
void add_row(const float* from, float factor, int64_t columns, float* to) {
  for (int64_t c = 0; c < columns; ++c) {
    const float product = from[c] * factor;
    to[c] = to[c] + product;
  }
}

}  // namespace

void combine_row(const SumSpec& spec, const std::vector<Term>& terms, void* out) {
  const bool hosts = std::any_of(spec.host_of.begin(), spec.host_of.end(), [](int host) { return host != 0; });
  const bool per_host = spec.order == CombineOrder::per_host && hosts;
  std::map<int, std::vector<Term>> summed_together;  // by rank or host
  for (const auto& term : terms)
    summed_together[per_host ? spec.host_of[static_cast<size_t>(term.rank)] : term.rank].push_back(term);
  const auto columns = static_cast<size_t>(spec.hidden);
  std::vector<float> row(columns), sum(columns), partial(columns);
  std::vector<std::byte> rounded(columns * sizeof(float));
  // to += factor * from; a factor of 1 leaves the product exact.
  const auto add = [&spec, &row](std::vector<float>& to, const void* from, float factor) {
    load_row(spec.type, from, spec.hidden, row.data());
    add_row(row.data(), factor, spec.hidden, to.data());
  };
  const auto add_term = [&](std::vector<float>& to, const Term& term) {
    add(to, term.row, spec.weighted ? term.weight : 1.0f);
  };
  if (spec.bias[0]) load_row(spec.type, spec.bias[0], spec.hidden, sum.data());
  if (spec.bias[1]) add(sum, spec.bias[1], 1.0f);
  if (!per_host && (spec.order != CombineOrder::per_rank || spec.pre_reduced)) {
    for (const auto& term : terms) add_term(sum, term);
  } else {
    for (const auto& [where, inside] : summed_together) {
      std::fill(partial.begin(), partial.end(), 0.0f);
      for (const auto& term : inside) add_term(partial, term);
      store_row(spec.type, partial.data(), spec.hidden, rounded.data());
      add(sum, rounded.data(), 1.0f);
    }
  }
  store_row(spec.type, sum.data(), spec.hidden, out);
}

}  // namespace oracle
