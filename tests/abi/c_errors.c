// SPDX-License-Identifier: Apache-2.0
// Tests misuse, faults and object lifetimes through the C ABI.
#define _POSIX_C_SOURCE 200809L  // barriers, nanosleep, unsetenv
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "c_check.h"

enum { kHidden = 8, kTokens = 2 };

static sy_normal_config make_config(void) {
  sy_normal_config c = SY_NORMAL_CONFIG_INIT;
  c.hidden = kHidden;
  c.max_tokens = kTokens;
  c.num_experts = 2;
  c.topk = 1;
  c.dtype = SY_DTYPE_F32;
  return c;
}

static sy_group_options small(int64_t timeout_ms) {
  sy_group_options o = SY_GROUP_OPTIONS_INIT;
  o.heap_bytes = 1 << 20;
  o.timeout_ms = timeout_ms;
  o.rendezvous_timeout_ms = 300;
  return o;
}

static const float kRows[kTokens * kHidden] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const int32_t kIds[kTokens] = {0, 1};

static sy_const_row_view rows_view(void) { return view_of_rows(kRows, kTokens, kHidden); }
static sy_expert_ids ids_view(void) { return view_of_ids(kIds, kTokens, 1); }

// A group of one rank, for tests without peers.
static sy_group* alone(void) {
  sy_group* group = NULL;
  const sy_group_options options = small(1000);
  CHECK_OK(sy_group_in_process(1, &options, &group));
  return group;
}

static void versions_and_texts(void) {
  CHECK(strcmp(sy_last_error(), "") == 0);
  int32_t major = -1, minor = -1, patch = -1;
  CHECK_OK(sy_version(&major, &minor, &patch));
  CHECK_OK(sy_version(NULL, NULL, NULL));
  char text[64];
  snprintf(text, sizeof text, "%d.%d.%d", (int)major, (int)minor, (int)patch);
  CHECK(strcmp(text, sy_version_string()) == 0);
  CHECK(strcmp(sy_code_name(SY_OK), "ok") == 0 && strcmp(sy_code_name(SY_PEER_TIMEOUT), "peer_timeout") == 0);
  CHECK(strcmp(sy_code_name(-1), "unknown") == 0 && strcmp(sy_code_name(12345), "unknown") == 0);
}

static void sizes_of_structs(void) {
  // A program compiled against a newer header, whose struct is longer.
  struct {
    sy_group_options known;
    unsigned char news[32];
  } newer = {SY_GROUP_OPTIONS_INIT, {0}};
  newer.known.heap_bytes = 1 << 20;
  newer.known.struct_size = sizeof newer;
  sy_group* group = NULL;
  CHECK_OK(sy_group_in_process(1, &newer.known, &group));
  CHECK_OK(sy_group_destroy(group));
  newer.news[5] = 1;
  CHECK_FAILS(sy_group_in_process(1, &newer.known, &group), SY_INVALID_ARGUMENT, "offset 85");
  CHECK(group == NULL);

  // A program compiled against an older header: its struct is shorter, and the memory after it does not belong to the struct.
  // Missing members take their default values.
  size_t* older = malloc(2 * sizeof(size_t));
  if (!older) abort();
  older[0] = 2 * sizeof(size_t);
  older[1] = 1 << 20;
  CHECK_OK(sy_group_in_process(1, (const sy_group_options*)(const void*)older, &group));
  size_t size = 0;
  CHECK_OK(sy_group_heap(group, NULL, &size));
  CHECK(size >= (size_t)1 << 20 && size < (size_t)1 << 28);
  free(older);
  size_t* answer = malloc(2 * sizeof(size_t));  // has room only for total_ms
  if (!answer) abort();
  answer[0] = 2 * sizeof(size_t);
  answer[1] = SIZE_MAX;
  CHECK_OK(sy_group_wait_statistics(group, 0, (sy_wait_statistics*)(void*)answer));
  CHECK(answer[0] == 2 * sizeof(size_t) && answer[1] == 0);  // 0.0
  free(answer);
  CHECK_OK(sy_group_destroy(group));

  const size_t wrong[] = {0, 8, 17, 4104, SIZE_MAX - 7};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    sy_group_options options = SY_GROUP_OPTIONS_INIT;
    options.struct_size = wrong[i];
    CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "options->struct_size");
  }
}

