// SPDX-License-Identifier: Apache-2.0
// Derives the routing, the exchange configs and their memory from a `switchyard verify` case.
#pragma once

#include <cstddef>
#include <vector>

#include "check/low_latency_rank.hpp"
#include "run/modes.hpp"
#include "run/names.hpp"
#include "verify/verify.hpp"

namespace switchyard::tool {

Backend backend_of(const VerifyCase& c);

/// A scenario that includes the routing of all ranks. Ranks have different numbers of tokens unless --equal-tokens is given.
/// \throws UsageError, Error(io)
Scenario scenario_of(const VerifyCase& c, const VerifyOptions& options);
NormalConfig normal_config(const VerifyCase& c, const Scenario& s);
/// Configs for a case of low-latency mode. All of them run on the same data.
std::vector<LowLatencyConfig> low_latency_configs(const VerifyCase& c, const Scenario& s);
/// This verb's checks for a mode.
struct VerifyMode {
  const Mode& mode;
  /// Collective. All checks for a rank.
  std::vector<CheckResult> (*run)(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device);
  size_t (*heap_bytes)(const VerifyCase& c, const Scenario& s);    ///< symmetric memory of a rank
  size_t (*device_bytes)(const VerifyCase& c, const Scenario& s);  ///< further memory of a rank
  double (*copies)(const VerifyCase& c);                           ///< copies of device_bytes that a CPU rank holds at once
};
const VerifyMode& verify_mode(const VerifyCase& c);

// Memory of the modes.
size_t normal_heap_bytes(const VerifyCase& c, const Scenario& s);
size_t normal_device_bytes(const VerifyCase& c, const Scenario& s);
size_t low_latency_heap_bytes(const VerifyCase& c, const Scenario& s);
size_t low_latency_device_bytes(const VerifyCase& c, const Scenario& s);
size_t layer_heap_bytes(const VerifyCase& c, const Scenario& s);
size_t layer_device_bytes(const VerifyCase& c, const Scenario& s);

/// Collective. A whole layer with either exchange and each combine order, as well as its fused form, checked against a single
/// rank that computes everything.
std::vector<CheckResult> layer_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device);

/// Symmetric memory of a rank. \throws Error(invalid_argument) for sizes that an exchange rejects
size_t heap_bytes(const VerifyCase& c, const Scenario& s);
/// "normal, rank_major rows, ring staging", or the mode's name.
std::string mode_text(const VerifyCase& c);

}  // namespace switchyard::tool
