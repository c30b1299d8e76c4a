// SPDX-License-Identifier: Apache-2.0
// The C ABI on a GPU, from C11 through the shared library. Two ranks are two threads that share the GPU, each with its own
// stream. Values are small multiples of a quarter, so every sum is exact; expected values are computed by the loops in this
// file.
//
// Nothing is allocated or copied while a rank may wait for the other: all memory is allocated and written, and all streams have
// been used, before the first call.
#define _POSIX_C_SOURCE 200809L  // setenv
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "abi/c_check.h"
#include "gpu/harness/c_gpu.h"
#include "switchyard/c/ledger.h"
#include "switchyard/c/low_latency.h"

enum { kWorld = 2, kHidden = 384, kExperts = 3, kTopk = 2, kMaxTokens = 3, kCapacity = kWorld * kMaxTokens, kAlignment = 4 };

// Rank 0 holds experts 0 and 1, and rank 1 holds expert 2. Ids 9 and -1 select no expert.
static const int32_t kIds[kWorld][kMaxTokens * kTopk] = {{0, 2, 1, 0, 2, -1}, {2, 1, 9, 0}};
static const int64_t kTokens[kWorld] = {3, 2};
static const float kFactors[kExperts] = {2.0f, 0.5f, 4.0f};

static int valid(int32_t expert) { return expert >= 0 && expert < kExperts; }
static int owner(int32_t expert) { return valid(expert) ? expert == 2 : -1; }
static int32_t first_of(int rank) { return rank == 0 ? 0 : 2; }
static int32_t experts_of(int rank) { return rank == 0 ? 2 : 1; }
static float value(int rank, int64_t token, int column) { return (float)(16 * rank + 4 * (int)token + column % 7 + 1); }
static float weight(int rank, int64_t f) {
  const int64_t token = f / kTopk, k = f % kTopk;
  return (float)(1 + rank + token + 2 * k) * 0.25f;
}

// State of a rank on the GPU.
typedef struct Rank {
  int rank;
  sy_group* group;
  cudaStream_t stream;
  float *x, *weights, *factors, *out[4];
  int32_t* ids;
  sy_const_row_view rows;
  sy_expert_ids expert_ids;
} Rank;

static void make_inputs(Rank* me) {
  float x[kMaxTokens * kHidden], weights[kMaxTokens * kTopk];
  for (int i = 0; i < kMaxTokens * kHidden; ++i) x[i] = value(me->rank, i / kHidden, i % kHidden);
  for (int f = 0; f < kMaxTokens * kTopk; ++f) weights[f] = weight(me->rank, f);
  CHECK(cudaStreamCreateWithFlags(&me->stream, cudaStreamNonBlocking) == cudaSuccess);
  me->x = on_gpu(x, sizeof x);
  me->weights = on_gpu(weights, sizeof weights);
  me->factors = on_gpu(kFactors + first_of(me->rank), (size_t)experts_of(me->rank) * sizeof(float));
  me->ids = on_gpu(kIds[me->rank], sizeof kIds[me->rank]);
  memset(x, 0xff, sizeof x);
  for (int i = 0; i < 4; ++i) me->out[i] = on_gpu(x, sizeof x);
  CHECK(cudaMemsetAsync(me->out[0], 0xff, sizeof x, me->stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(me->stream) == cudaSuccess);
  me->rows = view_of_rows(me->x, kTokens[me->rank], kHidden);
  me->expert_ids = view_of_ids(me->ids, kTokens[me->rank], kTopk);
}

static void free_inputs(Rank* me) {
  void* const all[] = {me->x, me->weights, me->factors, me->ids, me->out[0], me->out[1], me->out[2], me->out[3]};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) CHECK(cudaFree(all[i]) == cudaSuccess);
  CHECK(cudaStreamDestroy(me->stream) == cudaSuccess);
}

// The host may copy only while all ranks' streams are idle.
static void finish(const Rank* me) {
  CHECK(cudaStreamSynchronize(me->stream) == cudaSuccess);
  CHECK_OK(sy_group_check(me->group));
  CHECK_OK(sy_group_barrier(me->group));
}

// out = x times the sum over the token's experts of its weight (if weighted) and the expert's factor (if scaled).
static void check_sums(const Rank* me, const float* device, int weighted, int scaled) {
  float out[kMaxTokens * kHidden];
  read_back(out, device, sizeof out);
  for (int64_t t = 0; t < kTokens[me->rank]; ++t) {
    float factor = 0.0f;
    for (int64_t f = t * kTopk; f < (t + 1) * kTopk; ++f) {
      const int32_t e = kIds[me->rank][f];
      if (valid(e)) factor += (weighted ? weight(me->rank, f) : 1.0f) * (scaled ? kFactors[e] : 1.0f);
    }
    for (int j = 0; j < kHidden; ++j) CHECK(out[t * kHidden + j] == factor * value(me->rank, t, j));
  }
}

