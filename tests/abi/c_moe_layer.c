// SPDX-License-Identifier: Apache-2.0
// A complete layer through the C ABI on two ranks: the same bits as the C++ class, memory requirements, and rejected calls.
#include "c_layer.h"
#include "c_layer_reference.h"
#include "switchyard/c/expert_map.h"

enum { kHidden = 24, kWidth = 16, kExperts = 2, kTokens = 7, kTopk = 2, kWorld = 2 };
enum { kWrong = SY_INVALID_ARGUMENT };

static uint16_t w13[kWorld][kExperts * 2 * kWidth * kHidden], w2[kWorld][kExperts * kHidden * kWidth];
static uint16_t x[kWorld][kTokens * kHidden];
static int32_t ids[kWorld][kTokens * kTopk];
static float weights[kWorld][kTokens * kTopk];
// State shared by the ranks of one run, written before they start.
static int low_latency_of_run;
static sy_moe_form form_of_run;
static uint16_t expected[2][kWorld][kTokens * kHidden];  // without and with `add`

static moe_case make_case(int low_latency) {
  const moe_case c = {.experts = {kHidden, kWidth, kExperts, 0, NULL, NULL},
                      .w13 = {w13[0], w13[1]},
                      .w2 = {w2[0], w2[1]},
                      .x = {x[0], x[1]},
                      .ids = {ids[0], ids[1]},
                      .weights = {weights[0], weights[1]},
                      .tokens = kTokens,
                      .topk = kTopk,
                      .low_latency = low_latency};
  return c;
}

static sy_moe_layer_config make_config(int low_latency) {
  sy_moe_layer_config c = SY_MOE_LAYER_CONFIG_INIT;
  c.hidden = kHidden;
  c.intermediate = kWidth;
  c.num_experts = kWorld * kExperts;
  c.topk = kTopk;
  c.max_tokens = kTokens;
  c.exchange = low_latency ? SY_MOE_EXCHANGE_LOW_LATENCY : SY_MOE_EXCHANGE_NORMAL;
  c.invalid_ids = SY_INVALID_IDS_COUNT;  // some ids of the cases are invalid
  return c;
}

static void make_numbers(void) {
  for (int r = 0; r < kWorld; ++r) {
    const mlp_case c = {kHidden, kWidth, kExperts, 0, NULL, NULL};
    static uint16_t others[kExperts * 2 * kWidth * kHidden], unused[kExperts * kHidden * kWidth];
    reference_weights(11 + (uint64_t)r, &c, w13[r], w2[r]);
    reference_weights(21 + (uint64_t)r, &c, others, unused);
    memcpy(x[r], others, sizeof x[r]);
    for (int f = 0; f < kTokens * kTopk; ++f) {
      ids[r][f] = (3 * f + r) % 5;  // 4 is no expert
      weights[r][f] = 0.5f + 0.125f * (float)(f % 4);
    }
  }
}

static void make_expected(int low_latency) {
  const moe_case c = make_case(low_latency);
  for (int add = 0; add < 2; ++add) {
    uint16_t* const out[kWorld] = {expected[add][0], expected[add][1]};
    for (int r = 0; r < kWorld; ++r) memcpy(out[r], x[1 - r], sizeof x[r]);
    reference_moe(&c, add, out);
  }
}

static void wrong_scaled_weights(int rank, const sy_moe_layer* layer) {
  const float scale = 1.0f;
  sy_moe_layer* other = NULL;
  CHECK_FAILS(sy_moe_layer_with_scaled_weights(NULL, w13[rank], w2[rank], NULL, NULL, NULL, NULL, &other), kWrong,
              "layer is NULL");
  CHECK_FAILS(sy_moe_layer_with_scaled_weights(layer, w13[rank], w2[rank], NULL, NULL, NULL, NULL, NULL), kWrong,
              "other is NULL");
  CHECK_FAILS(sy_moe_layer_with_scaled_weights(layer, w13[rank], w2[rank], NULL, NULL, &scale, NULL, &other), kWrong,
              "intermediate_scale is given");
  CHECK(other == NULL);
}

