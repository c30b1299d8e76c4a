// SPDX-License-Identifier: Apache-2.0
// Expert compute through the C ABI, called from C11: the CPU experts produce the same bits as the C++ class, both in a separate
// call and between a dispatch and a combine.
#include "c_layer.h"

#include <stdlib.h>

#include "c_layer_reference.h"

enum { kHidden = 24, kWidth = 16, kExperts = 3, kRows = 40, kTokens = 12, kTopk = 2 };

static uint16_t w13[kExperts * 2 * kWidth * kHidden], w2[kExperts * kHidden * kWidth], x[kRows * kHidden];

static mlp_case make_case(int views_weights) {
  const mlp_case c = {kHidden, kWidth, kExperts, views_weights, w13, w2};
  return c;
}

// The rows are weights generated from another seed, which are bf16 numbers of all kinds.
static void make_numbers(void) {
  const mlp_case c = make_case(0);
  reference_weights(7, &c, w13, w2);
  static uint16_t others[kExperts * 2 * kWidth * kHidden], unused[kExperts * kHidden * kWidth];
  reference_weights(8, &c, others, unused);
  memcpy(x, others, sizeof x);
}

static sy_expert_mlp* make_mlp(int views_weights) {
  const sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
  options.storage = views_weights ? SY_WEIGHTS_VIEW : SY_WEIGHTS_PACKED;
  sy_expert_mlp* mlp = NULL;
  CHECK_OK(sy_expert_mlp_create(&shape, w13, w2, &options, &mlp));
  return mlp;
}

static void forward(sy_expert_mlp* mlp, int views_weights) {
  static const int64_t first_row[kExperts] = {20, 0, 31}, num_rows[kExperts] = {11, 17, 5};
  static const int32_t masked[kExperts] = {4, 0, 13};
  static const int64_t wide[kExperts] = {4, 0, 13}, places[kExperts] = {0, 13, 26};
  const mlp_case c = make_case(views_weights);
  uint16_t expected[kRows * kHidden], y[kRows * kHidden];
  const sy_const_row_view from = bf16_rows(x, kRows, kHidden);
  const sy_row_view to = bf16_results(y, kRows, kHidden);
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  rows.num_rows = num_rows;
  rows.first_row = first_row;
  memset(expected, 0xab, sizeof expected);  // rows of no expert must stay unchanged
  memset(y, 0xab, sizeof y);
  reference_forward(&c, x, kRows, first_row, num_rows, expected);
  CHECK_OK(sy_expert_mlp_forward(mlp, &from, &rows, &to, NULL));
  CHECK(memcmp(y, expected, sizeof y) == 0);

  sy_expert_call call = SY_EXPERT_CALL_INIT;
  call.num_sms = 7;  // ignored on the CPU
  rows = (sy_expert_rows)SY_EXPERT_ROWS_INIT;
  rows.num_rows_32 = masked;
  rows.rows_per_expert = 13;
  memset(expected, 0xcd, sizeof expected);
  memset(y, 0xcd, sizeof y);
  reference_forward(&c, x, kRows, places, wide, expected);
  CHECK_OK(sy_expert_mlp_forward(mlp, &from, &rows, &to, &call));
  CHECK(memcmp(y, expected, sizeof y) == 0);
}

static void rank_major(sy_expert_mlp* mlp, int views_weights) {
  const mlp_case c = make_case(views_weights);
  int32_t ids[kTokens * kTopk];
  float weights[kTokens * kTopk];
  for (int f = 0; f < kTokens * kTopk; ++f) {
    ids[f] = f % 5 - 1;  // -1 and 3 are not experts of this rank
    weights[f] = 0.25f * (float)(1 + f % 3);
  }
  const sy_expert_ids view = view_of_ids(ids, kTokens, kTopk);
  for (int weighted = 0; weighted < 2; ++weighted) {
    uint16_t expected[kTokens * kHidden], y[kTokens * kHidden];
    memset(expected, 0xab, sizeof expected);
    memset(y, 0xcd, sizeof y);  // every row is written
    reference_rank_major(&c, x, ids, kTokens, kTopk, weighted ? weights : NULL, expected);
    CHECK_OK(sy_expert_mlp_forward_rank_major(mlp, x, &view, weighted ? weights : NULL, y));
    CHECK(memcmp(y, expected, sizeof y) == 0);
  }
}

