// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine in C11 on two ranks that are threads. Every rank returns the received rows and weights unchanged, so
// each token must come back multiplied by the number of ranks that received it, here two.
#include <switchyard/c/switchyard.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { kRanks = 2, kExperts = 4, kTopk = 2, kTokens = 8, kHidden = 16 };

typedef struct Rank {
  sy_group* group;
  sy_normal_config config;
  int wrong;
} Rank;

// Prints the error and returns from the function. A real program would clean up here.
#define TRY(call)                                                       \
  do {                                                                  \
    const sy_code code = (call);                                        \
    if (code != SY_OK) {                                                \
      fprintf(stderr, "%s: %s\n", sy_code_name(code), sy_last_error()); \
      return 1;                                                         \
    }                                                                   \
  } while (0)

// Runs one rank with its tokens x [kTokens, kHidden]. Returns 0 if all calls succeeded.
static int exchange_tokens(Rank* me, const float* x, const int32_t* ids, const float* weights, float* out, float* out_weights) {
  sy_exchange* exchange = NULL;
  TRY(sy_exchange_create(me->group, &me->config, &exchange));

  sy_const_row_view rows = SY_CONST_ROW_VIEW_INIT;
  rows.data = x;
  rows.rows = kTokens;
  rows.cols = kHidden;
  rows.dtype = SY_DTYPE_F32;
  sy_expert_ids routing = SY_EXPERT_IDS_INIT;
  routing.data = ids;
  routing.num_tokens = kTokens;
  routing.topk = kTopk;
  sy_dispatched* dispatched = NULL;
  TRY(sy_exchange_dispatch(exchange, &rows, &routing, weights, NULL, &dispatched));

  sy_dispatched_view received = SY_DISPATCHED_VIEW_INIT;
  TRY(sy_dispatched_get(dispatched, &received));
  rows.data = received.x;  // a real program would run its experts here, in place
  rows.rows = received.rows;
  sy_combine_options options = SY_COMBINE_OPTIONS_INIT;
  options.topk_weights = received.topk_weights;
  TRY(sy_exchange_combine(exchange, &rows, received.handle, out, &options, out_weights));

  sy_dispatched_destroy(dispatched);
  sy_exchange_destroy(exchange);
  return 0;
}

static void* run_rank(void* argument) {
  Rank* me = argument;
  float x[kTokens * kHidden], out[kTokens * kHidden] = {0}, weights[kTokens * kTopk], out_weights[kTokens * kTopk] = {0};
  int32_t ids[kTokens * kTopk];
  for (int i = 0; i < kTokens * kHidden; ++i) x[i] = (float)(i % 13);
  for (int t = 0; t < kTokens; ++t)
    for (int k = 0; k < kTopk; ++k) {
      ids[t * kTopk + k] = t % 2 + 2 * k;  // rank 0 holds experts 0 and 1, rank 1 holds 2 and 3
      weights[t * kTopk + k] = 0.25f * (float)(k + 1);
    }
  me->wrong = exchange_tokens(me, x, ids, weights, out, out_weights);
  for (int i = 0; i < kTokens * kHidden; ++i) me->wrong += out[i] != 2.0f * x[i];
  me->wrong += memcmp(weights, out_weights, sizeof weights) != 0;
  return NULL;
}

int main(void) {
  sy_normal_config config = SY_NORMAL_CONFIG_INIT;
  config.hidden = kHidden;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.max_tokens = kTokens;
  config.dtype = SY_DTYPE_F32;
  sy_group_options options = SY_GROUP_OPTIONS_INIT;
  TRY(sy_exchange_heap_bytes(&config, kRanks, SY_BACKEND_CPU, &options.heap_bytes));
  sy_group* groups[kRanks];
  TRY(sy_group_in_process(kRanks, &options, groups));

  Rank ranks[kRanks];
  pthread_t threads[kRanks];
  for (int r = 0; r < kRanks; ++r) {
    ranks[r] = (Rank){groups[r], config, 0};
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) return 1;
  }
  int wrong = 0;
  for (int r = 0; r < kRanks; ++r) pthread_join(threads[r], NULL);
  for (int r = 0; r < kRanks; ++r) wrong += ranks[r].wrong;
  for (int r = 0; r < kRanks; ++r) sy_group_destroy(groups[r]);
  printf("%d ranks through the C ABI, %d tokens each: %s\n", kRanks, kTokens, wrong == 0 ? "PASS" : "FAIL");
  return wrong == 0 ? 0 : 1;
}
