// SPDX-License-Identifier: Apache-2.0
#include "measure/planning.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
  /// What the workers of a sender write of each record. The arithmetic is that of protocol/normal/dispatch_direct.hpp: where a
  /// destination lies is looked up for each entry. \returns seconds
  double write() {
    const Clock::time_point begin = Clock::now();
    std::byte* const block = cold_.data() + turn_++ % kBlocks * block_bytes();
    for (Block& at : blocks_) at = {block, block + kRecords * 4, block + kRecords * 4 * (1 + kTopk)};
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t first = h_.send_begin[idx(t)], places = h_.send_begin[idx(t) + 1] - first;
      for (int i = 0; i < places * topk_; ++i) write_entry(t, h_.sends[idx(first + i / topk_)], i % topk_);
    }
    return seconds_since(begin);
  }
  /// What a receiver makes of as many records. \returns seconds
  double read() {
    const Clock::time_point begin = Clock::now();
    const Block& at = blocks_.front();
    h_.record_token.resize(kRecords);
    h_.record_route.resize(kRecords * kTopk);
    h_.record_weight.resize(kRecords * kTopk);
    std::memcpy(h_.record_token.data(), at.token, kRecords * 4);
    std::memcpy(h_.record_route.data(), at.route, kRecords * kTopk * 4);
    std::memcpy(h_.record_weight.data(), at.weight, kRecords * kTopk * 4);
    detail::build_receiver_side(h_);
    return seconds_since(begin);
  }

 private:
  static constexpr size_t kRecords = kWorld * kTokens;  // every token has a record for every rank
  static constexpr size_t kBlocks = 256;                // 139 MB
  static constexpr size_t block_bytes() { return kRecords * 4 * (1 + 2 * kTopk); }
  static size_t idx(int64_t i) { return static_cast<size_t>(i); }
  struct Block {
    std::byte *token, *route, *weight;
  };

  void write_entry(int64_t token, const detail::SendEntry& entry, int k) {
    const Block& at = blocks_[idx(entry.rank)];
    const int first = h_.map.first(entry.rank), last = first + h_.map.count(entry.rank);
    const int64_t f = token * topk_ + k, to = int64_t{entry.record} * topk_ + k;
    const int32_t id = h_.ids[idx(f)];
    const bool here = id >= first && id < last;
    reinterpret_cast<int32_t*>(at.route)[to] = here ? id - first : -1;
    reinterpret_cast<float*>(at.weight)[to] = here ? weights_[idx(f)] : 0.0f;
    if (k == 0) reinterpret_cast<int32_t*>(at.token)[entry.record] = static_cast<int32_t>(token);
  }

  std::vector<int32_t> ids_;
  detail::LocalPlan local_;
  detail::HandleData h_;
  std::vector<float> weights_ = std::vector<float>(idx(kTokens * kTopk), 0.125f);
  std::vector<std::byte> cold_ = std::vector<std::byte>(kBlocks * block_bytes());
  std::vector<Block> blocks_ = std::vector<Block>(kWorld);
  size_t turn_ = 0;
  volatile int topk_ = kTopk;  // no constant where the library has none
};

}  // namespace

PlanningTimes measure_planning(const Machine& machine, double seconds) {
  PlanningTimes out;
  std::thread([&] {
    pin_thread(share_of_cpus(machine, 0, machine.usable_cores()));
    Planning planning;
    std::vector<double> plans, writes, reads;
    double sum = 0;
    for (int i = -1; i < 1000 && (i < 5 || sum < seconds); ++i) {
      const double plan = planning.plan(), write = planning.write(), read = planning.read();
      if (i < 0) continue;
      plans.push_back(plan);
      writes.push_back(write);
      reads.push_back(read);
      sum += plan + write + read;
    }
    const auto ns = [](std::vector<double>& all, int64_t entries) {
      std::sort(all.begin(), all.end());
      return all[all.size() / 2] * 1e9 / static_cast<double>(entries);
    };
    out.route_ns = ns(plans, kTokens * kTopk);
    out.record_write_ns = ns(writes, kWorld * kTokens * kTopk);
    out.record_read_ns = ns(reads, kWorld * kTokens * kTopk);
  }).join();
  return out;
}

}  // namespace switchyard::measure
