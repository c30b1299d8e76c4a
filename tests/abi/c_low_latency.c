// SPDX-License-Identifier: Apache-2.0
// Low-latency mode and the flat exchange through the C ABI, called from C11. Expert e turns x into (e + 1) * x; all numbers are
// small multiples of a quarter, so every sum is exact.
#include <stdio.h>
#include <stdlib.h>

#include "c_check.h"
#include "switchyard/c/expert_map.h"
#include "switchyard/c/low_latency.h"

enum { kWorld = 2, kHidden = 384, kGroup = 128, kExperts = 3, kTopk = 2, kMaxTokens = 3, kCapacity = kWorld * kMaxTokens };

// Rank 0 holds experts 0 and 1, and rank 1 holds expert 2. Id -1 selects no expert; one token of rank 1 selects the same expert
// twice.
static const int32_t kIds[kWorld][kMaxTokens][kTopk] = {{{0, 2}, {1, 0}, {2, -1}}, {{2, 1}, {-1, -1}, {2, 2}}};
static const int64_t kTokens[kWorld] = {3, 3};

static int32_t first_of(int rank) { return rank == 0 ? 0 : 2; }
static int32_t experts_of(int rank) { return rank == 0 ? 2 : 1; }
static float value(int rank, int64_t token, int column) { return (float)(16 * rank + 4 * (int)token + column % 7 + 1); }
static float weight(int rank, int64_t token, int k) { return (float)(1 + rank + (int)token + 2 * k) * 0.25f; }

typedef struct Input {
  float x[kMaxTokens * kHidden], weights[kMaxTokens * kTopk];
  sy_const_row_view rows;
  sy_expert_ids ids;
  sy_low_latency_dispatch_options options;
} Input;

static void make_input(Input* in, int rank) {
  for (int64_t t = 0; t < kTokens[rank]; ++t) {
    for (int j = 0; j < kHidden; ++j) in->x[t * kHidden + j] = value(rank, t, j);
    for (int k = 0; k < kTopk; ++k) in->weights[t * kTopk + k] = weight(rank, t, k);
  }
  in->rows = view_of_rows(in->x, kTokens[rank], kHidden);
  in->ids = view_of_ids(kIds[rank][0], kTokens[rank], kTopk);
  in->options = (sy_low_latency_dispatch_options)SY_LOW_LATENCY_DISPATCH_OPTIONS_INIT;
  in->options.topk_weights = in->weights;
}

static sy_low_latency_config make_config(sy_scale_kind scales) {
  sy_low_latency_config c = SY_LOW_LATENCY_CONFIG_INIT;
  c.hidden = kHidden;
  c.max_tokens = kMaxTokens;
  c.num_experts = kExperts;
  c.topk = kTopk;
  c.dtype = SY_DTYPE_F32;
  c.scales = scales;
  c.pieces = 3;
  return c;
}

typedef struct Objects {
  sy_low_latency* exchange;
  sy_low_latency_output* output;
  sy_low_latency_rows* rows;
  sy_low_latency_view view;
  sy_row_view y;
} Objects;

static Objects make_objects(sy_group* group, sy_scale_kind scales) {
  const sy_low_latency_config config = make_config(scales);
  Objects o = {NULL, NULL, NULL, SY_LOW_LATENCY_VIEW_INIT, SY_ROW_VIEW_INIT};
  CHECK_OK(sy_low_latency_create(group, &config, &o.exchange));
  CHECK_OK(sy_low_latency_make_output(o.exchange, &o.output));
  CHECK_OK(sy_low_latency_make_rows(o.exchange, SY_DTYPE_F32, &o.rows));
  CHECK_OK(sy_low_latency_output_get(o.output, &o.view));
  CHECK_OK(sy_low_latency_rows_get(o.rows, &o.y));
  return o;
}

static void destroy_objects(Objects* o) {
  CHECK_OK(sy_low_latency_rows_destroy(o->rows));
  CHECK_OK(sy_low_latency_output_destroy(o->output));
  CHECK_OK(sy_low_latency_destroy(o->exchange));
}

