// SPDX-License-Identifier: Apache-2.0
#include "measure/figures.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "measure/result_file.hpp"

namespace switchyard::measure {

using nlohmann::json;

Times summarize(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const auto percentile = [&](double p) {
    const double rank = std::ceil(p * static_cast<double>(seconds.size()));
    return seconds[static_cast<size_t>(std::max(1.0, rank)) - 1];
  };
  Times t;
  t.p50 = percentile(0.50);
  t.p99 = percentile(0.99);
  t.min = seconds.front();
  t.max = seconds.back();
  t.mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
  t.iterations = static_cast<int>(seconds.size());
  return t;
}

std::vector<double> slowest(const std::vector<std::vector<double>>& per_rank) {
  std::vector<double> out = per_rank.front();
  for (const std::vector<double>& rank : per_rank) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = std::max(out[i], rank[i]);
  }
  return out;
}

Times times_of(const std::vector<nlohmann::json>& ranks, const std::string& key) {
  const nlohmann::json::json_pointer at(key);
  std::vector<std::vector<double>> all;
  for (const nlohmann::json& r : ranks) all.push_back(r.at(at).get<std::vector<double>>());
  return summarize(slowest(all));
}

Times fastest_of(const std::vector<nlohmann::json>& ranks, const std::string& key) {
  Times best;
  const size_t attempts = ranks.at(0).at(nlohmann::json::json_pointer(key)).size();
  for (size_t i = 0; i < attempts; ++i) {
    const Times t = times_of(ranks, key + "/" + std::to_string(i));
    if (i == 0 || t.p50 < best.p50) best = t;
  }
  return best;
}

ExchangeBytes exchange_bytes(int64_t tokens, int64_t pairs, int64_t remote_pairs, int64_t routes, double source_row_bytes,
                             double sent_row_bytes, double result_row_bytes) {
  ExchangeBytes b;
  b.logical = static_cast<double>(routes) * sent_row_bytes;
  b.payload = static_cast<double>(pairs) * sent_row_bytes;
  b.remote = static_cast<double>(remote_pairs) * sent_row_bytes;
  b.dispatch_limit = static_cast<double>(tokens) * source_row_bytes + b.payload;
  b.combine_limit = static_cast<double>(pairs + tokens) * result_row_bytes;
  return b;
}

int rotation_sets(double bytes_per_set, double llc_bytes, double memory_limit) {
  const double wanted = std::ceil(4 * llc_bytes / std::max(1.0, bytes_per_set));
  const double possible = std::floor(memory_limit / std::max(1.0, bytes_per_set));
  return static_cast<int>(std::clamp(std::min(wanted, possible), 2.0, 32.0));
}

json to_json(const Times& t) {
  return {{"p50_us", t.p50 * 1e6}, {"p99_us", t.p99 * 1e6},   {"min_us", t.min * 1e6},
          {"max_us", t.max * 1e6}, {"mean_us", t.mean * 1e6}, {"iterations", t.iterations}};
}

json to_json(const Machine& m) {
  return {{"cpu", m.cpu_model},
          {"virtual_machine", m.virtual_machine},
          {"logical_cpus", m.logical_cpus},
          {"usable_cores", m.usable_cores()},
          {"threads_per_core", m.threads_per_core},
          {"numa_nodes", m.numa_nodes},
          {"l1d_bytes_per_core", m.l1d_bytes},
          {"l2_bytes_per_core", m.l2_bytes},
          {"last_level_cache_bytes", m.llc_bytes},
          {"memory_bytes", m.memory_bytes},
          {"os", m.os},
          {"kernel", m.kernel}};
}

json to_json(const CopyLimit& limit) {
  json rates = json::array();
  for (const CopyRate& r : limit.rates) {
    rates.push_back({{"method", r.method}, {"gb_per_s", r.gbs}, {"min", r.gbs_min}, {"max", r.gbs_max}, {"passes", r.passes}});
  }
  return {{"gb_per_s", limit.best().gbs}, {"method", limit.best().method},    {"threads", limit.threads},
          {"source_bytes", limit.bytes},  {"counts", "bytes read + written"}, {"rates", rates}};
}

json to_json(const ExchangeBytes& b) {
  return {{"logical", b.logical},
          {"payload", b.payload},
          {"remote", b.remote},
          {"dispatch_limit", b.dispatch_limit},
          {"combine_limit", b.combine_limit}};
}

void write_json(const std::string& path, const json& document) {
  write_file(path, document.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

}  // namespace switchyard::measure