static void memory_of_an_exchange(void) {
  sy_memory_requirement need = SY_MEMORY_REQUIREMENT_INIT;
  need.struct_size = 0;
  const sy_normal_config config = make_config();
  CHECK_FAILS(sy_exchange_memory_required(&config, 2, SY_BACKEND_CPU, &need), SY_INVALID_ARGUMENT, "requirement->struct_size");
  CHECK(need.control_bytes == 0 && need.pool_bytes == 0);
  need.struct_size = sizeof need;
  CHECK_OK(sy_exchange_memory_required(&config, 2, SY_BACKEND_CPU, &need));
  CHECK(need.control_bytes > 0 && need.pool_bytes > 0 && need.ring_bytes == 0);
  CHECK(need.total_bytes == need.control_bytes + need.pool_bytes);
  size_t heap = 0;
  CHECK_OK(sy_exchange_heap_bytes(&config, 2, SY_BACKEND_CPU, &heap));
  CHECK(heap > need.total_bytes);
  // On GPUs, the requirement also includes handle tables. Computing it needs no GPU.
  sy_memory_requirement on_gpu = SY_MEMORY_REQUIREMENT_INIT;
  CHECK_OK(sy_exchange_memory_required(&config, 2, SY_BACKEND_CUDA, &on_gpu));
  CHECK(on_gpu.control_bytes == need.control_bytes && on_gpu.pool_bytes > need.pool_bytes);
  sy_memory_requirement on_cpu = SY_MEMORY_REQUIREMENT_INIT;
  CHECK_OK(sy_exchange_memory_required(&config, 2, SY_BACKEND_CPU, &on_cpu));
  CHECK(on_cpu.total_bytes == need.total_bytes);
  size_t gpu_heap = 0;
  CHECK_OK(sy_exchange_heap_bytes(&config, 2, SY_BACKEND_CUDA, &gpu_heap));
  CHECK(gpu_heap > heap && gpu_heap > on_gpu.total_bytes);
  CHECK_FAILS(sy_exchange_memory_required(&config, 2, 2, &on_gpu), SY_INVALID_ARGUMENT, "backend = 2");
  CHECK_FAILS(sy_exchange_heap_bytes(&config, 2, -1, &gpu_heap), SY_INVALID_ARGUMENT, "backend = -1");
  int64_t max = 0;
  CHECK_OK(sy_exchange_max_rows(&config, 2, &max));
  CHECK(max == 2 * config.max_tokens);  // rank-major: all tokens of both ranks
  CHECK_FAILS(sy_exchange_max_rows(&config, 0, &max), SY_INVALID_ARGUMENT, "world = 0");
  sy_normal_config ring = config;
  ring.staging = SY_STAGING_RING;
  CHECK_OK(sy_exchange_memory_required(&ring, 2, SY_BACKEND_CPU, &need));  // default settings
  ring.ring_num_channels = 10;
  ring.ring_slots = 256;
  const size_t default_bytes = need.ring_bytes;
  CHECK_OK(sy_exchange_memory_required(&ring, 2, SY_BACKEND_CPU, &need));
  CHECK(default_bytes > 0 && default_bytes < need.ring_bytes);
  const size_t unbounded = need.ring_bytes;
  ring.ring_max_bytes = unbounded / 2;
  CHECK_OK(sy_exchange_memory_required(&ring, 2, SY_BACKEND_CPU, &need));
  CHECK(need.pool_bytes == 0 && need.ring_bytes > 0 && need.ring_bytes <= unbounded / 2 && need.private_bytes == 0);
}