// The map exchanges the experts of each rank, and the ids are those of the experts: the layer selects the slots in `ids`.
static void selected_slots(int rank, sy_group* group, sy_moe_layer* layer) {
  int32_t experts[kWorld * kExperts] = {1, 0, 3, 2};
  sy_expert_map map = SY_EXPERT_MAP_INIT;
  map.num_experts = kWorld * kExperts;
  map.world = kWorld;
  map.slots_per_rank = kExperts;
  map.expert_of_slot = experts;
  sy_slot_selector* selector = NULL;
  CHECK_OK(sy_slot_selector_create(group, &map, NULL, &selector));
  int32_t given[kTokens * kTopk];
  for (int f = 0; f < kTokens * kTopk; ++f) given[f] = ids[rank][f] < 4 ? ids[rank][f] ^ 1 : 4;
  const sy_expert_ids routing = view_of_ids(given, kTokens, kTopk);
  uint16_t out[kTokens * kHidden];
  sy_moe_layer_call call = SY_MOE_LAYER_CALL_INIT;
  call.selector = selector;
  CHECK_OK(sy_moe_layer_forward(layer, x[rank], &routing, weights[rank], out, &call));
  CHECK(memcmp(out, expected[0][rank], sizeof out) == 0);
  CHECK_OK(sy_slot_selector_destroy(selector));
}

static void two_calls(int rank, sy_group* group) {
  sy_moe_layer_config config = make_config(low_latency_of_run);
  config.form = form_of_run;
  sy_moe_layer* layer = NULL;
  CHECK_OK(sy_moe_layer_create(group, &config, w13[rank], w2[rank], NULL, &layer));
  const sy_expert_ids routing = view_of_ids(ids[rank], kTokens, kTopk);
  uint16_t out[kTokens * kHidden];
  memset(out, 0xff, sizeof out);
  CHECK_OK(sy_moe_layer_forward(layer, x[rank], &routing, weights[rank], out, NULL));
  CHECK(memcmp(out, expected[0][rank], sizeof out) == 0);
  sy_moe_layer_call call = SY_MOE_LAYER_CALL_INIT;
  call.add = 1;
  memcpy(out, x[1 - rank], sizeof out);
  CHECK_OK(sy_moe_layer_forward(layer, x[rank], &routing, weights[rank], out, &call));
  CHECK(memcmp(out, expected[1][rank], sizeof out) == 0);
  const int32_t tokens = 3;
  call.add = 0;
  call.device_tokens = &tokens;
  memset(out, 0xff, sizeof out);
  CHECK_OK(sy_moe_layer_forward(layer, x[rank], &routing, weights[rank], out, &call));
  CHECK(out[3 * kHidden - 1] != 0xffff && out[3 * kHidden] == 0xffff);
  selected_slots(rank, group, layer);

  const uint8_t* dropped = (const uint8_t*)out;
  int64_t count = 1;
  CHECK_OK(sy_moe_layer_dropped(layer, &dropped, &count));
  CHECK(dropped == NULL && count == 0);
  const char *text = NULL, *begin = low_latency_of_run ? "separate, low_latency, " : "separate, normal, ";
  if (form_of_run == SY_MOE_FORM_FUSED) begin = "fused, normal, ";
  CHECK_OK(sy_moe_layer_implementation(layer, &text));
  CHECK(strncmp(text, begin, strlen(begin)) == 0);

  // A layer that shares everything but the weights with another layer, and uses the other rank's weights, outlives that layer.
  sy_moe_layer* other = NULL;
  const int peer = 1 - rank;
  CHECK_FAILS(sy_moe_layer_with_weights(NULL, w13[peer], w2[peer], NULL, NULL, NULL, &other), kWrong, "layer is NULL");
  CHECK_FAILS(sy_moe_layer_with_weights(layer, w13[peer], w2[peer], NULL, NULL, NULL, NULL), kWrong, "other is NULL");
  CHECK_FAILS(sy_moe_layer_with_weights(layer, NULL, w2[peer], NULL, NULL, NULL, &other), kWrong, "w13 is null");
  CHECK(other == NULL);
  CHECK_OK(sy_moe_layer_with_weights(layer, w13[peer], w2[peer], NULL, NULL, NULL, &other));
  CHECK_OK(sy_moe_layer_forward(other, x[rank], &routing, weights[rank], out, NULL));
  CHECK(memcmp(out, expected[0][rank], sizeof out) != 0);
  sy_moe_layer* back = NULL;
  wrong_scaled_weights(rank, other);
  CHECK_OK(sy_moe_layer_with_scaled_weights(other, w13[rank], w2[rank], NULL, NULL, NULL, NULL, &back));
  CHECK_OK(sy_moe_layer_destroy(other));
  CHECK_OK(sy_moe_layer_forward(back, x[rank], &routing, weights[rank], out, NULL));
  CHECK(memcmp(out, expected[0][rank], sizeof out) == 0);
  CHECK_OK(sy_moe_layer_destroy(back));

  CHECK_FAILS(sy_moe_layer_dropped(layer, NULL, &count), kWrong, "dropped is NULL");
  CHECK_FAILS(sy_moe_layer_dropped(layer, &dropped, NULL), kWrong, "count is NULL");
  CHECK_FAILS(sy_moe_layer_implementation(layer, NULL), kWrong, "text is NULL");
  CHECK_OK(sy_moe_layer_destroy(layer));
}

