// SPDX-License-Identifier: Apache-2.0
// The layer library's C ABI on a GPU, from C11 through the shared library. Matrices consist of small integers and scales are
// powers of two, so float32 sums are exact and an output has only one correct value; expected values are computed by the loops
// in this file.
#include <stdlib.h>

#include "gpu/gemm/c_layer_rows.h"

enum { kMaxElements = 1 << 17 };

// ---- Numbers ----

static uint8_t e4m3_of(int value) { return value == 0 ? 0x00 : value > 0 ? 0x38 : 0xb8; }

void* bf16_on_gpu(int seed, int64_t elements) {
  static uint16_t host[kMaxElements];
  if (elements > kMaxElements) abort();
  for (int64_t i = 0; i < elements; ++i) host[i] = bf16_of((float)number(seed, i));
  return on_gpu(host, (size_t)elements * sizeof *host);
}

static void* e4m3_on_gpu(int seed, int64_t elements) {
  static uint8_t host[kMaxElements];
  if (elements > kMaxElements) abort();
  for (int64_t i = 0; i < elements; ++i) host[i] = e4m3_of(number(seed, i));
  return on_gpu(host, (size_t)elements);
}

// ---- Grouped GEMM ----

enum { kN = 72, kK = 88 };

const int64_t kFirstRow[kExperts] = {20, 0, 2}, kNumRows[kExperts] = {11, 0, 17};
const int32_t kMasked[kExperts] = {5, 16, 0};
const int64_t kMaskedFirst[kExperts] = {0, 16, 32}, kMaskedRows[kExperts] = {5, 16, 0};

static float product(sy_weight_order order, int e, int64_t row, int column) {
  int sum = 0;
  for (int j = 0; j < kK; ++j) {
    const int64_t at = order == SY_WEIGHTS_NK ? column * kK + j : j * kN + column;
    sum += number(1, (int64_t)e * kN * kK + at) * number(2, row * kK + j);
  }
  return (float)sum;
}

// Rows that belong to no expert keep their content.
static void check_products(const void* device, sy_weight_order order, int relu, const int64_t* first, const int64_t* counts) {
  static uint16_t out[kRows * kN];
  CHECK(cudaMemcpy(out, device, sizeof out, cudaMemcpyDeviceToHost) == cudaSuccess);
  int wrong = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const int e = expert_of(row, first, counts);
    for (int j = 0; j < kN; ++j) {
      const float sum = e < 0 ? 0.0f : product(order, e, row, j);
      const uint16_t expected = e < 0 ? 0xabab : bf16_of(relu && sum < 0.0f ? 0.0f : sum);
      wrong += out[row * kN + j] != expected;
    }
  }
  CHECK(wrong == 0);
}

static void grouped_gemm(cudaStream_t stream, sy_weight_order order, sy_epilogue epilogue) {
  sy_grouped_gemm_config config = SY_GROUPED_GEMM_CONFIG_INIT;
  config.num_experts = kExperts;
  config.n = kN;
  config.k = kK;
  config.order = order;
  config.epilogue = epilogue;
  void* const memory[] = {bf16_on_gpu(1, kExperts * kN * kK),  bf16_on_gpu(2, kRows * kK),
                          filled_on_gpu(0xab, kRows * kN * 2), filled_on_gpu(0xab, kRows * kN * 2),
                          on_gpu(kFirstRow, sizeof kFirstRow), on_gpu(kNumRows, sizeof kNumRows),
                          on_gpu(kMasked, sizeof kMasked)};
  sy_grouped_gemm* gemm = NULL;
  CHECK_OK(sy_grouped_gemm_create(&config, memory[0], NULL, &gemm));
  const sy_const_row_view x = bf16_rows(memory[1], kRows, kK);
  const sy_row_view out = bf16_results(memory[2], kRows, kN), again = bf16_results(memory[3], kRows, kN);
  sy_expert_rows ranges = SY_EXPERT_ROWS_INIT, masked = SY_EXPERT_ROWS_INIT;
  ranges.first_row = memory[4];
  ranges.num_rows = memory[5];
  masked.num_rows_32 = memory[6];
  masked.rows_per_expert = 16;
  sy_grouped_gemm_options options = SY_GROUPED_GEMM_OPTIONS_INIT;
  options.stream = stream;
  CHECK_OK(sy_grouped_gemm_run(gemm, &x, &ranges, &out, &options));
  options.num_sms = 2;
  CHECK_OK(sy_grouped_gemm_run(gemm, &x, &masked, &again, &options));
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  const int relu = epilogue == SY_EPILOGUE_RELU;
  check_products(memory[2], order, relu, kFirstRow, kNumRows);
  check_products(memory[3], order, relu, kMaskedFirst, kMaskedRows);

  options.num_sms = 100000;
  CHECK_FAILS(sy_grouped_gemm_run(gemm, &x, &ranges, &out, &options), SY_INVALID_ARGUMENT, "num_sms = 100000");
  const sy_const_row_view odd = bf16_rows((const char*)memory[1] + 2, kRows, kK);
  CHECK_FAILS(sy_grouped_gemm_run(gemm, &odd, &ranges, &out, NULL), SY_INVALID_ARGUMENT, "x must begin at");
  const sy_row_view narrow = bf16_results(memory[2], kRows, kN - 8);
  CHECK_FAILS(sy_grouped_gemm_run(gemm, &x, &ranges, &narrow, NULL), SY_INVALID_ARGUMENT, "out has 64 columns");
  CHECK_OK(sy_grouped_gemm_destroy(gemm));
  free_all(memory, sizeof memory / sizeof *memory);
}

