// SPDX-License-Identifier: Apache-2.0
// Rates of moves, measured with moves of temporary weights. Every rank uses the slowest rank's times, so all ranks measure the
// same sizes and return the same rates.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "exchange/group/exchange_base.hpp"
#include "exchange/slots/move.hpp"
#include "plan/expert_division.hpp"

namespace switchyard {

using namespace detail;

namespace {

constexpr size_t kSmallBytes = 256, kFirstBytes = size_t{1} << 20, kLargestBytes = size_t{64} << 20;
constexpr int kMoves = 3;          // of each size, after one that is not timed
constexpr double kLongEnough = 3;  // target time of a large move, in multiples of that of a small move

/// Collective. Returns `mine` with the rates of the slowest rank.
StepOptions slowest(Group::Impl& group, const char* call, const StepOptions& mine) {
  const double rates[] = {mine.link_bytes_per_s, mine.seconds_per_row, mine.seconds_per_move};
  constexpr size_t kRates = std::size(rates);
  std::vector<double> all(kRates * static_cast<size_t>(group.bootstrap->world()));
  ConstructionReport report;
  report.report = attempt([&] { check_step(0, mine); });
  group.agree(call, {agreed("StepOptions::tile", mine.tile)}, report, rates, sizeof rates, all.data());
  StepOptions agreed_options = mine;
  for (size_t i = 0; i < all.size(); i += kRates) {
    agreed_options.link_bytes_per_s = std::min(agreed_options.link_bytes_per_s, all[i]);
    agreed_options.seconds_per_row = std::max(agreed_options.seconds_per_row, all[i + 1]);
    agreed_options.seconds_per_move = std::max(agreed_options.seconds_per_move, all[i + 2]);
  }
  return agreed_options;
}

class MoveTimer {
 public:
  MoveTimer(Group& group, const MoveOptions& options) : group_(group), options_(options) {
    const int world = group.size();
    before_ = after_ = home_map(world, world, 2);
    for (int r = 0; r < world; ++r) after_.expert_of_slot[static_cast<size_t>(r) * 2 + 1] = (r + 1) % world;
  }

  /// Collective. Measures several moves in which every rank receives an expert of `bytes` bytes from the next rank. Returns the
  /// time of the fastest one, on the slowest rank.
  double seconds(size_t bytes) {
    Group::Impl& group = group_.impl();
    std::shared_ptr<void> memory;
    ConstructionReport report;
    report.report = attempt([&] { memory = allocate(2 * bytes); });
    group.agree(kCall, {agreed("bytes to move", static_cast<int64_t>(bytes))}, report);
    const SlotArray array{memory.get(), bytes};
    double best = std::numeric_limits<double>::max();
    for (int move = 0; move <= kMoves; ++move) {
      group.all_gather("", 1, met_, kCall, Operation::barrier);
      const auto start = std::chrono::steady_clock::now();
      move_weights(group_, before_, after_, {&array, 1}, options_);
      const double now = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (move > 0) best = std::min(best, now);
    }
    std::vector<double> all(static_cast<size_t>(group_.size()));
    group.all_gather(&best, sizeof best, all.data(), kCall, Operation::all_gather);
    return *std::max_element(all.begin(), all.end());
  }

  static constexpr const char* kCall = "measure_step_rates";

 private:
  std::shared_ptr<void> allocate(size_t bytes) {
    if (DeviceRank* const device = group_.impl().device.get()) return device->ordinary_memory(bytes, options_.stream);
    return std::shared_ptr<std::byte[]>(new std::byte[bytes]());
  }

  Group& group_;
  const MoveOptions options_;
  ExpertMap before_, after_;
  char met_[kMaxRanks] = {};
};

}  // namespace

StepOptions agree_on_step_rates(Group& group, const StepOptions& mine) {
  constexpr const char* kCall = "agree_on_step_rates";
  return group.impl().collective_call(kCall, [&] { return slowest(group.impl(), kCall, mine); });
}

StepOptions measure_step_rates(Group& group, const StepOptions& mine, const MoveOptions& options) {
  return group.impl().collective_call(MoveTimer::kCall, [&] {
    StepOptions rates = slowest(group.impl(), MoveTimer::kCall, mine);
    if (group.size() == 1) return rates;
    MoveTimer timer(group, options);
    rates.seconds_per_move = timer.seconds(kSmallBytes);
    for (size_t bytes = kFirstBytes;; bytes *= 4) {
      const double seconds = timer.seconds(bytes);
      if (seconds < kLongEnough * rates.seconds_per_move && bytes < kLargestBytes) continue;
      // A larger move that takes no longer than a small one has no measurable transfer time.
      const double transfer = std::max(seconds - rates.seconds_per_move, seconds / 100);
      rates.link_bytes_per_s = static_cast<double>(bytes) / transfer;
      return rates;
    }
  });
}

}  // namespace switchyard
