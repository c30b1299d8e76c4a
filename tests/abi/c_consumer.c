// SPDX-License-Identifier: Apache-2.0
// Uses the C ABI from C11. Two ranks are two threads; expected values are computed by the loops in this file.
#include <stdlib.h>

#include "c_check.h"
#include "switchyard/c/binding.h"
#include "switchyard/c/low_latency.h"

enum { kWorld = 2, kHidden = 16, kExperts = 3, kTopk = 2, kMaxTokens = 3 };

// ---- Routing and values ----

// Rank 0 holds experts 0 and 1, and rank 1 holds expert 2. Id -1 selects no expert.
static const int32_t kIds[kWorld][kMaxTokens][kTopk] = {{{0, 2}, {1, 0}, {2, -1}}, {{2, 1}, {-1, 0}}};
static const int64_t kTokens[kWorld] = {3, 2};

static int owner(int32_t expert) { return expert < 0 || expert >= kExperts ? -1 : expert == 2; }
static int32_t first_of(int rank) { return rank == 0 ? 0 : 2; }
static int32_t experts_of(int rank) { return rank == 0 ? 2 : 1; }
static float value(int rank, int64_t token, int column) { return (float)(100 * rank + 10 * (int)token + column); }
static float weight(int rank, int64_t token, int k) { return (float)(1 + rank + 2 * (int)token + 4 * k) * 0.25f; }
static int is_sent_to(int source, int64_t token, int rank) {
  return owner(kIds[source][token][0]) == rank || owner(kIds[source][token][1]) == rank;
}

typedef struct Input {
  float x[kMaxTokens * kHidden], weights[kMaxTokens * kTopk];
  sy_const_row_view rows;
  sy_expert_ids ids;
} Input;

static void make_input(Input* in, int rank, float offset) {
  for (int64_t t = 0; t < kTokens[rank]; ++t) {
    for (int j = 0; j < kHidden; ++j) in->x[t * kHidden + j] = value(rank, t, j) + offset;
    for (int k = 0; k < kTopk; ++k) in->weights[t * kTopk + k] = weight(rank, t, k);
  }
  in->rows = view_of_rows(in->x, kTokens[rank], kHidden);
  in->ids = view_of_ids(kIds[rank][0], kTokens[rank], kTopk);
}

static sy_normal_config make_config(sy_layout layout, sy_staging staging) {
  sy_normal_config c = SY_NORMAL_CONFIG_INIT;
  c.hidden = kHidden;
  c.max_tokens = kMaxTokens;
  c.num_experts = kExperts;
  c.topk = kTopk;
  c.layout = layout;
  c.expert_alignment = layout == SY_LAYOUT_EXPERT_MAJOR ? 4 : 1;
  c.dtype = SY_DTYPE_F32;
  c.staging = staging;
  c.ring_num_channels = 2;
  c.ring_send_chunk = 1;
  c.ring_slots = 3;
  return c;
}

// ---- Two ranks as threads ----

// State shared by the threads of one run, written before they start.
static sy_layout layout_of_run;
static sy_staging staging_of_run;

typedef struct Rank {
  int rank;
  sy_group* group;
  sy_layout layout;
} Rank;

static sy_exchange* create(const Rank* me) {
  const sy_normal_config config = make_config(me->layout, staging_of_run);
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(me->group, &config, &exchange));
  return exchange;
}

static sy_dispatched_view get(const sy_dispatched* dispatched) {
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));
  return view;
}

static int row_equals(const sy_dispatched_view* v, int64_t row, int source, int64_t token, float offset) {
  const float* x = (const float*)v->x + row * kHidden;
  for (int j = 0; j < kHidden; ++j)
    if (x[j] != value(source, token, j) + offset) return 0;
  return 1;
}

// ---- Results of a dispatch ----

static void check_rank_major(const sy_dispatched_view* v, int rank, float offset) {
  int64_t row = 0;
  for (int s = 0; s < kWorld; ++s)
    for (int64_t t = 0; t < kTokens[s]; ++t) {
      if (!is_sent_to(s, t, rank)) continue;
      CHECK(row_equals(v, row, s, t, offset));
      CHECK(v->source_token[row] == t);
      for (int k = 0; k < kTopk; ++k) {
        const int here = owner(kIds[s][t][k]) == rank;
        CHECK(v->topk_ids[row * kTopk + k] == (here ? kIds[s][t][k] - first_of(rank) : -1));
        CHECK(v->topk_weights[row * kTopk + k] == (here ? weight(s, t, k) : 0.0f));
      }
      ++row;
    }
  CHECK(v->rows == row && v->x_rows == row && v->x_cols == kHidden);
  CHECK(v->row_source == NULL && v->row_weights == NULL && v->expert_first_row == NULL);
}