// ---- fp8 ----

enum { kFp8N = 136, kFp8K = 256, kBlocks = 2, kRowScales = 4 };  // a row of scales is padded to 16 bytes

static float weight_scale(int e, int block_n, int block_k) { return (float)(1 << (e + block_n + 2 * block_k) % 3); }
static float row_scale(int64_t row, int block) { return (float)(1 << (row + block) % 2) * 0.5f; }

static float fp8_product(int e, int64_t row, int column) {
  float sum = 0.0f;
  for (int b = 0; b < kBlocks; ++b) {
    int block = 0;
    for (int j = b * 128; j < (b + 1) * 128; ++j)
      block += number(3, ((int64_t)e * kFp8N + column) * kFp8K + j) * number(4, row * kFp8K + j);
    sum += (float)block * weight_scale(e, column / 128, b) * row_scale(row, b);
  }
  return sum;
}

static void fp8_gemm(cudaStream_t stream) {
  float weight_scales[kExperts][2][kBlocks], row_scales[kRows][kRowScales] = {{0}};
  for (int e = 0; e < kExperts; ++e)
    for (int n = 0; n < 2; ++n)
      for (int k = 0; k < kBlocks; ++k) weight_scales[e][n][k] = weight_scale(e, n, k);
  for (int row = 0; row < kRows; ++row)
    for (int b = 0; b < kBlocks; ++b) row_scales[row][b] = row_scale(row, b);
  void* const memory[] = {e4m3_on_gpu(3, kExperts * kFp8N * kFp8K),
                          e4m3_on_gpu(4, kRows * kFp8K),
                          on_gpu(weight_scales, sizeof weight_scales),
                          on_gpu(row_scales, sizeof row_scales),
                          filled_on_gpu(0xab, kRows * kFp8N * 2),
                          on_gpu(kFirstRow, sizeof kFirstRow),
                          on_gpu(kNumRows, sizeof kNumRows)};
  sy_grouped_gemm_config config = SY_GROUPED_GEMM_CONFIG_INIT;
  config.num_experts = kExperts;
  config.n = kFp8N;
  config.k = kFp8K;
  config.dtype = SY_DTYPE_FP8_E4M3;
  sy_grouped_gemm* gemm = NULL;
  CHECK_OK(sy_grouped_gemm_create(&config, memory[0], memory[2], &gemm));
  sy_const_row_view x = bf16_rows(memory[1], kRows, kFp8K);
  x.dtype = SY_DTYPE_FP8_E4M3;
  x.scale_kind = SY_SCALE_F32;
  x.scales = memory[3];
  const sy_row_view out = bf16_results(memory[4], kRows, kFp8N);
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  rows.first_row = memory[5];
  rows.num_rows = memory[6];
  sy_grouped_gemm_options options = SY_GROUPED_GEMM_OPTIONS_INIT;
  options.stream = stream;
  CHECK_OK(sy_grouped_gemm_run(gemm, &x, &rows, &out, &options));
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  static uint16_t made[kRows * kFp8N];
  CHECK(cudaMemcpy(made, memory[4], sizeof made, cudaMemcpyDeviceToHost) == cudaSuccess);
  int wrong = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const int e = expert_of(row, kFirstRow, kNumRows);
    for (int j = 0; j < kFp8N; ++j) wrong += made[row * kFp8N + j] != (e < 0 ? 0xabab : bf16_of(fp8_product(e, row, j)));
  }
  CHECK(wrong == 0);
  CHECK_OK(sy_grouped_gemm_destroy(gemm));
  free_all(memory, sizeof memory / sizeof *memory);
}