// Routes beyond a capacity of one row are dropped: the table marks them, and they do not contribute to any sum.
static void drops(int rank, sy_group* group) {
  sy_moe_layer_config config = make_config(0);
  config.capacity = 1;
  config.overflow = SY_OVERFLOW_DROP_AND_REPORT;
  sy_moe_layer* layer = NULL;
  CHECK_OK(sy_moe_layer_create(group, &config, w13[rank], w2[rank], NULL, &layer));
  const sy_expert_ids routing = view_of_ids(ids[rank], kTokens, kTopk);
  uint16_t out[kTokens * kHidden];
  CHECK_OK(sy_moe_layer_forward(layer, x[rank], &routing, NULL, out, NULL));
  const uint8_t* dropped = NULL;
  int64_t count = 0, kept = 0;
  CHECK_OK(sy_moe_layer_dropped(layer, &dropped, &count));
  CHECK(count == kTokens * kTopk && dropped != NULL);
  for (int f = 0; f < count; ++f) kept += ids[rank][f] < kWorld * kExperts && !dropped[f];
  int kept_of_both[kWorld] = {0, 0};
  const int mine = (int)kept;
  CHECK_OK(sy_group_all_gather(group, &mine, sizeof mine, kept_of_both));
  CHECK(kept_of_both[0] + kept_of_both[1] == kWorld);  // one row on each rank
  CHECK_OK(sy_moe_layer_destroy(layer));
}

// The fused form supports only normal mode and keeps tokens and returned rows in the heap. On the CPU, its weights may be
// packed.
static void fused_memory(sy_moe_layer_config config) {
  const sy_code unsupported = SY_UNSUPPORTED;
  const size_t rows = kTokens * (1 + kTopk) * kHidden * sizeof(uint16_t);
  sy_moe_layer_memory m = SY_MOE_LAYER_MEMORY_INIT;
  size_t heap_bytes = 0;
  config.form = SY_MOE_FORM_FUSED;
  config.storage = SY_WEIGHTS_VIEW;
  config.exchange = SY_MOE_EXCHANGE_LOW_LATENCY;
  CHECK_FAILS(sy_moe_layer_heap_bytes(&config, kWorld, SY_BACKEND_CUDA, &heap_bytes), unsupported, "::form = fused");
  config.exchange = SY_MOE_EXCHANGE_NORMAL;
  config.storage = SY_WEIGHTS_PACKED;
  CHECK_OK(sy_moe_layer_memory_required(&config, kWorld, SY_BACKEND_CPU, &m));
  CHECK_OK(sy_moe_layer_heap_bytes(&config, kWorld, SY_BACKEND_CPU, &heap_bytes));
  CHECK(m.heap_bytes > rows && heap_bytes > m.heap_bytes && m.scratch_bytes > 0 && m.weight_bytes > 0);
  config.storage = SY_WEIGHTS_VIEW;
  CHECK_OK(sy_moe_layer_memory_required(&config, kWorld, SY_BACKEND_CUDA, &m));
  CHECK_OK(sy_moe_layer_heap_bytes(&config, kWorld, SY_BACKEND_CUDA, &heap_bytes));
  CHECK(m.heap_bytes > rows && heap_bytes > m.heap_bytes && m.scratch_bytes > 0 && m.weight_bytes == 0);
}

