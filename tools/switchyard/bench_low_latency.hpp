// SPDX-License-Identifier: Apache-2.0
// `switchyard bench --mode low_latency`: latency of decode-sized exchanges, each call timed from entry to exit on the slowest
// rank.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench.hpp"
#include "oracle.hpp"
#include "rank_device.hpp"
#include "ranks.hpp"
#include "switchyard/low_latency.hpp"

namespace switchyard::tool {

/// One rank's clock and memory.
class ReplayClock {
 public:
  virtual ~ReplayClock() = default;
  virtual RankDevice& device() = 0;
  /// Collective. Seconds of `call`, `n` times after `warmup` more. Before each all ranks meet; on a GPU the call is a part of a
  /// graph that is replayed, and before it the L2 cache is filled with other lines.
  virtual std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) = 0;
  /// Nothing for so long: on the rank's own thread, or enqueued.
  virtual void idle(double microseconds) = 0;
};
/// clock.time() of calls that rank 0 enters `late_us` after the others, counted from when it does. `self`: this rank.
std::vector<double> time_entered_late(ReplayClock& clock, int self, int64_t late_us, const std::function<void()>& call,
                                      int64_t warmup, int64_t n);

/// One that also knows the limits of a routing.
class LatencyClock : public ReplayClock {
 public:
  /// Collective. Times of bare kernels that move the same rows, by name and block shape: "push" (each token's row of `sent`
  /// bytes to its ranks) and "pull" (the rows of `returned` bytes summed). Empty on the CPU.
  virtual nlohmann::json limits(size_t sent, size_t returned, int64_t warmup, int64_t n) = 0;
  /// Arithmetic that takes about so long by itself: the rank's own thread does it, or it is enqueued for all multiprocessors
  /// of the rank.
  virtual void compute(double microseconds) = 0;
};

std::unique_ptr<LatencyClock> make_host_clock(Group& group);
/// Collective. Only on GPUs, and with kReplayClockBytes of each rank's heap. \throws UsageError without CUDA code in this build
std::unique_ptr<ReplayClock> make_cuda_replay_clock(Group& group);
inline constexpr size_t kReplayClockBytes = size_t{2} << 20;
/// Collective. \throws UsageError without CUDA code in this build
std::unique_ptr<LatencyClock> make_cuda_clock(Group& group, const Scenario& s, const BenchOptions& options, size_t row_bytes);
/// Symmetric memory that it takes of each rank's heap.
size_t cuda_clock_bytes(const Scenario& s, const BenchOptions& options, size_t row_bytes);

/// The times at `key` of every rank's results; of each iteration the slowest rank's.
bench::Times times_of(const std::vector<nlohmann::json>& ranks, const nlohmann::json::json_pointer& key);
/// Says so below the table, if rank 0 entered late.
void print_late(const BenchOptions& any);
/// The group of a point: `row_bytes` of a row that comes back.
RankJob latency_job(const Scenario& s, const LowLatencyConfig& config, const BenchOptions& options, size_t row_bytes);
/// Throws UsageError where the ranks of `job` and their inputs and outputs find no room in the machine's memory.
void check_latency_room(const BenchOptions& options, const RankJob& job, size_t rank_bytes, const bench::Machine& machine);
/// Of what every rank returned: the largest "remote_bytes", and all "checks" by rank.
double most_remote_bytes(const std::vector<nlohmann::json>& ranks);
std::vector<CheckResult> checks_of(const std::vector<nlohmann::json>& ranks);
nlohmann::json checks_json(const std::vector<CheckResult>& checks);
/// The GPUs of a measurement. \throws UsageError without a usable one
struct MeasuredGpus {
  std::vector<std::string> names;
  int sms = 0;               ///< of one
  nlohmann::json described;  ///< for the JSON
  int64_t sms_of_rank(int64_t ranks) const;
};
MeasuredGpus gpus_to_measure();
/// Fills in what was left to choose. Returns what the JSON says of the GPUs, null on the CPU. \throws UsageError
nlohmann::json fit_points(const BenchOptions& options, std::vector<BenchOptions>& points);

/// What is wrong with a configuration before anything is measured: UsageError, or the library's Error.
void check_low_latency(const BenchOptions& options, const bench::Machine& machine);
void check_flat(const BenchOptions& options, const bench::Machine& machine);
/// One configuration without anything left to choose: its entry in the runs of --json. \throws RankError, UsageError
nlohmann::json measured_low_latency(const BenchOptions& options);
nlohmann::json measured_flat(const BenchOptions& options);

/// `points`: every configuration to measure. \returns the exit status
int run_bench_low_latency(const BenchOptions& options, std::vector<BenchOptions> points);
/// `switchyard bench --mode flat`: the whole exchange of scaling experts, in one launch and in two.
int run_bench_flat(const BenchOptions& options, std::vector<BenchOptions> points);
/// --contest: the five benchmark shapes of the published all-to-all contest.
std::vector<BenchOptions> contest_points(const BenchOptions& options);

}  // namespace switchyard::tool
