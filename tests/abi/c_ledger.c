// SPDX-License-Identifier: Apache-2.0
// Ledgers and ledger combine through the C ABI. Each ledger comes from a dispatch or from hand-written tables. Each expert row
// is its token times (expert + 1); all values are small multiples of a quarter, so every sum is exact.
#include <stdio.h>
#include <stdlib.h>

#include "c_check.h"
#include "switchyard/c/ledger.h"

enum { kWorld = 2, kHidden = 20, kExperts = 3, kTopk = 2, kTokens = 2, kPadded = 16 };

// Rank 0 holds experts 0 and 1, and rank 1 holds expert 2.
static const int32_t kIds[kWorld][kTokens][kTopk] = {{{0, 2}, {1, -1}}, {{2, 1}, {2, 0}}};

static float value(int rank, int64_t token, int column) { return (float)(16 * rank + 4 * (int)token + column % 7 + 1); }
static float prob(int rank, int64_t token, int k) { return (float)(1 + rank + (int)token + 2 * k) * 0.25f; }

static sy_ledger_config make_config(void) {
  sy_ledger_config c = SY_LEDGER_CONFIG_INIT;
  c.hidden = kHidden;
  c.max_tokens = kTokens;
  c.num_experts = kExperts;
  c.topk = kTopk;
  c.dtype = SY_DTYPE_F32;
  return c;
}