// Structs from programs compiled before these members existed.
static void shorter_options(void) {
  sy_group* group = NULL;
  sy_group_options options = small(1000);
  options.struct_size = offsetof(sy_group_options, backend);
  options.backend = 99;  // not part of the struct
  CHECK_OK(sy_group_in_process(1, &options, &group));
  const sy_normal_config config = make_config();
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  sy_dispatch_options how = SY_DISPATCH_OPTIONS_INIT;
  how.struct_size = offsetof(sy_dispatch_options, stream);
  how.known_memory = 99;
  const sy_const_row_view rows = rows_view();
  const sy_expert_ids ids = ids_view();
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &rows, &ids, NULL, &how, &dispatched));
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));
  sy_combine_options sum = SY_COMBINE_OPTIONS_INIT;
  sum.struct_size = offsetof(sy_combine_options, stream);
  sum.known_memory = 99;
  float out[kTokens * kHidden] = {0};
  CHECK_OK(sy_exchange_combine(exchange, &rows, view.handle, out, &sum, NULL));
  CHECK(memcmp(out, kRows, sizeof out) == 0);
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
  CHECK_OK(sy_group_destroy(group));
}

// Without a GPU, creation fails with a typed error that names the option; with a GPU, it returns a group.
static void gpu_groups(void) {
  sy_group* group = NULL;
  sy_group_options options = small(1000);
  options.backend = 2;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "options->backend = 2");
  options.backend = SY_BACKEND_CUDA;
  options.device = -2;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "options->device = -2");
  options.device = -1;
  const sy_code code = sy_group_in_process(1, &options, &group);
  CHECK(code == SY_OK ? group != NULL : code == SY_UNSUPPORTED && group == NULL && strlen(sy_last_error()) > 20);
  CHECK_OK(sy_group_destroy(group));
}

static void null_arguments(void) {
  sy_group_options options = SY_GROUP_OPTIONS_INIT;
  sy_group* group = NULL;
  const sy_code wrong = SY_INVALID_ARGUMENT;
  CHECK_FAILS(sy_group_in_process(1, &options, NULL), SY_INVALID_ARGUMENT, "groups is NULL");
  CHECK_FAILS(sy_group_in_process(0, NULL, &group), SY_INVALID_ARGUMENT, "world = 0");
  CHECK_FAILS(sy_group_in_process(65, NULL, &group), SY_INVALID_ARGUMENT, "[1, 64]");
  CHECK_FAILS(sy_group_connect(0, 1, NULL, "t", NULL, &group), SY_INVALID_ARGUMENT, "store is NULL");
  CHECK_FAILS(sy_group_connect(0, 1, "unix:@x", NULL, NULL, &group), SY_INVALID_ARGUMENT, "token is NULL");
  CHECK_FAILS(sy_group_connect(0, 1, "unix:@x", "t", NULL, NULL), SY_INVALID_ARGUMENT, "group is NULL");
  CHECK(sy_group_from_environment(NULL, NULL) == wrong && sy_group_rank(NULL, NULL) == wrong &&
        sy_group_size(NULL, NULL) == wrong);
  CHECK(sy_group_barrier(NULL) == wrong && sy_group_all_gather(NULL, NULL, 0, NULL) == wrong && sy_group_check(NULL) == wrong);
  CHECK(sy_group_abort(NULL, 1) == wrong && sy_group_leave(NULL) == wrong && sy_group_wait_statistics(NULL, 0, NULL) == wrong &&
        sy_group_heap(NULL, NULL, NULL) == wrong);
  CHECK(sy_group_register_memory(NULL, NULL, 0, NULL) == wrong && sy_group_sleep(NULL) == wrong &&
        sy_group_wake(NULL) == wrong);
  CHECK(sy_exchange_memory_required(NULL, 1, SY_BACKEND_CPU, NULL) == wrong &&
        sy_exchange_heap_bytes(NULL, 1, SY_BACKEND_CPU, NULL) == wrong);
  CHECK(sy_exchange_create(NULL, NULL, NULL) == wrong && sy_exchange_dispatch(NULL, NULL, NULL, NULL, NULL, NULL) == wrong);
  CHECK(sy_exchange_dispatch_cached(NULL, NULL, NULL, NULL, NULL) == wrong && sy_dispatched_get(NULL, NULL) == wrong);
  CHECK(sy_exchange_allocate_rows(NULL, NULL, 0, SY_ANY_STREAM, NULL) == wrong && sy_rows_get(NULL, NULL) == wrong);
  CHECK(sy_exchange_combine(NULL, NULL, NULL, NULL, NULL, NULL) == wrong && sy_exchange_last_call(NULL, NULL) == wrong);
  CHECK(sy_handle_retain(NULL) == wrong && sy_handle_num_tokens(NULL, NULL) == wrong && sy_handle_rows(NULL, NULL) == wrong);
  CHECK(sy_exchange_memory_required(NULL, 1, 0, NULL) == wrong && sy_exchange_heap_bytes(NULL, 1, 0, NULL) == wrong);
  CHECK(sy_exchange_max_rows(NULL, 1, NULL) == wrong);
  CHECK(sy_dispatched_used_by(NULL, NULL) == wrong && sy_rows_used_by(NULL, NULL) == wrong);
  CHECK(sy_handle_counts(NULL, NULL) == wrong);
  CHECK(sy_handle_serialize(NULL, NULL) == wrong && sy_handle_deserialize(NULL, 0, NULL) == wrong);
  CHECK(sy_handle_matrices(NULL, 1, NULL) == wrong && sy_handle_ledger(NULL, NULL) == wrong);
  CHECK(sy_routing_layout_of(NULL, 1, 1, NULL) == wrong && sy_scale_row_bytes(1, 0, NULL) == wrong);
  CHECK(sy_first_expert(1, 1, 0, NULL) == wrong);
  CHECK_OK(sy_group_destroy(NULL));
  CHECK_OK(sy_registered_destroy(NULL));
  CHECK_OK(sy_exchange_destroy(NULL));
  CHECK_OK(sy_dispatched_destroy(NULL));
  CHECK_OK(sy_rows_destroy(NULL));
  CHECK_OK(sy_handle_release(NULL));
  CHECK_OK(sy_storage_release(NULL));
}

