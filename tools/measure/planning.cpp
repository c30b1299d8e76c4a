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

#include "arch/cpu/row_ops.hpp"
#include "measure/stopwatch.hpp"
#include "plan/plan.hpp"

namespace switchyard::measure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kExperts = 256, kTopk = 8, kWorld = 2;
constexpr int64_t kTokens = 4096;

/// The distinct experts of each token, in no particular order.
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

/// The plan for a dispatch in which both ranks have the same ids. As in a program that does other work between calls, each plan
/// creates its handle in memory that is not in any cache.
class Planning {
 public:
  Planning() {
    for (size_t i = 0; i < kRowBytes; ++i) row_[i] = static_cast<std::byte>(i % 61);
    place(0);
    for (size_t i = 0; i < kHandles + 1; ++i) {  // allocates the memory of all handles, which the allocator then reuses
      plan();
      read();
    }
  }

  /// A sender's work. \returns seconds
  double plan() {
    ++turn_;
    detail::HandleData& h = handles_[turn_ % kHandles];
    h = detail::HandleData();
    h.counts.capacity.assign(kWorld, std::numeric_limits<int64_t>::max());
    const std::vector<int32_t>& ids = ids_[turn_ % kHandles];
    const Clock::time_point begin = Clock::now();
    local_.build({ids.data(), kTokens, kTopk, false}, kExperts, kWorld);
    detail::GatheredCounts& counts = h.counts;
    counts.world = kWorld;
    counts.experts = kExperts;
    counts.tokens.assign(kWorld, kTokens);
    counts.routes.clear();
    counts.touching.clear();
    for (int r = 0; r < kWorld; ++r) {
      counts.routes.insert(counts.routes.end(), local_.routes_per_expert.begin(), local_.routes_per_expert.end());
      counts.touching.insert(counts.touching.end(), local_.tokens_per_rank.begin(), local_.tokens_per_rank.end());
    }
    detail::build_owner_side(local_, h);
    h.weights.assign(weights_.begin(), weights_.end());
    return seconds_since(begin);
  }
  /// The cost of records written by a sender's workers, interleaved with their rows: stores to records miss the caches and
  /// compete with stores to rows for memory bandwidth. The arithmetic is that of protocol/normal/dispatch_direct.hpp: each
  /// entry looks up the address of its destination. \returns the additional seconds that rows with records take compared with
  /// rows only
  double write() {
    const double rows = send(false);
    return send(true) - rows;
  }
  /// A receiver's work for the same number of records. \returns seconds
  double read() {
    detail::HandleData& h = handles_[turn_ % kHandles];
    const Clock::time_point begin = Clock::now();
    const Block& at = blocks_.front();
    h.record_token.resize(kRecords);
    h.record_route.resize(kRecords * kTopk);
    h.record_weight.resize(kRecords * kTopk);
    std::memcpy(h.record_token.data(), at.token, kRecords * 4);
    std::memcpy(h.record_route.data(), at.route, kRecords * kTopk * 4);
    std::memcpy(h.record_weight.data(), at.weight, kRecords * kTopk * 4);
    detail::build_receiver_side(h);
    return seconds_since(begin);
  }

 private:
  static constexpr size_t kRecords = kWorld * kTokens;  // every token has a record for every rank
  static constexpr size_t kHandles = 128;               // about 1 MB each
  static constexpr size_t kBlocks = 128;                // 70 MB
  static constexpr size_t kRowBytes = 7168;             // quantized
  static constexpr size_t block_bytes() { return kRecords * 4 * (1 + 2 * kTopk); }
  static size_t idx(int64_t i) { return static_cast<size_t>(i); }
  struct Block {
    std::byte *token, *route, *weight;
  };

  void place(size_t block) {
    std::byte* const begin = cold_.data() + block * block_bytes();
    for (Block& at : blocks_) at = {begin, begin + kRecords * 4, begin + kRecords * 4 * (1 + kTopk)};
  }

  double send(bool records) {
    const detail::HandleData& h = handles_[turn_ % kHandles];
    const Clock::time_point begin = Clock::now();
    place(block_++ % kBlocks);
    bool streamed = false;
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t first = h.send_begin[idx(t)], places = h.send_begin[idx(t) + 1] - first;
      for (int i = 0; records && i < places * topk_; ++i) write_entry(h, t, h.sends[idx(first + i / topk_)], i % topk_);
      void* to[kWorld];
      for (size_t r = 0; r < kWorld; ++r) to[r] = rows_.data() + (r * kTokens + idx(t)) * kRowBytes;
      streamed |= detail::multicast_row(to, kWorld, row_.data(), kRowBytes);
    }
    if (streamed) detail::flush_streams();
    return seconds_since(begin);
  }

  void write_entry(const detail::HandleData& h, int64_t token, const detail::SendEntry& entry, int k) {
    const Block& at = blocks_[idx(entry.rank)];
    const int first = h.map.first(entry.rank), last = first + h.map.count(entry.rank);
    const int64_t f = token * topk_ + k, to = int64_t{entry.record} * topk_ + k;
    const int32_t id = h.ids[idx(f)];
    const bool here = id >= first && id < last;
    reinterpret_cast<int32_t*>(at.route)[to] = here ? id - first : -1;
    reinterpret_cast<float*>(at.weight)[to] = here ? weights_[idx(f)] : 0.0f;
    if (k == 0) reinterpret_cast<int32_t*>(at.token)[entry.record] = static_cast<int32_t>(token);
  }

  std::vector<std::vector<int32_t>> ids_ = std::vector<std::vector<int32_t>>(kHandles, scattered_ids());
  std::vector<detail::HandleData> handles_ = std::vector<detail::HandleData>(kHandles);
  detail::LocalPlan local_;
  std::vector<float> weights_ = std::vector<float>(idx(kTokens * kTopk), 0.125f);
  std::vector<std::byte> row_ = std::vector<std::byte>(kRowBytes);
  std::vector<std::byte> rows_ = std::vector<std::byte>(kWorld * kTokens * kRowBytes);
  std::vector<std::byte> cold_ = std::vector<std::byte>(kBlocks * block_bytes());
  std::vector<Block> blocks_ = std::vector<Block>(kWorld);
  size_t turn_ = 0, block_ = 0;
  volatile int topk_ = kTopk;  // volatile: topk is not a constant in the library either
};

}  // namespace

PlanningTimes measure_planning(const Machine& machine, double seconds) {
  PlanningTimes out;
  std::thread([&] {
    pin_thread(share_of_cpus(machine, 0, machine.usable_cores()));
    Planning planning;
    std::vector<double> plans, writes, reads;
    const Clock::time_point begin = Clock::now();
    for (int i = -1; i < 1000 && (i < 5 || seconds_since(begin) < seconds); ++i) {
      const double plan = planning.plan(), write = planning.write(), read = planning.read();
      if (i < 0) continue;
      plans.push_back(plan);
      writes.push_back(write);
      reads.push_back(read);
    }
    const auto ns = [](std::vector<double>& all, int64_t entries) {
      std::sort(all.begin(), all.end());
      return all[all.size() / 2] * 1e9 / static_cast<double>(entries);
    };
    out.route_ns = ns(plans, kTokens * kTopk);
    out.record_write_ns = std::max(0.0, ns(writes, kWorld * kTokens * kTopk));
    out.record_read_ns = ns(reads, kWorld * kTokens * kTopk);
  }).join();
  return out;
}

}  // namespace switchyard::measure
