// SPDX-License-Identifier: Apache-2.0
// Included by row_math.cpp once per vector instruction set; the guard toggles, as Highway requires.
#if defined(SWITCHYARD_GEMM_CPU_ROW_MATH_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef SWITCHYARD_GEMM_CPU_ROW_MATH_INL
#undef SWITCHYARD_GEMM_CPU_ROW_MATH_INL
#else
#define SWITCHYARD_GEMM_CPU_ROW_MATH_INL
#endif

#include <cstdint>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::detail {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Stores float32 lanes as bf16, correctly rounded. Highway's own conversion truncates (as of 1.0.3).
template <class D>
HWY_INLINE void store_bf16([[maybe_unused]] D d, hn::Vec<D> value, uint16_t* dst) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint16_t, D> du16;
  const auto bits = hn::BitCast(du, value);
  const auto top = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(top, hn::Set(du, 1));
  const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF))));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
  const auto result = hn::IfThenElse(is_nan, hn::Or(top, hn::Set(du, 0x40)), nearest);
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, result)), du16, dst);  // below 2^16: saturation has no effect
}

template <class D>
HWY_INLINE void widen_step([[maybe_unused]] D d, const uint16_t* src, float* dst) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> du16;
  const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, src)));
  hn::StoreU(hn::BitCast(d, bits), d, dst);
}

/// Computes exp only for numbers <= 0, so that it cannot overflow and both branches of the logistic function keep their
/// precision.
template <class D>
HWY_INLINE void swiglu_step(D d, const float* gate, const float* up, uint16_t* dst) {
  const auto g = hn::LoadU(d, gate);
  const auto one = hn::Set(d, 1.0f);
  const auto e = hn::Exp(d, hn::Neg(hn::Abs(g)));
  const auto numerator = hn::IfThenElse(hn::Lt(g, hn::Zero(d)), e, one);
  const auto silu = hn::Mul(g, hn::Div(numerator, hn::Add(one, e)));
  store_bf16(d, hn::Mul(silu, hn::LoadU(d, up)), dst);
}

template <class D>
HWY_INLINE void add_scaled_step(D d, const float* src, float weight, float* sum) {
  const auto product = hn::Mul(hn::Set(d, weight), hn::LoadU(d, src));
  hn::StoreU(hn::Add(hn::LoadU(d, sum), product), d, sum);
}

/// Calls `step(tag, i)` for whole vectors, then for the remaining single elements.
template <class Step>
HWY_INLINE void for_elements(int64_t n, const Step& step) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) step(d, i);
  for (; i < n; ++i) step(d1, i);
}

void widen_any(const uint16_t* HWY_RESTRICT src, int64_t n, float* HWY_RESTRICT dst) {
  for_elements(n, [=](auto d, int64_t i) HWY_ATTR { widen_step(d, src + i, dst + i); });
}
void round_any(const float* HWY_RESTRICT src, int64_t n, uint16_t* HWY_RESTRICT dst) {
  for_elements(n, [=](auto d, int64_t i) HWY_ATTR { store_bf16(d, hn::LoadU(d, src + i), dst + i); });
}
void swiglu_any(const float* HWY_RESTRICT gate, const float* HWY_RESTRICT up, int64_t n, uint16_t* HWY_RESTRICT dst) {
  for_elements(n, [=](auto d, int64_t i) HWY_ATTR { swiglu_step(d, gate + i, up + i, dst + i); });
}
void add_scaled_any(const float* HWY_RESTRICT src, float weight, int64_t n, float* HWY_RESTRICT sum) {
  for_elements(n, [=](auto d, int64_t i) HWY_ATTR { add_scaled_step(d, src + i, weight, sum + i); });
}

}  // namespace HWY_NAMESPACE
}  // namespace switchyard::detail
HWY_AFTER_NAMESPACE();

#endif