// ---- Experts ----

enum { kHidden = 64, kWidth = 48 };

static sy_grouped_gemm* half_of_experts(int64_t n, int64_t k, sy_epilogue epilogue, const void* weights) {
  sy_grouped_gemm_config config = SY_GROUPED_GEMM_CONFIG_INIT;
  config.num_experts = kExperts;
  config.n = n;
  config.k = k;
  config.epilogue = epilogue;
  sy_grouped_gemm* gemm = NULL;
  CHECK_OK(sy_grouped_gemm_create(&config, weights, NULL, &gemm));
  return gemm;
}

static sy_expert_mlp* gpu_experts(const void* w13, const void* w2) {
  const sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
  options.backend = SY_BACKEND_CUDA;
  sy_expert_mlp* mlp = NULL;
  CHECK_FAILS(sy_expert_mlp_create(&shape, w13, w2, &options, &mlp), SY_INVALID_ARGUMENT, "storage is packed");
  options.storage = SY_WEIGHTS_VIEW;
  options.max_rows = kRows;
  CHECK_OK(sy_expert_mlp_create(&shape, w13, w2, &options, &mlp));
  sy_expert_memory memory = SY_EXPERT_MEMORY_INIT;
  const char* text = "";
  CHECK_OK(sy_expert_mlp_memory(mlp, &memory));
  CHECK(memory.scratch_bytes == kRows * kWidth * 2 && memory.weight_bytes == 0);
  CHECK_OK(sy_expert_mlp_implementation(mlp, &text));
  CHECK(strcmp(text, "bf16 wgmma:sm_90a") == 0);
  return mlp;
}

