// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/tracing.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

#include "arch/cuda/ptx.cuh"
#include "exchange/gpu/kernel.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

constexpr int kQuestions = 64;
constexpr uint64_t kDeadlineNs = 1'000'000'000;
constexpr size_t kAskedAt = 0, kAnsweredAt = 64;

struct Answer {
  uint64_t timer_ns;
  uint64_t number;
};

/// Answers the host's time queries. Ends after the last query or at the deadline.
__global__ void answer_kernel(const uint64_t* asked, Answer* answer) {
  if (asked == nullptr) return;  // IdleCall
  const uint64_t start = ptx::global_timer();
  for (uint64_t n = 1; n <= kQuestions; ++n) {
    uint64_t now = 0;
    while (ptx::load_acquire<Scope::system>(asked) < n) {
      now = ptx::global_timer();
      if (now - start > kDeadlineNs) return;
    }
    answer->timer_ns = ptx::global_timer();
    ptx::store_release<Scope::system>(&answer->number, n);
  }
}

__global__ void mark_kernel(const DeviceTrace trace, uint32_t event, int64_t launch, bool begins) {
  if (trace.records == nullptr) return;  // IdleCall
  const uint64_t now = ptx::global_timer();
  const uint32_t place = atomicAdd(&trace.sizes[trace.marks()], 1u) & (trace.capacity - 1);
  trace.records[trace.marks() * trace.capacity + place] = {
      now, now, launch, DeviceRecord::kAnchor, begins ? DeviceRecord::kMarkBegin : DeviceRecord::kMarkEnd, event};
}

const Kernel<const DeviceTrace, uint32_t, int64_t, bool> marks("trace mark kernel", mark_kernel, 1,
                                                               [](const DeviceLimits&) { return 0; });
const Kernel<const uint64_t*, Answer*> answers("clock kernel", answer_kernel, 1, [](const DeviceLimits&) { return 0; });

}  // namespace

std::optional<TimerReading> read_timer(const ClockMailbox& mailbox, gpu::Stream stream) {
  auto& asked = *reinterpret_cast<uint64_t*>(mailbox.host + kAskedAt);
  auto& answer = *reinterpret_cast<Answer*>(mailbox.host + kAnsweredAt);
  std::atomic_ref(asked).store(0);
  std::atomic_ref(answer.number).store(0);
  answers.launch({1, 1, 0}, stream, reinterpret_cast<const uint64_t*>(mailbox.device + kAskedAt),
                 reinterpret_cast<Answer*>(mailbox.device + kAnsweredAt));
  TimerReading best;
  best.round_trip_ns = ~uint64_t{0};
  for (uint64_t n = 1; n <= kQuestions; ++n) {
    const uint64_t before = Tracer::now_ns();
    std::atomic_ref(asked).store(n, std::memory_order_release);
    while (std::atomic_ref(answer.number).load(std::memory_order_acquire) < n) {
      if (Tracer::now_ns() - before > kDeadlineNs) {
        std::atomic_ref(asked).store(kQuestions, std::memory_order_release);  // the kernel then ends at once
        check_cuda(gpu::wait_for_stream(stream), "clock kernel");
        return std::nullopt;
      }
    }
    const uint64_t round_trip = Tracer::now_ns() - before;
    if (round_trip >= best.round_trip_ns) continue;
    best = {answer.timer_ns, static_cast<int64_t>(before + round_trip / 2 - answer.timer_ns), round_trip};
  }
  check_cuda(gpu::wait_for_stream(stream), "clock kernel");
  return best;
}

void DeviceTracing::start(int blocks, int warps, size_t capacity, const ClockMailbox& mailbox, gpu::Stream stream) {
  capacity = std::bit_ceil(capacity);
  const DeviceTrace wanted{nullptr, nullptr, blocks, warps, static_cast<uint32_t>(capacity)};
  const size_t sizes_bytes = (wanted.tracks() * sizeof(uint32_t) + 127) / 128 * 128;
  if (!buffers_.records || buffers_.blocks != blocks || buffers_.warps != warps || buffers_.capacity != wanted.capacity) {
    if (buffers_.records)
      throw Error(ErrorCode::invalid_argument,
                  "trace: this group was traced before with num_blocks, num_warps, events_per_track = " +
                      std::to_string(buffers_.blocks) + ", " + std::to_string(buffers_.warps) + ", " +
                      std::to_string(buffers_.capacity) + "; captured graphs may still record, so use the same again");
    memory_ = DeviceMemory(sizes_bytes + wanted.tracks() * capacity * sizeof(DeviceRecord), stream);
    buffers_ = wanted;
    buffers_.sizes = memory_.as<uint32_t>();
    buffers_.records = memory_.as<DeviceRecord>(sizes_bytes);
  }
  check_cuda(gpu::fill(buffers_.sizes, 0, sizes_bytes, stream), "trace");
  check_cuda(gpu::wait_for_stream(stream), "trace");
  first_ = read_timer(mailbox, stream);
  active_ = buffers_;
}

void DeviceTracing::mark(Event event, int64_t launch, bool begins, gpu::Stream stream) const {
  marks.launch({1, 1, 0}, stream, active_, static_cast<uint32_t>(event), launch, begins);
}

void DeviceTracing::stop(Tracer& tracer, const ClockMailbox& mailbox, gpu::Stream stream) {
  if (!active_.records) return;
  active_ = DeviceTrace{};
  check_cuda(gpu::wait_for_device(), "end of the traced calls");
  std::vector<uint32_t> sizes(buffers_.tracks());
  std::vector<DeviceRecord> records(buffers_.tracks() * buffers_.capacity);
  check_cuda(gpu::copy_to_host(sizes.data(), buffers_.sizes, sizes.size() * sizeof sizes[0], stream), "trace");
  check_cuda(gpu::copy_to_host(records.data(), buffers_.records, records.size() * sizeof records[0], stream), "trace");
  check_cuda(gpu::wait_for_stream(stream), "trace");
  const std::optional<TimerReading> last = read_timer(mailbox, stream);
  if (!last) throw Error(ErrorCode::system, "trace: the GPU did not answer within a second when asked for its time");
  const HostTime host(first_.value_or(*last), *last);
  append_device_records(tracer, buffers_, sizes, records, host);
  tracer.set_clock_error_ns(std::max(tracer.clock_error_ns(), host.error_ns()));
}

}  // namespace switchyard::detail