// Values that the C++ types cannot represent. Each is tested in a separate group, because an invalid collective call makes its
// group unusable.
static void wrong_members(void) {
  sy_group* group = NULL;
  sy_group_options options = small(1000);
  options.timeout_ms = 0;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "timeout_ms = 0");
  options.timeout_ms = options.rendezvous_timeout_ms = INT64_MAX;  // never
  CHECK_OK(sy_group_in_process(1, &options, &group));
  CHECK_OK(sy_group_barrier(group));
  CHECK_FAILS(sy_group_set_timeout(group, 0), SY_INVALID_ARGUMENT, "timeout = 0 ms");
  CHECK_FAILS(sy_group_set_timeout(NULL, 1000), SY_INVALID_ARGUMENT, "group is NULL");
  CHECK_OK(sy_group_set_timeout(group, 1000));
  CHECK_OK(sy_group_set_timeout(group, INT64_MAX));
  CHECK_OK(sy_group_barrier(group));
  CHECK_OK(sy_group_destroy(group));
  options = small(1000);
  group = NULL;
  options = small(1000);
  options.reserved = 1;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "reserved = 1");
  options = small(1000);
  options.num_sms = -7;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "num_sms = -7");
  const size_t members[] = {offsetof(sy_normal_config, layout), offsetof(sy_normal_config, staging),
                            offsetof(sy_normal_config, dtype), offsetof(sy_normal_config, invalid_ids)};
  const char* names[] = {"config->layout = 256", "config->staging = 256", "config->dtype = 256", "config->invalid_ids = 256"};
  for (size_t i = 0; i < 4; ++i) {
    group = alone();
    sy_normal_config config = make_config();
    const int32_t value = 256;  // becomes 0 if truncated to a byte
    memcpy((char*)&config + members[i], &value, sizeof value);
    sy_exchange* exchange = (sy_exchange*)&config;
    const sy_code code = sy_exchange_create(group, &config, &exchange);
    check_report(code == SY_INVALID_ARGUMENT && strstr(sy_last_error(), names[i]) && !exchange, __FILE__, __LINE__, names[i]);
    CHECK_OK(sy_group_destroy(group));
  }

  group = alone();
  sy_normal_config config = make_config();
  config.max_tokens = 1 << 20;
  sy_exchange* exchange = NULL;
  CHECK_FAILS(sy_exchange_create(group, &config, &exchange), SY_HEAP_EXHAUSTED, "heap");
  CHECK_OK(sy_group_destroy(group));
  CHECK_FAILS(sy_exchange_heap_bytes(&config, 65, SY_BACKEND_CPU, &(size_t){0}), SY_INVALID_ARGUMENT, "world = 65");
  int32_t expert = -1;
  CHECK_OK(sy_first_expert(5, 2, 1, &expert));
  CHECK(expert == 3);
  CHECK_OK(sy_first_expert(5, 2, 2, &expert));
  CHECK(expert == 5);
  CHECK_FAILS(sy_first_expert(5, 2, 3, &expert), SY_INVALID_ARGUMENT, "rank = 3");
}

