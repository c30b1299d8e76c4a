// SPDX-License-Identifier: Apache-2.0
// A single measured or traced configuration: its options, and the scenario and configs derived from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/scenario.hpp"
#include "run/modes.hpp"
#include "run/names.hpp"
#include "run/routing_source.hpp"

namespace switchyard::tool {

inline constexpr int64_t kMaxSpareSlots = 1024;
inline constexpr int64_t kMaxCapacity = 6400;  ///< percent

struct BenchOptions {
  std::string backend = "cpu";
  std::string mode = "normal";
  int64_t ranks = 0;  ///< 0: 2, or 8 with 16 cores or more
  int64_t blocks = 1;
  int64_t warps = 0;  ///< 0: cores / ranks, at least 1
  int64_t sms = 0;    ///< CUDA: multiprocessors per call or, for a layer, per kernel; 0: as tuned, or the library's default
  int64_t combine_sms = 0;  ///< CUDA: multiprocessors of combine; 0: as `sms`
  int64_t tokens = 512;
  int64_t hidden = 7168;
  int64_t experts = 0;
  int64_t topk = 0;
  int64_t alignment = 1;
  std::string layout = "rank_major";
  std::string staging = "direct";
  std::string dtype = "bf16";
  std::string quantize = "none";
  std::string order = "per_rank";
  std::string sending = "per_rank";       ///< low latency
  std::string scale_order = "row_major";  ///< low latency
  int64_t pieces = 0;                     ///< low latency; 0: the library's default
  int64_t late_us = 0;                    ///< low latency, flat: delay of rank 0's entry after the others
  std::string exchange = "normal";        ///< layer: the mode that moves its rows
  std::string form = "automatic";         ///< layer, traced: separate calls or one call
  int64_t intermediate = 0;               ///< layer: width of an expert's MLP; 0: 2048 on GPUs, 64 on the CPU
  int64_t capacity = 0;                   ///< layer: rows of a rank in the fused form, in percent of the mean; 0: the default
  std::string accumulate = "exact";       ///< layer: sums of fp8 products
  std::string scaling = "block";          ///< layer: granularity of fp8 scales
  std::string intermediate_scaling = "per_group";  ///< layer: of the rows between the products
  int64_t spare_slots = 0;                         ///< layer: slots per rank for replicas of experts
  bool balance = false;                            ///< layer: replicas are planned from the routes of the call itself
  int64_t compute = 0;  ///< low latency: microseconds of arithmetic between the halves of calls; 0: not measured
  std::string routing = "uniform";
  int64_t channels = 0;  ///< ring settings; 0: the library's default
  int64_t send_chunk = 0;
  int64_t slots = 0;
  bool cached = false;     ///< dispatch with the handle of the first dispatch
  int64_t iterations = 0;  ///< 0: 40; on GPUs 200, so p99 excludes the two slowest
  int64_t warmup = 5;
  int64_t sets = 0;  ///< 0: enough to exceed four times the last-level cache
  std::string pin = "auto";
  bool processes = false;
  bool verify = true;
  bool limits = true;  ///< CUDA: also measure bare kernels
  int64_t seed = 1;
  bool contest = false;            ///< flat: the five shapes of the contest instead of one
  std::vector<std::string> sweep;  ///< "tokens=128,512"
  std::vector<std::string> swept;  ///< names of the options that differ between the points of a run: "tokens"
  std::string json_path;
  std::string html_path;
  std::string commit;       ///< overrides the built-in commit
  int64_t limit_ms = 1500;  ///< CPU, normal: duration of one measurement of the copy limit
};

/// The mode that moves rows: the configuration's mode or, for a layer, --exchange.
const Mode& exchange_of(const BenchOptions& o);
RoutingSource routing_source(const BenchOptions& o);
/// A configuration's scenario without its routes.
Scenario shape_of(const BenchOptions& o, const RoutingSource& source);
NormalConfig normal_config(const BenchOptions& o, const Scenario& s);
/// The routes of `s` must be set.
LowLatencyConfig low_latency_config(const BenchOptions& o, const Scenario& s);
/// Scales of the rows in flight: created by --quantize or included with fp8 input rows.
ScaleKind sent_scales(const BenchOptions& o);
/// Bytes per row on the way to the experts, scales included.
size_t sent_row_bytes(const BenchOptions& o);
/// Bytes per row on the way back.
size_t returned_row_bytes(const BenchOptions& o);

/// Throws UsageError for options that are mutually exclusive in the configuration's mode.
void check_words(const BenchOptions& o);
/// CUDA, modes without experts: sets each number of multiprocessors that was left on automatic to the tuned value for this GPU
/// and shape or else to the library's default, but at most `max`.
void choose_sms(BenchOptions& o, const std::string& gpu, int64_t max);

}  // namespace switchyard::tool
