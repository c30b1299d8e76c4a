/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers and rows of experts in gpu_c_layer. */
#pragma once

#include <cuda_runtime_api.h>

#include "abi/c_layer.h"
#include "gpu/harness/c_gpu.h"

enum { kExperts = 3, kRows = 48 };

/* Rows of each expert, with gaps, and an expert without rows. Defined in c_layer.c, as are the following functions. */
extern const int64_t kFirstRow[kExperts], kNumRows[kExperts];
/* Rows in units of 16. */
extern const int32_t kMasked[kExperts];
extern const int64_t kMaskedFirst[kExperts], kMaskedRows[kExperts];
/* Values of one seed (see number). */
void* bf16_on_gpu(int seed, int64_t elements);

/* Returns the expert of a row, or -1. */
static inline int expert_of(int64_t row, const int64_t* first_row, const int64_t* num_rows) {
  for (int e = 0; e < kExperts; ++e)
    if (row >= first_row[e] && row < first_row[e] + num_rows[e]) return e;
  return -1;
}

/* -1, 0 or 1: pseudorandom, and independent of the values of other seeds. */
static inline int number(int seed, int64_t i) {
  uint64_t bits = ((uint64_t)seed << 32) + (uint64_t)i + 1;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  return (int)((bits >> 33) % 3) - 1;
}

/* The nearest bf16, ties to even. The argument must not be NaN. */
static inline uint16_t bf16_of(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float float_of(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float value = 0.0f;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* In c_gradients.c: the calls of switchyard/c/gemm_gradients.h. */
void run_gradient_tests(cudaStream_t stream);
/* In c_moe_layer.c: the calls of switchyard/c/layer.h. */
void run_moe_layer_on_gpu(cudaStream_t stream);