static void routing_without_a_group(void) {
  const int64_t wide[4] = {0, 2, -1, 1};
  sy_expert_ids ids = SY_EXPERT_IDS_INIT;
  ids.data = wide;
  ids.num_tokens = 2;
  ids.topk = 2;
  ids.is_int64 = 1;
  sy_routing_layout layout = SY_ROUTING_LAYOUT_INIT;
  CHECK_OK(sy_routing_layout_of(&ids, 3, 2, &layout));
  CHECK(layout.world == 2 && layout.num_experts == 3 && layout.num_tokens == 2);
  CHECK(layout.num_tokens_per_rank[0] == 2 && layout.num_tokens_per_rank[1] == 1);
  CHECK(layout.num_tokens_per_expert[0] == 1 && layout.num_tokens_per_expert[1] == 1 && layout.num_tokens_per_expert[2] == 1);
  CHECK(memcmp(layout.is_token_in_rank, (const uint8_t[4]){1, 1, 1, 0}, 4) == 0);
  CHECK_OK(sy_storage_release(layout.storage));
  int32_t counts[5];
  uint8_t where[4];
  CHECK_FAILS(sy_routing_layout_enqueue(&ids, 0, 2, counts, counts + 2, where, NULL), SY_INVALID_ARGUMENT, "num_experts = 0");
  CHECK_FAILS(sy_routing_layout_enqueue(&ids, 32769, 2, counts, counts + 2, where, NULL), SY_INVALID_ARGUMENT,
              "num_experts in [1, 32768]");
  ids.is_int64 = 3;
  CHECK_FAILS(sy_routing_layout_of(&ids, 3, 2, &layout), SY_INVALID_ARGUMENT, "is_int64 = 3");
  sy_handle* handle = NULL;
  CHECK_FAILS(sy_handle_deserialize("damaged", 7, &handle), SY_INVALID_ARGUMENT, "");
  CHECK(handle == NULL);
}

// Destroys every object before the objects created from it; the rows stay readable until the end.
static void destroyed_in_the_wrong_order(void) {
  sy_group* group = alone();
  const sy_normal_config config = make_config();
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  CHECK_OK(sy_group_destroy(group));
  const sy_const_row_view x = rows_view();
  const sy_expert_ids ids = ids_view();
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &x, &ids, NULL, NULL, &dispatched));
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));
  CHECK(view.topk_weights == NULL && view.rows == kTokens);
  sy_handle* handle = view.handle;
  CHECK_OK(sy_handle_retain(handle));
  sy_rows* rows = NULL;
  CHECK_FAILS(sy_exchange_allocate_rows(exchange, handle, 4, SY_ANY_STREAM, &rows), SY_INVALID_ARGUMENT, "dtype = 4");
  CHECK_OK(sy_exchange_allocate_rows(exchange, handle, SY_DTYPE_F32, SY_ANY_STREAM, &rows));
  CHECK_OK(sy_exchange_destroy(exchange));
  CHECK(memcmp(view.x, kRows, sizeof kRows) == 0);
  CHECK_OK(sy_dispatched_destroy(dispatched));
  sy_row_view mine = SY_ROW_VIEW_INIT;
  CHECK_OK(sy_rows_get(rows, &mine));
  memset(mine.data, 0, sizeof kRows);
  CHECK_OK(sy_rows_destroy(rows));
  CHECK(view.source_token[1] == 1);  // the handle keeps the routing alive
  CHECK_OK(sy_handle_release(handle));
}

