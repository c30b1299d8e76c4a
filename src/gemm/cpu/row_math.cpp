// SPDX-License-Identifier: Apache-2.0
// Requires -ffp-contract=off, because GCC also contracts vector intrinsics.
#include "gemm/cpu/row_math.hpp"

#include "gemm/announce.hpp"

// Highway 1.0.3 (Debian 12) does not compile if this target is the compiler's baseline (-march=native on Ice Lake and later):
// it omits the target from the list of targets to compile, but then requires it. AVX3 replaces it.
#define HWY_DISABLED_TARGETS HWY_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/cpu/row_math-inl.hpp"
#include "hwy/foreach_target.h"  // compiles all targets but the last; the next line compiles the last
#include "gemm/cpu/row_math-inl.hpp"

namespace switchyard::detail {
namespace {

HWY_EXPORT(widen_any);
HWY_EXPORT(round_any);
HWY_EXPORT(swiglu_any);
HWY_EXPORT(add_scaled_any);

template <class T>
void announce_read_n(const T* begin, int64_t n) {
  announce_read(begin, static_cast<size_t>(n) * sizeof(T));
}
template <class T>
void announce_write_n(T* begin, int64_t n) {
  announce_write(begin, static_cast<size_t>(n) * sizeof(T));
}

}  // namespace

void widen_bf16(const uint16_t* src, int64_t n, float* dst) {
  announce_read_n(src, n);
  announce_write_n(dst, n);
  HWY_DYNAMIC_DISPATCH(widen_any)(src, n, dst);
}

void round_to_bf16(const float* src, int64_t n, uint16_t* dst) {
  announce_read_n(src, n);
  announce_write_n(dst, n);
  HWY_DYNAMIC_DISPATCH(round_any)(src, n, dst);
}

void swiglu(const float* gate, const float* up, int64_t n, uint16_t* dst) {
  announce_read_n(gate, n);
  announce_read_n(up, n);
  announce_write_n(dst, n);
  HWY_DYNAMIC_DISPATCH(swiglu_any)(gate, up, n, dst);
}

void add_scaled(const float* src, float weight, int64_t n, float* sum) {
  announce_read_n(src, n);
  announce_write_n(sum, n);
  HWY_DYNAMIC_DISPATCH(add_scaled_any)(src, weight, n, sum);
}

}  // namespace switchyard::detail
