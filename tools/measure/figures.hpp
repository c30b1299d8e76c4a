// SPDX-License-Identifier: Apache-2.0
// What the exchange benchmark and its peer share: how times are summed up, which bytes count, and how both are written down.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "measure/copy_limit.hpp"
#include "measure/machine.hpp"

namespace switchyard::measure {

/// Seconds of the slowest rank, over iterations.
struct Times {
  double p50 = 0, p99 = 0, min = 0, max = 0, mean = 0;
  int iterations = 0;
};
/// Percentiles by nearest rank. \pre not empty
Times summarize(std::vector<double> seconds);
/// What p99 of so many iterations is: the maximum ("max"), or less than that ("p99").
inline const char* tail_name(int64_t iterations) { return iterations < 100 ? "max" : "p99"; }
/// Element i is the largest of all ranks' element i.
std::vector<double> slowest(const std::vector<std::vector<double>>& per_rank);

/// Seconds at `key` of each rank's results; of each iteration the slowest rank's.
Times times_of(const std::vector<nlohmann::json>& ranks, const std::string& key);
/// Times of the attempt with the lowest median. The attempts are the elements of the list at `key`.
Times fastest_of(const std::vector<nlohmann::json>& ranks, const std::string& key);

/// Bytes of one exchange, all ranks together.
struct ExchangeBytes {
  double logical = 0;         ///< one row per route: what an exchange without token saving would move
  double payload = 0;         ///< one row per (token, rank), own rank included
  double remote = 0;          ///< the same without the own rank
  double dispatch_limit = 0;  ///< each source row read once, each (token, rank) row written once
  double combine_limit = 0;   ///< the reverse: each (token, rank) row read once, each token's row written once
};
/// `pairs`: number of (token, rank) pairs; `remote_pairs`: those of another rank; `routes`: kept routes.
ExchangeBytes exchange_bytes(int64_t tokens, int64_t pairs, int64_t remote_pairs, int64_t routes, double source_row_bytes,
                             double sent_row_bytes, double result_row_bytes);

/// Number of input sets so that a benchmark that goes round them leaves nothing in the caches: the sets together exceed four
/// times the last-level cache, between 2 and 32, within `memory_limit` bytes.
int rotation_sets(double bytes_per_set, double llc_bytes, double memory_limit);

nlohmann::json to_json(const Times& times);
nlohmann::json to_json(const Machine& machine);
nlohmann::json to_json(const CopyLimit& limit);
nlohmann::json to_json(const ExchangeBytes& bytes);

/// write_file of `document` with a final newline.
void write_json(const std::string& path, const nlohmann::json& document);

}  // namespace switchyard::measure