static void wrong_on_rank_0(int rank, sy_group* group) {
  const sy_normal_config config = make_config();
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  const sy_const_row_view x = rows_view();
  const sy_expert_ids ids = ids_view();
  sy_dispatched* dispatched = (sy_dispatched*)&exchange;
  if (rank == 0) {
    CHECK_FAILS(sy_exchange_dispatch(exchange, NULL, &ids, NULL, NULL, &dispatched), SY_INVALID_ARGUMENT, "x is NULL");
  } else {
    int32_t failed_rank = -1;
    sy_code reason = -1;
    CHECK_FAILS(sy_exchange_dispatch(exchange, &x, &ids, NULL, NULL, &dispatched), SY_PEER_FAILED, "rank 0");
    CHECK_OK(sy_last_peer_failure(&failed_rank, &reason));
    CHECK(failed_rank == 0 && reason == SY_INVALID_ARGUMENT);
  }
  CHECK(dispatched == NULL);
  CHECK_FAILS(sy_exchange_dispatch(exchange, &x, &ids, NULL, NULL, &dispatched), SY_PEER_FAILED, "rank 0");
  CHECK_OK(sy_exchange_destroy(exchange));
}

static void different_configs(int rank, sy_group* group) {
  sy_normal_config config = make_config();
  config.topk += rank;
  sy_exchange* exchange = NULL;
  CHECK_FAILS(sy_exchange_create(group, &config, &exchange), SY_MISMATCH, "NormalConfig");
  CHECK(exchange == NULL);
}

static void aborting(int rank, sy_group* group) {
  CHECK_FAILS(sy_group_abort(group, 0), SY_INVALID_ARGUMENT, "reason = 0");
  CHECK_OK(sy_group_check(group));
  CHECK_OK(sy_group_barrier(group));
  if (rank == 1) CHECK_OK(sy_group_abort(group, 42));
  sy_code code = SY_OK;
  for (int i = 0; i < 2000 && code == SY_OK; ++i) {
    code = sy_group_check(group);
    nanosleep(&(struct timespec){0, 5000000}, NULL);
  }
  int32_t failed_rank = -1;
  sy_code reason = -1;
  CHECK(code == SY_PEER_FAILED);
  CHECK_OK(sy_last_peer_failure(&failed_rank, &reason));
  CHECK(failed_rank == 1 && reason == 42);
}

static pthread_barrier_t timed_out;

// Rank 1 never calls dispatch.
static void late_peer(int rank, sy_group* group) {
  const sy_normal_config config = make_config();
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  if (rank == 0) {
    const sy_const_row_view x = rows_view();
    const sy_expert_ids ids = ids_view();
    sy_dispatched* dispatched = NULL;
    CHECK_FAILS(sy_exchange_dispatch(exchange, &x, &ids, NULL, NULL, &dispatched), SY_PEER_TIMEOUT, "rank 0 waited");
    CHECK(dispatched == NULL);
    sy_wait_report report = SY_WAIT_REPORT_INIT;
    CHECK_OK(sy_last_wait_report(&report));
    CHECK(strcmp(report.operation, "dispatch") == 0 && report.site[0] != '\0' && report.call == 1);
    CHECK(report.waiting_rank == 0 && report.awaited_rank == 1 && report.expected > report.seen && report.waited_ms >= 200.0);
    int32_t failed_rank = -1;
    sy_code reason = -1;
    char text[256];
    snprintf(text, sizeof text, "%s", sy_last_error());
    CHECK(sy_last_peer_failure(&failed_rank, &reason) == SY_INVALID_ARGUMENT && failed_rank == -1);
    CHECK(sy_last_wait_report(NULL) == SY_INVALID_ARGUMENT && strncmp(text, sy_last_error(), strlen(text)) == 0);
    sy_wait_statistics waits = SY_WAIT_STATISTICS_INIT;
    waits.total_ms = waits.max_ms = -1.0;
    CHECK_OK(sy_group_wait_statistics(group, 1, &waits));
    CHECK(waits.max_ms >= 0.0 && waits.total_ms >= waits.max_ms && (waits.waits > 0 || waits.total_ms == 0.0));
    CHECK_FAILS(sy_group_wait_statistics(group, 2, &waits), SY_INVALID_ARGUMENT, "peer = 2");
  }
  pthread_barrier_wait(&timed_out);
  if (rank == 1) {
    CHECK(strcmp(sy_last_error(), "") == 0);  // errors are per thread
    CHECK_FAILS(sy_group_check(group), SY_PEER_FAILED, "rank 0");
  }
  CHECK_OK(sy_exchange_destroy(exchange));
}

