/* SPDX-License-Identifier: Apache-2.0 */
/* Shared parts of the C programs of the layer library. */
#pragma once

#include "c_check.h"
#include "switchyard/c/expert.h"
#include "switchyard/c/gemm.h"
#include "switchyard/c/gemm_gradients.h"
#include "switchyard/c/layer.h"

static inline sy_const_row_view bf16_rows(const void* data, int64_t rows, int64_t cols) {
  sy_const_row_view v = SY_CONST_ROW_VIEW_INIT;
  v.data = data;
  v.rows = rows;
  v.cols = cols;
  return v;
}

static inline sy_row_view bf16_results(void* data, int64_t rows, int64_t cols) {
  sy_row_view v = SY_ROW_VIEW_INIT;
  v.data = data;
  v.rows = rows;
  v.cols = cols;
  return v;
}

static inline sy_expert_shape small_shape(int64_t hidden, int64_t intermediate, int32_t experts) {
  sy_expert_shape s = SY_EXPERT_SHAPE_INIT;
  s.hidden = hidden;
  s.intermediate = intermediate;
  s.num_local_experts = experts;
  return s;
}

/* In c_moe_layer.c, c_layer_errors.c, c_gradient_errors.c. */
void run_moe_layer_tests(void);
void run_layer_error_tests(void);
void run_gradient_error_tests(void);
