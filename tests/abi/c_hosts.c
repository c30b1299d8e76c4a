// SPDX-License-Identifier: Apache-2.0
// Multi-host groups from C, on named hosts: two ranks as threads, and three as processes. Expected values are computed by the
// loops in this file.
#define _POSIX_C_SOURCE 200809L

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "c_check.h"

enum { kHidden = 16, kMaxTestRanks = 3 };

static sy_group_options options_on(const char* host) {
  sy_group_options o = patient_options(1 << 20);
  o.host = host;
  return o;
}

// Every rank has one token with a route to each rank: expert e is on rank e. Checks rows, sums and network traffic.
static void exchange_of_one_token(sy_group* group) {
  int32_t rank = -1, world = 0, hosts = 0, host = -1;
  CHECK_OK(sy_group_rank(group, &rank));
  CHECK_OK(sy_group_size(group, &world));
  CHECK_OK(sy_group_hosts(group, &hosts, &host));
  sy_normal_config config = SY_NORMAL_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = 1;
  config.num_experts = config.topk = world;
  config.dtype = SY_DTYPE_F32;
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  float x[kHidden], out[kHidden] = {0};
  int32_t ids[kMaxTestRanks] = {0, 1, 2};
  for (int j = 0; j < kHidden; ++j) x[j] = (float)(100 * rank + j);
  const sy_const_row_view rows = view_of_rows(x, 1, kHidden);
  const sy_expert_ids expert_ids = view_of_ids(ids, 1, world);
  sy_dispatched* dispatched = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &rows, &expert_ids, NULL, NULL, &dispatched));
  // The row was sent once to each other host, regardless of the number of ranks on that host, after a head of 128 bytes and
  // padded to 128 bytes.
  sy_call_statistics last = SY_CALL_STATISTICS_INIT;
  CHECK_OK(sy_exchange_last_call(exchange, &last));
  CHECK(last.network_bytes == (uint64_t)(hosts - 1) * 256 && last.remote_bytes == (uint64_t)(world - 1) * sizeof x);
  sy_dispatched_view view = SY_DISPATCHED_VIEW_INIT;
  CHECK_OK(sy_dispatched_get(dispatched, &view));
  CHECK(view.rows == world);
  for (int r = 0; r < world; ++r)
    for (int j = 0; j < kHidden; ++j) CHECK(((const float*)view.x)[r * kHidden + j] == (float)(100 * r + j));
  sy_const_row_view back = view_of_rows(view.x, view.rows, kHidden);
  sy_combine_options how = SY_COMBINE_OPTIONS_INIT;
  how.order = SY_ORDER_PER_HOST;
  CHECK_OK(sy_exchange_combine(exchange, &back, view.handle, out, &how, NULL));
  for (int j = 0; j < kHidden; ++j) CHECK(out[j] == (float)world * x[j]);
  CHECK_OK(sy_exchange_last_call(exchange, &last));
  CHECK(last.network_bytes == (uint64_t)(hosts - 1) * sizeof x);
  CHECK_OK(sy_dispatched_destroy(dispatched));
  CHECK_OK(sy_exchange_destroy(exchange));
  CHECK_OK(sy_group_barrier(group));
}

static void two_hosts(int rank, sy_group* group) {
  int32_t hosts = 0, host = -1;
  CHECK_OK(sy_group_hosts(group, &hosts, NULL));
  CHECK_OK(sy_group_hosts(group, NULL, &host));
  CHECK(hosts == 2 && host == rank);
  exchange_of_one_token(group);
}

static void where_ranks_are(void) {
  sy_group* groups[4] = {NULL, NULL, NULL, NULL};
  const sy_group_options options = options_on("a,a,b");
  CHECK_OK(sy_group_in_process(4, &options, groups));
  const int32_t expected[] = {0, 0, 1, 0};
  for (int32_t r = 0; r < 4; ++r) {
    int32_t hosts = 0, host = -1, other = -1;
    CHECK_OK(sy_group_hosts(groups[r], &hosts, &host));
    CHECK_OK(sy_group_host_of(groups[0], r, &other));
    CHECK(hosts == 2 && host == expected[r] && other == expected[r]);
  }
  int32_t host = 7;
  CHECK_FAILS(sy_group_host_of(groups[0], 4, &host), SY_INVALID_ARGUMENT, "rank = 4");
  CHECK_FAILS(sy_group_host_of(groups[0], 0, NULL), SY_INVALID_ARGUMENT, "host is NULL");
  CHECK_FAILS(sy_group_host_of(NULL, 0, &host), SY_INVALID_ARGUMENT, "group is NULL");
  CHECK_FAILS(sy_group_hosts(NULL, &host, &host), SY_INVALID_ARGUMENT, "group is NULL");
  CHECK(host == 7);
  for (int r = 0; r < 4; ++r) CHECK_OK(sy_group_destroy(groups[r]));
}