static sy_const_row_view answers(const Objects* o) {
  CHECK(o->y.dtype == SY_DTYPE_F32 && o->y.rows == o->view.x_rows && o->y.cols == kHidden);
  return view_of_rows(o->y.data, o->y.rows, o->y.cols);
}

// Number of rows that `source`, with `tokens` tokens, sends to global expert `expert`: one per token that selects this expert.
static int32_t rows_from(int source, int64_t tokens, int32_t expert) {
  int32_t rows = 0;
  for (int64_t t = 0; t < tokens; ++t) rows += kIds[source][t][0] == expert || kIds[source][t][1] == expert;
  return rows;
}

// Every row of every local expert is the one named in `row_source`; each (source, token) pair occurs once, with sources in
// ascending order.
static void check_delivered(const Objects* o, int rank, const int64_t* tokens) {
  const sy_low_latency_view* v = &o->view;
  CHECK(v->num_local_experts == experts_of(rank) && v->world == kWorld && v->rows_per_expert == kCapacity &&
        v->x_cols == kHidden);
  CHECK(v->x_rows == v->num_local_experts * kCapacity && v->x_dtype == SY_DTYPE_F32 && v->x_scales == NULL);
  for (int32_t e = 0; e < v->num_local_experts; ++e) {
    const int32_t expert = first_of(rank) + e;
    int32_t first = 0;
    unsigned seen = 0;
    for (int s = 0; s < kWorld; ++s) {
      const int32_t rows = rows_from(s, tokens[s], expert);
      CHECK(v->source_range[e * kWorld + s] == ((int64_t)first << 32 | rows));
      for (int32_t i = first; i < first + rows; ++i) {
        const int64_t row = e * kCapacity + i, from = v->row_source[row];
        const int64_t token = from & 0xffff, k = from >> 32 & 0xffff;
        CHECK(from >> 48 == s && token < tokens[s] && k < kTopk && kIds[s][token][k] == expert);
        CHECK((seen >> (s * kMaxTokens + token) & 1) == 0);
        seen |= 1u << (s * kMaxTokens + token);
        for (int j = 0; j < kHidden; ++j) CHECK(((const float*)v->x)[row * kHidden + j] == value(s, token, j));
      }
      first += rows;
    }
    CHECK(v->rows_of_expert[e] == first);
  }
}

// y = (expert + 1) * x for the valid rows. All other rows stay NaN, which must not affect any sum.
static void run_experts(const Objects* o, int rank) {
  memset(o->y.data, 0xff, (size_t)o->y.rows * kHidden * sizeof(float));
  for (int32_t e = 0; e < o->view.num_local_experts; ++e)
    for (int64_t i = 0; i < (int64_t)o->view.rows_of_expert[e] * kHidden; ++i) {
      const int64_t at = (int64_t)e * kCapacity * kHidden + i;
      ((float*)o->y.data)[at] = (float)(first_of(rank) + e + 1) * ((const float*)o->view.x)[at];
    }
}

// Factor of token t: the sum over its experts of weight * (expert + 1). If `extra` is given, each term is also multiplied by
// extra[expert].
static float factor(int rank, int64_t t, int weighted, const float* extra) {
  float sum = 0.0f;
  for (int k = 0; k < kTopk; ++k) {
    const int32_t e = kIds[rank][t][k];
    if (e < 0 || e >= kExperts) continue;
    sum += (weighted ? weight(rank, t, k) : 1.0f) * (float)(e + 1) * (extra ? extra[e] : 1.0f);
  }
  return sum;
}

static void check_sums(const float* out, int rank, int64_t tokens, int weighted, const float* extra) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int j = 0; j < kHidden; ++j) CHECK(out[t * kHidden + j] == factor(rank, t, weighted, extra) * value(rank, t, j));
}