static void check_expert_major(const sy_dispatched_view* v, int rank, float offset) {
  int64_t row = 0;
  for (int32_t e = 0; e < experts_of(rank); ++e) {
    CHECK(v->expert_first_row[e] == row);
    const int64_t first = row;
    for (int s = 0; s < kWorld; ++s)
      for (int64_t t = 0; t < kTokens[s]; ++t)
        for (int k = 0; k < kTopk; ++k) {
          if (kIds[s][t][k] != first_of(rank) + e) continue;
          CHECK(row_equals(v, row, s, t, offset));
          CHECK(v->row_source[row] == ((int64_t)s << 48 | (int64_t)k << 32 | t));
          CHECK(v->row_weights[row] == weight(s, t, k));
          ++row;
        }
    CHECK(v->tokens_per_expert[e] == row - first);
    for (; row % 4 != 0; ++row) {
      CHECK(v->row_source[row] == -1);
      for (int j = 0; j < kHidden; ++j) CHECK(((const float*)v->x)[row * kHidden + j] == 0.0f);
    }
    CHECK(v->aligned_per_expert[e] == row - first);
  }
  CHECK(v->rows == row && v->topk_ids == NULL && v->topk_weights == NULL && v->source_token == NULL);
}

// The handle provides the same counts in host memory.
static void check_counts(const sy_dispatched_view* v, const Rank* me) {
  sy_counts c = SY_COUNTS_INIT;
  CHECK_OK(sy_handle_counts(v->handle, &c));
  CHECK(c.rows == v->rows && c.num_local_experts == experts_of(me->rank) && c.storage != NULL);
  CHECK((c.expert_first_row != NULL) == (me->layout == SY_LAYOUT_EXPERT_MAJOR));
  for (int64_t e = 0; e < c.num_local_experts; ++e) {
    int64_t routes = 0;
    for (int s = 0; s < kWorld; ++s)
      for (int64_t f = 0; f < kTokens[s] * kTopk; ++f) routes += kIds[s][f / kTopk][f % kTopk] == first_of(me->rank) + e;
    CHECK(c.tokens_per_expert[e] == routes && c.aligned_per_expert[e] == v->aligned_per_expert[e]);
    if (c.expert_first_row) CHECK(c.expert_first_row[e] == v->expert_first_row[e]);
  }
  CHECK_OK(sy_storage_release(c.storage));
}

static void check_view(const sy_dispatched_view* v, const Rank* me, float offset) {
  CHECK(v->world == kWorld && v->topk == kTopk && v->num_local_experts == experts_of(me->rank) &&
        v->num_tokens == kTokens[me->rank]);
  CHECK(v->x_dtype == SY_DTYPE_F32 && v->x_scale_kind == SY_SCALE_NONE && v->x_scales == NULL);
  CHECK(v->dropped == NULL && v->dropped_per_source == NULL && v->handle != NULL);
  if (me->layout == SY_LAYOUT_RANK_MAJOR)
    check_rank_major(v, me->rank, offset);
  else
    check_expert_major(v, me->rank, offset);
  check_counts(v, me);
}

// ---- Combine ----

// Expert e turns a row x into (e + 1) * x. With rank-major rows, the "experts" double x instead. `y` has as many rows as the
// view.
static void apply_experts(const sy_dispatched_view* v, const Rank* me, float* y) {
  for (int64_t row = 0; row < v->rows; ++row) {
    float factor = 2.0f;
    if (me->layout == SY_LAYOUT_EXPERT_MAJOR) {
      int32_t e = v->num_local_experts - 1;
      while (row < v->expert_first_row[e]) --e;
      factor = (float)(first_of(me->rank) + e + 1);
    }
    for (int j = 0; j < kHidden; ++j) y[row * kHidden + j] = factor * ((const float*)v->x)[row * kHidden + j];
  }
}

