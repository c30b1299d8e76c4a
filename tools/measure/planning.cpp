// SPDX-License-Identifier: Apache-2.0
#include "measure/planning.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "plan/plan.hpp"

namespace switchyard::measure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kExperts = 256, kTopk = 8, kWorld = 2;
constexpr int64_t kTokens = 4096;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Distinct experts in each token, in no order.
std::vector<int32_t> scattered_ids() {
  std::vector<int32_t> ids(kTokens * kTopk);
  uint32_t state = 1;
  for (int64_t t = 0; t < kTokens; ++t) {
    state = state * 1664525u + 1013904223u;
    const auto first = static_cast<int32_t>(state >> 24);
    for (int k = 0; k < kTopk; ++k)
      ids[static_cast<size_t>(t * kTopk + k)] = (first + k * 37) % kExperts;  // 37 and 256 have no common factor
  }
  return ids;
}

/// The plan of a dispatch in which both ranks have the same ids.
class Planning {
 public:
  Planning() : ids_(scattered_ids()) { h_.counts.capacity.assign(kWorld, std::numeric_limits<int64_t>::max()); }

  /// What a sender does. \returns seconds
  double plan() {
    const Clock::time_point begin = Clock::now();
    local_.build({ids_.data(), kTokens, kTopk, false}, kExperts, kWorld);
    detail::GatheredCounts& counts = h_.counts;
    counts.world = kWorld;
    counts.experts = kExperts;
    counts.tokens.assign(kWorld, kTokens);
    counts.routes.clear();
    counts.touching.clear();
    for (int r = 0; r < kWorld; ++r) {
      counts.routes.insert(counts.routes.end(), local_.routes_per_expert.begin(), local_.routes_per_expert.end());
      counts.touching.insert(counts.touching.end(), local_.tokens_per_rank.begin(), local_.tokens_per_rank.end());
    }
    detail::build_owner_side(local_, h_);
    return seconds_since(begin);
  }
  /// What is written of each of its records, and what the receiver makes of as many. \returns seconds
  double records() {
    const auto count = static_cast<size_t>(h_.num_records);
    token_.resize(count);
    route_.resize(count * kTopk);
    const Clock::time_point begin = Clock::now();
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t at = h_.send_begin[static_cast<size_t>(t)]; at < h_.send_begin[static_cast<size_t>(t) + 1]; ++at)
        write(t, h_.sends[static_cast<size_t>(at)]);
    h_.record_token = token_;
    h_.record_route = route_;
    detail::build_receiver_side(h_);
    return seconds_since(begin);
  }
  int64_t num_records() const { return h_.num_records; }

 private:
  void write(int64_t token, const detail::SendEntry& entry) {
    const int first = h_.map.first(entry.rank), last = first + h_.map.count(entry.rank);
    const auto record = static_cast<size_t>(entry.record);
    for (int k = 0; k < kTopk; ++k) {
      const int32_t id = h_.ids[static_cast<size_t>(token * kTopk + k)];
      route_[record * kTopk + static_cast<size_t>(k)] = id >= first && id < last ? id - first : -1;
    }
    token_[record] = static_cast<int32_t>(token);
  }

  std::vector<int32_t> ids_;
  detail::LocalPlan local_;
  detail::HandleData h_;
  std::vector<int32_t> token_, route_;
};

}  // namespace

PlanningTimes measure_planning(const Machine& machine, double seconds) {
  PlanningTimes out;
  std::thread([&] {
    pin_thread(share_of_cpus(machine, 0, machine.usable_cores()));
    Planning planning;
    std::vector<double> plans, records;
    double sum = 0;
    for (int i = -1; i < 1000 && (i < 5 || sum < seconds); ++i) {
      const double plan = planning.plan(), record = planning.records();
      if (i < 0) continue;
      plans.push_back(plan);
      records.push_back(record);
      sum += plan + record;
    }
    const auto median = [](std::vector<double>& all) {
      std::sort(all.begin(), all.end());
      return all[all.size() / 2];
    };
    out.route_ns = median(plans) * 1e9 / (kTokens * kTopk);
    out.record_ns = median(records) * 1e9 / static_cast<double>(planning.num_records());
  }).join();
  return out;
}

}  // namespace switchyard::measure
