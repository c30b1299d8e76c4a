// SPDX-License-Identifier: Apache-2.0
#include "run/modes.hpp"

#include <limits>
#include <stdexcept>

#include "switchyard/normal.hpp"

namespace switchyard::tool {

const Mode kNormal{.name = "normal",
                   .tuning = TuningMode::normal,
                   .expert_major_tuning = TuningMode::normal_expert_major,
                   .has_layouts = true,
                   .has_dispatch = true,
                   .has_experts = false,
                   .plain_rows = false,
                   .one_launch = false,
                   .returns_per_route = false,
                   .default_sms = kDefaultSms,
                   .max_tokens = std::numeric_limits<int64_t>::max()};
const Mode kLowLatency{.name = "low_latency",
                       .tuning = TuningMode::low_latency,
                       .expert_major_tuning = TuningMode::low_latency,
                       .has_layouts = false,
                       .has_dispatch = true,
                       .has_experts = false,
                       .plain_rows = false,
                       .one_launch = false,
                       .returns_per_route = false,
                       .default_sms = 0,
                       .max_tokens = 65535};
const Mode kFlat{.name = "flat",
                 .tuning = TuningMode::flat,
                 .expert_major_tuning = TuningMode::flat,
                 .has_layouts = false,
                 .has_dispatch = true,
                 .has_experts = false,
                 .plain_rows = true,
                 .one_launch = true,
                 .returns_per_route = true,
                 .default_sms = 0,
                 .max_tokens = 65535};
const Mode kLedger{.name = "ledger",
                   .tuning = TuningMode::ledger,
                   .expert_major_tuning = TuningMode::ledger,
                   .has_layouts = false,
                   .has_dispatch = false,
                   .has_experts = false,
                   .plain_rows = true,
                   .one_launch = true,
                   .returns_per_route = true,
                   .default_sms = 0,
                   .max_tokens = std::numeric_limits<int64_t>::max()};
const Mode kLayer{.name = "layer",
                  .tuning = TuningMode::normal,
                  .expert_major_tuning = TuningMode::normal_expert_major,
                  .has_layouts = false,
                  .has_dispatch = true,
                  .has_experts = true,
                  .plain_rows = false,
                  .one_launch = false,
                  .returns_per_route = false,
                  .default_sms = kDefaultSms,
                  .max_tokens = std::numeric_limits<int64_t>::max()};

const Mode& mode_named(const std::string& name) {
  for (const Mode* mode : {&kNormal, &kLowLatency, &kFlat, &kLedger, &kLayer})
    if (name == mode->name) return *mode;
  throw std::invalid_argument("mode '" + name + "' is not known");
}

}  // namespace switchyard::tool
