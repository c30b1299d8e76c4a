/* SPDX-License-Identifier: Apache-2.0 */
/* What the C++ classes of the layer library make of the same arguments. In c_layer_reference.cpp. */
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

/* Of all elements: a closed form of (seed, global expert, matrix, row, column). */
void reference_weights(uint64_t seed, const mlp_case* of, uint16_t* w13, uint16_t* w2);
/* Each writes `y` as ExpertMlp does; exceptions end the program. */
void reference_forward(const mlp_case* of, const uint16_t* x, int64_t rows, const int64_t* first_row, const int64_t* num_rows,
                       uint16_t* y);
void reference_rank_major(const mlp_case* of, const uint16_t* x, const int32_t* ids, int64_t tokens, int topk,
                          const float* weights, uint16_t* y);
/* ExpertMlp::memory(), of weights and of scratch, and implementation(), cut to `size`. */
void reference_facts(const mlp_case* of, size_t* weight_bytes, size_t* scratch_bytes, char* implementation, size_t size);

#ifdef __cplusplus
}
#endif
