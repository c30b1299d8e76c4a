// SPDX-License-Identifier: Apache-2.0
// A point of `bench --mode layer`: its configuration, and what a rank times and checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/latency.hpp"
#include "layer/balanced_calls.hpp"
#include "layer/layer_rank.hpp"
#include "run/replicas.hpp"

namespace switchyard::tool {

/// Number of turns in which sections are timed and steps recorded.
inline constexpr int64_t kLayerTurns = 4;
/// Maximum number of calls whose steps are recorded.
inline constexpr int64_t kMaxRecordedCalls = 100;
/// Maximum number of threads of a rank that recompute tokens: each thread holds one expert's weights in float32.
inline constexpr int kMaxLayerThreads = 8;
/// Keys of the fused forms' sections.
inline constexpr const char* kFusedKeys[] = {"fused", "fused_per_rank"};
/// Keys of all timed sections and steps.
std::vector<const char*> layer_keys();

LayerArithmetic arithmetic_of(const BenchOptions& o);
/// Checks the granularity of fp8 scales. \throws UsageError
void check_scaling(const BenchOptions& o);

struct LayerPoint {
  BenchOptions options;
  LayerSpec spec;
  nlohmann::json replicas;  ///< with --spare-slots: the map
  // With --balance:
  std::vector<Routing> ids;  ///< of experts, by rank; else empty
  ExpertMap home;
  size_t expert_bytes = 0;
  bool balances() const { return options.balance && options.spare_slots > 0; }
};

LayerPoint make_layer_point(const BenchOptions& o);
RankJob layer_job(const LayerPoint& p);

/// Collective. Returns the seconds of each section and step, by key, and the checks. threads: for recomputed tokens. max_sms:
/// maximum number of multiprocessors of a rank.
nlohmann::json measure_layer_rank(const LayerPoint& p, Group& group, RankLink& link, int threads, int64_t max_sms);

}  // namespace switchyard::tool