// ---- Normal mode and the ledger ----

static sy_normal_config normal_config(sy_layout layout, int32_t alignment) {
  sy_normal_config c = SY_NORMAL_CONFIG_INIT;
  c.hidden = kHidden;
  c.max_tokens = kMaxTokens;
  c.num_experts = kExperts;
  c.topk = kTopk;
  c.dtype = SY_DTYPE_F32;
  c.layout = layout;
  c.expert_alignment = alignment;
  return c;
}

// Ordered by (expert, source, token), with each expert's rows padded with zeros.
static void check_expert_major(const Rank* me, const sy_dispatched_view* v) {
  sy_counts counts = SY_COUNTS_INIT;
  CHECK_OK(sy_handle_counts(v->handle, &counts));
  CHECK(v->rows == -1 && counts.rows <= v->x_rows && counts.num_local_experts == experts_of(me->rank));
  float* const x = malloc((size_t)counts.rows * kHidden * sizeof *x);
  read_back(x, v->x, (size_t)counts.rows * kHidden * sizeof *x);
  int64_t row = 0;
  for (int64_t e = 0; e < counts.num_local_experts; ++e) {
    CHECK(counts.expert_first_row[e] == row);
    const int64_t first = row;
    for (int s = 0; s < kWorld; ++s)
      for (int64_t f = 0; f < kTokens[s] * kTopk; ++f) {
        if (kIds[s][f] != first_of(me->rank) + e) continue;
        for (int j = 0; j < kHidden; ++j) CHECK(x[row * kHidden + j] == value(s, f / kTopk, j));
        ++row;
      }
    CHECK(counts.tokens_per_expert[e] == row - first);
    for (; row % kAlignment != 0; ++row)
      for (int j = 0; j < kHidden; ++j) CHECK(x[row * kHidden + j] == 0.0f);
  }
  CHECK(row == counts.rows);
  free(x);
  CHECK_OK(sy_storage_release(counts.storage));
}

static void normal(const Rank* me, sy_layout layout) {
  const sy_normal_config config = normal_config(layout, layout == SY_LAYOUT_EXPERT_MAJOR ? kAlignment : 1);
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(me->group, &config, &exchange));

  sy_dispatch_options to = SY_DISPATCH_OPTIONS_INIT;
  sy_combine_options back = SY_COMBINE_OPTIONS_INIT;
  to.stream = back.stream = me->stream;
  back.order = layout == SY_LAYOUT_EXPERT_MAJOR ? SY_ORDER_PER_ROUTE : SY_ORDER_PER_RANK;
  sy_dispatched* d = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &me->rows, &me->expert_ids, me->weights, &to, &d));
  sy_dispatched_view v = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(d, &v));
  const sy_const_row_view y = view_of_rows(v.x, v.x_rows, kHidden);
  CHECK_OK(sy_exchange_combine(exchange, &y, v.handle, me->out[0], &back, NULL));
  finish(me);
  if (layout == SY_LAYOUT_EXPERT_MAJOR) {
    check_expert_major(me, &v);
    check_sums(me, me->out[0], 1, 0);
  } else {  // once per rank to which the token was sent
    float out[kMaxTokens * kHidden];
    read_back(out, me->out[0], sizeof out);
    for (int64_t t = 0; t < kTokens[me->rank]; ++t) {
      const int a = owner(kIds[me->rank][t * kTopk]), b = owner(kIds[me->rank][t * kTopk + 1]);
      const float ranks = (float)((a >= 0) + (b >= 0 && b != a));
      for (int j = 0; j < kHidden; ++j) CHECK(out[t * kHidden + j] == ranks * value(me->rank, t, j));
    }
  }
  CHECK_OK(sy_dispatched_destroy(d));
  CHECK_OK(sy_exchange_destroy(exchange));
  CHECK_OK(sy_group_barrier(me->group));
}