static void facts(const sy_expert_mlp* mlp, int views_weights) {
  const mlp_case c = make_case(views_weights);
  size_t weight_bytes = 0, scratch_bytes = 0;
  char implementation[128];
  reference_facts(&c, &weight_bytes, &scratch_bytes, implementation, sizeof implementation);
  sy_expert_memory has = SY_EXPERT_MEMORY_INIT, needs = SY_EXPERT_MEMORY_INIT;
  CHECK_OK(sy_expert_mlp_memory(mlp, &has));
  CHECK(has.weight_bytes == weight_bytes && has.scratch_bytes == scratch_bytes);
  CHECK(has.total_bytes == weight_bytes + scratch_bytes && (weight_bytes == 0) == (views_weights != 0));
  const sy_expert_shape shape = small_shape(kHidden, kWidth, kExperts);
  sy_expert_options options = SY_EXPERT_OPTIONS_INIT;
  options.storage = views_weights ? SY_WEIGHTS_VIEW : SY_WEIGHTS_PACKED;
  CHECK_OK(sy_expert_mlp_memory_required(&shape, &options, &needs));
  CHECK(needs.total_bytes == has.total_bytes && needs.weight_bytes == has.weight_bytes);
  const char *text = NULL, *again = NULL;
  CHECK_OK(sy_expert_mlp_implementation(mlp, &text));
  CHECK_OK(sy_expert_mlp_implementation(mlp, &again));
  CHECK(text == again && strcmp(text, implementation) == 0);
}

// The caller's weights may be freed once they are packed.
static void packed_weights_are_copies(void) {
  sy_expert_mlp* mlp = make_mlp(0);
  static uint16_t kept[sizeof w13 / sizeof *w13];
  memcpy(kept, w13, sizeof w13);
  const int64_t first_row[kExperts] = {0, 0, 0}, num_rows[kExperts] = {kRows, 0, 0};
  uint16_t expected[kRows * kHidden], y[kRows * kHidden];
  const mlp_case c = make_case(0);
  reference_forward(&c, x, kRows, first_row, num_rows, expected);
  memset(w13, 0xff, sizeof w13);
  const sy_const_row_view from = bf16_rows(x, kRows, kHidden);
  const sy_row_view to = bf16_results(y, kRows, kHidden);
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  rows.num_rows = num_rows;
  rows.first_row = first_row;
  CHECK_OK(sy_expert_mlp_forward(mlp, &from, &rows, &to, NULL));
  CHECK(memcmp(y, expected, sizeof y) == 0);
  memcpy(w13, kept, sizeof w13);
  CHECK_OK(sy_expert_mlp_destroy(mlp));
}

// ---- A layer of one rank ----

static const int32_t kIds[kTokens * kTopk] = {0, 2, 1, 0, 2, -1, 2, 1, 1, 1, 0, 1, 2, 0, 1, 2, -1, -1, 0, 1, 2, 2, 1, 0};

// Checks the expert results against those of the C++ class for the same call on the dispatched rows.
static void check_experts_of(const void* from, const void* made, int64_t rows, const int64_t* first_row,
                             const int64_t* counts) {
  const mlp_case c = make_case(0);
  uint16_t* expected = malloc((size_t)rows * kHidden * sizeof *expected);
  if (!expected) abort();
  reference_forward(&c, from, rows, first_row, counts, expected);
  for (int e = 0; e < kExperts; ++e)
    CHECK(memcmp(expected + first_row[e] * kHidden, (const uint16_t*)made + first_row[e] * kHidden,
                 (size_t)(counts[e] * kHidden) * sizeof *expected) == 0);
  free(expected);
}

static void layer_of_normal_mode(sy_group* group, sy_expert_mlp* mlp) {
  sy_normal_config config = SY_NORMAL_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = kTokens;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.layout = SY_LAYOUT_EXPERT_MAJOR;
  config.expert_alignment = 4;
  sy_exchange* exchange = NULL;
  sy_dispatched* dispatched = NULL;
  sy_rows* made = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  const sy_const_row_view tokens = bf16_rows(x, kTokens, kHidden);
  const sy_expert_ids ids = view_of_ids(kIds, kTokens, kTopk);
  CHECK_OK(sy_exchange_dispatch(exchange, &tokens, &ids, NULL, NULL, &dispatched));
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));
  CHECK_OK(sy_exchange_allocate_rows(exchange, view.handle, SY_DTYPE_BF16, SY_ANY_STREAM, &made));
  sy_row_view y = SY_ROW_VIEW_INIT;
  CHECK_OK(sy_rows_get(made, &y));
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  CHECK_OK(sy_expert_rows_of_dispatched(&view, &rows));
  CHECK(rows.num_rows == view.tokens_per_expert && rows.first_row == view.expert_first_row && rows.num_rows_32 == NULL);
  CHECK(rows.rows_per_expert == 0 && rows.scale_rows == 0);
  const sy_const_row_view delivered = bf16_rows(view.x, view.x_rows, kHidden);
  CHECK_OK(sy_expert_mlp_forward(mlp, &delivered, &rows, &y, NULL));
  check_experts_of(view.x, y.data, view.x_rows, view.expert_first_row, view.tokens_per_expert);
  uint16_t out[kTokens * kHidden];
  memset(out, 0xff, sizeof out);
  const sy_const_row_view answers = bf16_rows(y.data, y.rows, kHidden);
  CHECK_OK(sy_exchange_combine(exchange, &answers, view.handle, out, NULL, NULL));
  for (int j = 0; j < kHidden; ++j) CHECK(out[8 * kHidden + j] == 0);  // a token without an expert
  CHECK_OK(sy_rows_destroy(made));
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
}

