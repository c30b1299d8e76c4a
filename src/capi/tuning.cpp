// SPDX-License-Identifier: Apache-2.0
#include "switchyard/tuning.hpp"

#include "capi/structs.hpp"
#include "switchyard/c/tuning.h"

using namespace switchyard;
using namespace switchyard::detail;

extern "C" sy_code sy_tuning_find(const char* path, const sy_tuning_key* key, sy_tuning_values* values) {
  return guarded([&] {
    check_struct(values, sizeof *values, "values");
    const TuningKey twin = from_c(key);
    fill(values, (path ? Tuning({TuningFile::read(path)}) : Tuning::from_environment()).find(twin));
  });
}