// Every intermediate value is a small multiple of 1/4, so sums are exact in any order.
static void check_combined(const Rank* me, const float* out, const float* out_weights, float offset, const float* bias) {
  for (int64_t t = 0; t < kTokens[me->rank]; ++t) {
    float factor = 0.0f;
    for (int k = 0; k < kTopk; ++k) {
      const int32_t id = kIds[me->rank][t][k];
      const int valid = owner(id) >= 0;
      if (me->layout == SY_LAYOUT_EXPERT_MAJOR) factor += valid ? weight(me->rank, t, k) * (float)(id + 1) : 0.0f;
      if (out_weights) CHECK(out_weights[t * kTopk + k] == (valid ? weight(me->rank, t, k) : 0.0f));
    }
    if (me->layout == SY_LAYOUT_RANK_MAJOR) factor = (float)(2 * (is_sent_to(me->rank, t, 0) + is_sent_to(me->rank, t, 1)));
    for (int j = 0; j < kHidden; ++j) {
      const float expected = factor * (value(me->rank, t, j) + offset) + (bias ? 2.0f * bias[t * kHidden + j] : 0.0f);
      CHECK(out[t * kHidden + j] == expected);
    }
  }
}

static void combine_and_check(const Rank* me, sy_exchange* exchange, const sy_dispatched_view* v, const sy_handle* handle,
                              float offset, int in_place) {
  float* memory = calloc((size_t)v->rows * kHidden + 1, sizeof(float));
  sy_row_view mine = SY_ROW_VIEW_INIT;
  sy_rows* buffer = NULL;
  if (in_place) {
    CHECK_OK(sy_exchange_allocate_rows(exchange, handle, SY_DTYPE_F32, SY_ANY_STREAM, &buffer));
    CHECK_OK(sy_rows_get(buffer, &mine));
    CHECK(mine.rows == v->rows && mine.cols == kHidden && mine.dtype == SY_DTYPE_F32);
  }
  float* y = in_place ? mine.data : memory;
  apply_experts(v, me, y);
  sy_const_row_view rows = SY_CONST_ROW_VIEW_INIT;
  rows.data = y;
  rows.rows = v->rows;
  rows.cols = kHidden;
  rows.dtype = SY_DTYPE_F32;
  float bias[kMaxTokens * kHidden], out[kMaxTokens * kHidden], out_weights[kMaxTokens * kTopk];
  for (int i = 0; i < kMaxTokens * kHidden; ++i) bias[i] = (float)i;
  sy_combine_options options = SY_COMBINE_OPTIONS_INIT;
  options.bias[0] = options.bias[1] = bias;
  const int rank_major = me->layout == SY_LAYOUT_RANK_MAJOR;
  if (rank_major) options.topk_weights = v->topk_weights;
  CHECK_OK(sy_exchange_combine(exchange, &rows, handle, out, &options, rank_major ? out_weights : NULL));
  check_combined(me, out, rank_major ? out_weights : NULL, offset, bias);
  if (!rank_major) {
    options = (sy_combine_options)SY_COMBINE_OPTIONS_INIT;
    options.order = SY_ORDER_PER_ROUTE;
    CHECK_OK(sy_exchange_combine(exchange, &rows, handle, out, &options, NULL));
    check_combined(me, out, NULL, offset, NULL);
  } else {
    CHECK_OK(sy_exchange_combine(exchange, &rows, handle, out, NULL, NULL));
    check_combined(me, out, NULL, offset, NULL);
  }
  if (buffer) CHECK_OK(sy_rows_used_by(buffer, NULL));
  CHECK_OK(sy_rows_destroy(buffer));
  free(memory);
}

// Delivers the rows of `view` again, into memory that this program owns and that outlives the dispatch.
static void deliver_to_own_memory(sy_exchange* exchange, const Input* in, const sy_handle* handle,
                                  const sy_dispatched_view* view) {
  sy_row_view own = SY_ROW_VIEW_INIT;
  own.rows = view->x_rows;
  own.cols = view->x_cols;
  own.dtype = view->x_dtype;
  own.data = malloc((size_t)(view->x_rows * view->x_cols) * sizeof(float) + 1);
  if (!own.data) abort();
  sy_dispatch_options options = SY_DISPATCH_OPTIONS_INIT;
  options.out = &own;
  sy_dispatched* delivered = NULL;
  CHECK_OK(sy_exchange_dispatch_cached(exchange, &in->rows, handle, &options, &delivered));
  CHECK(get(delivered).x == own.data && get(delivered).x_rows == view->x_rows);
  CHECK_OK(sy_dispatched_destroy(delivered));
  const size_t bytes = (size_t)(view->rows * view->x_cols) * sizeof(float);
  CHECK(memcmp(own.data, view->x, bytes) == 0);
  // Repeats the call without requesting an output object.
  memset(own.data, 0x5a, bytes);
  CHECK_OK(sy_exchange_dispatch_cached(exchange, &in->rows, handle, &options, NULL));
  CHECK(memcmp(own.data, view->x, bytes) == 0);
  free(own.data);
}

