// SPDX-License-Identifier: Apache-2.0
// The matrix instruction of sm_90a: a warpgroup (128 threads, i.e. four warps starting at a multiple of four) multiplies two
// operands in shared memory. d[64, N] (+)= a[64, 16] * b[N, 16]^T in float32, for bf16 and f16.
//
// Order: wgmma_begin() must precede the first instruction that reads shared memory or accumulators written by ordinary code,
// wgmma_commit() closes a group, and wgmma_wait<n>() returns when all but the latest n groups are complete. Shared-memory
// operands are written by tensor copies; their mbarrier must have been waited for. An accumulator may be read only after
// keep().
//
// Fragments: thread t of the warpgroup holds, in d[4 * j + 2 * i + c], row 16 * (t / 32) + t % 32 / 4 + 8 * i of column 8 * j +
// 2 * (t % 4) + c.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace switchyard::detail::ptx {

/// Memory order of an operand in shared memory: the 16 elements along the summed dimension are adjacent (inner), or the
/// operand's rows are adjacent (outer).
enum class OperandOrder : uint8_t { inner, outer };

/// Descriptor of an operand written by a tensor copy with 128-byte swizzle at `address`, a multiple of 1024: consecutive atoms
/// of 8 rows of 128 bytes. With inner order, each memory row is a row of the operand with 64 elements along the summed
/// dimension; the next 16 elements are at descriptor + 2. With outer order, each memory row is one element along the summed
/// dimension for 64 rows of the operand. The next 16 elements are at descriptor + 128; in an operand with more than 64 rows,
/// the next 64 rows start `next_64` bytes later.
__device__ __forceinline__ uint64_t operand_at(uint32_t address, uint32_t next_64 = 16) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kNextAtom = 1024 >> 4;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(next_64 >> 4) << 16 | kNextAtom << 32 |
         kSwizzle128;
}
inline constexpr uint64_t kInnerStep = 2, kOuterStep = 128;  // descriptor steps to the next 16 elements of the sum
inline constexpr uint64_t operand_bytes(uint32_t bytes) { return bytes >> 4; }

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
/// Prevents reads of the accumulators from being moved ahead of this point or the preceding wait.
template <int kCount>
__device__ __forceinline__ void keep(float (&d)[kCount]) {
#pragma unroll
  for (float& f : d) asm volatile("" : "+f"(f)::"memory");
}

/// Forces a value to stay in its register; otherwise the compiler recomputes it in each iteration of a loop.
__device__ __forceinline__ void keep_register(uint32_t& v) { asm volatile("" : "+r"(v)); }

/// A single instruction with N columns. `first` overwrites d without reading it; a "+f" operand that was never written would
/// keep the registers of every N live at once. `add` accumulates.
template <int N>
struct Wgmma;