static void registered_and_asleep(void) {
  sy_group* group = alone();
  sy_normal_config config = make_config();
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  const sy_const_row_view x = rows_view();
  const sy_expert_ids ids = ids_view();
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &x, &ids, NULL, NULL, &dispatched));
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));

  sy_registered* registered = NULL;
  float y[kTokens * kHidden], out[kTokens * kHidden] = {0};
  for (int i = 0; i < kTokens * kHidden; ++i) y[i] = kRows[i] + 100;
  CHECK_FAILS(sy_group_register_memory(group, NULL, 1, &registered), SY_INVALID_ARGUMENT, "memory = null");
  CHECK(registered == NULL);
  CHECK_OK(sy_group_register_memory(group, y, sizeof y, &registered));
  sy_const_row_view rows = x;
  rows.data = y;

  CHECK_FAILS(sy_group_wake(group), SY_INVALID_ARGUMENT, "does not sleep");
  CHECK_OK(sy_group_sleep(group));
  CHECK_FAILS(sy_group_sleep(group), SY_INVALID_ARGUMENT, "sleeps already");
  CHECK_FAILS(sy_exchange_combine(exchange, &rows, view.handle, out, NULL, NULL), SY_INVALID_ARGUMENT, "sleeps");
  CHECK_OK(sy_group_wake(group));
  CHECK_OK(sy_exchange_combine(exchange, &rows, view.handle, out, NULL, NULL));
  CHECK(memcmp(out, y, sizeof y) == 0);
  sy_call_statistics statistics = SY_CALL_STATISTICS_INIT;
  CHECK_OK(sy_exchange_last_call(exchange, &statistics));
  CHECK(statistics.copied_bytes == 0);
  CHECK_OK(sy_registered_destroy(registered));
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
  CHECK_OK(sy_group_destroy(group));
}

static void rendezvous(void) {
  const char* launchers[] = {"SWITCHYARD_RANK", "SWITCHYARD_WORLD_SIZE", "RANK",
                             "WORLD_SIZE",      "OMPI_COMM_WORLD_RANK",  "SLURM_PROCID"};
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers; ++i) unsetenv(launchers[i]);
  sy_group* group = NULL;
  CHECK_FAILS(sy_group_from_environment(NULL, &group), SY_INVALID_ARGUMENT, "SWITCHYARD_RANK");
  char store[64];
  snprintf(store, sizeof store, "unix:@switchyard-c-consumer-%ld", (long)getpid());
  const sy_group_options options = small(1000);
  CHECK_FAILS(sy_group_connect(0, 3, store, "token", &options, &group), SY_RENDEZVOUS, "rank");
  uint64_t missing = 0;
  CHECK_OK(sy_last_missing_ranks(&missing));
  CHECK(missing == 6);
  CHECK_FAILS(sy_group_connect(3, 3, store, "token", &options, &group), SY_INVALID_ARGUMENT, "rank = 3");
  CHECK_OK(sy_group_connect(0, 1, store, "token", &options, &group));
  CHECK_OK(sy_group_barrier(group));
  CHECK_OK(sy_group_destroy(group));
}

void run_error_tests(void) {
  versions_and_texts();
  sizes_of_structs();
  memory_of_an_exchange();
  shorter_options();
  gpu_groups();
  null_arguments();
  wrong_members();
  routing_without_a_group();
  destroyed_in_the_wrong_order();
  registered_and_asleep();
  sy_group_options options = small(20000);
  run_two_ranks(wrong_on_rank_0, &options);
  run_two_ranks(different_configs, &options);
  run_two_ranks(aborting, &options);
  options = small(200);
  pthread_barrier_init(&timed_out, NULL, 2);
  run_two_ranks(late_peer, &options);
  pthread_barrier_destroy(&timed_out);
  rendezvous();
}
