// SPDX-License-Identifier: Apache-2.0
// Code compiled once per instruction set. row_ops.cpp includes this file repeatedly, each time with a different HWY_NAMESPACE
// and set of enabled instructions; this file and the files below therefore have no include guards. All versions produce
// identical bits. Must be compiled with -ffp-contract=off.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::detail {
namespace HWY_NAMESPACE {

int64_t target_id() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace switchyard::detail
HWY_AFTER_NAMESPACE();

#if HWY_TARGET == HWY_SCALAR
#include "arch/cpu/scalar_kernels-inl.hpp"
#else
#include "arch/cpu/row_kernels-inl.hpp"
#include "arch/cpu/quantize_kernels-inl.hpp"
#endif