// Tests an exchange that counts invalid ids. Only the last token of this rank has any.
static void invalid_ids(int rank, sy_group* group) {
  sy_exchange* exchange = NULL;
  sy_normal_config config = make_config(layout_of_run, staging_of_run);
  config.invalid_ids = SY_INVALID_IDS_COUNT;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  Input in;
  make_input(&in, rank, 0.0f);
  const int64_t topk = in.ids.topk, invalid = in.ids.num_tokens > 0 ? topk : 0;
  int64_t given[kMaxTokens * kTopk];
  for (int64_t f = 0; f < in.ids.num_tokens * topk; ++f)
    given[f] = f / topk + 1 < in.ids.num_tokens ? -1 : ((int64_t)1 << 32) + f;
  in.ids.data = given;
  in.ids.is_int64 = 1;
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &in.rows, &in.ids, NULL, NULL, &dispatched));
  int64_t of_handle = -1, of_exchange = -1;
  CHECK_OK(sy_handle_invalid_ids(get(dispatched).handle, &of_handle));
  CHECK_OK(sy_exchange_invalid_ids(exchange, &of_exchange));
  CHECK(of_handle == invalid && of_exchange == invalid && *get(dispatched).invalid_ids == invalid);
  CHECK(sy_exchange_invalid_ids(NULL, &of_exchange) == SY_INVALID_ARGUMENT);
  CHECK(sy_handle_invalid_ids(get(dispatched).handle, NULL) == SY_INVALID_ARGUMENT);
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
}

// Runs dispatch and combine, then a cached dispatch and its combine. The cached dispatch uses a handle that outlives its
// dispatch and was serialized and restored.
static void round_trip(int own_rank, sy_group* group) {
  const Rank rank_of_run = {own_rank, group, layout_of_run};
  const Rank* me = &rank_of_run;
  sy_exchange* exchange = create(me);
  Input in;
  make_input(&in, me->rank, 0.0f);
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &in.rows, &in.ids, in.weights, NULL, &dispatched));
  sy_dispatched_view view = get(dispatched);
  check_view(&view, me, 0.0f);
  sy_call_statistics statistics = SY_CALL_STATISTICS_INIT;
  CHECK_OK(sy_exchange_last_call(exchange, &statistics));
  uint64_t sent = 0, remote = 0;
  for (int64_t t = 0; t < kTokens[me->rank]; ++t)
    for (int r = 0; r < kWorld; ++r) {
      sent += (uint64_t)is_sent_to(me->rank, t, r);
      remote += (uint64_t)(r != me->rank && is_sent_to(me->rank, t, r));
    }
  CHECK(statistics.payload_rows == sent && statistics.remote_bytes == remote * kHidden * sizeof(float) &&
        statistics.total_us > 0.0);
  combine_and_check(me, exchange, &view, view.handle, 0.0f, 1);

  sy_handle* handle = view.handle;
  CHECK_OK(sy_handle_retain(handle));
  CHECK_OK(sy_dispatched_used_by(dispatched, NULL));
  CHECK_OK(sy_dispatched_destroy(dispatched));
  sy_bytes bytes = SY_BYTES_INIT;
  CHECK_OK(sy_handle_serialize(handle, &bytes));
  sy_handle* copy = NULL;
  CHECK_OK(sy_handle_deserialize(bytes.data, bytes.size, &copy));
  CHECK_OK(sy_storage_release(bytes.storage));
  CHECK_OK(sy_handle_release(handle));

  make_input(&in, me->rank, 1000.0f);
  CHECK_OK(sy_exchange_dispatch_cached(exchange, &in.rows, copy, NULL, &dispatched));
  view = get(dispatched);
  check_view(&view, me, 1000.0f);
  int64_t tokens = 0, rows = 0;
  CHECK_OK(sy_handle_num_tokens(copy, &tokens));
  CHECK_OK(sy_handle_rows(copy, &rows));
  CHECK(tokens == kTokens[me->rank] && rows == view.rows);
  combine_and_check(me, exchange, &view, copy, 1000.0f, 0);
  deliver_to_own_memory(exchange, &in, copy, &view);
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_handle_release(copy));
  CHECK_OK(sy_exchange_destroy(exchange));
}

