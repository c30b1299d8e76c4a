// SPDX-License-Identifier: Apache-2.0
#include "bench_low_latency.hpp"
#include "row_moves.hpp"

namespace switchyard::tool {
namespace {

using bench::GpuRank;
using nlohmann::json;

/// Memory and stream of a GpuRank.
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
  void release() override {}  // freed with the GpuRank

 private:
  GpuRank& gpu_;
};

std::vector<double> time_on(Group& group, GpuRank& gpu, const std::function<void()>& call, int64_t warmup, int64_t n) {
  group.barrier();
  gpu.capture(call);
  group.barrier();
  std::vector<double> all = gpu.replay(static_cast<int>(warmup + n));
  group.check();
  group.barrier();
  return {all.begin() + warmup, all.end()};
}

class PlainClock final : public ReplayClock {
 public:
  explicit PlainClock(Group& group) : group_(group), gpu_(group, 0), device_(gpu_) {}
  RankDevice& device() override { return device_; }
  std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) override {
    return time_on(group_, gpu_, call, warmup, n);
  }
  void idle(double microseconds) override { gpu_.idle(microseconds); }

 private:
  Group& group_;
  GpuRank gpu_;
  BenchDevice device_;
};

class CudaClock final : public LatencyClock {
 public:
  CudaClock(Group& group, const Scenario& s, const BenchOptions& options, size_t row_bytes)
      : group_(group),
        gpu_(group, cuda_clock_rows(s, row_bytes)),
        device_(gpu_),
        tokens_(s.tokens(group.rank())),
        sms_(static_cast<int>(options.sms)) {
    gpu_.set_moves(plan_moves(s).moves[static_cast<size_t>(group.rank())]);
  }
  static size_t cuda_clock_rows(const Scenario& s, size_t row_bytes) {
    size_t rows = 0;
    for (int r = 0; r < s.world; ++r) rows += static_cast<size_t>(s.tokens(r));
    return rows * row_bytes;
  }

  RankDevice& device() override { return device_; }

  std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) override {
    return time_on(group_, gpu_, call, warmup, n);
  }
  void idle(double microseconds) override { gpu_.idle(microseconds); }

  json limits(size_t sent, size_t returned, int64_t warmup, int64_t n) override {
    json out = {{"push", json::array()}, {"pull", json::array()}};
    for (int shape = 0; shape < bench::kFloorShapes; ++shape) {
      gpu_.push(tokens_, sent, sms_, shape);  // takes its memory
      gpu_.pull(tokens_, returned, sms_, shape);
      device_.wait();
      out["push"].push_back(time([&] { gpu_.push(tokens_, sent, sms_, shape), gpu_.meet(); }, warmup, n));
      out["pull"].push_back(time([&] { gpu_.pull(tokens_, returned, sms_, shape), gpu_.meet(); }, warmup, n));
    }
    return out;
  }

  void compute(double microseconds) override { gpu_.compute(microseconds); }

 private:
  Group& group_;
  GpuRank gpu_;
  BenchDevice device_;
  int64_t tokens_;
  int sms_;
};

}  // namespace

std::unique_ptr<LatencyClock> make_cuda_clock(Group& group, const Scenario& s, const BenchOptions& options, size_t row_bytes) {
  return std::make_unique<CudaClock>(group, s, options, row_bytes);
}
std::unique_ptr<ReplayClock> make_cuda_replay_clock(Group& group) { return std::make_unique<PlainClock>(group); }
size_t cuda_clock_bytes(const Scenario& s, const BenchOptions&, size_t row_bytes) {
  return GpuRank::heap_bytes(CudaClock::cuda_clock_rows(s, row_bytes));
}

}  // namespace switchyard::tool
