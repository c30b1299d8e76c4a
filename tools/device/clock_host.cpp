// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>

#include "device/clock.hpp"

namespace switchyard::tool {
namespace {

class HostClock final : public Clock {
 public:
  explicit HostClock(Group& group) : group_(group), device_(rank_device(group.rank(), 0, 0)) {}
  RankDevice& device() override { return *device_; }
  double once(const std::function<void()>& call) override {
    group_.barrier();
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) override {
    std::vector<double> all;
    for (int64_t i = 0; i < warmup + n; ++i) {
      const double seconds = once(call);
      if (i >= warmup) all.push_back(seconds);
    }
    return all;
  }
  void meet() override { group_.barrier(); }
  void idle(double microseconds) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double, std::micro>(microseconds);
    while (std::chrono::steady_clock::now() < end) {
    }
  }
  void compute(double microseconds) override {
    if (rounds_per_us_ == 0) calibrate();
    work(static_cast<int64_t>(microseconds * rounds_per_us_));
  }

 private:
  /// Dependent multiplications and additions.
  void work(int64_t rounds) {
    float a = sink_, b = 1;
    for (int64_t i = 0; i < rounds; ++i) {
      a = a * 0.5f + b;
      b = b * 0.5f + a * 0.25f;
    }
    sink_ = b;
  }
  /// Uses the fastest of several calibration turns, because ranks may disturb each other.
  void calibrate() {
    constexpr int64_t kRounds = 1 << 16;
    for (int turn = 0; turn < 8; ++turn) {
      const auto begin = std::chrono::steady_clock::now();
      work(kRounds);
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
      rounds_per_us_ = std::max(rounds_per_us_, static_cast<double>(kRounds) / took.count());
    }
  }

  volatile float sink_ = 1;
  double rounds_per_us_ = 0;
  Group& group_;
  std::shared_ptr<RankDevice> device_;
};

}  // namespace

std::unique_ptr<Clock> make_host_clock(Group& group) { return std::make_unique<HostClock>(group); }

std::vector<double> time_entered_late(Clock& clock, int self, int64_t late_us, const std::function<void()>& call,
                                      int64_t warmup, int64_t n) {
  if (late_us == 0) return clock.time(call, warmup, n);
  const auto late = static_cast<double>(late_us);
  std::vector<double> seconds = clock.time(
      [&] {
        clock.idle(self == 0 ? late : 0);  // all ranks call it, for equal numbers of launches
        call();
      },
      warmup, n);
  for (double& s : seconds) s -= late * 1e-6;
  return seconds;
}

}  // namespace switchyard::tool
