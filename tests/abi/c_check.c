// SPDX-License-Identifier: Apache-2.0
// Counts the checks of a C program.
#include "c_check.h"

#include <stdatomic.h>
#include <stdio.h>

static atomic_int passed, failed;

void check_report(int ok, const char* file, int line, const char* text) {
  atomic_fetch_add(ok ? &passed : &failed, 1);
  if (!ok) printf("%s:%d: %s (last error: %s)\n", file, line, text, sy_last_error());
}

int check_status(void) {
  printf("%d passed, %d failed\n", atomic_load(&passed), atomic_load(&failed));
  return atomic_load(&failed) == 0 ? 0 : 1;
}