// Lists of N / 2 registers, in groups of eight: their names in the assembly text, and the operands.
#define SWITCHYARD_NAMES_1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SWITCHYARD_NAMES_2 SWITCHYARD_NAMES_1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SWITCHYARD_NAMES_3 SWITCHYARD_NAMES_2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SWITCHYARD_NAMES_4 SWITCHYARD_NAMES_3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define SWITCHYARD_NAMES_5 SWITCHYARD_NAMES_4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define SWITCHYARD_NAMES_6 SWITCHYARD_NAMES_5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define SWITCHYARD_NAMES_7 SWITCHYARD_NAMES_6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define SWITCHYARD_NAMES_8 SWITCHYARD_NAMES_7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define SWITCHYARD_NAMES_9 SWITCHYARD_NAMES_8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define SWITCHYARD_NAMES_10 SWITCHYARD_NAMES_9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define SWITCHYARD_NAMES_11 SWITCHYARD_NAMES_10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define SWITCHYARD_NAMES_12 SWITCHYARD_NAMES_11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define SWITCHYARD_NAMES_13 SWITCHYARD_NAMES_12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define SWITCHYARD_NAMES_14 SWITCHYARD_NAMES_13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define SWITCHYARD_NAMES_15 SWITCHYARD_NAMES_14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define SWITCHYARD_NAMES_16 SWITCHYARD_NAMES_15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define SWITCHYARD_EIGHT(c, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define SWITCHYARD_ACCUMULATORS_1(c) SWITCHYARD_EIGHT(c, 0)
#define SWITCHYARD_ACCUMULATORS_2(c) SWITCHYARD_ACCUMULATORS_1(c), SWITCHYARD_EIGHT(c, 8)
#define SWITCHYARD_ACCUMULATORS_3(c) SWITCHYARD_ACCUMULATORS_2(c), SWITCHYARD_EIGHT(c, 16)
#define SWITCHYARD_ACCUMULATORS_4(c) SWITCHYARD_ACCUMULATORS_3(c), SWITCHYARD_EIGHT(c, 24)
#define SWITCHYARD_ACCUMULATORS_5(c) SWITCHYARD_ACCUMULATORS_4(c), SWITCHYARD_EIGHT(c, 32)
#define SWITCHYARD_ACCUMULATORS_6(c) SWITCHYARD_ACCUMULATORS_5(c), SWITCHYARD_EIGHT(c, 40)
#define SWITCHYARD_ACCUMULATORS_7(c) SWITCHYARD_ACCUMULATORS_6(c), SWITCHYARD_EIGHT(c, 48)
#define SWITCHYARD_ACCUMULATORS_8(c) SWITCHYARD_ACCUMULATORS_7(c), SWITCHYARD_EIGHT(c, 56)
#define SWITCHYARD_ACCUMULATORS_9(c) SWITCHYARD_ACCUMULATORS_8(c), SWITCHYARD_EIGHT(c, 64)
#define SWITCHYARD_ACCUMULATORS_10(c) SWITCHYARD_ACCUMULATORS_9(c), SWITCHYARD_EIGHT(c, 72)
#define SWITCHYARD_ACCUMULATORS_11(c) SWITCHYARD_ACCUMULATORS_10(c), SWITCHYARD_EIGHT(c, 80)
#define SWITCHYARD_ACCUMULATORS_12(c) SWITCHYARD_ACCUMULATORS_11(c), SWITCHYARD_EIGHT(c, 88)
#define SWITCHYARD_ACCUMULATORS_13(c) SWITCHYARD_ACCUMULATORS_12(c), SWITCHYARD_EIGHT(c, 96)
#define SWITCHYARD_ACCUMULATORS_14(c) SWITCHYARD_ACCUMULATORS_13(c), SWITCHYARD_EIGHT(c, 104)
#define SWITCHYARD_ACCUMULATORS_15(c) SWITCHYARD_ACCUMULATORS_14(c), SWITCHYARD_EIGHT(c, 112)
#define SWITCHYARD_ACCUMULATORS_16(c) SWITCHYARD_ACCUMULATORS_15(c), SWITCHYARD_EIGHT(c, 120)

// TYPE: type of both operands; A, B: 1 if the operand has outer order; C: constraint of the accumulators; I: N / 16; X, Y:
// operand indices of the descriptors.
#define SWITCHYARD_WGMMA_TEXT(TYPE, ADD, C, N, I, X, Y, A, B)                                                             \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " #ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
               " {" SWITCHYARD_NAMES_##I "}, %" #X ", %" #Y ", p, 1, 1, " #A ", " #B ";}"                                 \
               : SWITCHYARD_ACCUMULATORS_##I(C)                                                                           \
               : "l"(a), "l"(b))
#define SWITCHYARD_WGMMA_ORDERS(TYPE, ADD, C, N, I, X, Y)               \
  if constexpr (kA == OperandOrder::inner && kB == OperandOrder::inner) \
    SWITCHYARD_WGMMA_TEXT(TYPE, ADD, C, N, I, X, Y, 0, 0);              \
  else if constexpr (kB == OperandOrder::inner)                         \
    SWITCHYARD_WGMMA_TEXT(TYPE, ADD, C, N, I, X, Y, 1, 0);              \
  else                                                                  \
    SWITCHYARD_WGMMA_TEXT(TYPE, ADD, C, N, I, X, Y, 1, 1)
#define SWITCHYARD_WGMMA_CALL(NAME, ADD, C, N, I, X, Y)                                       \
  template <class Element, OperandOrder kA, OperandOrder kB>                                  \
  static __device__ __forceinline__ void NAME(float(&d)[N / 2], uint64_t a, uint64_t b) {     \
    static_assert(std::is_same_v<Element, __nv_bfloat16> || std::is_same_v<Element, __half>); \
    if constexpr (std::is_same_v<Element, __half>) {                                          \
      SWITCHYARD_WGMMA_ORDERS("f16", ADD, C, N, I, X, Y);                                     \
    } else {                                                                                  \
      SWITCHYARD_WGMMA_ORDERS("bf16", ADD, C, N, I, X, Y);                                    \
    }                                                                                         \
  }
