// SPDX-License-Identifier: Apache-2.0
// Symmetric memory for external allocators, whose functions take no state argument.
#include <stdint.h>
#include <string.h>

#include "c_check.h"
#include "switchyard/c/row_memory.h"

enum { kBytes = 4096 };

static size_t heap_used(const sy_group* group) {
  size_t used = 0;
  CHECK_OK(sy_group_heap(group, &used, NULL));
  return used;
}

static sy_group* alone(void) {
  sy_group* group = NULL;
  sy_group_options options = SY_GROUP_OPTIONS_INIT;
  options.heap_bytes = 1 << 20;
  CHECK_OK(sy_group_in_process(1, &options, &group));
  return group;
}

static void gives_and_takes_back(void) {
  sy_group* const group = alone();
  sy_row_memory* memory = NULL;
  CHECK(sy_row_memory_allocate(64, 0, NULL) == NULL);  // no row memory is in use
  CHECK_OK(sy_row_memory_create(group, kBytes, &memory));
  CHECK(heap_used(group) >= kBytes);
  CHECK_OK(sy_row_memory_use(memory));
  char* const first = sy_row_memory_allocate(kBytes, 0, NULL);
  char* const second = sy_row_memory_allocate(2 * kBytes, 0, NULL);  // no room is left: ordinary memory
  CHECK(first != NULL && second != NULL && (uintptr_t)first % 512 == 0 && (uintptr_t)second % 512 == 0);
  memset(first, 1, kBytes);
  memset(second, 2, 2 * kBytes);
  CHECK(first[kBytes - 1] == 1 && second[0] == 2);
  CHECK_OK(sy_group_used_by(group, first, NULL));  // no effect on the CPU
  CHECK(sy_row_memory_allocate(0, 0, NULL) == NULL && sy_row_memory_allocate(-1, 0, NULL) == NULL);
  sy_row_memory_free(second, 2 * kBytes, 0, NULL);
  sy_row_memory_free(first, kBytes, 0, NULL);
  sy_row_memory_free(NULL, 0, 0, NULL);
  char stranger;
  sy_row_memory_free(&stranger, 1, 0, NULL);  // unknown memory: no effect
  CHECK(sy_row_memory_allocate(kBytes, 0, NULL) == first);
  sy_row_memory_free(first, kBytes, 0, NULL);
  CHECK_OK(sy_row_memory_use(NULL));
  CHECK(sy_row_memory_allocate(64, 0, NULL) == NULL);
  CHECK_OK(sy_row_memory_destroy(memory));
  CHECK(heap_used(group) == 0);
  CHECK_OK(sy_group_destroy(group));
}

// Allocated memory keeps the row memory and its group alive.
static void outlives_its_group(void) {
  sy_group* const group = alone();
  sy_row_memory* memory = NULL;
  CHECK_OK(sy_row_memory_create(group, kBytes, &memory));
  CHECK_OK(sy_row_memory_use(memory));
  char* const rows = sy_row_memory_allocate(kBytes, 0, NULL);
  CHECK(rows != NULL);
  CHECK_OK(sy_row_memory_destroy(memory));
  CHECK_OK(sy_group_destroy(group));
  memset(rows, 3, kBytes);
  CHECK(rows[0] == 3 && rows[kBytes - 1] == 3);
  sy_row_memory_free(rows, kBytes, 0, NULL);
  CHECK(sy_row_memory_allocate(64, 0, NULL) == NULL);  // using it does not keep anything alive
}

static void misuse(void) {
  sy_row_memory* memory = (sy_row_memory*)&memory;
  CHECK(sy_group_used_by(NULL, NULL, NULL) == SY_INVALID_ARGUMENT);
  CHECK(sy_row_memory_create(NULL, kBytes, &memory) == SY_INVALID_ARGUMENT && memory == NULL);
  sy_group* const group = alone();
  CHECK(sy_row_memory_create(group, kBytes, NULL) == SY_INVALID_ARGUMENT);
  CHECK_OK(sy_group_destroy(group));
  sy_group* const other = alone();
  CHECK(sy_row_memory_create(other, 0, &memory) == SY_INVALID_ARGUMENT && memory == NULL);
  CHECK(sy_row_memory_create(other, 2 << 20, &memory) == SY_HEAP_EXHAUSTED && memory == NULL);
  CHECK_OK(sy_row_memory_destroy(NULL));
  CHECK_OK(sy_group_destroy(other));
}

void run_row_memory_tests(void) {
  gives_and_takes_back();
  outlives_its_group();
  misuse();
}