static void wrong_options(void) {
  sy_group* group = NULL;
  sy_group_options options = options_on("");
  options.silence_ms = -1;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "silence_ms = -1");
  options = options_on(NULL);
  options.network = 3;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "options->network = 3");
  options = options_on(NULL);
  options.reserved2 = 1;
  CHECK_FAILS(sy_group_in_process(1, &options, &group), SY_INVALID_ARGUMENT, "reserved2 = 1");
  // For a program compiled before these members existed, the memory after its struct is not read.
  options = options_on((const char*)1);
  options.struct_size = offsetof(sy_group_options, host);
  options.silence_ms = options.network = options.reserved2 = 99;
  CHECK_OK(sy_group_in_process(1, &options, &group));
  int32_t hosts = 0;
  CHECK_OK(sy_group_hosts(group, &hosts, NULL));
  CHECK(hosts == 1);
  CHECK_OK(sy_group_destroy(group));
}

// Runs one of three processes, two of which share a host. The last one does not enter the barrier; the waiting ranks receive an
// error that states how long its host was silent. The last process stays alive until the others, which hold the other end of
// `stays`, have exited.
static int be_process(int32_t rank, const char* store, const int stays[2]) {
  sy_group* group = NULL;
  sy_group_options options = options_on("a,a,b");
  options.silence_ms = 60000;
  CHECK_OK(sy_group_connect(rank, 3, store, "of-this-test", &options, &group));
  int32_t host = -1;
  CHECK_OK(sy_group_hosts(group, NULL, &host));
  CHECK(host == rank / 2);
  exchange_of_one_token(group);
  if (rank == 2) {
    char none = 0;
    close(stays[1]);
    CHECK(read(stays[0], &none, 1) == 0);
    CHECK_OK(sy_group_destroy(group));
    return check_status();
  }
  CHECK_OK(sy_group_set_timeout(group, 300));
  CHECK(sy_group_barrier(group) == SY_PEER_TIMEOUT);
  sy_wait_report report = SY_WAIT_REPORT_INIT;
  CHECK_OK(sy_last_wait_report(&report));
  CHECK(report.awaited_rank == 2 && strcmp(report.site, "network") == 0);
  CHECK(report.silent_ms >= 0 && report.silent_ms < report.waited_ms + 60000);
  CHECK_OK(sy_group_destroy(group));
  return check_status();
}

static void three_processes(void) {
  char store[64];
  snprintf(store, sizeof store, "unix:@switchyard-c-hosts-%ld", (long)getpid());
  int stays[2] = {-1, -1};
  CHECK(pipe(stays) == 0);
  fflush(NULL);
  pid_t children[3];
  for (int32_t r = 0; r < 3; ++r) {
    children[r] = fork();
    if (children[r] == 0) {
      const int status = be_process(r, store, stays);
      fflush(NULL);
      _exit(status);
    }
  }
  close(stays[0]);
  close(stays[1]);
  for (int r = 0; r < 3; ++r) {
    int status = -1;
    CHECK(waitpid(children[r], &status, 0) == children[r]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

// Rank 1 reports its own failure instead of creating an object.
static void failed_before_creation(int rank, sy_group* group) {
  sy_normal_config config = SY_NORMAL_CONFIG_INIT;
  config.hidden = kHidden;
  config.max_tokens = config.topk = 1;
  config.num_experts = 2;
  sy_exchange* exchange = NULL;
  int32_t all[2] = {-1, -1};
  if (rank == 1)
    CHECK_FAILS(sy_group_agree(group, "model", SY_IO, "no such file", &rank, sizeof rank, all), SY_IO,
                "model, rank 1: no such file");
  else
    CHECK_FAILS(sy_exchange_create(group, &config, &exchange), SY_IO, "rank 1: no such file");
  CHECK(exchange == NULL && all[0] == -1);
  const int32_t mine = 5 + rank;
  CHECK_OK(sy_group_agree(group, "model", SY_OK, NULL, &mine, sizeof mine, all));
  CHECK(all[0] == 5 && all[1] == 6);
  CHECK_OK(sy_group_agree(group, "model", SY_OK, NULL, NULL, 0, NULL));
  CHECK_FAILS(sy_group_agree(group, "model", rank == 0 ? 99 : SY_OK, NULL, NULL, 0, NULL), SY_INVALID_ARGUMENT,
              "model, rank 0: code = 99");
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  CHECK_OK(sy_exchange_destroy(exchange));
}

void run_host_tests(void) {
  where_ranks_are();
  wrong_options();
  const sy_group_options options = options_on("a,b");
  run_two_ranks(two_hosts, &options);
  run_two_ranks(failed_before_creation, &options);
#if defined(__SANITIZE_THREAD__)  // does not support threads in a process forked from a multithreaded one
  (void)three_processes;
#else
  three_processes();
#endif
}
