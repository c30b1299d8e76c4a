// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: lookup of tuned values, the counterpart of the lookup in switchyard/tuning.hpp. Groups perform this lookup themselves
/// when they are formed. docs/tuning.md describes the file and the lookup. No function requires a group.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Mode to which a value applies and, for normal mode, the layout (NORMAL: rank-major).
typedef int32_t sy_tuning_mode;
enum {
  SY_TUNING_NORMAL = 0,
  SY_TUNING_LOW_LATENCY = 1,
  SY_TUNING_FLAT = 2,
  SY_TUNING_LEDGER = 3,
  SY_TUNING_NORMAL_EXPERT_MAJOR = 4
};

/// Key of a measurement.
typedef struct sy_tuning_key {
  size_t struct_size;
  const char* device;                ///< "cpu", or the name of the GPU as the driver reports it
  int64_t hidden SY_DEFAULT(1);      ///< >= 1
  int64_t max_tokens SY_DEFAULT(1);  ///< max_tokens of the object, >= 1
  int32_t ranks SY_DEFAULT(1);       ///< >= 1
  sy_tuning_mode mode;
} sy_tuning_key;

/// Values of an entry; 0 means unset, and the library chooses. switchyard/tuning.hpp lists the values of each mode.
typedef struct sy_tuning_values {
  size_t struct_size;
  int32_t dispatch_sms;
  int32_t combine_sms;
  int32_t sms;
  int32_t dispatch_warps;
  int32_t dispatch_stages;
  int32_t combine_warps;
  int32_t pieces;
  int32_t warps;
  int32_t chunk_kib;
  int32_t quantized_dispatch_sms;
} sy_tuning_values;

/// Values of the nearest entry in `path` or, if that is NULL, in the active tuning: the file named by SWITCHYARD_TUNING, then
/// the built-in table. All 0 if there is no entry for this device and mode. Errors: invalid_argument naming the file, the line,
/// the given value and the allowed values.
sy_code sy_tuning_find(const char* path, const sy_tuning_key* key, sy_tuning_values* values);

#ifdef __cplusplus
}
#endif
