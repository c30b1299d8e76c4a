// SPDX-License-Identifier: Apache-2.0
// Counts a C program's checks and runs its ranks.
#include "c_check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static atomic_int passed, failed;

void check_report(int ok, const char* file, int line, const char* text) {
  atomic_fetch_add(ok ? &passed : &failed, 1);
  if (!ok) printf("%s:%d: %s (last error: %s)\n", file, line, text, sy_last_error());
}

int check_status(void) {
  printf("%d passed, %d failed\n", atomic_load(&passed), atomic_load(&failed));
  return atomic_load(&failed) == 0 ? 0 : 1;
}

typedef struct Thread {
  int rank;
  sy_group* group;
  void (*body)(int rank, sy_group* group);
} Thread;

static void* run_thread(void* argument) {
  const Thread* me = argument;
  me->body(me->rank, me->group);
  return NULL;
}

void run_two_ranks(void (*body)(int rank, sy_group* group), const sy_group_options* options) {
  enum { kWorld = 2 };
  sy_group* groups[kWorld] = {NULL, NULL};
  CHECK_OK(sy_group_in_process(kWorld, options, groups));
  pthread_t threads[kWorld];
  Thread ranks[kWorld];
  for (int r = 0; r < kWorld; ++r) {
    ranks[r] = (Thread){r, groups[r], body};
    if (pthread_create(&threads[r], NULL, run_thread, &ranks[r]) != 0) abort();
  }
  for (int r = 0; r < kWorld; ++r) pthread_join(threads[r], NULL);
  for (int r = 0; r < kWorld; ++r) CHECK_OK(sy_group_destroy(groups[r]));
}
