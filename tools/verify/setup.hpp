// SPDX-License-Identifier: Apache-2.0
// From a case of `switchyard verify` to its routing, the configs of its exchanges and the memory that they need.
#pragma once

#include <cstddef>
#include <vector>

#include "check/low_latency_rank.hpp"
#include "run/modes.hpp"
#include "run/names.hpp"
#include "verify/verify.hpp"

namespace switchyard::tool {

Backend backend_of(const VerifyCase& c);

/// With the routing of all ranks: they hold different numbers of tokens, unless --equal-tokens. \throws UsageError, Error(io)
Scenario scenario_of(const VerifyCase& c, const VerifyOptions& options);
NormalConfig normal_config(const VerifyCase& c, const Scenario& s);
/// What a case of low-latency mode runs, on the same data.
std::vector<LowLatencyConfig> low_latency_configs(const VerifyCase& c, const Scenario& s);
/// What this verb does in a mode.
struct VerifyMode {
  const Mode& mode;
  /// Collective. Every check that a rank makes.
  std::vector<CheckResult> (*run)(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device);
  size_t (*heap_bytes)(const VerifyCase& c, const Scenario& s);    ///< symmetric memory of a rank
  size_t (*device_bytes)(const VerifyCase& c, const Scenario& s);  ///< of a rank besides
  double (*copies)(const VerifyCase& c);                           ///< of device_bytes that a rank on the CPU has at once
};
const VerifyMode& verify_mode(const VerifyCase& c);

// Memory of the modes.
size_t normal_heap_bytes(const VerifyCase& c, const Scenario& s);
size_t normal_device_bytes(const VerifyCase& c, const Scenario& s);
size_t low_latency_heap_bytes(const VerifyCase& c, const Scenario& s);
size_t low_latency_device_bytes(const VerifyCase& c, const Scenario& s);
size_t layer_heap_bytes(const VerifyCase& c, const Scenario& s);
size_t layer_device_bytes(const VerifyCase& c, const Scenario& s);

/// Collective. A whole layer around either exchange, with each order of combine, and its fused form, against one rank that
/// computes everything.
std::vector<CheckResult> layer_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device);

/// Symmetric memory of a rank. \throws Error(invalid_argument) for sizes that an exchange does not take.
size_t heap_bytes(const VerifyCase& c, const Scenario& s);
/// "normal, rank_major rows, ring staging", or the mode's name.
std::string mode_text(const VerifyCase& c);

}  // namespace switchyard::tool