static void whole_calls(int rank, sy_group* group) {
  Objects o = make_objects(group, SY_SCALE_NONE);
  Input in;
  make_input(&in, rank);
  CHECK_OK(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options));
  check_delivered(&o, rank, kTokens);
  sy_call_statistics statistics = SY_CALL_STATISTICS_INIT;
  CHECK_OK(sy_low_latency_last_call(o.exchange, &statistics));
  // Each token is sent to a rank once: rank 0 sends two tokens to rank 1, and rank 1 sends one to rank 0.
  CHECK(statistics.remote_bytes == (rank == 0 ? 2u : 1u) * kHidden * sizeof(float));
  run_experts(&o, rank);

  float out[kMaxTokens * kHidden];
  const sy_const_row_view y = answers(&o);
  CHECK_OK(sy_low_latency_combine(o.exchange, &y, o.output, out, NULL));
  check_sums(out, rank, kTokens[rank], 1, NULL);
  sy_low_latency_combine_options options = SY_LOW_LATENCY_COMBINE_OPTIONS_INIT;
  options.order = SY_ORDER_PER_RANK;
  memset(out, 0xff, sizeof out);
  CHECK_OK(sy_low_latency_combine(o.exchange, &y, o.output, out, &options));
  check_sums(out, rank, kTokens[rank], 1, NULL);

  // Passes weights and factors to combine.
  const float ones[kMaxTokens * kTopk] = {1, 1, 1, 1, 1, 1}, factors[kExperts] = {2.0f, 0.5f, 4.0f};
  options.order = SY_ORDER_PER_ROUTE;
  options.topk_weights = ones;
  options.expert_scale = factors + first_of(rank);
  CHECK_OK(sy_low_latency_combine(o.exchange, &y, o.output, out, &options));
  check_sums(out, rank, kTokens[rank], 0, factors);

  // The token count is read from memory: one token on rank 0, none on rank 1.
  const int32_t now = rank == 0 ? 1 : 0;
  const int64_t tokens[kWorld] = {1, 0};
  in.options.device_tokens = &now;
  CHECK_OK(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options));
  check_delivered(&o, rank, tokens);
  run_experts(&o, rank);
  memset(out, 0, sizeof out);
  CHECK_OK(sy_low_latency_combine(o.exchange, &y, o.output, out, NULL));
  check_sums(out, rank, tokens[rank], 1, NULL);
  CHECK(out[kHidden] == 0.0f);
  destroy_objects(&o);
}

static void halves(int rank, sy_group* group) {
  Objects o = make_objects(group, SY_SCALE_NONE);
  Input in;
  float out[kMaxTokens * kHidden];
  const sy_const_row_view y = answers(&o);
  CHECK_FAILS(sy_low_latency_receive(o.exchange), SY_INVALID_ARGUMENT, "nothing was sent");
  for (int turn = 0; turn < 3; ++turn) {
    make_input(&in, rank);
    CHECK_OK(sy_low_latency_dispatch_send(o.exchange, &in.rows, &in.ids, o.output, &in.options));
    memset(&in, 0xff, sizeof in);  // the caller may reuse it
    CHECK_OK(sy_low_latency_receive(o.exchange));
    CHECK_FAILS(sy_low_latency_receive(o.exchange), SY_INVALID_ARGUMENT, "nothing was sent");
    check_delivered(&o, rank, kTokens);
    run_experts(&o, rank);
    CHECK_OK(sy_low_latency_combine_send(o.exchange, &y, o.output, out, NULL));
    memset(o.y.data, 0xff, (size_t)o.y.rows * kHidden * sizeof(float));
    CHECK_OK(sy_low_latency_receive(o.exchange));
    check_sums(out, rank, kTokens[rank], 1, NULL);
  }
  destroy_objects(&o);
}