// ---- Views of a handle ----

static void check_matrices(const sy_handle* handle, int rank) {
  sy_matrices m = SY_MATRICES_INIT;
  CHECK_OK(sy_handle_matrices(handle, 1, &m));
  CHECK(m.world == kWorld && m.num_channels == 1 && m.num_tokens == kTokens[rank]);
  int64_t received = 0;
  for (int d = 0; d < kWorld; ++d) {
    int32_t prefix = 0;
    for (int s = 0; s < kWorld; ++s) {
      int32_t sent = 0;
      for (int64_t t = 0; t < kTokens[s]; ++t) {
        if (s == rank) {
          CHECK(m.is_token_in_rank[t * kWorld + d] == is_sent_to(s, t, d));
          CHECK(m.send_head[t * kWorld + d] == (is_sent_to(s, t, d) ? sent : -1));
        }
        if (d == rank && is_sent_to(s, t, d)) CHECK(m.recv_src_idx[received++] == t);
        sent += is_sent_to(s, t, d);
      }
      prefix += sent;
      CHECK(m.rank_prefix_matrix[s * kWorld + d] == prefix);
      if (s == rank) CHECK(m.channel_prefix_matrix[d] == sent);
    }
  }
  CHECK(m.num_recv == received && m.recv_channel_prefix_matrix[0] == 0 && m.recv_channel_prefix_matrix[1] == 0);
  CHECK_OK(sy_storage_release(m.storage));
}

static void check_ledger(const sy_handle* handle, int rank) {
  sy_ledger l = SY_LEDGER_INIT;
  CHECK_OK(sy_handle_ledger(handle, &l));
  CHECK(l.world == kWorld && l.num_experts == kExperts && l.num_experts_padded == 16 &&
        l.num_local_experts == experts_of(rank));
  CHECK(l.num_routes == kTokens[rank] * kTopk);
  int32_t row = 0;
  for (int32_t e = 0; e < kExperts; ++e) {
    const int32_t first = row;
    for (int64_t f = 0; f < l.num_routes; ++f)
      if (kIds[rank][f / kTopk][f % kTopk] == e) CHECK(l.expanded_row_idx[f] == row++);
    CHECK(l.peer_token_per_expert[rank * 16 + e] == row - first && l.cumsum_per_expert[rank * 16 + e] == row);
  }
  CHECK(l.dispatch_offset[0] == 0 && l.prev_sum_before_rank[0] == 0);
  CHECK_OK(sy_storage_release(l.storage));
}

static void views(int own_rank, sy_group* group) {
  const Rank rank_of_run = {own_rank, group, layout_of_run};
  const Rank* me = &rank_of_run;
  int32_t rank = -1, size = -1, gathered[kWorld] = {-1, -1};
  CHECK_OK(sy_group_rank(me->group, &rank));
  CHECK_OK(sy_group_size(me->group, &size));
  CHECK(rank == me->rank && size == kWorld);
  CHECK_OK(sy_group_all_gather(me->group, &rank, sizeof rank, gathered));
  CHECK(gathered[0] == 0 && gathered[1] == 1);
  sy_exchange* exchange = create(me);
  size_t used = 0, total = 0;
  CHECK_OK(sy_group_heap(me->group, &used, &total));
  CHECK(used > 0 && used <= total && total >= (size_t)1 << 20);
  Input in;
  make_input(&in, me->rank, 0.0f);
  int64_t wide[kMaxTokens * kTopk] = {0};
  for (int64_t f = 0; f < kTokens[rank] * kTopk; ++f) wide[f] = kIds[rank][f / kTopk][f % kTopk];
  in.ids.data = wide;
  in.ids.is_int64 = 1;
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &in.rows, &in.ids, in.weights, NULL, &dispatched));
  sy_dispatched_view view = get(dispatched);
  check_view(&view, me, 0.0f);
  check_matrices(view.handle, rank);
  check_ledger(view.handle, rank);
  CHECK_OK(sy_group_barrier(me->group));
  CHECK_OK(sy_group_check(me->group));
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
}

// ---- Options of dispatch ----

