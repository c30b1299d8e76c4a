// SPDX-License-Identifier: Apache-2.0
// Misuse of the gradient functions through the C ABI, tested without a GPU: configs rejected at creation, and the checks that
// every call makes before it uses its object.
#include <math.h>
#include <stdlib.h>

#include "c_layer.h"

enum { kWidth = 16, kExperts = 2, kWrong = SY_INVALID_ARGUMENT };

static sy_weight_gradient_config weight_config(void) {
  sy_weight_gradient_config c = SY_WEIGHT_GRADIENT_CONFIG_INIT;
  c.num_experts = kExperts;
  c.n = 2 * kWidth;
  c.k = kWidth;
  return c;
}

static sy_swiglu_gradient_config swiglu_config(void) {
  sy_swiglu_gradient_config c = SY_SWIGLU_GRADIENT_CONFIG_INIT;
  c.num_experts = kExperts;
  c.columns = kWidth;
  return c;
}

static sy_routing_gradient_config routing_config(void) {
  sy_routing_gradient_config c = SY_ROUTING_GRADIENT_CONFIG_INIT;
  c.num_experts = kExperts;
  c.columns = kWidth;
  return c;
}

static void defaults(void) {
  const sy_weight_gradient_config weight = SY_WEIGHT_GRADIENT_CONFIG_INIT;
  const sy_swiglu_gradient_config swiglu = SY_SWIGLU_GRADIENT_CONFIG_INIT;
  const sy_routing_gradient_config routing = SY_ROUTING_GRADIENT_CONFIG_INIT;
  CHECK(weight.struct_size == 40 && swiglu.struct_size == 40 && routing.struct_size == 24);
  CHECK(weight.dtype == SY_DTYPE_BF16 && weight.out_dtype == SY_DTYPE_F32 && weight.add == 0);
  CHECK(swiglu.dtype == SY_DTYPE_BF16 && routing.dtype == SY_DTYPE_BF16);
  CHECK(isinf(swiglu.swiglu_limit) && swiglu.swiglu_alpha == 1.0f && swiglu.swiglu_up_shift == 0.0f);
}

static void null_arguments(void) {
  const sy_weight_gradient_config weight = weight_config();
  const sy_swiglu_gradient_config swiglu = swiglu_config();
  const sy_routing_gradient_config routing = routing_config();
  CHECK_FAILS(sy_weight_gradient_create(&weight, NULL), kWrong, "gradient is NULL");
  CHECK_FAILS(sy_swiglu_gradient_create(&swiglu, NULL), kWrong, "gradient is NULL");
  CHECK_FAILS(sy_routing_gradient_create(&routing, NULL), kWrong, "gradient is NULL");
  // A failed creation sets the object to NULL.
  int unused = 0;
  sy_weight_gradient* of_weights = (sy_weight_gradient*)(void*)&unused;
  sy_swiglu_gradient* of_swiglu = (sy_swiglu_gradient*)(void*)&unused;
  sy_routing_gradient* of_routing = (sy_routing_gradient*)(void*)&unused;
  CHECK_FAILS(sy_weight_gradient_create(NULL, &of_weights), kWrong, "config is NULL");
  CHECK_FAILS(sy_swiglu_gradient_create(NULL, &of_swiglu), kWrong, "config is NULL");
  CHECK_FAILS(sy_routing_gradient_create(NULL, &of_routing), kWrong, "config is NULL");
  CHECK(!of_weights && !of_swiglu && !of_routing);

  const sy_const_row_view from = bf16_rows(NULL, 0, kWidth);
  const sy_row_view to = bf16_results(NULL, 0, kWidth);
  const sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  float results[4] = {0.0f};
  CHECK_FAILS(sy_weight_gradient_run(NULL, &from, &from, &rows, results, NULL), kWrong, "gradient is NULL");
  CHECK_FAILS(sy_swiglu_gradient_run(NULL, &from, &from, &rows, &to, NULL, NULL), kWrong, "gradient is NULL");
  CHECK_FAILS(sy_routing_gradient_run(NULL, &from, &from, &rows, results, NULL), kWrong, "gradient is NULL");
  CHECK_OK(sy_weight_gradient_destroy(NULL));
  CHECK_OK(sy_swiglu_gradient_destroy(NULL));
  CHECK_OK(sy_routing_gradient_destroy(NULL));
}

static void wrong_weight_gradients(void) {
  sy_weight_gradient_config config = weight_config();
  sy_weight_gradient* gradient = NULL;
#define CHECK_REFUSED(member, value, word)                                  \
  config = weight_config();                                                 \
  config.member = value;                                                    \
  CHECK_FAILS(sy_weight_gradient_create(&config, &gradient), kWrong, word); \
  CHECK(gradient == NULL)
  CHECK_REFUSED(num_experts, 0, "num_experts = 0");
  CHECK_REFUSED(num_experts, 2049, "num_experts = 2049");
  CHECK_REFUSED(n, 12, "n = 12");
  CHECK_REFUSED(k, 0, "k = 0");
  CHECK_REFUSED(dtype, 256, "config->dtype = 256");  // becomes 0 if truncated to a byte
  CHECK_REFUSED(dtype, SY_DTYPE_F32, "dtype = f32");
  CHECK_REFUSED(dtype, SY_DTYPE_FP8_E4M3, "dtype = fp8_e4m3");
  CHECK_REFUSED(out_dtype, 256, "config->out_dtype = 256");
  CHECK_REFUSED(out_dtype, SY_DTYPE_F16, "out_dtype = f16: must be f32 or bf16");
  CHECK_REFUSED(add, 2, "config->add = 2");
  CHECK_REFUSED(add, 256, "config->add = 256");
#undef CHECK_REFUSED
}