// The MLP, which consists of two products, must be bitwise equal to two separate products.
static void experts(cudaStream_t stream) {
  void* const memory[] = {bf16_on_gpu(5, kExperts * 2 * kWidth * kHidden),
                          bf16_on_gpu(6, kExperts * kHidden * kWidth),
                          bf16_on_gpu(7, kRows * kHidden),
                          filled_on_gpu(0xab, kRows * kWidth * 2),
                          filled_on_gpu(0xab, kRows * kHidden * 2),
                          filled_on_gpu(0xab, kRows * kHidden * 2),
                          on_gpu(kFirstRow, sizeof kFirstRow),
                          on_gpu(kNumRows, sizeof kNumRows)};
  sy_expert_mlp* mlp = gpu_experts(memory[0], memory[1]);
  sy_grouped_gemm* up = half_of_experts(2 * kWidth, kHidden, SY_EPILOGUE_SWIGLU, memory[0]);
  sy_grouped_gemm* down = half_of_experts(kHidden, kWidth, SY_EPILOGUE_NONE, memory[1]);
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  rows.first_row = memory[6];
  rows.num_rows = memory[7];
  const sy_const_row_view x = bf16_rows(memory[2], kRows, kHidden), between = bf16_rows(memory[3], kRows, kWidth);
  const sy_row_view act = bf16_results(memory[3], kRows, kWidth), y = bf16_results(memory[4], kRows, kHidden),
                    expected = bf16_results(memory[5], kRows, kHidden);
  sy_grouped_gemm_options options = SY_GROUPED_GEMM_OPTIONS_INIT;
  sy_expert_call call = SY_EXPERT_CALL_INIT;
  options.stream = call.stream = stream;
  call.num_sms = 3;
  CHECK_OK(sy_grouped_gemm_run(up, &x, &rows, &act, &options));
  CHECK_OK(sy_grouped_gemm_run(down, &between, &rows, &expected, &options));
  CHECK_OK(sy_expert_mlp_forward(mlp, &x, &rows, &y, &call));
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  static uint16_t made[2][kRows * kHidden];
  for (int i = 0; i < 2; ++i) CHECK(cudaMemcpy(made[i], memory[4 + i], sizeof made[i], cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(memcmp(made[0], made[1], sizeof made[0]) == 0);
  int different = 0;  // some outputs were computed, and only where there are experts
  for (int i = 0; i < kHidden; ++i) different += made[0][20 * kHidden + i] != 0xabab;
  CHECK(different > 0 && made[0][0] == 0xabab && made[0][40 * kHidden] == 0xabab);
  const sy_expert_ids none = view_of_ids(NULL, 0, 1);
  CHECK_FAILS(sy_expert_mlp_forward_rank_major(mlp, NULL, &none, NULL, NULL), SY_UNSUPPORTED, "on the CPU only");
  CHECK_OK(sy_grouped_gemm_destroy(up));
  CHECK_OK(sy_grouped_gemm_destroy(down));
  CHECK_OK(sy_expert_mlp_destroy(mlp));
  free_all(memory, sizeof memory / sizeof *memory);
}

// ---- A layer of one rank: dispatch, a square product per expert, combine ----

enum { kTokens = 6, kTopk = 2 };
static const int32_t kIds[kTokens * kTopk] = {0, 2, 1, 0, 2, -1, 2, 1, -1, -1, 1, 2};

typedef struct Layer {
  cudaStream_t stream;
  sy_group* group;
  sy_grouped_gemm* gemm;
  sy_const_row_view x;
  sy_expert_ids ids;
  void* out;
} Layer;

static void check_sums(const Layer* l) {
  uint16_t out[kTokens * kHidden];
  CHECK(cudaStreamSynchronize(l->stream) == cudaSuccess);
  CHECK_OK(sy_group_check(l->group));
  CHECK(cudaMemcpy(out, l->out, sizeof out, cudaMemcpyDeviceToHost) == cudaSuccess);
  int wrong = 0;
  for (int t = 0; t < kTokens; ++t)
    for (int n = 0; n < kHidden; ++n) {
      int sum = 0;
      for (int k = 0; k < kTopk; ++k) {
        const int32_t e = kIds[t * kTopk + k];
        for (int j = 0; e >= 0 && j < kHidden; ++j)
          sum += number(8, ((int64_t)e * kHidden + n) * kHidden + j) * number(9, (int64_t)t * kHidden + j);
      }
      wrong += out[t * kHidden + n] != bf16_of((float)sum);
    }
  CHECK(wrong == 0);
  CHECK(cudaMemset(l->out, 0xff, sizeof out) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
}

static void run_gemm(const Layer* l, void* from, int64_t num_rows, const sy_expert_rows* rows, const sy_row_view* y) {
  sy_grouped_gemm_options options = SY_GROUPED_GEMM_OPTIONS_INIT;
  options.stream = l->stream;
  const sy_const_row_view delivered = bf16_rows(from, num_rows, kHidden);
  CHECK_OK(sy_grouped_gemm_run(l->gemm, &delivered, rows, y, &options));
}

static void normal_layer(const Layer* l) {
  sy_normal_config config = SY_NORMAL_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = kTokens;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.layout = SY_LAYOUT_EXPERT_MAJOR;
  sy_exchange* exchange = NULL;
  sy_dispatched* dispatched = NULL;
  sy_rows* made = NULL;
  CHECK_OK(sy_exchange_create(l->group, &config, &exchange));
  sy_dispatch_options to = SY_DISPATCH_OPTIONS_INIT;
  sy_combine_options back = SY_COMBINE_OPTIONS_INIT;
  to.stream = back.stream = l->stream;
  back.order = SY_ORDER_PER_ROUTE;
  CHECK_OK(sy_exchange_dispatch(exchange, &l->x, &l->ids, NULL, &to, &dispatched));
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  sy_row_view y = SY_ROW_VIEW_INIT;
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));
  CHECK_OK(sy_exchange_allocate_rows(exchange, view.handle, SY_DTYPE_BF16, l->stream, &made));
  CHECK_OK(sy_rows_get(made, &y));
  CHECK_OK(sy_expert_rows_of_dispatched(&view, &rows));
  run_gemm(l, view.x, view.x_rows, &rows, &y);
  const sy_const_row_view answers = bf16_rows(y.data, y.rows, kHidden);
  CHECK_OK(sy_exchange_combine(exchange, &answers, view.handle, l->out, &back, NULL));
  check_sums(l);
  CHECK_OK(sy_rows_destroy(made));
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
}

static void low_latency_layer(const Layer* l) {
  sy_low_latency_config config = SY_LOW_LATENCY_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = kTokens;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.scales = SY_SCALE_NONE;
  sy_low_latency* exchange = NULL;
  sy_low_latency_output* output = NULL;
  sy_low_latency_rows* made = NULL;
  CHECK_OK(sy_low_latency_create(l->group, &config, &exchange));
  CHECK_OK(sy_low_latency_make_output(exchange, &output));
  CHECK_OK(sy_low_latency_make_rows(exchange, SY_DTYPE_BF16, &made));
  sy_low_latency_view view = SY_LOW_LATENCY_VIEW_INIT;
  sy_row_view y = SY_ROW_VIEW_INIT;
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  CHECK_OK(sy_low_latency_output_get(output, &view));
  CHECK_OK(sy_low_latency_rows_get(made, &y));
  CHECK_OK(sy_expert_rows_of_low_latency(&view, &rows));
  sy_low_latency_dispatch_options to = SY_LOW_LATENCY_DISPATCH_OPTIONS_INIT;
  sy_low_latency_combine_options back = SY_LOW_LATENCY_COMBINE_OPTIONS_INIT;
  to.stream = back.stream = l->stream;
  const sy_const_row_view answers = bf16_rows(y.data, y.rows, kHidden);
  CHECK_OK(sy_low_latency_dispatch(exchange, &l->x, &l->ids, output, &to));
  run_gemm(l, view.x, view.x_rows, &rows, &y);
  CHECK_OK(sy_low_latency_combine(exchange, &answers, output, l->out, &back));
  check_sums(l);
  CHECK_OK(sy_low_latency_destroy(exchange));
  CHECK_OK(sy_low_latency_rows_destroy(made));
  CHECK_OK(sy_low_latency_output_destroy(output));
}

static void layers(cudaStream_t stream) {
  void* const memory[] = {bf16_on_gpu(8, kExperts * kHidden * kHidden), bf16_on_gpu(9, kTokens * kHidden),
                          on_gpu(kIds, sizeof kIds), filled_on_gpu(0xff, kTokens * kHidden * 2)};
  Layer l = {.stream = stream, .out = memory[3]};
  sy_group_options options = patient_options((size_t)64 << 20);
  options.backend = SY_BACKEND_CUDA;
  options.device = 0;
  CHECK_OK(sy_group_in_process(1, &options, &l.group));
  l.gemm = half_of_experts(kHidden, kHidden, SY_EPILOGUE_NONE, memory[0]);
  l.x = bf16_rows(memory[1], kTokens, kHidden);
  l.ids = view_of_ids(memory[2], kTokens, kTopk);
  normal_layer(&l);
  low_latency_layer(&l);
  CHECK_OK(sy_grouped_gemm_destroy(l.gemm));
  CHECK_OK(sy_group_destroy(l.group));
  free_all(memory, sizeof memory / sizeof *memory);
}

int main(void) {
  int status = 0;
  if (!gpu_is_visible(&status)) return status;
  cudaStream_t stream = NULL;
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  const sy_weight_order orders[] = {SY_WEIGHTS_NK, SY_WEIGHTS_KN};
  for (int i = 0; i < 2; ++i) {
    grouped_gemm(stream, orders[i], SY_EPILOGUE_NONE);
    grouped_gemm(stream, orders[i], SY_EPILOGUE_RELU);
  }
  fp8_gemm(stream);
  experts(stream);
  layers(stream);
  run_gradient_tests(stream);
  run_moe_layer_on_gpu(stream);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaSuccess);
  return check_status();
}
