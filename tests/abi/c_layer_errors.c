// SPDX-License-Identifier: Apache-2.0
// Misuse of the layer library through the C ABI: error codes and messages, structs of other versions, and threads. No call
// needs a GPU.
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>

#include "c_layer.h"

enum { kHidden = 16, kWidth = 8, kExperts = 2, kRows = 4 };
enum { kWrong = SY_INVALID_ARGUMENT };

// Aligned to 16 bytes, as GPUs require for weights.
static _Alignas(16) uint16_t w13[kExperts * 2 * kWidth * kHidden];
static _Alignas(16) uint16_t w2[kExperts * kHidden * kWidth];
static uint16_t x[kRows * kHidden], y[kRows * kHidden];
static const int64_t kCounts[kExperts] = {2, 2};

static sy_grouped_gemm_config gemm_config(void) {
  sy_grouped_gemm_config c = SY_GROUPED_GEMM_CONFIG_INIT;
  c.num_experts = kExperts;
  c.n = 2 * kWidth;
  c.k = kHidden;
  return c;
}

static sy_expert_rows expert_rows(void) {
  sy_expert_rows r = SY_EXPERT_ROWS_INIT;
  r.num_rows = kCounts;
  r.rows_per_expert = 2;
  return r;
}

static sy_expert_mlp* make_mlp(void) {
  const sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  sy_expert_mlp* mlp = NULL;
  CHECK_OK(sy_expert_mlp_create(&shape, w13, w2, NULL, &mlp));
  return mlp;
}

static void defaults(void) {
  const sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
  CHECK(options.struct_size == sizeof options && options.storage == SY_WEIGHTS_PACKED);
  CHECK(options.route_scratch_bytes == (size_t)64 << 20 && options.backend == SY_BACKEND_CPU);
  CHECK(sizeof(sy_grouped_gemm_config) == 72 && sizeof(sy_grouped_gemm_options) == 40 && sizeof(sy_expert_rows) == 56);
  CHECK(sizeof(sy_expert_shape) == 32 && sizeof(sy_expert_options) == 80 && sizeof(sy_expert_call) == 24);
  CHECK(sizeof(sy_expert_memory) == 32);
}

