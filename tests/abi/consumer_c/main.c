// SPDX-License-Identifier: Apache-2.0
// Uses the exchange and the experts from C, and reads the errors of both libraries with one function.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <switchyard/c/expert.h>
#include <switchyard/c/gemm.h>
#include <switchyard/c/gemm_gradients.h>
#include <switchyard/c/switchyard.h>

// One expert of 1 x 1 matrices of ones: y = silu(1) * 1, within bf16.
static int experts_work(void) {
  static const uint16_t one = 0x3F80, w13[2] = {0x3F80, 0x3F80};
  static const int64_t num_rows = 1;
  uint16_t result = 0;
  sy_expert_shape shape = SY_EXPERT_SHAPE_INIT;
  shape.hidden = shape.intermediate = shape.num_local_experts = 1;
  sy_const_row_view x = SY_CONST_ROW_VIEW_INIT;
  sy_row_view y = SY_ROW_VIEW_INIT;
  x.data = &one;
  y.data = &result;
  x.rows = x.cols = y.rows = y.cols = 1;
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  rows.num_rows = &num_rows;
  rows.rows_per_expert = 1;
  sy_expert_mlp* mlp = NULL;
  const int ok =
      sy_expert_mlp_create(&shape, w13, &one, NULL, &mlp) == SY_OK && sy_expert_mlp_forward(mlp, &x, &rows, &y, NULL) == SY_OK;
  sy_expert_mlp_destroy(mlp);
  return ok && result == 0x3F3B;  // 0.7311
}

// Gradient functions are linked; they reject invalid arguments before they look for a GPU.
static int gradients_are_linked(void) {
  const sy_weight_gradient_config config = SY_WEIGHT_GRADIENT_CONFIG_INIT;
  sy_weight_gradient* gradient = NULL;
  return sy_weight_gradient_create(&config, &gradient) == SY_INVALID_ARGUMENT && gradient == NULL;
}

static int errors_are_reported(void) {
  const int of_experts = sy_expert_mlp_memory(NULL, NULL) == SY_INVALID_ARGUMENT && strcmp(sy_last_error(), "mlp is NULL") == 0;
  const int of_exchange = sy_group_barrier(NULL) == SY_INVALID_ARGUMENT && strstr(sy_last_error(), "group is NULL");
  return of_experts && of_exchange;
}

int main(void) {
  sy_group* alone = NULL;
  int ok = sy_group_in_process(1, NULL, &alone) == SY_OK && sy_group_barrier(alone) == SY_OK;
  ok = ok && experts_work() && gradients_are_linked() && errors_are_reported();
  sy_group_destroy(alone);
  puts(ok ? "consumer: PASS" : "consumer: FAIL");
  return ok ? 0 : 1;
}