// Groups whose largest magnitude is 448 have scale 1, and small integers are exact in e4m3.
static void quantised(int rank, sy_group* group) {
  Objects o = make_objects(group, SY_SCALE_F32);
  const sy_low_latency_config config = make_config(SY_SCALE_F32);
  size_t scale_bytes = 0;
  CHECK_OK(sy_low_latency_scale_row_bytes(&config, &scale_bytes));
  CHECK(o.view.scale_order == SY_SCALES_ROW_MAJOR && o.view.scale_group == kGroup);
  CHECK(scale_bytes == 16 && o.view.x_dtype == SY_DTYPE_FP8_E4M3 && o.view.x_scale_kind == SY_SCALE_F32);
  Input in;
  make_input(&in, rank);
  for (int i = 0; i < kMaxTokens * kHidden; ++i) in.x[i] = i % kGroup == 0 ? 448.0f : 1.0f;
  CHECK_OK(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, NULL));
  for (int32_t e = 0; e < o.view.num_local_experts; ++e)
    for (int64_t row = e * kCapacity; row < e * kCapacity + o.view.rows_of_expert[e]; ++row) {
      for (size_t g = 0; g < kHidden / kGroup; ++g) {
        float scale = 0.0f;
        memcpy(&scale, (const char*)o.view.x_scales + (size_t)row * scale_bytes + g * sizeof scale, sizeof scale);
        CHECK(scale == 1.0f);
      }
      for (int j = 0; j < kHidden; ++j)
        CHECK(((const unsigned char*)o.view.x)[row * kHidden + j] == (j % kGroup == 0 ? 0x7e : 0x38));
    }
  destroy_objects(&o);
}

// The view includes the layout of the scales. A program compiled against an earlier header uses a shorter view.
static void scales_in_views(int rank, sy_group* group) {
  (void)rank;
  sy_low_latency_config config = make_config(SY_SCALE_F32);
  config.scale_group = 64;
  config.scale_order = SY_SCALES_COLUMN_MAJOR;
  sy_low_latency* exchange = NULL;
  sy_low_latency_output* output = NULL;
  CHECK_OK(sy_low_latency_create(group, &config, &exchange));
  CHECK_OK(sy_low_latency_make_output(exchange, &output));
  sy_low_latency_view view = SY_LOW_LATENCY_VIEW_INIT;
  CHECK(view.scale_order == SY_SCALES_ROW_MAJOR && view.scale_group == 0);
  CHECK_OK(sy_low_latency_output_get(output, &view));
  CHECK(view.scale_order == SY_SCALES_COLUMN_MAJOR && view.scale_group == 64);

  enum { kOlder = offsetof(sy_low_latency_view, scale_order) / sizeof(size_t) };
  size_t* older = calloc(kOlder, sizeof(size_t));  // the memory after it does not belong to the struct
  if (!older) abort();
  older[0] = kOlder * sizeof(size_t);
  CHECK_OK(sy_low_latency_output_get(output, (sy_low_latency_view*)(void*)older));
  CHECK(older[0] == kOlder * sizeof(size_t) &&
        memcmp(older + 1, (const char*)&view + sizeof(size_t), (kOlder - 1) * sizeof(size_t)) == 0);
  free(older);
  CHECK_OK(sy_low_latency_output_destroy(output));

  // The same with caller-provided memory.
  sy_row_view own = SY_ROW_VIEW_INIT;
  own.rows = view.x_rows;
  own.cols = view.x_cols;
  own.dtype = view.x_dtype;
  own.scale_kind = view.x_scale_kind;
  own.data = malloc((size_t)(view.x_rows * view.x_cols) + 1);
  CHECK_FAILS(sy_low_latency_make_output_in(exchange, &own, &output), SY_INVALID_ARGUMENT, "memory.scales is null");
  CHECK(output == NULL);
  own.scales = malloc((size_t)(view.num_local_experts * view.scale_rows * (view.x_cols + 63) / 64) * sizeof(float) + 1);
  CHECK_OK(sy_low_latency_make_output_in(exchange, &own, &output));
  CHECK_OK(sy_low_latency_output_get(output, &view));
  CHECK(view.x == own.data && view.x_scales == own.scales && view.row_source != NULL);
  CHECK_OK(sy_low_latency_output_destroy(output));
  free(own.data);
  free(own.scales);
  CHECK_OK(sy_low_latency_destroy(exchange));
}

