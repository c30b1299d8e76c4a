// SPDX-License-Identifier: Apache-2.0
// A whole layer of one rank on a GPU through the C ABI: both exchanges produce the same bits, and a token with a single expert
// has the bits of the row computed by ExpertMlp.
#include "gpu/gemm/c_layer_rows.h"

enum { kHidden = 64, kWidth = 48, kTokens = 6, kTopk = 2 };

static const int32_t kIds[kTokens * kTopk] = {0, 2, 1, 0, 2, -1, 2, 1, -1, -1, 1, 2};

typedef struct Arrays {
  void *w13, *w2, *x, *ids, *out;
} Arrays;

static sy_moe_layer_config make_config(sy_moe_exchange exchange) {
  sy_moe_layer_config c = SY_MOE_LAYER_CONFIG_INIT;
  c.hidden = kHidden;
  c.intermediate = kWidth;
  c.num_experts = kExperts;
  c.topk = kTopk;
  c.max_tokens = kTokens;
  c.exchange = exchange;
  c.storage = SY_WEIGHTS_VIEW;
  return c;
}

// Makes one call that either writes `out` or adds to zeros; both give the same result.
static void run_layer(sy_moe_exchange exchange, const Arrays* a, int add, cudaStream_t stream, uint16_t* out) {
  const sy_moe_layer_config config = make_config(exchange);
  sy_group_options options = patient_options(0);
  options.backend = SY_BACKEND_CUDA;
  options.device = 0;
  CHECK_OK(sy_moe_layer_heap_bytes(&config, 1, SY_BACKEND_CUDA, &options.heap_bytes));
  sy_group* group = NULL;
  sy_moe_layer* layer = NULL;
  CHECK_OK(sy_group_in_process(1, &options, &group));
  CHECK_OK(sy_moe_layer_create(group, &config, a->w13, a->w2, NULL, &layer));
  CHECK_OK(sy_group_destroy(group));  // the layer keeps it alive
  const sy_expert_ids ids = view_of_ids(a->ids, kTokens, kTopk);
  sy_moe_layer_call call = SY_MOE_LAYER_CALL_INIT;
  call.stream = stream;
  call.add = add;
  CHECK(cudaMemset(a->out, add ? 0 : 0xff, kTokens * kHidden * 2) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(sy_moe_layer_forward(layer, a->x, &ids, NULL, a->out, &call));
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  read_back(out, a->out, kTokens * kHidden * 2);
  CHECK_OK(sy_moe_layer_destroy(layer));
}

// Computes the output of expert 2 for token 2, which has no other expert.
static void run_expert(const Arrays* a, cudaStream_t stream, uint16_t* row) {
  sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
  options.backend = SY_BACKEND_CUDA;
  options.storage = SY_WEIGHTS_VIEW;
  options.max_rows = kTokens;
  sy_expert_mlp* mlp = NULL;
  CHECK_OK(sy_expert_mlp_create(&shape, a->w13, a->w2, &options, &mlp));
  const int64_t counts[kExperts] = {0, 0, 1}, first[kExperts] = {0, 0, 2};
  void* const memory[] = {on_gpu(counts, sizeof counts), on_gpu(first, sizeof first)};
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  rows.num_rows = memory[0];
  rows.first_row = memory[1];
  const sy_const_row_view x = bf16_rows(a->x, kTokens, kHidden);
  const sy_row_view y = bf16_results(a->out, kTokens, kHidden);
  sy_expert_call call = SY_EXPERT_CALL_INIT;
  call.stream = stream;
  CHECK_OK(sy_expert_mlp_forward(mlp, &x, &rows, &y, &call));
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  read_back(row, (const uint16_t*)a->out + 2 * kHidden, kHidden * 2);
  CHECK_OK(sy_expert_mlp_destroy(mlp));
  free_all(memory, sizeof memory / sizeof *memory);
}

void run_moe_layer_on_gpu(cudaStream_t stream) {
  const Arrays a = {bf16_on_gpu(31, kExperts * 2 * kWidth * kHidden), bf16_on_gpu(32, kExperts * kHidden * kWidth),
                    bf16_on_gpu(33, kTokens * kHidden), on_gpu(kIds, sizeof kIds), filled_on_gpu(0xff, kTokens * kHidden * 2)};
  static uint16_t made[4][kTokens * kHidden];
  for (int i = 0; i < 4; ++i)
    run_layer(i % 2 ? SY_MOE_EXCHANGE_LOW_LATENCY : SY_MOE_EXCHANGE_NORMAL, &a, i / 2, stream, made[i]);
  for (int i = 1; i < 4; ++i) CHECK(memcmp(made[0], made[i], sizeof made[0]) == 0);
  for (int c = 0; c < kHidden; ++c) CHECK(made[0][4 * kHidden + c] == 0);  // a token without an expert
  uint16_t row[kHidden];
  run_expert(&a, stream, row);
  CHECK(memcmp(row, made[0] + 2 * kHidden, sizeof row) == 0);
  int different = 0;
  for (int c = 0; c < kHidden; ++c) different += row[c] != 0;
  CHECK(different > kHidden / 2);
  void* const memory[] = {a.w13, a.w2, a.x, a.ids, a.out};
  free_all(memory, sizeof memory / sizeof *memory);
}