static void null_arguments(void) {
  sy_expert_mlp* mlp = make_mlp();
  const sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  const sy_grouped_gemm_config config = gemm_config();
  const sy_const_row_view from = bf16_rows(x, kRows, kHidden);
  const sy_row_view to = bf16_results(y, kRows, kHidden);
  const sy_expert_rows rows = expert_rows();
  const sy_expert_ids ids = view_of_ids(NULL, 0, 1);
  sy_expert_rows filled = SY_EXPERT_ROWS_INIT;
  const char* text = NULL;

  CHECK_FAILS(sy_expert_mlp_create(&shape, w13, w2, NULL, NULL), kWrong, "mlp is NULL");
  sy_expert_mlp* none = mlp;
  CHECK_FAILS(sy_expert_mlp_create(NULL, w13, w2, NULL, &none), kWrong, "shape is NULL");
  CHECK(none == NULL);
  CHECK_FAILS(sy_expert_mlp_create(&shape, NULL, w2, NULL, &none), kWrong, "w13 is null");
  CHECK_FAILS(sy_expert_mlp_create(&shape, w13, NULL, NULL, &none), kWrong, "w2 is null");
  CHECK_FAILS(sy_expert_mlp_forward(NULL, &from, &rows, &to, NULL), kWrong, "mlp is NULL");
  CHECK_FAILS(sy_expert_mlp_forward(mlp, NULL, &rows, &to, NULL), kWrong, "x is NULL");
  CHECK_FAILS(sy_expert_mlp_forward(mlp, &from, NULL, &to, NULL), kWrong, "rows is NULL");
  CHECK_FAILS(sy_expert_mlp_forward(mlp, &from, &rows, NULL, NULL), kWrong, "y is NULL");
  CHECK_FAILS(sy_expert_mlp_forward_rank_major(NULL, x, &ids, NULL, y), kWrong, "mlp is NULL");
  CHECK_FAILS(sy_expert_mlp_forward_rank_major(mlp, x, NULL, NULL, y), kWrong, "topk_ids is NULL");
  CHECK_FAILS(sy_expert_mlp_memory_required(&shape, NULL, NULL), kWrong, "memory is NULL");
  sy_expert_memory memory = SY_EXPERT_MEMORY_INIT;
  CHECK_FAILS(sy_expert_mlp_memory_required(NULL, NULL, &memory), kWrong, "shape is NULL");
  CHECK_FAILS(sy_expert_mlp_memory(NULL, &memory), kWrong, "mlp is NULL");
  CHECK_FAILS(sy_expert_mlp_memory(mlp, NULL), kWrong, "memory is NULL");
  CHECK_FAILS(sy_expert_mlp_implementation(NULL, &text), kWrong, "mlp is NULL");
  CHECK_FAILS(sy_expert_mlp_implementation(mlp, NULL), kWrong, "text is NULL");

  CHECK_FAILS(sy_grouped_gemm_create(&config, w13, NULL, NULL), kWrong, "gemm is NULL");
  sy_grouped_gemm* gemm = (sy_grouped_gemm*)(void*)&text;
  CHECK_FAILS(sy_grouped_gemm_create(NULL, w13, NULL, &gemm), kWrong, "config is NULL");
  CHECK(gemm == NULL);
  CHECK_FAILS(sy_grouped_gemm_create(&config, NULL, NULL, &gemm), kWrong, "weights is null");
  CHECK_FAILS(sy_grouped_gemm_run(NULL, &from, &rows, &to, NULL), kWrong, "gemm is NULL");
  CHECK_FAILS(sy_grouped_gemm_output(NULL, NULL, NULL), kWrong, "config is NULL");
  CHECK_FAILS(sy_expert_rows_of_dispatched(NULL, &filled), kWrong, "dispatched is NULL");
  CHECK_FAILS(sy_expert_rows_of_dispatched(&(sy_dispatched_view)SY_DISPATCHED_VIEW_INIT, NULL), kWrong, "rows is NULL");
  CHECK_FAILS(sy_expert_rows_of_low_latency(NULL, &filled), kWrong, "output is NULL");
  CHECK_FAILS(sy_expert_rows_of_low_latency(&(sy_low_latency_view)SY_LOW_LATENCY_VIEW_INIT, NULL), kWrong, "rows is NULL");
  CHECK_OK(sy_expert_mlp_destroy(NULL));
  CHECK_OK(sy_grouped_gemm_destroy(NULL));
  CHECK_OK(sy_expert_mlp_destroy(mlp));
}

static void wrong_experts(void) {
  sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
  sy_expert_mlp* mlp = NULL;
#define CHECK_REFUSED(code, word) CHECK_FAILS(sy_expert_mlp_create(&shape, w13, w2, &options, &mlp), code, word)
  shape.hidden = 0;
  CHECK_REFUSED(kWrong, "shape.hidden is 0");
  shape = small_shape(kHidden, kWidth, -1);
  CHECK_REFUSED(kWrong, "shape.num_local_experts is -1");
  shape.num_local_experts = kExperts;
  shape.reserved = 1;
  CHECK_REFUSED(kWrong, "shape->reserved = 1");
  shape.reserved = 0;
  options.backend = 256;  // becomes 0 if truncated to a byte
  CHECK_REFUSED(kWrong, "options->backend = 256: must be cpu (0) or cuda (1)");
  options.backend = SY_BACKEND_CPU;
  options.dtype = 256;
  CHECK_REFUSED(kWrong, "options->dtype = 256");
  options.dtype = SY_DTYPE_F32;
  CHECK_REFUSED(kWrong, "options.dtype is f32");
  options.dtype = SY_DTYPE_F16;
  CHECK_REFUSED(SY_UNSUPPORTED, "options.dtype is f16");
  options.dtype = SY_DTYPE_FP8_E4M3;
  CHECK_REFUSED(SY_UNSUPPORTED, "options.dtype is fp8_e4m3");
  options.dtype = SY_DTYPE_BF16;
  options.storage = 256;
  CHECK_REFUSED(kWrong, "options->storage = 256: must be packed (0) or view (1)");
  options.storage = SY_WEIGHTS_PACKED;
  options.reserved = -1;
  CHECK_REFUSED(kWrong, "options->reserved = -1");
  options.reserved = 0;
  options.backend = SY_BACKEND_CUDA;
  CHECK_REFUSED(kWrong, "options.storage is packed");
  options.storage = SY_WEIGHTS_VIEW;
  options.max_rows = -1;
  CHECK_REFUSED(kWrong, "options.max_rows is -1");
#undef CHECK_REFUSED
  CHECK(mlp == NULL);
}