// The hand-written tables. A rank's expert rows are ordered by (expert, source), and its return buffer by (expert, token).
static int32_t peer_tokens[kWorld * kPadded] = {1, 1, 1, [kPadded] = 1, 1, 2};
static int32_t cumsum[kWorld * kPadded] = {1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3,
                                           1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
static const int32_t kRowOfRoute[kWorld][kTokens * kTopk] = {{0, 2, 1, -1}, {2, 1, 3, 0}};
static const int32_t kFirstRow[kWorld][2] = {{0, 2}, {0}};
static const int32_t kBefore[kWorld][kWorld * 2] = {{0, 0, 1, 1}, {0, 1}};

static sy_ledger make_ledger(int rank) {
  sy_ledger l = SY_LEDGER_INIT;
  l.world = kWorld;
  l.num_experts = kExperts;
  l.num_experts_padded = kPadded;
  l.num_local_experts = rank == 0 ? 2 : 1;
  l.num_routes = kTokens * kTopk;
  l.peer_token_per_expert = peer_tokens;
  l.expanded_row_idx = kRowOfRoute[rank];
  l.cumsum_per_expert = cumsum;
  l.dispatch_offset = kFirstRow[rank];
  l.prev_sum_before_rank = kBefore[rank];
  return l;
}

static int equal(const int32_t* a, const int32_t* b, int64_t n) { return memcmp(a, b, (size_t)n * sizeof *a) == 0; }

static void check_same(const sy_ledger* a, const sy_ledger* b) {
  CHECK(a->world == b->world && a->num_experts == b->num_experts && a->num_experts_padded == b->num_experts_padded &&
        a->num_local_experts == b->num_local_experts && a->num_routes == b->num_routes);
  CHECK(equal(a->peer_token_per_expert, b->peer_token_per_expert, kWorld * kPadded));
  CHECK(equal(a->expanded_row_idx, b->expanded_row_idx, a->num_routes));
  CHECK(equal(a->cumsum_per_expert, b->cumsum_per_expert, kWorld * kPadded));
  CHECK(equal(a->dispatch_offset, b->dispatch_offset, a->num_local_experts));
  CHECK(equal(a->prev_sum_before_rank, b->prev_sum_before_rank, (int64_t)kWorld * a->num_local_experts));
}

// Expert rows of rank `rank`, ordered by (expert, source, token).
static int64_t make_expert_rows(int rank, float* rows) {
  int64_t row = 0;
  for (int32_t e = rank == 0 ? 0 : 2; e < (rank == 0 ? 2 : 3); ++e)
    for (int s = 0; s < kWorld; ++s)
      for (int64_t t = 0; t < kTokens; ++t)
        for (int k = 0; k < kTopk; ++k)
          if (kIds[s][t][k] == e) {
            for (int j = 0; j < kHidden; ++j) rows[row * kHidden + j] = (float)(e + 1) * value(s, t, j);
            ++row;
          }
  return row;
}

static void check_sums(const float* out, int rank, int with_probs) {
  for (int64_t t = 0; t < kTokens; ++t)
    for (int j = 0; j < kHidden; ++j) {
      float sum = 0.0f;
      for (int k = 0; k < kTopk; ++k)
        if (kIds[rank][t][k] >= 0)
          sum += (with_probs ? prob(rank, t, k) : 1.0f) * (float)(kIds[rank][t][k] + 1) * value(rank, t, j);
      CHECK(out[t * kHidden + j] == sum);
    }
}

static void combines(int rank, sy_group* group) {
  const sy_ledger_config config = make_config();
  const sy_ledger ledger = make_ledger(rank);
  sy_ledger_combine* combine = NULL;
  sy_prepared_ledger* prepared = NULL;
  CHECK_OK(sy_ledger_combine_create(group, &config, &combine));
  CHECK_OK(sy_ledger_combine_prepare(combine, &ledger, &prepared));
  int64_t tokens = -1, rows = -1, returned = -1;
  CHECK_OK(sy_prepared_ledger_sizes(prepared, &tokens, &rows, &returned));
  CHECK_OK(sy_prepared_ledger_sizes(prepared, NULL, NULL, NULL));
  CHECK(tokens == kTokens && rows == (rank == 0 ? 4 : 3) && returned == (rank == 0 ? 3 : 4));

  float experts[4 * kHidden], probs[kTokens * kTopk], out[kTokens * kHidden];
  CHECK(make_expert_rows(rank, experts) == rows);
  const sy_const_row_view y = view_of_rows(experts, rows, kHidden);
  for (int f = 0; f < kTokens * kTopk; ++f) probs[f] = prob(rank, f / kTopk, f % kTopk);
  const sy_ledger_combine_options options = SY_LEDGER_COMBINE_OPTIONS_INIT;
  for (int turn = 0; turn < 4; ++turn) {
    memset(out, 0xff, sizeof out);
    CHECK_OK(sy_ledger_combine_run(combine, &y, turn % 2 ? probs : NULL, prepared, out, turn < 2 ? NULL : &options));
    check_sums(out, rank, turn % 2);
  }

  sy_bytes bytes = SY_BYTES_INIT;
  CHECK_OK(sy_ledger_pack(&ledger, &config, kWorld, rank, &bytes));
  memset(out, 0xff, sizeof out);
  CHECK_OK(sy_combine_by_ledger(&y, probs, bytes.data, bytes.size, combine, kTokens, out, NULL));
  check_sums(out, rank, 1);
  CHECK_OK(sy_storage_release(bytes.storage));

  sy_const_row_view back = SY_CONST_ROW_VIEW_INIT;
  CHECK_OK(sy_ledger_combine_returned(combine, &back));
  CHECK(back.rows == returned && back.cols == kHidden && back.dtype == SY_DTYPE_F32);
  for (int f = 0; f < kTokens * kTopk; ++f) {
    const int32_t e = kIds[rank][f / kTopk][f % kTopk], row = kRowOfRoute[rank][f];
    for (int j = 0; j < kHidden && e >= 0; ++j)
      CHECK(((const float*)back.data)[row * kHidden + j] == (float)(e + 1) * value(rank, f / kTopk, j));
  }
  sy_call_statistics statistics = SY_CALL_STATISTICS_INIT;
  CHECK_OK(sy_ledger_combine_last_call(combine, &statistics));
  CHECK(statistics.remote_bytes == (rank == 0 ? 2u : 1u) * kHidden * sizeof(float));
  CHECK_OK(sy_ledger_combine_destroy(combine));
  CHECK_OK(sy_prepared_ledger_sizes(prepared, &tokens, NULL, NULL));  // objects may be destroyed in any order
  CHECK_OK(sy_prepared_ledger_destroy(prepared));
}

// The tables of a dispatch equal the hand-written ones.
static void from_a_dispatch(int rank, sy_group* group) {
  sy_normal_config config = SY_NORMAL_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = kTokens;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.dtype = SY_DTYPE_F32;
  config.layout = SY_LAYOUT_EXPERT_MAJOR;
  float x[kTokens * kHidden] = {0};
  const sy_const_row_view rows = view_of_rows(x, kTokens, kHidden);
  const sy_expert_ids ids = view_of_ids(kIds[rank][0], kTokens, kTopk);
  sy_exchange* exchange = NULL;
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  CHECK_OK(sy_exchange_dispatch(exchange, &rows, &ids, NULL, NULL, &dispatched));
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));
  sy_ledger ledger = SY_LEDGER_INIT;
  CHECK_OK(sy_handle_ledger(view.handle, &ledger));
  const sy_ledger by_hand = make_ledger(rank);
  check_same(&ledger, &by_hand);
  CHECK_OK(sy_storage_release(ledger.storage));
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
}

