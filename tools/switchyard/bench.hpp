// SPDX-License-Identifier: Apache-2.0
// `switchyard bench`: dispatch and combine, timed and verified, against the copy limit of the same machine in the same run.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../../bench/measure.hpp"
#include "exchange_check.hpp"
#include "progress.hpp"
#include "routing_source.hpp"

namespace switchyard::tool {

inline constexpr int64_t kMostLateUs = 100'000;

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

/// One measured configuration.
struct BenchRun {
  BenchOptions options;  ///< with all automatic values filled in
  int experts = 0;
  int topk = 0;
  std::string routing;  ///< description
  RingSettings ring;    ///< ring staging: as measured
  int sets = 0;
  double working_set_bytes = 0;
  bench::Times dispatch, combine, both;
  bench::ExchangeBytes bytes;
  double plan_us = 0;         ///< median of the slowest rank's bookkeeping inside dispatch
  double counted_remote = 0;  ///< remote bytes of a dispatch, as the library counts them
  size_t heap_bytes = 0;      ///< symmetric memory per rank
  std::vector<CheckResult> checks;
  bool passed() const;
};

/// Fills in what was left to choose. \throws UsageError
BenchOptions with_defaults(const BenchOptions& options, const bench::Machine& machine);
/// What is wrong with a configuration before anything is measured: UsageError, or the library's Error.
void check_exchange(const BenchOptions& options, const bench::Machine& machine);
/// \throws RankError, Error, UsageError. `on_progress` gets the share done.
BenchRun measure_exchange(const BenchOptions& options, const bench::Machine& machine,
                          const std::function<void(double)>& on_progress);
/// CUDA: multiprocessors where they were left to choose: as tuned for this GPU and shape, else the library's own; at most
/// `most`.
void choose_sms(BenchOptions& options, const std::string& gpu, int64_t most);
/// The copy limit of this machine, with a line of progress.
bench::CopyLimit limit_now(Progress& progress, const BenchOptions& options, const bench::Machine& machine, const char* title);
/// What makes the copy limit hard to believe: one before and one after (GB/s) that differ by more than a third of the larger,
/// or a share of it above 1.
std::vector<std::string> limit_notes(double before, double after, double largest_share);
/// --json and --html of `document`. What cannot be written is returned, so that the figures are printed all the same.
[[nodiscard]] std::exception_ptr write_results(const BenchOptions& options, const nlohmann::json& document);
/// The last words of a run: which files there are. \throws what write_results returned
void print_written(const BenchOptions& options, const std::exception_ptr& problem);
/// \returns the exit status
int run_bench(const BenchOptions& options);

}  // namespace switchyard::tool
