/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of C programs. Any thread. */
#pragma once

#include <string.h>

#include "switchyard/c/switchyard.h"
#include "switchyard/c/trace.h"

/* Counts one check; prints it if it fails. In c_check.c. */
void check_report(int ok, const char* file, int line, const char* text);
/* Prints the numbers of passed and failed checks. Returns the program's exit status. */
int check_status(void);
#define CHECK(condition) check_report(!!(condition), __FILE__, __LINE__, #condition)
#define CHECK_OK(call) check_report((call) == SY_OK, __FILE__, __LINE__, #call)
/* The call must fail with this code, and the error text must contain `word`. */
#define CHECK_FAILS(call, code, word) \
  check_report((call) == (code) && strstr(sy_last_error(), word) != NULL, __FILE__, __LINE__, #call ": " #code ", '" word "'")

/* Views of float32 rows and of int32 ids. */
static inline sy_const_row_view view_of_rows(const float* data, int64_t rows, int64_t cols) {
  sy_const_row_view v = SY_CONST_ROW_VIEW_INIT;
  v.data = data;
  v.rows = rows;
  v.cols = cols;
  v.dtype = SY_DTYPE_F32;
  return v;
}
static inline sy_expert_ids view_of_ids(const int32_t* data, int64_t tokens, int32_t topk) {
  sy_expert_ids v = SY_EXPERT_IDS_INIT;
  v.data = data;
  v.num_tokens = tokens;
  v.topk = topk;
  return v;
}

/* Options of a group whose calls must succeed. */
static inline sy_group_options patient_options(size_t heap_bytes) {
  sy_group_options o = SY_GROUP_OPTIONS_INIT;
  o.heap_bytes = heap_bytes;
  o.timeout_ms = 20000;
  o.num_warps = 2;
  return o;
}

/* Runs `body(rank, group)` on two threads, one for each rank of a group. In c_check.c. */
void run_two_ranks(void (*body)(int rank, sy_group* group), const sy_group_options* options);

/* In c_errors.c, c_hosts.c, c_low_latency.c, c_ledger.c, c_row_memory.c, c_trace.c. */
void run_error_tests(void);
void run_host_tests(void);
void run_low_latency_tests(void);
void run_ledger_tests(void);
void run_row_memory_tests(void);
void run_trace_tests(void);