// Rank 1's ledger has one extra row from rank 0, and both ranks receive the error.
static void different_ledgers(int rank, sy_group* group) {
  const sy_ledger_config config = make_config();
  sy_ledger ledger = make_ledger(rank);
  int32_t other[kWorld * kPadded] = {0}, prefix[kWorld * kPadded], before[kWorld] = {0, 2};
  if (rank == 1) {
    memcpy(other, peer_tokens, sizeof other);
    memcpy(prefix, cumsum, sizeof prefix);
    other[2] = 2;
    for (int e = 2; e < kPadded; ++e) prefix[e] = 4;
    ledger.peer_token_per_expert = other;
    ledger.cumsum_per_expert = prefix;
    ledger.prev_sum_before_rank = before;
  }
  sy_ledger_combine* combine = NULL;
  sy_prepared_ledger* prepared = NULL;
  CHECK_OK(sy_ledger_combine_create(group, &config, &combine));
  CHECK_OK(sy_ledger_combine_prepare(combine, &ledger, &prepared));
  float experts[4 * kHidden] = {0}, out[kTokens * kHidden];
  const sy_const_row_view y = view_of_rows(experts, 4, kHidden);
  const sy_code code = sy_ledger_combine_run(combine, &y, NULL, prepared, out, NULL);
  int32_t failed = -1;
  sy_code reason = code;  // found here, or reported by the other rank
  if (code == SY_PEER_FAILED) CHECK_OK(sy_last_peer_failure(&failed, &reason));
  CHECK(reason == SY_MISMATCH && (code == reason || failed == 1 - rank));
  CHECK_OK(sy_prepared_ledger_destroy(prepared));
  CHECK_OK(sy_ledger_combine_destroy(combine));
}

// Rank 1 passes bytes that contain a row twice: its own error names the row, and rank 0's error names rank 1.
static void malformed_bytes(int rank, sy_group* group) {
  const sy_ledger_config config = make_config();
  const sy_ledger ledger = make_ledger(rank);
  sy_ledger_combine* combine = NULL;
  sy_bytes bytes = SY_BYTES_INIT;
  CHECK_OK(sy_ledger_combine_create(group, &config, &combine));
  CHECK_OK(sy_ledger_pack(&ledger, &config, kWorld, rank, &bytes));
  int32_t copy[448 / 4];
  CHECK(bytes.size == sizeof copy);
  memcpy(copy, bytes.data, sizeof copy);
  if (rank == 1) copy[128 / 4 + 1] = copy[128 / 4];  // expanded_row_idx begins at 128
  float experts[4 * kHidden] = {0}, out[kTokens * kHidden];
  const sy_const_row_view y = view_of_rows(experts, 4, kHidden);
  if (rank == 1) {
    CHECK_FAILS(sy_combine_by_ledger(&y, NULL, copy, sizeof copy, combine, kTokens, out, NULL), SY_INVALID_ARGUMENT,
                "expanded_row_idx[1] = 2: route 0 has this row already");
  } else {
    int32_t failed = -1;
    sy_code reason = SY_OK;
    CHECK(sy_combine_by_ledger(&y, NULL, copy, sizeof copy, combine, kTokens, out, NULL) == SY_PEER_FAILED);
    CHECK_OK(sy_last_peer_failure(&failed, &reason));
    CHECK(failed == 1 && reason == SY_INVALID_ARGUMENT);
  }
  CHECK_OK(sy_storage_release(bytes.storage));
  CHECK_OK(sy_ledger_combine_destroy(combine));
}

static void packed(void) {
  const sy_ledger_config config = make_config();
  for (int rank = 0; rank < kWorld; ++rank) {
    const sy_ledger ledger = make_ledger(rank);
    CHECK_OK(sy_ledger_check(&ledger, &config, kWorld, rank));
    sy_bytes bytes = SY_BYTES_INIT;
    CHECK_OK(sy_ledger_pack(&ledger, &config, kWorld, rank, &bytes));
    CHECK(bytes.size == 128 + 64 + 128 + 64 + 64);
    CHECK(equal(bytes.data, peer_tokens, kWorld * kPadded));
    sy_ledger again = SY_LEDGER_INIT;
    CHECK_OK(sy_ledger_unpack(bytes.data, bytes.size, &config, kWorld, rank, kTokens, &again));
    check_same(&ledger, &again);
    CHECK_OK(sy_storage_release(again.storage));
    CHECK_FAILS(sy_ledger_unpack(bytes.data, bytes.size - 1, &config, kWorld, rank, kTokens, &again), SY_INVALID_ARGUMENT,
                "at least 448");
    CHECK_OK(sy_storage_release(bytes.storage));
  }
  // The published figures.
  sy_ledger_config published = SY_LEDGER_CONFIG_INIT;
  published.hidden = 7168;
  published.max_tokens = 64;
  published.num_experts = 4;
  published.topk = 8;
  sy_ledger_format format = SY_LEDGER_FORMAT_INIT;
  CHECK_OK(sy_ledger_format_of(&published, 2, 24, &format));
  CHECK(format.workspace_bytes == 2304 && format.route_meta_bytes == 2432 && format.window_bytes == 7340160 &&
        format.guard_bytes == 4096);
}

