// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "device/clock.hpp"
#include "measure/gpu/quantize_rate.hpp"

namespace switchyard::tool {
namespace {

using measure::GpuRank;

/// The memory and stream of a GpuRank.
class BenchDevice final : public RankDevice {
 public:
  explicit BenchDevice(GpuRank& gpu) : gpu_(gpu) {}
  void* stream() const override { return gpu_.stream(); }
  void* allocate(size_t bytes) override { return bytes > 0 ? gpu_.allocate(bytes) : nullptr; }
  void write(void* device, const void* host, size_t bytes) override { gpu_.write(device, host, bytes); }
  void read(void* host, const void* device, size_t bytes) const override { gpu_.read(host, device, bytes); }
  void fill(void* device, int byte, size_t bytes) override {
    const std::vector<std::byte> host(bytes, static_cast<std::byte>(byte));
    gpu_.write(device, host.data(), bytes);
  }
  void wait() const override { gpu_.wait(); }
  void keep() override {}     // nothing to do: all memory is kept
  void release() override {}  // memory is freed with the GpuRank

 private:
  GpuRank& gpu_;
};

class GpuClock final : public Clock {
 public:
  GpuClock(Group& group, Timing timing, const LimitRows& rows)
      : group_(group), timing_(timing), gpu_(group, rows.bytes), device_(gpu_), tokens_(rows.tokens) {
    if (rows.pushed) gpu_.set_moves(*rows.pushed);
    if (rows.pulled) gpu_.set_pulled(*rows.pulled);
  }

  RankDevice& device() override { return device_; }
  double once(const std::function<void()>& call) override {
    section(call);
    return gpu_.seconds().back();
  }
  std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) override {
    return timing_ == Timing::replayed ? replayed(call, warmup, n) : enqueued(call, warmup, n);
  }
  std::vector<double> time_first_kernel(const std::function<void()>& call, int64_t warmup, int64_t n) override {
    group_.barrier();
    gpu_.capture_first_kernel(call);
    group_.barrier();
    const std::vector<double> all = gpu_.replay(static_cast<int>(warmup + n));
    gpu_.drop_graph();
    group_.check();
    return {all.begin() + warmup, all.end()};
  }
  void meet() override { gpu_.align(); }
  void idle(double microseconds) override { gpu_.idle(microseconds); }
  void compute(double microseconds) override { gpu_.compute(microseconds); }

  LimitTimes push_limits(size_t row_bytes, int sms, int64_t warmup, int64_t n) override {
    return limits(&GpuRank::push, row_bytes, sms, warmup, n);
  }
  LimitTimes pull_limits(size_t row_bytes, int sms, int64_t warmup, int64_t n) override {
    return limits(&GpuRank::pull, row_bytes, sms, warmup, n);
  }

  std::vector<double> meeting_limit(int64_t warmup, int64_t n) override {
    return time([&] { gpu_.meet(); }, warmup, n);
  }
  std::vector<double> quantize_limit(int64_t rows, int64_t hidden, int sms, int64_t warmup, int64_t n) override {
    const void* const x = gpu_.allocate(static_cast<size_t>(rows * hidden) * 2);
    void* const sink = gpu_.allocate(4);
    return time([&] { measure::enqueue_quantize(gpu_.stream(), x, rows, hidden, sms, sink); }, warmup, n);
  }

 private:
  void section(const std::function<void()>& call) {
    gpu_.align();
    gpu_.begin();
    call();
    gpu_.end();
  }
  std::vector<double> enqueued(const std::function<void()>& call, int64_t warmup, int64_t n) {
    const int64_t total = warmup + n;
    std::vector<double> all;
    for (int64_t i = 0; i < total; ++i) {
      section(call);
      if ((i + 1) % GpuRank::kMaxSections != 0 && i + 1 != total) continue;
      const std::vector<double> some = gpu_.seconds();
      all.insert(all.end(), some.begin(), some.end());
      group_.check();
    }
    return {all.begin() + warmup, all.end()};
  }
  std::vector<double> replayed(const std::function<void()>& call, int64_t warmup, int64_t n) {
    group_.barrier();
    gpu_.capture(call);
    group_.barrier();
    const std::vector<double> all = gpu_.replay(static_cast<int>(warmup + n));
    group_.check();
    group_.barrier();
    return {all.begin() + warmup, all.end()};
  }
  using Launch = void (GpuRank::*)(int64_t tokens, size_t row_bytes, int sms, int shape);
  LimitTimes limits(Launch launch, size_t row_bytes, int sms, int64_t warmup, int64_t n) {
    LimitTimes shapes;
    for (int shape = 0; shape < measure::kFloorShapes; ++shape) {
      if (timing_ == Timing::replayed) {  // the first launch allocates memory, which is impossible during capture
        (gpu_.*launch)(tokens_, row_bytes, sms, shape);
        device_.wait();
      }
      shapes.push_back(time([&] { (gpu_.*launch)(tokens_, row_bytes, sms, shape), gpu_.meet(); }, warmup, n));
    }
    return shapes;
  }

  Group& group_;
  const Timing timing_;
  GpuRank gpu_;
  BenchDevice device_;
  int64_t tokens_;
};

}  // namespace

std::unique_ptr<Clock> make_gpu_clock(Group& group, Timing timing, const LimitRows& rows) {
  return std::make_unique<GpuClock>(group, timing, rows);
}
size_t gpu_clock_bytes(size_t limit_bytes) { return GpuRank::heap_bytes(limit_bytes); }

}  // namespace switchyard::tool