static void layer_of_low_latency(sy_group* group, sy_expert_mlp* mlp) {
  sy_low_latency_config config = SY_LOW_LATENCY_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = kTokens;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.scales = SY_SCALE_NONE;
  sy_low_latency* exchange = NULL;
  sy_low_latency_output* output = NULL;
  sy_low_latency_rows* made = NULL;
  CHECK_OK(sy_low_latency_create(group, &config, &exchange));
  CHECK_OK(sy_low_latency_make_output(exchange, &output));
  CHECK_OK(sy_low_latency_make_rows(exchange, SY_DTYPE_BF16, &made));
  sy_low_latency_view view = SY_LOW_LATENCY_VIEW_INIT;
  sy_row_view y = SY_ROW_VIEW_INIT;
  CHECK_OK(sy_low_latency_output_get(output, &view));
  CHECK_OK(sy_low_latency_rows_get(made, &y));
  sy_expert_rows rows = SY_EXPERT_ROWS_INIT;
  CHECK_OK(sy_expert_rows_of_low_latency(&view, &rows));
  CHECK(rows.num_rows_32 == view.rows_of_expert && rows.rows_per_expert == view.rows_per_expert && rows.num_rows == NULL);
  CHECK(rows.first_row == NULL && rows.scale_rows == 0);
  const sy_const_row_view tokens = bf16_rows(x, kTokens, kHidden);
  const sy_expert_ids ids = view_of_ids(kIds, kTokens, kTopk);
  CHECK_OK(sy_low_latency_dispatch(exchange, &tokens, &ids, output, NULL));
  const sy_const_row_view delivered = bf16_rows(view.x, view.x_rows, kHidden);
  CHECK_OK(sy_expert_mlp_forward(mlp, &delivered, &rows, &y, NULL));
  int64_t first_row[kExperts], counts[kExperts];
  for (int e = 0; e < kExperts; ++e) {
    first_row[e] = e * view.rows_per_expert;
    counts[e] = view.rows_of_expert[e];
  }
  CHECK(counts[0] == 6 && counts[1] == 7 && counts[2] == 6);
  check_experts_of(view.x, y.data, view.x_rows, first_row, counts);
  uint16_t out[kTokens * kHidden];
  memset(out, 0xff, sizeof out);
  const sy_const_row_view answers = bf16_rows(y.data, y.rows, kHidden);
  CHECK_OK(sy_low_latency_combine(exchange, &answers, output, out, NULL));
  for (int j = 0; j < kHidden; ++j) CHECK(out[8 * kHidden + j] == 0);
  CHECK_OK(sy_low_latency_rows_destroy(made));
  CHECK_OK(sy_low_latency_output_destroy(output));
  CHECK_OK(sy_low_latency_destroy(exchange));
}

int main(void) {
  CHECK(strcmp(sy_last_error(), "") == 0);
  make_numbers();
  for (int views_weights = 0; views_weights < 2; ++views_weights) {
    sy_expert_mlp* mlp = make_mlp(views_weights);
    forward(mlp, views_weights);
    rank_major(mlp, views_weights);
    facts(mlp, views_weights);
    CHECK_OK(sy_expert_mlp_destroy(mlp));
  }
  packed_weights_are_copies();
  sy_group* group = NULL;
  const sy_group_options options = patient_options(1 << 20);
  sy_expert_mlp* mlp = make_mlp(0);
  CHECK_OK(sy_group_in_process(1, &options, &group));
  layer_of_normal_mode(group, mlp);
  layer_of_low_latency(group, mlp);
  CHECK_OK(sy_group_destroy(group));
  CHECK_OK(sy_expert_mlp_destroy(mlp));
  run_moe_layer_tests();
  run_layer_error_tests();
  run_gradient_error_tests();
  return check_status();
}
