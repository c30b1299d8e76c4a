// SPDX-License-Identifier: Apache-2.0
// Vectorized row ops: quantization. See kernels-inl.hpp.
#include <algorithm>
#include <cstring>

#include "base/number_formats.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::detail {
namespace HWY_NAMESPACE {

constexpr size_t kMaxGroup = static_cast<size_t>(kScaleGroup);

/// e4m3 codes in the low byte of each lane.
HWY_INLINE VI round_e4m3(VF value) {
  const DU du;
  const DI di;
  const VU bits = hn::BitCast(du, value);
  const VU magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
  const VI ordered = hn::BitCast(di, magnitude);
  const VI clamped = hn::Min(ordered, hn::Set(di, 0x43E00000));  // 448
  const VI odd = hn::And(hn::ShiftRight<20>(clamped), hn::Set(di, 1));
  const VI normal = hn::ShiftRight<20>(hn::Add(hn::Sub(clamped, hn::Set(di, 0x3C000000 - 0x7FFFF)), odd));
  // Below 2^-6: after adding 2^14, the low bits contain the value in multiples of 2^-9, rounded to nearest.
  const VF shifted = hn::Add(hn::BitCast(DF(), clamped), hn::Set(DF(), 16384.0f));
  const VI subnormal = hn::Sub(hn::BitCast(di, shifted), hn::Set(di, 0x46800000));
  const VI code = hn::IfThenElse(hn::Lt(clamped, hn::Set(di, 0x3C800000)), subnormal, normal);
  const VI sign = hn::BitCast(di, hn::ShiftRight<24>(hn::Xor(bits, magnitude)));
  return hn::IfThenElse(hn::Gt(ordered, hn::Set(di, 0x7F800000)), hn::Set(di, kE4m3Nan), hn::Or(code, sign));
}

/// Widens a complete group into `values` and returns its largest finite magnitude.
template <class Row>
HWY_INLINE float widen_group(const uint8_t* source, float* HWY_RESTRICT values, size_t size) {
  const DF df;
  const DI di;
  const size_t lanes = hn::Lanes(df);
  VI largest = hn::Zero(di);
  for (size_t i = 0; i < size; i += lanes) {
    const VF value = Row::load(source + i * Row::kBytes);
    hn::Store(value, df, values + i);
    const VI magnitude = hn::And(hn::BitCast(di, value), hn::Set(di, 0x7FFFFFFF));
    largest = hn::Max(largest, hn::IfThenElseZero(hn::Lt(magnitude, hn::Set(di, 0x7F800000)), magnitude));
  }
  return f32_of_bits(static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest))));
}

/// The quotient that determines the scale of a complete group: amax / 448, or 1 if amax is zero and the group contains an
/// infinity.
HWY_INLINE float scale_of_group(const float* HWY_RESTRICT values, size_t size, float amax) {
  const float quotient = amax / kE4m3Max;
  if (quotient != 0) return quotient;
  const DF df;
  const DI di;
  VI infinite = hn::Zero(di);
  for (size_t i = 0; i < size; i += hn::Lanes(df)) {
    const VI magnitude = hn::And(hn::BitCast(di, hn::Load(df, values + i)), hn::Set(di, 0x7FFFFFFF));
    infinite = hn::Max(infinite, hn::IfThenElseZero(hn::Eq(magnitude, hn::Set(di, 0x7F800000)), hn::Set(di, 1)));
  }
  return hn::GetLane(hn::MaxOfLanes(di, infinite)) != 0 ? 1.0f : 0.0f;
}

/// Codes of a complete group. They are 0 for all values except NaN if scale_of_group is zero, else the codes of the quotients
/// by `divisor`.
HWY_INLINE void quantize_group(const float* HWY_RESTRICT values, size_t size, float quotient, float divisor,
                               uint8_t* HWY_RESTRICT q) {
  const DF df;
  const DI di;
  const D8Quarter d8;
  const size_t lanes = hn::Lanes(df);
  if (quotient == 0) {
    for (size_t i = 0; i < size; i += lanes) {
      const auto is_nan = hn::RebindMask(di, hn::IsNaN(hn::Load(df, values + i)));
      hn::StoreU(hn::DemoteTo(d8, hn::IfThenElseZero(is_nan, hn::Set(di, kE4m3Nan))), d8, q + i);
    }
    return;
  }
  const VF divisors = hn::Set(df, divisor);
  for (size_t i = 0; i < size; i += 2 * lanes) {
    const VI low = round_e4m3(hn::Div(hn::Load(df, values + i), divisors));
    const VI high = round_e4m3(hn::Div(hn::Load(df, values + i + lanes), divisors));
    hn::StoreU(hn::DemoteTo(d8, low), d8, q + i);
    hn::StoreU(hn::DemoteTo(d8, high), d8, q + i + lanes);
  }
}

/// Derives the scale of `group` from `quotient` (scale_of_group), stores it, and returns the divisor of the group's elements.
HWY_INLINE float store_scale(float quotient, uint8_t* scales, size_t group, ScaleKind kind) {
  if (kind == ScaleKind::ue8m0) {
    scales[group] = ue8m0_from_scale(quotient);
    return f32_from_ue8m0(scales[group]);
  }
  std::memcpy(scales + group * sizeof quotient, &quotient, sizeof quotient);
  return quotient;
}

/// Processes several groups at a time to hide latency: the maximum of one group is a long chain of dependent instructions.
template <class Row>
void quantize_typed(uint8_t* q, uint8_t* scales, const uint8_t* src, size_t hidden, ScaleKind kind, size_t size) {
  constexpr size_t kBatch = 4;
  alignas(kBufferAlignment) float values[kBatch][kMaxGroup];
  const void* const row = src;
  const ReadAhead read_ahead(&row, 1, hidden * Row::kBytes);
  const size_t whole_groups = hidden / size;
  for (size_t group = 0; group < whole_groups; group += kBatch) {
    const size_t count = std::min(kBatch, whole_groups - group);
    float quotients[kBatch];
    read_ahead.advance(group * size * Row::kBytes, count * size * Row::kBytes);
    for (size_t i = 0; i < count; ++i) {
      const float amax = widen_group<Row>(src + (group + i) * size * Row::kBytes, values[i], size);
      quotients[i] = scale_of_group(values[i], size, amax);
    }
    for (size_t i = 0; i < count; ++i) {
      const float divisor = store_scale(quotients[i], scales, group + i, kind);
      quantize_group(values[i], size, quotients[i], divisor, q + (group + i) * size);
    }
  }
  const size_t rest = hidden - whole_groups * size;
  if (rest == 0) return;
  alignas(kBufferAlignment) uint8_t padded[kMaxGroup * Row::kBytes] = {};
  alignas(kBufferAlignment) uint8_t codes[kMaxGroup];
  std::memcpy(padded, src + whole_groups * size * Row::kBytes, rest * Row::kBytes);
  const float amax = widen_group<Row>(padded, values[0], size);
  const float quotient = scale_of_group(values[0], size, amax);
  quantize_group(values[0], size, quotient, store_scale(quotient, scales, whole_groups, kind), codes);
  std::memcpy(q + whole_groups * size, codes, rest);
}

void quantize_any(uint8_t* q, uint8_t* scales, const uint8_t* src, DType type, size_t hidden, ScaleKind kind, size_t size) {
  with_quantised_type(type, [&]<DType T>() { quantize_typed<VectorRow<T>>(q, scales, src, hidden, kind, size); });
}

}  // namespace HWY_NAMESPACE
}  // namespace switchyard::detail
HWY_AFTER_NAMESPACE();
