/* SPDX-License-Identifier: Apache-2.0 */
/* Results of the C++ classes of the layer library for the same arguments. In c_layer_reference.cpp. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mlp_case {
  int64_t hidden, intermediate;
  int experts, views_weights;
  const uint16_t *w13, *w2;
} mlp_case;

/* Fills all elements: a closed form of (seed, global expert, matrix, row, column). */
void reference_weights(uint64_t seed, const mlp_case* of, uint16_t* w13, uint16_t* w2);
/* Each writes `y` like ExpertMlp; exceptions end the program. */
void reference_forward(const mlp_case* of, const uint16_t* x, int64_t rows, const int64_t* first_row, const int64_t* num_rows,
                       uint16_t* y);
void reference_rank_major(const mlp_case* of, const uint16_t* x, const int32_t* ids, int64_t tokens, int topk,
                          const float* weights, uint16_t* y);
/* ExpertMlp::memory(), of weights and of scratch, and implementation(), cut to `size`. */
void reference_facts(const mlp_case* of, size_t* weight_bytes, size_t* scratch_bytes, char* implementation, size_t size);

/* A layer of two ranks, each with half of the experts; here the ranks are threads of a separate group. */
typedef struct moe_case {
  mlp_case experts; /* of each rank; w13 and w2 are not used */
  const uint16_t *w13[2], *w2[2], *x[2];
  const int32_t* ids[2];
  const float* weights[2];
  int64_t tokens;
  int topk, low_latency;
} moe_case;
/* Writes `out` of both ranks like MoeLayer. `add`: adds to the existing content. */
void reference_moe(const moe_case* of, int add, uint16_t* const out[2]);
/* MoeLayer::memory_required(): heap, private, weights, scratch; and heap_bytes(). */
void reference_moe_memory(const moe_case* of, size_t bytes[5]);

#ifdef __cplusplus
}
#endif
