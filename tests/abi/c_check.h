/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the C consumer. Any thread. */
#pragma once

#include <string.h>

#include "switchyard/c/switchyard.h"

/* Counts one check; prints those that fail. In c_consumer.c. */
void check_report(int ok, const char* file, int line, const char* text);
#define CHECK(condition) check_report(!!(condition), __FILE__, __LINE__, #condition)
#define CHECK_OK(call) check_report((call) == SWITCHYARD_OK, __FILE__, __LINE__, #call)
/* The call fails with this code, and the text names `word`. */
#define CHECK_FAILS(call, code, word) \
  check_report((call) == (code) && strstr(sy_last_error(), word) != NULL, __FILE__, __LINE__, #call ": " #code ", '" word "'")

/* Runs `body(rank, group)` on two threads, each a rank of one group. In c_consumer.c. */
void run_two_ranks(void (*body)(int rank, sy_group* group), const sy_group_options* options);

/* In c_errors.c, c_low_latency.c, c_ledger.c. */
void run_error_tests(void);
void run_low_latency_tests(void);
void run_ledger_tests(void);