static void times_expert(float* x, int64_t n, const sy_row_origin* row, int64_t column, void* user) {
  const float* const extra = user;
  for (int64_t i = 0; i < n; ++i) {
    const float expected = value(row->rank, row->token, (int)(column + i));
    x[i] = x[i] == expected && kIds[row->rank][row->token][row->k] == row->expert
               ? x[i] * (float)(row->expert + 1) * extra[row->expert]
               : -1.0f;
  }
}

static void all_to_all(int rank, sy_group* group) {
  Objects o = make_objects(group, SY_SCALE_NONE);
  Input in;
  make_input(&in, rank);
  float out[kMaxTokens * kHidden], extra[kExperts] = {2.0f, 0.5f, 4.0f};
  sy_all_to_all_options options = SY_ALL_TO_ALL_OPTIONS_INIT;
  options.topk_weights = in.weights;
  options.row_function = times_expert;
  options.row_function_user = extra;
  CHECK_OK(sy_low_latency_all_to_all(o.exchange, &in.rows, &in.ids, out, &options));
  check_sums(out, rank, kTokens[rank], 1, extra);
  float factors[kExperts] = {2.0f, 1.0f, 12.0f};  // (e + 1) * extra
  options.row_function = NULL;
  options.expert_scale = factors + first_of(rank);
  CHECK_OK(sy_low_latency_all_to_all(o.exchange, &in.rows, &in.ids, out, &options));
  check_sums(out, rank, kTokens[rank], 1, extra);
  const float inverse[kExperts] = {1.0f, 0.5f, 1.0f / 3.0f};  // inverse of (e + 1): leaves the row unchanged
  CHECK_OK(sy_low_latency_all_to_all(o.exchange, &in.rows, &in.ids, out, NULL));
  check_sums(out, rank, kTokens[rank], 0, inverse);
  destroy_objects(&o);
}

// An object may be destroyed before the outputs created from it. Another object with the same config accepts these outputs.
static void in_any_order(int rank, sy_group* group) {
  size_t before = 0, after = 0;
  CHECK_OK(sy_group_heap(group, &before, NULL));
  Objects o = make_objects(group, SY_SCALE_NONE);
  Input in;
  float out[kMaxTokens * kHidden];
  make_input(&in, rank);
  CHECK_OK(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options));
  CHECK_OK(sy_low_latency_destroy(o.exchange));
  CHECK_OK(sy_group_heap(group, &after, NULL));
  CHECK(before == after);
  check_delivered(&o, rank, kTokens);

  const sy_low_latency_config config = make_config(SY_SCALE_NONE);
  CHECK_OK(sy_group_barrier(group));
  CHECK_OK(sy_low_latency_create(group, &config, &o.exchange));
  memset(o.view.x, 0, (size_t)o.view.x_rows * kHidden * sizeof(float));
  CHECK_OK(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options));
  check_delivered(&o, rank, kTokens);
  run_experts(&o, rank);
  const sy_const_row_view y = answers(&o);
  CHECK_OK(sy_low_latency_combine(o.exchange, &y, o.output, out, NULL));
  check_sums(out, rank, kTokens[rank], 1, NULL);
  CHECK_OK(sy_low_latency_destroy(o.exchange));
  CHECK_OK(sy_low_latency_output_destroy(o.output));
  CHECK_OK(sy_low_latency_rows_destroy(o.rows));
}

// Rank 0 starts a call without having received the previous one: it receives that error, and the other rank's error names the
// failed peer.
static void unreceived(int rank, sy_group* group) {
  Objects o = make_objects(group, SY_SCALE_NONE);
  Input in;
  make_input(&in, rank);
  if (rank == 0) {
    CHECK_OK(sy_low_latency_dispatch_send(o.exchange, &in.rows, &in.ids, o.output, &in.options));
    CHECK_FAILS(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options), SY_INVALID_ARGUMENT,
                "has not been received");
  } else {
    sy_code code = SY_OK;
    for (int i = 0; i < 2 && code == SY_OK; ++i)
      code = sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options);
    CHECK(code == SY_PEER_FAILED);
  }
  destroy_objects(&o);
}