static void wrong_row_gradients(void) {
  sy_swiglu_gradient_config swiglu = swiglu_config();
  sy_routing_gradient_config routing = routing_config();
  sy_swiglu_gradient* of_swiglu = NULL;
  sy_routing_gradient* of_routing = NULL;
#define CHECK_REFUSED(kind, member, value, word)                             \
  kind = kind##_config();                                                    \
  kind.member = value;                                                       \
  CHECK_FAILS(sy_##kind##_gradient_create(&kind, &of_##kind), kWrong, word); \
  CHECK(of_##kind == NULL)
  CHECK_REFUSED(swiglu, num_experts, -1, "num_experts = -1");
  CHECK_REFUSED(swiglu, columns, 20, "columns = 20");
  CHECK_REFUSED(swiglu, columns, INT64_MAX - 7, "columns = ");
  CHECK_REFUSED(swiglu, dtype, 256, "config->dtype = 256");
  CHECK_REFUSED(swiglu, dtype, SY_DTYPE_F32, "dtype = f32");
  CHECK_REFUSED(swiglu, swiglu_limit, 0.0f, "swiglu.limit = 0");
  CHECK_REFUSED(swiglu, swiglu_limit, NAN, "swiglu.limit = ");
  CHECK_REFUSED(swiglu, reserved, 1, "config->reserved = 1");
  CHECK_REFUSED(routing, num_experts, 0, "num_experts = 0");
  CHECK_REFUSED(routing, columns, 0, "columns = 0");
  CHECK_REFUSED(routing, dtype, 256, "config->dtype = 256");
  CHECK_REFUSED(routing, dtype, SY_DTYPE_F32, "dtype = f32");
#undef CHECK_REFUSED
}

// A library built without CUDA reports this. A library built with CUDA creates objects if a supported GPU is present.
static void gpus(void) {
#if !defined(LIBRARY_HAS_CUDA)
  const sy_weight_gradient_config weight = weight_config();
  const sy_swiglu_gradient_config swiglu = swiglu_config();
  const sy_routing_gradient_config routing = routing_config();
  sy_weight_gradient* of_weights = NULL;
  sy_swiglu_gradient* of_swiglu = NULL;
  sy_routing_gradient* of_routing = NULL;
  CHECK_FAILS(sy_weight_gradient_create(&weight, &of_weights), SY_UNSUPPORTED, "WeightGradient: this library was built");
  CHECK_FAILS(sy_swiglu_gradient_create(&swiglu, &of_swiglu), SY_UNSUPPORTED, "SwigluGradient: this library was built");
  CHECK_FAILS(sy_routing_gradient_create(&routing, &of_routing), SY_UNSUPPORTED, "without CUDA");
  CHECK(!of_weights && !of_swiglu && !of_routing);
#endif
}

static void sizes_of_structs(void) {
  struct {
    sy_weight_gradient_config known;
    unsigned char news[16];
  } newer = {SY_WEIGHT_GRADIENT_CONFIG_INIT, {0}};
  sy_weight_gradient* gradient = NULL;
  newer.known.struct_size = sizeof newer;
  CHECK_FAILS(sy_weight_gradient_create(&newer.known, &gradient), kWrong, "num_experts = 0");  // the longer struct was read
  newer.news[3] = 1;
  CHECK_FAILS(sy_weight_gradient_create(&newer.known, &gradient), kWrong, "offset 43");

  // A shorter struct lacks the members after the type: they take their default values, and the memory after the struct is not
  // read. The remaining checks depend on whether a GPU is present.
  const sy_swiglu_gradient_config whole = swiglu_config();
  enum { kOlder = offsetof(sy_swiglu_gradient_config, swiglu_limit) / sizeof(size_t) };
  size_t* older = calloc(kOlder, sizeof(size_t));
  if (!older) abort();
  memcpy(older, &whole, kOlder * sizeof(size_t));
  older[0] = kOlder * sizeof(size_t);
  sy_swiglu_gradient* of_swiglu = NULL;
  CHECK(sy_swiglu_gradient_create((const sy_swiglu_gradient_config*)(const void*)older, &of_swiglu) != kWrong);
  CHECK_OK(sy_swiglu_gradient_destroy(of_swiglu));
  free(older);

  const size_t wrong[] = {0, 8, 17, 4104, SIZE_MAX - 7};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    sy_routing_gradient_config config = routing_config();
    sy_routing_gradient* of_routing = NULL;
    config.struct_size = wrong[i];
    CHECK_FAILS(sy_routing_gradient_create(&config, &of_routing), kWrong, "config->struct_size");
  }
}

void run_gradient_error_tests(void) {
  defaults();
  null_arguments();
  wrong_weight_gradients();
  wrong_row_gradients();
  gpus();
  sizes_of_structs();
}