// Ledger of an expert-major dispatch, whose rows serve as the experts' answers.
static void ledger(const Rank* me) {
  const sy_normal_config by_expert = normal_config(SY_LAYOUT_EXPERT_MAJOR, 1);
  sy_ledger_config config = SY_LEDGER_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = kMaxTokens;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.dtype = SY_DTYPE_F32;
  sy_exchange* exchange = NULL;
  sy_ledger_combine* combine = NULL;
  CHECK_OK(sy_exchange_create(me->group, &by_expert, &exchange));
  CHECK_OK(sy_ledger_combine_create(me->group, &config, &combine));

  sy_dispatch_options to = SY_DISPATCH_OPTIONS_INIT;
  to.stream = me->stream;
  sy_dispatched* d = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &me->rows, &me->expert_ids, NULL, &to, &d));
  sy_dispatched_view v = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(d, &v));
  sy_ledger tables = SY_LEDGER_INIT;
  CHECK_OK(sy_handle_ledger(v.handle, &tables));
  sy_prepared_ledger* prepared = NULL;
  CHECK_OK(sy_ledger_combine_prepare(combine, &tables, &prepared));
  CHECK_OK(sy_storage_release(tables.storage));
  finish(me);

  sy_ledger_combine_options options = SY_LEDGER_COMBINE_OPTIONS_INIT;
  options.stream = me->stream;
  const sy_const_row_view y = view_of_rows(v.x, v.x_rows, kHidden);
  CHECK_OK(sy_ledger_combine_run(combine, &y, me->weights, prepared, me->out[1], &options));
  CHECK_OK(sy_ledger_combine_run(combine, &y, NULL, prepared, me->out[2], &options));
  finish(me);
  check_sums(me, me->out[1], 1, 0);
  check_sums(me, me->out[2], 0, 0);
  CHECK_OK(sy_prepared_ledger_destroy(prepared));
  CHECK_OK(sy_ledger_combine_destroy(combine));
  CHECK_OK(sy_dispatched_destroy(d));
  CHECK_OK(sy_exchange_destroy(exchange));
  CHECK_OK(sy_group_barrier(me->group));
}

// ---- Low latency ----

static sy_low_latency_config low_latency_config(void) {
  sy_low_latency_config c = SY_LOW_LATENCY_CONFIG_INIT;
  c.hidden = kHidden;
  c.max_tokens = kMaxTokens;
  c.num_experts = kExperts;
  c.topk = kTopk;
  c.dtype = SY_DTYPE_F32;
  c.scales = SY_SCALE_NONE;
  return c;
}

static void check_delivered(const Rank* me, const sy_low_latency_view* v) {
  const size_t experts = (size_t)experts_of(me->rank);
  CHECK(v->num_local_experts == experts_of(me->rank) && v->rows_per_expert == kCapacity &&
        v->x_rows == v->num_local_experts * kCapacity);
  float* const x = malloc(experts * kCapacity * kHidden * sizeof *x);
  int32_t counts[2] = {-1, -1};
  int64_t sources[2 * kCapacity];
  read_back(x, v->x, experts * kCapacity * kHidden * sizeof *x);
  read_back(counts, v->rows_of_expert, experts * sizeof counts[0]);
  read_back(sources, v->row_source, experts * kCapacity * sizeof sources[0]);
  for (int32_t e = 0; e < v->num_local_experts; ++e) {
    unsigned expected = 0, seen = 0;
    for (int s = 0; s < kWorld; ++s)
      for (int64_t f = 0; f < kTokens[s] * kTopk; ++f)
        if (kIds[s][f] == first_of(me->rank) + e) expected |= 1u << (s * kMaxTokens + f / kTopk);
    for (int64_t row = e * kCapacity; row < e * kCapacity + counts[e]; ++row) {
      const int64_t s = sources[row] >> 48, token = sources[row] & 0xffff;
      seen |= 1u << (s * kMaxTokens + token);
      for (int j = 0; j < kHidden; ++j) CHECK(x[row * kHidden + j] == value((int)s, token, j));
    }
    CHECK(seen == expected && counts[e] == __builtin_popcount(expected));
  }
  free(x);
}

