// SPDX-License-Identifier: Apache-2.0
// Code shared by the exchange benchmark and the benchmark with which it is compared: summaries of times, byte counts, and the
// output format.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "measure/copy_limit.hpp"
#include "measure/machine.hpp"

namespace switchyard::measure {

/// The slowest rank's time in each iteration, in seconds.
struct Times {
  double p50 = 0, p99 = 0, min = 0, max = 0, mean = 0;
  int iterations = 0;
};
/// Percentiles by nearest rank. \pre not empty
Times summarize(std::vector<double> seconds);
/// Name of the tail value for the given number of iterations: "max" if p99 would be the maximum, else "p99".
inline const char* tail_name(int64_t iterations) { return iterations < 100 ? "max" : "p99"; }
/// Element i is the maximum of element i over all ranks.
std::vector<double> slowest(const std::vector<std::vector<double>>& per_rank);

/// Times at `key` in the ranks' results, in seconds: the slowest rank's time in each iteration.
Times times_of(const std::vector<nlohmann::json>& ranks, const std::string& key);
/// Times of the attempt with the lowest median. The attempts are the elements of the list at `key`.
Times fastest_of(const std::vector<nlohmann::json>& ranks, const std::string& key);

/// Bytes moved by one exchange, summed over all ranks.
struct ExchangeBytes {
  double logical = 0;         ///< one row per route: traffic of an exchange that sends a row for each route
  double payload = 0;         ///< one row per (token, rank), own rank included
  double remote = 0;          ///< like payload, without the rank's own rows
  double dispatch_limit = 0;  ///< each source row read once, each (token, rank) row written once
  double combine_limit = 0;   ///< each (token, rank) row read once, each token's row written once
};
/// `pairs`: number of (token, rank) pairs; `remote_pairs`: number of pairs with another rank; `routes`: number of kept routes.
ExchangeBytes exchange_bytes(int64_t tokens, int64_t pairs, int64_t remote_pairs, int64_t routes, double source_row_bytes,
                             double sent_row_bytes, double result_row_bytes);

/// Number of input sets, from 2 to 32, for a benchmark that cycles through them and must not find them in the caches. Together,
/// the sets exceed four times the last-level cache but not `memory_limit` bytes.
int rotation_sets(double bytes_per_set, double llc_bytes, double memory_limit);

nlohmann::json to_json(const Times& times);
nlohmann::json to_json(const Machine& machine);
nlohmann::json to_json(const CopyLimit& limit);
nlohmann::json to_json(const ExchangeBytes& bytes);

/// Writes `document`, followed by a newline, using write_file.
void write_json(const std::string& path, const nlohmann::json& document);

}  // namespace switchyard::measure
