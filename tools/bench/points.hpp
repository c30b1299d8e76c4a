// SPDX-License-Identifier: Apache-2.0
// The configurations measured in one run of `switchyard bench`, and the options in which they differ.
#pragma once

#include <string>
#include <vector>

#include "bench/options.hpp"
#include "cli/style.hpp"
#include "measure/machine.hpp"

namespace switchyard::tool {

/// All combinations of the sweeps, each value once, the last sweep varying fastest; or the shapes of the contest. \throws
/// UsageError, also for a flag or sweep that has no effect in this mode
std::vector<BenchOptions> bench_points(const BenchOptions& options);

/// --contest: the five benchmark shapes from the published all-to-all contest.
std::vector<BenchOptions> contest_points(const BenchOptions& options);

/// Throws UsageError if less than `bytes` of this machine's memory are available. `bytes`: the total over all ranks of a point.
void check_point_memory(const BenchOptions& point, double bytes, const measure::Machine& machine);

/// Mean number of ranks per token under uniform routing, W (1 - C(E - E/W, K) / C(E, K)), for K distinct choices among E
/// experts split evenly over W ranks.
double expected_mean_ranks(int world, int experts, int topk);
/// Rejects a draw whose mean number of ranks per token deviates by more than 1 % from the expected mean. Accepts any draw if W
/// does not divide E.
void check_mean_ranks(double mean, int world, int experts, int topk, int64_t seed);

/// "2 ranks, 16 tokens", followed by any other swept options, as in ", hidden 512".
std::string point_title(const BenchOptions& point);
/// ", hidden 512" if all points share that value, else "".
std::string common_hidden(const BenchOptions& point);
/// The value of a sweepable option if all points share it, else "(see below)".
std::string common(const BenchOptions& point, const std::string& name);

/// If a table has `max` instead of p99, prints the reason below it.
void print_tail(const BenchOptions& any);
/// If rank 0 entered late, prints a note below the table.
void print_late(const BenchOptions& any);

/// A table of results. Swept options not among `shown` (the quantities in `header`) get a column at the front.
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
