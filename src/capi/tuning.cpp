// SPDX-License-Identifier: Apache-2.0
#include "switchyard/tuning.hpp"

#include "capi/structs.hpp"
#include "switchyard/c/tuning.h"

using namespace switchyard;
using namespace switchyard::detail;

namespace {

constexpr sy_tuning_key kKey = SY_TUNING_KEY_INIT;
static_assert(SY_TUNING_NORMAL == static_cast<int>(TuningMode::normal) &&
              SY_TUNING_LOW_LATENCY == static_cast<int>(TuningMode::low_latency) &&
              SY_TUNING_FLAT == static_cast<int>(TuningMode::flat) &&
              SY_TUNING_LEDGER == static_cast<int>(TuningMode::ledger) &&
              SY_TUNING_NORMAL_EXPERT_MAJOR == static_cast<int>(TuningMode::normal_expert_major));

TuningKey to_key(const sy_tuning_key* key) {
  const sy_tuning_key k = read_struct(key, kKey, "key");
  require(k.device, "key->device");
  require_range("key->hidden", k.hidden, 1, INT64_MAX);
  require_range("key->tokens", k.tokens, 1, INT64_MAX);
  require_range("key->ranks", k.ranks, 1, INT32_MAX);
  TuningKey result;
  result.device = k.device;
  result.mode = to_enum<TuningMode>("key->mode", k.mode);
  result.ranks = k.ranks;
  result.hidden = k.hidden;
  result.tokens = k.tokens;
  return result;
}

}  // namespace

extern "C" sy_code sy_tuning_find(const char* path, const sy_tuning_key* key, sy_tuning_values* values) {
  return guarded([&] {
    check_struct(values, sizeof *values, "values");
    const TuningKey twin = to_key(key);
    const TuningValues v = (path ? Tuning({TuningFile::read(path)}) : Tuning::from_environment()).find(twin);
    write_struct(
        values, sy_tuning_values{sizeof(sy_tuning_values), v.dispatch_sms, v.combine_sms, v.sms, v.dispatch_warps,
                                 v.dispatch_stages, v.combine_warps, v.pieces, v.warps, v.chunk_kib, v.quantized_dispatch_sms});
  });
}