// A library built without CUDA reports this; a library built with CUDA reports that the requested GPU does not exist.
static void gpus(void) {
  const sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
  options.backend = SY_BACKEND_CUDA;
  options.storage = SY_WEIGHTS_VIEW;
  options.max_rows = kRows;
  sy_expert_memory memory = SY_EXPERT_MEMORY_INIT;
  CHECK_OK(sy_expert_mlp_memory_required(&shape, &options, &memory));
  CHECK(memory.weight_bytes == 0 && memory.scratch_bytes == kRows * kWidth * 2 && memory.total_bytes == memory.scratch_bytes);
#if !defined(LIBRARY_HAS_CUDA)
  sy_expert_mlp* mlp = NULL;
  sy_grouped_gemm* gemm = NULL;
  const sy_grouped_gemm_config config = gemm_config();
  CHECK_FAILS(sy_expert_mlp_create(&shape, w13, w2, &options, &mlp), SY_UNSUPPORTED, "without CUDA");
  CHECK_FAILS(sy_grouped_gemm_create(&config, w13, NULL, &gemm), SY_UNSUPPORTED, "without CUDA");
  CHECK(mlp == NULL && gemm == NULL);
#endif
}

static void wrong_calls(void) {
  sy_expert_mlp* mlp = make_mlp();
  sy_const_row_view from = bf16_rows(x, kRows, kHidden);
  sy_row_view to = bf16_results(y, kRows, kHidden);
  sy_expert_rows rows = expert_rows();
  sy_expert_call call = SY_EXPERT_CALL_INIT;
#define CHECK_REFUSED(word) CHECK_FAILS(sy_expert_mlp_forward(mlp, &from, &rows, &to, &call), kWrong, word)
  call.reserved = 1;
  CHECK_REFUSED("call->reserved = 1");
  call.reserved = 0;
  from.dtype = 256;
  CHECK_REFUSED("x->dtype = 256");
  from.dtype = SY_DTYPE_F32;
  CHECK_REFUSED("x is of f32");
  from = bf16_rows(NULL, kRows, kHidden);
  CHECK_REFUSED("x is null");
  from = bf16_rows(x, kRows, kHidden);
  to.scale_kind = -1;
  CHECK_REFUSED("y->scale_kind = -1");
  to = bf16_results(y, kRows, kHidden + 1);
  CHECK_REFUSED("y has 17 columns");
  to = bf16_results(y, kRows, kHidden);
  rows.num_rows = NULL;
  CHECK_REFUSED("give num_rows or num_rows_32");
  rows = expert_rows();
  rows.rows_per_expert = -1;
  CHECK_REFUSED("rows_per_expert = -1");
#undef CHECK_REFUSED
  sy_expert_ids ids = view_of_ids(NULL, 1, 1);
  CHECK_FAILS(sy_expert_mlp_forward_rank_major(mlp, x, &ids, NULL, y), kWrong, "topk_ids.data");
  ids.is_int64 = 2;
  CHECK_FAILS(sy_expert_mlp_forward_rank_major(mlp, x, &ids, NULL, y), kWrong, "topk_ids->is_int64 = 2");
  CHECK_OK(sy_expert_mlp_destroy(mlp));
}