// Errors found by the C layer itself must also reach the peer.
static void wrong_on_rank_0(int rank, sy_group* group) {
  Objects o = make_objects(group, SY_SCALE_NONE);
  Input in;
  make_input(&in, rank);
  if (rank == 0) {
    in.options.known_memory = 2;
    CHECK_FAILS(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options), SY_INVALID_ARGUMENT,
                "options->known_memory = 2");
  } else {
    CHECK(sy_low_latency_dispatch(o.exchange, &in.rows, &in.ids, o.output, &in.options) == SY_PEER_FAILED);
    int32_t failed = -1;
    sy_code reason = SY_OK;
    CHECK_OK(sy_last_peer_failure(&failed, &reason));
    CHECK(failed == 0 && reason == SY_INVALID_ARGUMENT);
  }
  destroy_objects(&o);
}

// Makes an exchange of four slots, and a selector for kExperts experts.
static sy_slot_selector* select_slots(sy_group* group, sy_low_latency** exchange) {
  sy_low_latency_config config = make_config(SY_SCALE_NONE);
  config.num_experts = 4;
  CHECK_OK(sy_low_latency_create(group, &config, exchange));
  int32_t slots[] = {0, 1, 2, 0};
  sy_expert_map map = SY_EXPERT_MAP_INIT;
  map.num_experts = kExperts;
  map.world = kWorld;
  map.slots_per_rank = 2;
  map.expert_of_slot = slots;
  sy_slot_selector* selector = NULL;
  CHECK_OK(sy_slot_selector_create(group, &map, NULL, &selector));
  return selector;
}

// Only rank 1 passes a selector. Whichever rank finds the difference, the error names the option.
static void selector_of_dispatch(int rank, sy_group* group) {
  sy_low_latency* exchange = NULL;
  sy_low_latency_output* output = NULL;
  sy_slot_selector* selector = select_slots(group, &exchange);
  CHECK_OK(sy_low_latency_make_output(exchange, &output));
  Input in;
  make_input(&in, rank);
  in.options.selector = rank == 1 ? selector : NULL;
  CHECK_FAILS(sy_low_latency_dispatch(exchange, &in.rows, &in.ids, output, &in.options), SY_MISMATCH,
              "LowLatencyDispatchOptions::selector = ");
  CHECK(strstr(sy_last_error(), "given on rank 1") != NULL && strstr(sy_last_error(), "null on rank 0") != NULL);
  CHECK_OK(sy_low_latency_output_destroy(output));
  CHECK_OK(sy_low_latency_destroy(exchange));
  CHECK_OK(sy_slot_selector_destroy(selector));
}

static void selector_of_all_to_all(int rank, sy_group* group) {
  sy_low_latency* exchange = NULL;
  sy_slot_selector* selector = select_slots(group, &exchange);
  Input in;
  make_input(&in, rank);
  float out[kMaxTokens * kHidden];
  sy_all_to_all_options options = SY_ALL_TO_ALL_OPTIONS_INIT;
  options.selector = rank == 1 ? selector : NULL;
  CHECK_FAILS(sy_low_latency_all_to_all(exchange, &in.rows, &in.ids, out, &options), SY_MISMATCH,
              "AllToAllOptions::selector = ");
  CHECK(strstr(sy_last_error(), "given on rank 1") != NULL && strstr(sy_last_error(), "null on rank 0") != NULL);
  CHECK_OK(sy_low_latency_destroy(exchange));
  CHECK_OK(sy_slot_selector_destroy(selector));
}