#define SWITCHYARD_WGMMA(N, I, X, Y)                  \
  template <>                                         \
  struct Wgmma<N> {                                   \
    SWITCHYARD_WGMMA_CALL(first, 0, "=f", N, I, X, Y) \
    SWITCHYARD_WGMMA_CALL(add, 1, "+f", N, I, X, Y)   \
  };
SWITCHYARD_WGMMA(16, 1, 8, 9)
SWITCHYARD_WGMMA(32, 2, 16, 17)
SWITCHYARD_WGMMA(48, 3, 24, 25)
SWITCHYARD_WGMMA(64, 4, 32, 33)
SWITCHYARD_WGMMA(80, 5, 40, 41)
SWITCHYARD_WGMMA(96, 6, 48, 49)
SWITCHYARD_WGMMA(112, 7, 56, 57)
SWITCHYARD_WGMMA(128, 8, 64, 65)
SWITCHYARD_WGMMA(144, 9, 72, 73)
SWITCHYARD_WGMMA(160, 10, 80, 81)
SWITCHYARD_WGMMA(176, 11, 88, 89)
SWITCHYARD_WGMMA(192, 12, 96, 97)

/// Wgmma for fp8 e4m3 with 32 elements along the summed dimension and both operands in inner order; the next 32 elements are
/// kInnerStep further.
template <int N>
struct WgmmaE4m3;

#define SWITCHYARD_WGMMA_E4M3_CALL(NAME, ADD, C, N, I, X, Y)                                       \
  static __device__ __forceinline__ void NAME(float(&d)[N / 2], uint64_t a, uint64_t b) {          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k32.f32.e4m3.e4m3 {" SWITCHYARD_NAMES_##I "}, %" #X ", %" #Y ", p, 1, 1;}"       \
                 : SWITCHYARD_ACCUMULATORS_##I(C)                                                  \
                 : "l"(a), "l"(b));                                                                \
  }
#define SWITCHYARD_WGMMA_E4M3(N, I, X, Y)                  \
  template <>                                              \
  struct WgmmaE4m3<N> {                                    \
    SWITCHYARD_WGMMA_E4M3_CALL(first, 0, "=f", N, I, X, Y) \
    SWITCHYARD_WGMMA_E4M3_CALL(add, 1, "+f", N, I, X, Y)   \
  };
SWITCHYARD_WGMMA_E4M3(16, 1, 8, 9)
SWITCHYARD_WGMMA_E4M3(32, 2, 16, 17)
SWITCHYARD_WGMMA_E4M3(48, 3, 24, 25)
SWITCHYARD_WGMMA_E4M3(64, 4, 32, 33)
SWITCHYARD_WGMMA_E4M3(80, 5, 40, 41)
SWITCHYARD_WGMMA_E4M3(96, 6, 48, 49)
SWITCHYARD_WGMMA_E4M3(112, 7, 56, 57)
SWITCHYARD_WGMMA_E4M3(128, 8, 64, 65)

/// WgmmaE4m3<128> with the first operand in registers. Thread t of the warpgroup holds, in a[2 * j + i], elements [4 * (t % 4)
/// + 16 * j, + 4) of row 16 * (t / 32) + t % 32 / 4 + 8 * i. `add`: 0 overwrites d. If the compiler cannot know a 0 (it is read
/// from a kernel's parameters), it keeps d in its registers; otherwise it allocates others.
__device__ __forceinline__ void multiply_e4m3_rows(float (&d)[64], const uint32_t* a, uint64_t b, uint32_t add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" SWITCHYARD_NAMES_8
      "}, {%64, %65, %66, %67}, %68, p, 1, 1;}"
      : SWITCHYARD_ACCUMULATORS_8("+f")
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
/// Variant for d[64, 64] and 64 rows of b.
__device__ __forceinline__ void multiply_e4m3_rows(float (&d)[32], const uint32_t* a, uint64_t b, uint32_t add) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" SWITCHYARD_NAMES_4
               "}, {%32, %33, %34, %35}, %36, p, 1, 1;}"
               : SWITCHYARD_ACCUMULATORS_4("+f")
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// d[64, 256] += a[64, 32] * b[256, 32]^T for fp8 e4m3, both operands in shared memory, in inner order.
__device__ __forceinline__ void multiply_e4m3_256(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" SWITCHYARD_NAMES_16
               "}, %128, %129, p, 1, 1;}"
               : SWITCHYARD_ACCUMULATORS_16("+f")
               : "l"(a), "l"(b));
}

}  // namespace switchyard::detail::ptx