static void wrong_gemms(void) {
  sy_grouped_gemm_config config = gemm_config();
  sy_grouped_gemm* gemm = NULL;
#define CHECK_REFUSED(word) CHECK_FAILS(sy_grouped_gemm_create(&config, w13, NULL, &gemm), kWrong, word)
  const size_t members[] = {offsetof(sy_grouped_gemm_config, dtype),    offsetof(sy_grouped_gemm_config, order),
                            offsetof(sy_grouped_gemm_config, epilogue), offsetof(sy_grouped_gemm_config, weight_scales),
                            offsetof(sy_grouped_gemm_config, quantize), offsetof(sy_grouped_gemm_config, accumulate),
                            offsetof(sy_grouped_gemm_config, scaling),  offsetof(sy_grouped_gemm_config, output_scaling)};
  const char* names[] = {"config->dtype = 256",         "config->order = 256",         "config->epilogue = 256",
                         "config->weight_scales = 256", "config->quantize = 256",      "config->accumulate = 256",
                         "config->scaling = 256",       "config->output_scaling = 256"};
  for (size_t i = 0; i < sizeof members / sizeof *members; ++i) {
    config = gemm_config();
    const int32_t value = 256;  // becomes 0 if truncated to a byte
    memcpy((char*)&config + members[i], &value, sizeof value);
    const sy_code code = sy_grouped_gemm_create(&config, w13, NULL, &gemm);
    check_report(code == kWrong && strstr(sy_last_error(), names[i]) && !gemm, __FILE__, __LINE__, names[i]);
  }
  config = gemm_config();
  config.num_experts = 0;
  CHECK_REFUSED("num_experts = 0");
  config = gemm_config();
  config.n = 12;
  CHECK_REFUSED("n = 12");
  config = gemm_config();
  config.swiglu_limit = -1.0f;
  CHECK_REFUSED("swiglu.limit = -1");
  config = gemm_config();
  config.dtype = SY_DTYPE_FP8_E4M3;
  CHECK_REFUSED("weight_scales is null");
  config = gemm_config();
  config.scaling = SY_GRANULARITY_PER_CHANNEL;
  CHECK_REFUSED("scaling = per_channel: must be block but for fp8_e4m3");
  config.dtype = SY_DTYPE_FP8_E4M3;
  config.output_scaling = SY_OUTPUT_FIXED;
  CHECK_REFUSED("output_scaling = fixed: must be per_group");
#undef CHECK_REFUSED
  config = gemm_config();
  config.dtype = SY_DTYPE_FP8_E4M3;

  int64_t columns = 0;
  sy_dtype type = -1;
  config.epilogue = SY_EPILOGUE_SWIGLU;
  CHECK_OK(sy_grouped_gemm_output(&config, &columns, &type));
  CHECK(columns == kWidth && type == SY_DTYPE_BF16);
  config.quantize = SY_SCALE_UE8M0;
  CHECK_OK(sy_grouped_gemm_output(&config, NULL, &type));
  CHECK(type == SY_DTYPE_FP8_E4M3);
}

static void rows_of_views(void) {
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  sy_dispatched_view dispatched = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_expert_rows_of_dispatched(&dispatched, &rows));  // this rank has no experts
  CHECK(rows.num_rows == NULL && rows.first_row == NULL);
  dispatched.num_local_experts = kExperts;
  CHECK_FAILS(sy_expert_rows_of_dispatched(&dispatched, &rows), kWrong, "dispatched->tokens_per_expert is NULL");
  dispatched.tokens_per_expert = kCounts;
  CHECK_FAILS(sy_expert_rows_of_dispatched(&dispatched, &rows), kWrong, "rank-major");
  dispatched.num_local_experts = -1;
  CHECK_FAILS(sy_expert_rows_of_dispatched(&dispatched, &rows), kWrong, "dispatched->num_local_experts = -1");

  const int32_t counts[kExperts] = {1, 2};
  sy_low_latency_view output = SY_LOW_LATENCY_VIEW_INIT;
  output.rows_of_expert = counts;
  output.rows_per_expert = 6;
  output.scale_rows = 8;
  output.scale_order = SY_SCALES_COLUMN_MAJOR;
  output.scale_group = 64;
  CHECK_OK(sy_expert_rows_of_low_latency(&output, &rows));  // no scales
  CHECK(rows.num_rows_32 == counts && rows.rows_per_expert == 6 && rows.scale_rows == 0 && rows.num_rows == NULL);
  output.x_scale_kind = SY_SCALE_F32;
  CHECK_FAILS(sy_expert_rows_of_low_latency(&output, &rows), kWrong, "scale_group = 64");
  output.scale_group = 128;
  CHECK_OK(sy_expert_rows_of_low_latency(&output, &rows));
  CHECK(rows.scale_rows == 8);
  output.scale_order = 2;
  CHECK_FAILS(sy_expert_rows_of_low_latency(&output, &rows), kWrong, "output->scale_order = 2");
  // A view from a program or library that does not report the layout of its scales must be rejected; the layout is not guessed.
  output.scale_order = SY_SCALES_ROW_MAJOR;
  output.struct_size = offsetof(sy_low_latency_view, scale_order);
  CHECK_FAILS(sy_expert_rows_of_low_latency(&output, &rows), kWrong, "scale_group = 0");
}

