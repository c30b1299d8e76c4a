// SPDX-License-Identifier: Apache-2.0
// From a case of `switchyard verify` to its routing, the configs of its exchanges and the memory that they need.
#pragma once

#include <cstddef>
#include <vector>

#include "low_latency_check.hpp"
#include "verify.hpp"

namespace switchyard::tool {

/// Source rows of a case.
struct CaseRows {
  DType type;
  ScaleKind scales;  ///< of fp8 rows
};
CaseRows rows_of(const VerifyCase& c);
ScaleKind quantize_of(const VerifyCase& c);
Backend backend_of(const VerifyCase& c);

/// With the routing of all ranks: they hold different numbers of tokens, unless --equal-tokens. \throws UsageError, Error(io)
Scenario scenario_of(const VerifyCase& c, const VerifyOptions& options);
NormalConfig normal_config(const VerifyCase& c, const Scenario& s);
/// What a case of low-latency mode runs, on the same data.
std::vector<LowLatencyConfig> low_latency_configs(const VerifyCase& c, const Scenario& s);
/// Symmetric memory of a rank. \throws Error(invalid_argument) for sizes that an exchange does not take.
size_t heap_bytes(const VerifyCase& c, const Scenario& s);

}  // namespace switchyard::tool
