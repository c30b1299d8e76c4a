// SPDX-License-Identifier: Apache-2.0
// What one measured or traced configuration is: its options, and the scenario and configs that they make.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/scenario.hpp"
#include "run/modes.hpp"
#include "run/names.hpp"
#include "run/routing_source.hpp"

namespace switchyard::tool {

struct BenchOptions {
  std::string backend = "cpu";
  std::string mode = "normal";
  int64_t ranks = 0;  ///< 0: 2, or 8 with 16 cores or more
  int64_t blocks = 1;
  int64_t warps = 0;        ///< 0: cores / ranks, at least 1
  int64_t sms = 0;          ///< CUDA: multiprocessors of each call; 0: as tuned, or the library's default
  int64_t combine_sms = 0;  ///< CUDA: of combine; 0: as `sms`
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
  int64_t late_us = 0;                    ///< low latency, flat: rank 0 enters so much later than the others
  std::string exchange = "normal";        ///< layer: the mode whose calls move its rows
  std::string form = "automatic";         ///< layer, traced: in separate calls or in one
  int64_t intermediate = 0;               ///< layer: width of an expert's MLP; 0: 2048 on GPUs, 64 on the CPU
  int64_t compute = 0;  ///< low latency: microseconds of arithmetic between the halves of calls; 0: not measured
  std::string routing = "uniform";
  int64_t channels = 0;  ///< ring settings; 0: the library's default
  int64_t send_chunk = 0;
  int64_t slots = 0;
  bool cached = false;     ///< dispatch by the handle of the first one
  int64_t iterations = 0;  ///< 0: 40; on GPUs 200, of which p99 leaves out two
  int64_t warmup = 5;
  int64_t sets = 0;  ///< 0: as many as exceed four times the last-level cache
  std::string pin = "auto";
  bool processes = false;
  bool verify = true;
  bool limits = true;  ///< CUDA: also measure bare kernels
  int64_t seed = 1;
  bool contest = false;            ///< flat: the contest's five shapes instead of one
  std::vector<std::string> sweep;  ///< "tokens=128,512"
  std::vector<std::string> swept;  ///< what tells the points of a run apart: "tokens"
  std::string json_path;
  std::string html_path;
  std::string commit;       ///< overrides the built-in one
  int64_t limit_ms = 1500;  ///< CPU, normal: a measurement of the copy limit
};

/// The mode whose calls move rows: that of the configuration, or of a layer its --exchange.
const Mode& exchange_of(const BenchOptions& o);
RoutingSource routing_source(const BenchOptions& o);
/// The scenario of a configuration but for its routes.
Scenario shape_of(const BenchOptions& o, const RoutingSource& source);
NormalConfig normal_config(const BenchOptions& o, const Scenario& s);
/// `s` has its routes.
LowLatencyConfig low_latency_config(const BenchOptions& o, const Scenario& s);
/// Scales of the rows that travel: --quantize makes them, or they come with fp8 rows.
ScaleKind sent_scales(const BenchOptions& o);
/// Bytes of a row on its way to the experts, scales included.
size_t sent_row_bytes(const BenchOptions& o);
/// Bytes of a row on its way back.
size_t returned_row_bytes(const BenchOptions& o);

/// Throws UsageError for words that do not go together in the configuration's mode.
void check_words(const BenchOptions& o);
/// CUDA: multiprocessors where they were left to choose: as tuned for this GPU and shape, else the library's own; at most
/// `max`.
void choose_sms(BenchOptions& o, const std::string& gpu, int64_t max);

}  // namespace switchyard::tool