static void local_misuse(void) {
  sy_ledger_config config = make_config();
  sy_ledger ledger = make_ledger(0);
  CHECK_FAILS(sy_ledger_check(NULL, &config, kWorld, 0), SY_INVALID_ARGUMENT, "ledger");
  CHECK_FAILS(sy_ledger_check(&ledger, NULL, kWorld, 0), SY_INVALID_ARGUMENT, "config");
  CHECK_FAILS(sy_ledger_check(&ledger, &config, kWorld, 1), SY_INVALID_ARGUMENT, "num_local_experts");
  CHECK_FAILS(sy_ledger_check(&ledger, &config, kWorld, 2), SY_INVALID_ARGUMENT, "rank");
  int32_t rows[kTokens * kTopk] = {0, 2, 0, -1};
  ledger.expanded_row_idx = rows;
  CHECK_FAILS(sy_ledger_check(&ledger, &config, kWorld, 0), SY_INVALID_ARGUMENT, "expanded_row_idx[2]");
  ledger.expanded_row_idx = NULL;
  CHECK_FAILS(sy_ledger_check(&ledger, &config, kWorld, 0), SY_INVALID_ARGUMENT, "ledger->expanded_row_idx");
  ledger = make_ledger(0);
  ledger.num_routes = -1;
  CHECK_FAILS(sy_ledger_check(&ledger, &config, kWorld, 0), SY_INVALID_ARGUMENT, "ledger->num_routes = -1");
  ledger = make_ledger(0);
  ledger.num_experts_padded = 2;
  CHECK_FAILS(sy_ledger_check(&ledger, &config, kWorld, 0), SY_INVALID_ARGUMENT, "ledger->num_experts_padded = 2");
  ledger.struct_size = 5;
  CHECK_FAILS(sy_ledger_check(&ledger, &config, kWorld, 0), SY_INVALID_ARGUMENT, "ledger->struct_size = 5");

  size_t bytes = 0;
  sy_memory_requirement need = SY_MEMORY_REQUIREMENT_INIT;
  CHECK_OK(sy_ledger_combine_memory_required(&config, kWorld, SY_BACKEND_CPU, &need));
  CHECK_OK(sy_ledger_combine_heap_bytes(&config, kWorld, SY_BACKEND_CUDA, &bytes));
  CHECK(need.total_bytes > 0 && bytes > need.total_bytes);
  CHECK_FAILS(sy_ledger_combine_heap_bytes(&config, kWorld, 7, &bytes), SY_INVALID_ARGUMENT, "backend = 7");
  config.dtype = SY_DTYPE_FP8_E4M3;
  CHECK(sy_ledger_combine_heap_bytes(&config, kWorld, SY_BACKEND_CPU, &bytes) != SY_OK);
  sy_ledger_combine* combine = NULL;
  sy_prepared_ledger* prepared = NULL;
  CHECK_FAILS(sy_ledger_combine_create(NULL, &config, &combine), SY_INVALID_ARGUMENT, "group");
  CHECK_FAILS(sy_ledger_combine_prepare(NULL, &ledger, &prepared), SY_INVALID_ARGUMENT, "combine");
  CHECK_FAILS(sy_prepared_ledger_sizes(NULL, NULL, NULL, NULL), SY_INVALID_ARGUMENT, "prepared");
  CHECK_FAILS(sy_ledger_combine_run(NULL, NULL, NULL, NULL, NULL, NULL), SY_INVALID_ARGUMENT, "combine");
  CHECK_FAILS(sy_combine_by_ledger(NULL, NULL, rows, sizeof rows, NULL, kTokens, NULL, NULL), SY_INVALID_ARGUMENT, "window");
  CHECK_FAILS(sy_ledger_combine_returned(NULL, NULL), SY_INVALID_ARGUMENT, "combine");
  CHECK_FAILS(sy_ledger_combine_last_call(NULL, NULL), SY_INVALID_ARGUMENT, "combine");
  CHECK_OK(sy_ledger_combine_destroy(NULL));
  CHECK_OK(sy_prepared_ledger_destroy(NULL));
}

void run_ledger_tests(void) {
  const sy_group_options options = patient_options(1 << 20);
  run_two_ranks(combines, &options);
  run_two_ranks(from_a_dispatch, &options);
  run_two_ranks(different_ledgers, &options);
  run_two_ranks(malformed_bytes, &options);
  packed();
  local_misuse();
}