static void memory(int low_latency) {
  const moe_case c = make_case(low_latency);
  size_t bytes[5], heap_bytes = 0;
  reference_moe_memory(&c, bytes);
  sy_moe_layer_config config = make_config(low_latency);
  sy_moe_layer_memory m = SY_MOE_LAYER_MEMORY_INIT;
  CHECK_OK(sy_moe_layer_memory_required(&config, kWorld, SY_BACKEND_CPU, &m));
  CHECK(m.heap_bytes == bytes[0] && m.private_bytes == bytes[1] && m.weight_bytes == bytes[2] && m.scratch_bytes == bytes[3]);
  CHECK(m.total_bytes == bytes[0] + bytes[1] + bytes[2] + bytes[3]);
  CHECK_OK(sy_moe_layer_heap_bytes(&config, kWorld, SY_BACKEND_CPU, &heap_bytes));
  CHECK(heap_bytes == bytes[4]);
  config.topk = 0;
  CHECK_FAILS(sy_moe_layer_memory_required(&config, kWorld, SY_BACKEND_CPU, &m), kWrong, "MoeLayerConfig::topk = 0");
  CHECK_FAILS(sy_moe_layer_heap_bytes(&config, kWorld, SY_BACKEND_CPU, NULL), kWrong, "bytes is NULL");
  CHECK_FAILS(sy_moe_layer_heap_bytes(&config, kWorld, 7, &heap_bytes), kWrong, "backend = 7");
  config.exchange = 9;
  CHECK_FAILS(sy_moe_layer_heap_bytes(&config, kWorld, 0, &heap_bytes), kWrong, "config->exchange = 9");
  config = make_config(low_latency);
  config.form = 3;
  CHECK_FAILS(sy_moe_layer_heap_bytes(&config, kWorld, 0, &heap_bytes), kWrong, "config->form = 3");
  fused_memory(config);
  config = make_config(low_latency);
  config.invalid_ids = 2;
  CHECK_FAILS(sy_moe_layer_heap_bytes(&config, kWorld, 0, &heap_bytes), kWrong, "config->invalid_ids = 2");
  config = make_config(low_latency);
  config.struct_size = 40;  // from a program without further members: there are then no experts
  CHECK_FAILS(sy_moe_layer_heap_bytes(&config, kWorld, 0, &heap_bytes), kWrong, "MoeLayerConfig::num_experts = 0");
}

// A config rejected on one rank causes an error on all ranks, and the group stays usable; an invalid struct is reported to the
// peers like a failed rank.
static void refusals(int rank, sy_group* group) {
  sy_moe_layer_config config = make_config(0);
  config.topk = rank == 0 ? kTopk : 99;
  sy_moe_layer* layer = NULL;
  CHECK_FAILS(sy_moe_layer_create(group, &config, w13[rank], w2[rank], NULL, &layer), kWrong,
              "rank 1: MoeLayerConfig::topk = 99");
  CHECK(layer == NULL);
  config.topk = kTopk;
  CHECK_OK(sy_moe_layer_create(group, &config, w13[rank], w2[rank], NULL, &layer));
  const sy_expert_ids routing = view_of_ids(ids[rank], kTokens, kTopk);
  uint16_t out[kTokens * kHidden];
  CHECK_FAILS(sy_moe_layer_forward(NULL, x[rank], &routing, NULL, out, NULL), kWrong, "layer is NULL");
  sy_moe_layer* none = layer;
  CHECK_FAILS(sy_moe_layer_create(NULL, &config, w13[rank], w2[rank], NULL, &none), kWrong, "group is NULL");
  CHECK(none == NULL);
  sy_moe_layer_call call = SY_MOE_LAYER_CALL_INIT;
  call.add = rank == 0 ? 2 : 0;
  if (rank == 0)
    CHECK_FAILS(sy_moe_layer_forward(layer, x[rank], &routing, NULL, out, &call), kWrong, "call->add = 2");
  else
    CHECK_FAILS(sy_moe_layer_forward(layer, x[rank], &routing, NULL, out, &call), SY_PEER_FAILED, "rank 0");
  CHECK_OK(sy_moe_layer_destroy(layer));
  CHECK_OK(sy_moe_layer_destroy(NULL));
}

void run_moe_layer_tests(void) {
  const sy_group_options options = patient_options(1 << 20);
  make_numbers();
  for (low_latency_of_run = 0; low_latency_of_run < 2; ++low_latency_of_run) {
    make_expected(low_latency_of_run);
    run_two_ranks(two_calls, &options);
    memory(low_latency_of_run);
  }
  low_latency_of_run = 0;
  form_of_run = SY_MOE_FORM_FUSED;
  make_expected(low_latency_of_run);
  run_two_ranks(two_calls, &options);
  run_two_ranks(drops, &options);
  run_two_ranks(refusals, &options);
}