static void low_latency(const Rank* me) {
  const sy_low_latency_config config = low_latency_config();
  sy_low_latency* exchange = NULL;
  sy_low_latency_output* output = NULL;
  CHECK_OK(sy_low_latency_create(me->group, &config, &exchange));
  CHECK_OK(sy_low_latency_make_output(exchange, &output));
  sy_low_latency_view v = SY_LOW_LATENCY_VIEW_INIT;
  CHECK_OK(sy_low_latency_output_get(output, &v));
  CHECK_OK(sy_group_barrier(me->group));

  sy_low_latency_dispatch_options to = SY_LOW_LATENCY_DISPATCH_OPTIONS_INIT;
  sy_low_latency_combine_options back = SY_LOW_LATENCY_COMBINE_OPTIONS_INIT;
  sy_all_to_all_options both = SY_ALL_TO_ALL_OPTIONS_INIT;
  to.stream = back.stream = both.stream = me->stream;
  to.topk_weights = both.topk_weights = me->weights;
  both.expert_scale = me->factors;
  const sy_const_row_view y = view_of_rows(v.x, v.x_rows, kHidden);
  CHECK_OK(sy_low_latency_dispatch(exchange, &me->rows, &me->expert_ids, output, &to));
  CHECK_OK(sy_low_latency_combine(exchange, &y, output, me->out[0], &back));
  back.order = SY_ORDER_PER_RANK;
  CHECK_OK(sy_low_latency_combine(exchange, &y, output, me->out[1], &back));
  CHECK_OK(sy_low_latency_dispatch_send(exchange, &me->rows, &me->expert_ids, output, &to));
  CHECK_OK(sy_low_latency_receive(exchange));
  back.order = SY_ORDER_PER_ROUTE;
  back.expert_scale = me->factors;
  CHECK_OK(sy_low_latency_combine_send(exchange, &y, output, me->out[2], &back));
  CHECK_OK(sy_low_latency_receive(exchange));
  CHECK_OK(sy_low_latency_all_to_all(exchange, &me->rows, &me->expert_ids, me->out[3], &both));
  finish(me);
  check_delivered(me, &v);
  check_sums(me, me->out[0], 1, 0);
  check_sums(me, me->out[1], 1, 0);
  check_sums(me, me->out[2], 1, 1);
  check_sums(me, me->out[3], 1, 1);
  CHECK_OK(sy_low_latency_destroy(exchange));
  CHECK_OK(sy_low_latency_output_destroy(output));
  CHECK_OK(sy_group_barrier(me->group));
}

// Memory that kernels cannot use is rejected before anything is enqueued; the peer receives an error.
static void host_pointer(const Rank* me) {
  const sy_low_latency_config config = low_latency_config();
  sy_low_latency* exchange = NULL;
  CHECK_OK(sy_low_latency_create(me->group, &config, &exchange));
  sy_all_to_all_options options = SY_ALL_TO_ALL_OPTIONS_INIT;
  options.stream = me->stream;
  float host[kMaxTokens * kHidden] = {0};
  if (me->rank == 0) {
    const sy_const_row_view rows = view_of_rows(host, kTokens[0], kHidden);
    CHECK_FAILS(sy_low_latency_all_to_all(exchange, &rows, &me->expert_ids, me->out[0], &options), SY_INVALID_ARGUMENT,
                "host memory");
  } else {
    sy_code code = sy_low_latency_all_to_all(exchange, &me->rows, &me->expert_ids, me->out[0], &options);
    CHECK(cudaStreamSynchronize(me->stream) == cudaSuccess);  // the kernel ended before its deadline
    if (code == SY_OK) code = sy_group_check(me->group);
    CHECK(code == SY_PEER_FAILED);
  }
  CHECK_OK(sy_low_latency_destroy(exchange));
}

static void* run_rank(void* argument) {
  Rank* me = argument;
  normal(me, SY_LAYOUT_RANK_MAJOR);
  normal(me, SY_LAYOUT_EXPERT_MAJOR);
  ledger(me);
  low_latency(me);
  host_pointer(me);
  return NULL;
}

int main(void) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int status = 0;
  if (!gpu_is_visible(&status)) return status;
  sy_group_options options = patient_options((size_t)64 << 20);
  options.backend = SY_BACKEND_CUDA;
  options.device = 0;
  sy_group* groups[kWorld] = {NULL, NULL};
  if (sy_group_in_process(kWorld, &options, groups) != SY_OK) {
    printf("no group: %s\n", sy_last_error());
    return 1;
  }
  Rank ranks[kWorld];
  pthread_t threads[kWorld];
  for (int r = 0; r < kWorld; ++r) {
    ranks[r] = (Rank){.rank = r, .group = groups[r]};
    make_inputs(&ranks[r]);
  }
  for (int r = 0; r < kWorld; ++r)
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) abort();
  for (int r = 0; r < kWorld; ++r) pthread_join(threads[r], NULL);
  for (int r = 0; r < kWorld; ++r) free_inputs(&ranks[r]);
  for (int r = 0; r < kWorld; ++r) CHECK_OK(sy_group_destroy(groups[r]));
  CHECK(cudaGetLastError() == cudaSuccess);
  return check_status();
}