static void local_misuse(void) {
  sy_low_latency_config config = make_config(SY_SCALE_NONE);
  sy_memory_requirement need = SY_MEMORY_REQUIREMENT_INIT;
  size_t bytes = 0;
  CHECK_OK(sy_low_latency_memory_required(&config, kWorld, &need));
  CHECK_OK(sy_low_latency_heap_bytes(&config, kWorld, &bytes));
  CHECK(need.total_bytes > 0 && bytes > need.total_bytes);
  CHECK_FAILS(sy_low_latency_memory_required(&config, 0, &need), SY_INVALID_ARGUMENT, "world");
  CHECK_FAILS(sy_low_latency_heap_bytes(&config, kWorld, NULL), SY_INVALID_ARGUMENT, "bytes");
  CHECK_FAILS(sy_low_latency_heap_bytes(NULL, kWorld, &bytes), SY_INVALID_ARGUMENT, "config");
  config.sending = 2;
  CHECK_FAILS(sy_low_latency_heap_bytes(&config, kWorld, &bytes), SY_INVALID_ARGUMENT, "config->sending = 2");
  config.sending = SY_SENDING_PER_ROUTE;
  config.scale_order = -1;
  CHECK_FAILS(sy_low_latency_heap_bytes(&config, kWorld, &bytes), SY_INVALID_ARGUMENT, "config->scale_order = -1");
  config.scale_order = SY_SCALES_COLUMN_MAJOR;
  config.scale_group = 48;
  config.scales = SY_SCALE_UE8M0;
  CHECK_FAILS(sy_low_latency_heap_bytes(&config, kWorld, &bytes), SY_INVALID_ARGUMENT, "scale_group");
  CHECK_FAILS(sy_low_latency_scale_row_bytes(&config, &bytes), SY_INVALID_ARGUMENT, "config->scale_group = 48");
  config.scale_group = 32;
  CHECK_OK(sy_low_latency_scale_row_bytes(&config, &bytes));
  CHECK(bytes == 16);  // 12 bytes, padded
  config.struct_size = 3;
  CHECK_FAILS(sy_low_latency_heap_bytes(&config, kWorld, &bytes), SY_INVALID_ARGUMENT, "config->struct_size = 3");

  sy_low_latency* exchange = NULL;
  sy_low_latency_output* output = NULL;
  sy_low_latency_rows* rows = NULL;
  CHECK_FAILS(sy_low_latency_create(NULL, &config, &exchange), SY_INVALID_ARGUMENT, "group");
  CHECK_FAILS(sy_low_latency_make_output(NULL, &output), SY_INVALID_ARGUMENT, "exchange");
  CHECK_FAILS(sy_low_latency_make_output_in(NULL, NULL, &output), SY_INVALID_ARGUMENT, "exchange");
  CHECK_FAILS(sy_low_latency_make_rows(NULL, SY_DTYPE_F32, &rows), SY_INVALID_ARGUMENT, "exchange");
  CHECK_FAILS(sy_low_latency_output_get(NULL, NULL), SY_INVALID_ARGUMENT, "output");
  CHECK_FAILS(sy_low_latency_rows_get(NULL, NULL), SY_INVALID_ARGUMENT, "rows");
  CHECK_FAILS(sy_low_latency_dispatch(NULL, NULL, NULL, NULL, NULL), SY_INVALID_ARGUMENT, "exchange");
  CHECK_FAILS(sy_low_latency_receive(NULL), SY_INVALID_ARGUMENT, "exchange");
  CHECK_FAILS(sy_low_latency_last_call(NULL, NULL), SY_INVALID_ARGUMENT, "exchange");
  CHECK_OK(sy_low_latency_destroy(NULL));
  CHECK_OK(sy_low_latency_output_destroy(NULL));
  CHECK_OK(sy_low_latency_rows_destroy(NULL));
}

void run_low_latency_tests(void) {
  const sy_low_latency_config config = make_config(SY_SCALE_NONE);  // without scales, rows are larger
  sy_group_options options = patient_options(0);
  CHECK_OK(sy_low_latency_heap_bytes(&config, kWorld, &options.heap_bytes));
  run_two_ranks(whole_calls, &options);
  run_two_ranks(halves, &options);
  run_two_ranks(quantised, &options);
  run_two_ranks(scales_in_views, &options);
  run_two_ranks(all_to_all, &options);
  run_two_ranks(in_any_order, &options);
  run_two_ranks(unreceived, &options);
  run_two_ranks(wrong_on_rank_0, &options);
  options.heap_bytes += 1 << 20;
  run_two_ranks(selector_of_dispatch, &options);
  run_two_ranks(selector_of_all_to_all, &options);
  local_misuse();
}