static void options_of_dispatch(int own_rank, sy_group* group) {
  const Rank rank_of_run = {own_rank, group, layout_of_run};
  const Rank* me = &rank_of_run;
  sy_exchange* exchange = create(me);
  Input in;
  make_input(&in, me->rank, 0.0f);
  sy_dispatched* d = NULL;
  sy_dispatch_options options = SY_DISPATCH_OPTIONS_INIT;
  options.size = SY_SIZE_CAPACITY;
  options.capacity = 1;
  CHECK_FAILS(sy_exchange_dispatch(exchange, &in.rows, &in.ids, in.weights, &options, &d), SY_CAPACITY_EXCEEDED, "capacity");
  CHECK(d == NULL);
  options.overflow = SY_OVERFLOW_DROP_AND_REPORT;
  CHECK_OK(sy_exchange_dispatch(exchange, &in.rows, &in.ids, in.weights, &options, &d));
  sy_dispatched_view v = get(d);
  // Both ranks have room for only one row, which is token 0 of rank 0. Everything else is dropped.
  CHECK(v.rows == 1 && v.x_rows == 1 && row_equals(&v, 0, 0, 0, 0.0f) && v.dropped != NULL && v.dropped_per_source != NULL);
  for (int64_t f = 0; f < kTokens[me->rank] * kTopk; ++f)
    CHECK(v.dropped[f] == (owner(kIds[me->rank][f / kTopk][f % kTopk]) >= 0 && !(me->rank == 0 && f < kTopk)));
  CHECK_OK(sy_dispatched_destroy(d));

  options = (sy_dispatch_options)SY_DISPATCH_OPTIONS_INIT;
  options.quantize = SY_SCALE_F32;
  options.size = SY_SIZE_WORST_CASE;
  for (int i = 0; i < kMaxTokens * kHidden; ++i) in.x[i] = i % kHidden == 0 ? 448.0f : 1.0f;  // scale 1: exact in e4m3
  CHECK_OK(sy_exchange_dispatch(exchange, &in.rows, &in.ids, in.weights, &options, &d));
  v = get(d);
  size_t scale_bytes = 0;
  CHECK_OK(sy_scale_row_bytes(kHidden, SY_SCALE_F32, &scale_bytes));
  CHECK(v.x_dtype == SY_DTYPE_FP8_E4M3 && v.x_scale_kind == SY_SCALE_F32 && scale_bytes == 16);
  CHECK(v.x_rows == kWorld * kMaxTokens && v.rows < v.x_rows && v.source_token[v.rows] == -1);
  for (int64_t row = 0; row < v.rows; ++row) {
    float scale = 0.0f;
    memcpy(&scale, (const char*)v.x_scales + (size_t)row * scale_bytes, sizeof scale);
    CHECK(scale == 1.0f);
    for (int j = 0; j < kHidden; ++j) CHECK(((const unsigned char*)v.x)[row * kHidden + j] == (j == 0 ? 0x7e : 0x38));
  }
  CHECK_OK(sy_dispatched_destroy(d));
  CHECK_OK(sy_exchange_destroy(exchange));
}

// ---- Bindings ----

static void bytes_of_structs(void) {
  size_t bytes = 0;
  CHECK_OK(sy_struct_bytes("sy_normal_config", &bytes));
  CHECK(bytes == sizeof(sy_normal_config));
  CHECK_OK(sy_struct_bytes("sy_low_latency_view", &bytes));
  CHECK(bytes == sizeof(sy_low_latency_view));
  CHECK(sy_struct_bytes("sy_normal", &bytes) == SY_INVALID_ARGUMENT);
  CHECK(strstr(sy_last_error(), "sy_normal") != NULL && bytes == sizeof(sy_low_latency_view));
  CHECK(sy_struct_bytes(NULL, &bytes) == SY_INVALID_ARGUMENT);
  CHECK(sy_struct_bytes("sy_bytes", NULL) == SY_INVALID_ARGUMENT);
}

int main(void) {
  const sy_group_options options = patient_options(1 << 20);
  for (int run = 0; run < 4; ++run) {
    staging_of_run = run / 2 ? SY_STAGING_RING : SY_STAGING_DIRECT;
    layout_of_run = run % 2 ? SY_LAYOUT_EXPERT_MAJOR : SY_LAYOUT_RANK_MAJOR;
    run_two_ranks(round_trip, &options);
    run_two_ranks(invalid_ids, &options);
    run_two_ranks(views, &options);
    if (layout_of_run == SY_LAYOUT_RANK_MAJOR) run_two_ranks(options_of_dispatch, &options);
  }
  run_error_tests();
  run_host_tests();
  run_low_latency_tests();
  run_ledger_tests();
  run_row_memory_tests();
  run_trace_tests();
  bytes_of_structs();
  return check_status();
}
