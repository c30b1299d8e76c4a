// SPDX-License-Identifier: Apache-2.0
// The configurations that one run of `switchyard bench` measures, and what tells them apart.
#pragma once

#include <string>
#include <vector>

#include "bench/options.hpp"
#include "cli/style.hpp"
#include "measure/machine.hpp"

namespace switchyard::tool {

/// All combinations of the sweeps, the last one fastest, each value once; or the contest's shapes. \throws UsageError, also for
/// a flag or a sweep without effect in this mode
std::vector<BenchOptions> bench_points(const BenchOptions& options);

/// --contest: the five benchmark shapes of the published all-to-all contest.
std::vector<BenchOptions> contest_points(const BenchOptions& options);

/// Throws UsageError if this machine has not `bytes` of memory left, which all ranks of a point take together.
void check_point_memory(const BenchOptions& point, double bytes, const measure::Machine& machine);

/// Mean ranks per token of uniform routing, W (1 - C(E - E/W, K) / C(E, K)): K distinct choices among E experts, evenly split
/// over W ranks.
double expected_mean_ranks(int world, int experts, int topk);
/// Refuses a draw whose mean number of ranks per token is more than 1 % from that; any, if W does not divide E.
void check_mean_ranks(double mean, int world, int experts, int topk, int64_t seed);

/// "2 ranks, 16 tokens", and what else is swept: ", hidden 512".
std::string point_title(const BenchOptions& point);
/// ", hidden 512" if all points have it, else "".
std::string common_hidden(const BenchOptions& point);
/// The value of an option that can be swept if all points have it, else "(see below)".
std::string common(const BenchOptions& point, const std::string& name);

/// If a table has `max` where it could have p99: why.
void print_tail(const BenchOptions& any);
/// If rank 0 entered late: says so below the table.
void print_late(const BenchOptions& any);

/// A table of results. What is swept and not among `shown`, the quantities that `header` has, gets a column in front.
class PointTable {
 public:
  PointTable(const BenchOptions& any, const std::vector<std::string>& shown, const std::vector<std::string>& header);
  void row(const BenchOptions& point, const std::vector<std::string>& cells);
  std::string text() const { return table_.text(); }

 private:
  std::vector<std::string> swept_;
  Table table_;
};

}  // namespace switchyard::tool