static void sizes_of_structs(void) {
  struct {
    sy_expert_shape known;
    unsigned char news[16];
  } newer = {SY_EXPERT_SHAPE_INIT, {0}};
  newer.known = small_shape(kHidden, kWidth, kExperts);
  newer.known.struct_size = sizeof newer;
  sy_expert_mlp* mlp = NULL;
  CHECK_OK(sy_expert_mlp_create(&newer.known, w13, w2, NULL, &mlp));
  CHECK_OK(sy_expert_mlp_destroy(mlp));
  newer.news[3] = 1;
  CHECK_FAILS(sy_expert_mlp_create(&newer.known, w13, w2, NULL, &mlp), kWrong, "offset 35");

  // A shorter struct lacks the members after num_experts and type: they take their default values, and the memory after the
  // struct is not read.
  const sy_grouped_gemm_config whole = gemm_config();
  enum { kOlder = offsetof(sy_grouped_gemm_config, order) / sizeof(size_t) };
  size_t* older = calloc(kOlder, sizeof(size_t));
  if (!older) abort();
  memcpy(older, &whole, kOlder * sizeof(size_t));
  older[0] = kOlder * sizeof(size_t);
  int64_t columns = 0;
  CHECK_OK(sy_grouped_gemm_output((const sy_grouped_gemm_config*)(const void*)older, &columns, NULL));
  CHECK(columns == 2 * kWidth);
  free(older);

  const size_t wrong[] = {0, 8, 17, 4104, SIZE_MAX - 7};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
    options.struct_size = wrong[i];
    const sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
    CHECK_FAILS(sy_expert_mlp_create(&shape, w13, w2, &options, &mlp), kWrong, "options->struct_size");
    sy_expert_memory memory = SY_EXPERT_MEMORY_INIT;
    memory.struct_size = wrong[i];
    CHECK_FAILS(sy_expert_mlp_memory_required(&shape, NULL, &memory), kWrong, "memory->struct_size");
    sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
    rows.struct_size = wrong[i];
    const sy_low_latency_view output = SY_LOW_LATENCY_VIEW_INIT;
    CHECK_FAILS(sy_expert_rows_of_low_latency(&output, &rows), kWrong, "rows->struct_size");
  }
}

// If the weights exceed the available memory, the call returns SY_SYSTEM, and no exception escapes. A sanitizer's allocator
// would terminate the program instead.
static void without_memory(void) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const sy_expert_shape shape = small_shape(1 << 20, 1 << 20, 1 << 10);
  sy_expert_mlp* mlp = NULL;
  CHECK_FAILS(sy_expert_mlp_create(&shape, w13, w2, NULL, &mlp), SY_SYSTEM, "");
  CHECK(mlp == NULL && strlen(sy_last_error()) > 0);
#endif
}

// Errors are kept per thread and per library.
static void* on_another_thread(void* unused) {
  CHECK(strcmp(sy_last_error(), "") == 0);
  CHECK_FAILS(sy_expert_mlp_memory(NULL, NULL), kWrong, "mlp is NULL");
  return unused;
}

static void threads(void) {
  CHECK_FAILS(sy_grouped_gemm_output(NULL, NULL, NULL), kWrong, "config is NULL");
  pthread_t thread;
  if (pthread_create(&thread, NULL, on_another_thread, NULL) != 0) abort();
  pthread_join(thread, NULL);
  CHECK(strcmp(sy_last_error(), "config is NULL") == 0);
  CHECK_FAILS(sy_group_barrier(NULL), kWrong, "group is NULL");
  CHECK_FAILS(sy_expert_mlp_memory(NULL, NULL), kWrong, "mlp is NULL");
  CHECK_OK(sy_expert_mlp_destroy(NULL));
  CHECK(strcmp(sy_last_error(), "mlp is NULL") == 0);  // successful calls leave the error unchanged
}

void run_layer_error_tests(void) {
  defaults();
  null_arguments();
  wrong_experts();
  gpus();
  wrong_calls();
  wrong_gemms();
  rows_of_views();
  sizes_of_structs();
  without_memory();
  threads();
}
