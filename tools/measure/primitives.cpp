// SPDX-License-Identifier: Apache-2.0
#include "measure/primitives.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "arch/cpu/row_ops.hpp"
#include "measure/stopwatch.hpp"

namespace switchyard::measure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kHidden = 7168;
constexpr size_t kRowBytes = kHidden * 2;
constexpr int kPlaces[] = {1, 2, 4};  ///< rows on the other side
constexpr int kMax = 4;
constexpr int kQuantizedPlaces = 2;                 ///< destinations of a quantized row
constexpr int64_t kScaleBytes = kHidden / 128 * 4;  ///< scale bytes of a quantized row
constexpr int kMinProbePasses = 5, kMaxProbePasses = 60;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Rows of one worker, in the memory of a program or of a heap (a heap requests large pages from the system).
class Rows {
 public:
  Rows(size_t rows, bool heap) : rows_(rows) {
    data_ = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED)
      throw std::runtime_error("primitives: " + std::to_string(bytes() >> 20) + " MiB of memory are not available");
    if (heap) madvise(data_, bytes(), MADV_HUGEPAGE);
  }
  ~Rows() { munmap(data_, bytes()); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  std::byte* row(size_t i) const { return static_cast<std::byte*>(data_) + i % rows_ * kRowBytes; }
  size_t rows() const { return rows_; }
  /// Called by the thread that uses the rows.
  void touch() const {
    auto* words = static_cast<uint16_t*>(data_);
    for (size_t i = 0; i < rows_ * kHidden; ++i) words[i] = static_cast<uint16_t>(0x3f80 + i % 61);  // about 1, bf16
  }

 private:
  size_t bytes() const { return rows_ * kRowBytes; }
  void* data_;
  size_t rows_;
};

/// Memory of one worker: rows in its program (read by a dispatch, written by a combine) and rows in its heap.
struct Worker {
  explicit Worker(size_t rows)
      : program(rows, false), heap(rows, true), scratch(kHidden * 2), scales(rows * kQuantizedPlaces * kScaleBytes) {}
  Rows program, heap;
  std::vector<std::byte> scratch, scales;
};

/// A pass over `n` of a worker's rows. `next`: the worker whose memory is at the other end of a link.
using Pass = std::function<void(Worker& mine, Worker& next, size_t n)>;

/// Copies each source row to `places` rows in separate ranges, as if they were in the memories of different ranks.
void copy_pass(Worker& mine, size_t n, int places) {
  bool streamed = false;
  for (size_t i = 0; i < n; ++i) {
    void* rows[kMax];
    for (int p = 0; p < places; ++p) rows[p] = mine.heap.row(static_cast<size_t>(p) * n + i);
    streamed |= detail::multicast_row(rows, places, mine.program.row(i), kRowBytes);
  }
  if (streamed) detail::flush_streams();
}

/// Copies the same few rows, which stay in a cache, to another worker's memory.
void link_pass(Worker& mine, Worker& to, size_t n) {
  constexpr size_t kFew = 8;
  bool streamed = false;
  for (size_t i = 0; i < n; ++i) streamed |= detail::copy_row(to.heap.row(i), mine.program.row(i % kFew), kRowBytes);
  if (streamed) detail::flush_streams();
}

/// Computes `n` sums of `places` rows each, taken from separate ranges.
void sum_pass(Worker& mine, size_t n, int places) {
  bool streamed = false;
  for (size_t i = 0; i < n; ++i) {
    const void* rows[kMax];
    for (int p = 0; p < places; ++p) rows[p] = mine.heap.row(static_cast<size_t>(p) * n + i);
    const detail::ReduceSpec spec{mine.program.row(i), rows, nullptr, places, {nullptr, nullptr}, DType::bf16, kHidden};
    streamed |= detail::reduce_rows(spec);
  }
  if (streamed) detail::flush_streams();
}

/// Like a quantizing dispatch, quantizes into a row that stays in the cache, then copies it with its scales to separate places.
void quantize_pass(Worker& mine, size_t n) {
  auto* const q = reinterpret_cast<uint8_t*>(mine.scratch.data());
  std::byte* const row_scales = mine.scratch.data() + kHidden;
  bool streamed = false;
  for (size_t i = 0; i < n; ++i) {
    detail::quantize_row(q, row_scales, mine.program.row(i), DType::bf16, kHidden, ScaleKind::f32);
    void *rows[kQuantizedPlaces], *scales[kQuantizedPlaces];
    for (size_t p = 0; p < kQuantizedPlaces; ++p) {
      rows[p] = mine.heap.row(0) + (p * n + i) * kHidden;
      scales[p] = mine.scales.data() + (p * n + i) * kScaleBytes;
    }
    streamed |= detail::multicast_row(rows, kQuantizedPlaces, q, kHidden);
    streamed |= detail::multicast_row(scales, kQuantizedPlaces, row_scales, kScaleBytes);
  }
  if (streamed) detail::flush_streams();
}

/// Workers, some or all of which make passes over their rows.
class Crew {
 public:
  Crew(const Machine& machine, int workers, size_t rows) : gate_(workers + 1) {
    for (int w = 0; w < workers; ++w) workers_.push_back(std::make_unique<Worker>(rows));
    for (int w = 0; w < workers; ++w)
      threads_.emplace_back([this, &machine, w, workers] { work(share_of_cpus(machine, w, workers), static_cast<size_t>(w)); });
    gate_.arrive_and_wait();  // all rows have been touched
  }
  ~Crew() {
    pass_ = nullptr;
    gate_.arrive_and_wait();
    for (std::thread& t : threads_) t.join();
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  /// Median seconds from the opening of the gate until the last of the first `active` workers has finished.
  double seconds(const Pass& pass, int active, size_t n, double budget) {
    std::vector<double> all;
    double sum = 0;
    for (int i = -1; i < kMaxProbePasses && (i < kMinProbePasses || sum < budget); ++i) {
      pass_ = &pass;
      active_ = static_cast<size_t>(active);
      rows_ = n;
      const Clock::time_point begin = Clock::now();
      gate_.arrive_and_wait();
      gate_.arrive_and_wait();
      if (i < 0) continue;
      all.push_back(seconds_since(begin));
      sum += all.back();
    }
    return median(std::move(all));
  }
  size_t rows() const { return workers_.front()->heap.rows(); }

 private:
  void work(const std::vector<int>& cpus, size_t index) {
    pin_thread(cpus);
    Worker& mine = *workers_[index];
    mine.program.touch();
    mine.heap.touch();
    gate_.arrive_and_wait();
    while (true) {
      gate_.arrive_and_wait();
      if (pass_ == nullptr) return;
      if (index < active_) (*pass_)(mine, *workers_[(index + 1) % workers_.size()], rows_);
      gate_.arrive_and_wait();
    }
  }

  std::barrier<> gate_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
  const Pass* pass_ = nullptr;  // written between two passes, like the next two members
  size_t active_ = 0, rows_ = 0;
};

/// Combined rate of `active` workers.
RowRate row_rate(Crew& crew, int active, bool sums, double budget) {
  double ns_per_byte[3] = {};
  for (size_t i = 0; i < 3; ++i) {
    const int places = kPlaces[i];
    const size_t n = crew.rows() / static_cast<size_t>(places);
    const Pass pass = [&](Worker& mine, Worker&, size_t rows) {
      sums ? sum_pass(mine, rows, places) : copy_pass(mine, rows, places);
    };
    const double bytes = static_cast<double>(n * kRowBytes) * active;
    ns_per_byte[i] = crew.seconds(pass, active, n, budget / 3) * 1e9 / bytes;
  }
  return rate_of_line(ns_per_byte, sums);
}

/// Rate of `active` workers in source bytes, from the time to quantize and write rows minus the time to write them at
/// `write_gbs`.
double quantize_rate(Crew& crew, int active, double write_gbs, double budget) {
  const size_t n = crew.rows();
  const double seconds = crew.seconds([](Worker& mine, Worker&, size_t rows) { quantize_pass(mine, rows); }, active, n, budget);
  const double rows = static_cast<double>(n) * active;
  const double writing = rows * kQuantizedPlaces * static_cast<double>(kHidden + kScaleBytes) / (write_gbs * 1e9);
  return rows * kRowBytes * 1e-9 / std::max(seconds - writing, seconds * 0.1);
}

/// One-way time in microseconds between two threads that signal each other in turn.
double flag_time(const Machine& machine, int workers) {
  if (workers < 2) return 0;
  constexpr uint64_t kRounds = 20'000;
  struct alignas(128) Flag {
    std::atomic<uint64_t> value{0};
  } there, back;
  std::thread other([&] {
    pin_thread(share_of_cpus(machine, 1, workers));
    for (uint64_t i = 1; i <= kRounds; ++i) {
      while (there.value.load(std::memory_order_acquire) < i) {
      }
      back.value.store(i, std::memory_order_release);
    }
  });
  double us = 0;
  std::thread self([&] {
    pin_thread(share_of_cpus(machine, 0, workers));
    const Clock::time_point begin = Clock::now();
    for (uint64_t i = 1; i <= kRounds; ++i) {
      there.value.store(i, std::memory_order_release);
      while (back.value.load(std::memory_order_acquire) < i) {
      }
    }
    us = seconds_since(begin) * 1e6 / (2.0 * kRounds);
  });
  self.join();
  other.join();
  return us;
}

/// Sleeps like a rank's worker that has stopped polling while it waits for the next call.
class Sleeper {
 public:
  explicit Sleeper(const std::vector<int>& cpus) : thread_([this, cpus] { sleep(cpus); }) {}
  ~Sleeper() {
    wake(true);
    thread_.join();
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  /// Microseconds from now until the sleeper runs.
  double wake_up() {
    const Clock::time_point begin = Clock::now();
    wake(false);
    while (!awake_.load(std::memory_order_acquire)) {
    }
    awake_.store(false, std::memory_order_relaxed);
    return std::chrono::duration<double, std::micro>(woken_ - begin).count();
  }

 private:
  void wake(bool end) {
    {
      const std::lock_guard lock(mutex_);
      called_ = true;
      ends_ = end;
    }
    condition_.notify_all();
  }
  void sleep(const std::vector<int>& cpus) {
    pin_thread(cpus);
    std::unique_lock lock(mutex_);
    while (true) {
      while (!called_) condition_.wait(lock);
      called_ = false;
      if (ends_) return;
      woken_ = Clock::now();
      awake_.store(true, std::memory_order_release);
    }
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  bool called_ = false, ends_ = false;
  Clock::time_point woken_;
  std::atomic<bool> awake_{false};
  std::thread thread_;
};

double wake_time(const Machine& machine, int workers) {
  if (workers < 2) return 0;
  constexpr int kTimes = 200;
  constexpr std::chrono::microseconds kAsleep{300};  // about the time for which a rank plans before its workers have work
  std::vector<double> all;
  std::thread([&] {
    pin_thread(share_of_cpus(machine, 0, workers));
    Sleeper sleeper(share_of_cpus(machine, 1, workers));
    for (int i = 0; i < kTimes; ++i) {
      const Clock::time_point end = Clock::now() + kAsleep;
      while (Clock::now() < end) {
      }
      all.push_back(sleeper.wake_up());
    }
  }).join();
  return median(std::move(all));
}

}  // namespace

RowRate rate_of_line(const double (&t)[3], bool many_read) {
  // t = once + each * places, over places 1, 2, 4: mean 7 / 3, squared deviations 14 / 3.
  const double mean = (t[0] + t[1] + t[2]) / 3,
               each_fit = (t[0] * (1 - 7.0 / 3) + t[1] * (2 - 7.0 / 3) + t[2] * (4 - 7.0 / 3)) / (14.0 / 3);
  const double least = t[0] * 0.02;  // a rate more than 50 times the overall rate is noise
  const double each = std::clamp(each_fit, least, t[0] - least), once = std::max(mean - each * 7 / 3, least);
  return many_read ? RowRate{1 / each, 1 / once} : RowRate{1 / once, 1 / each};
}

HostPrimitives measure_primitives(const Machine& machine, const PrimitiveOptions& options,
                                  const std::function<void(double)>& on_progress) {
  HostPrimitives out;
  out.workers = std::max(1, options.workers);
  out.row_bytes = kRowBytes;
  const double wanted =
      std::min(options.llc_factor * static_cast<double>(machine.llc_bytes), static_cast<double>(machine.memory_available) / 8);
  const auto rows = static_cast<size_t>(wanted / kRowBytes / out.workers);
  Crew crew(machine, out.workers, std::max<size_t>(64, rows / 4 * 4));
  const double share = options.seconds / 8;
  double done = 0;
  const auto step = [&] {
    if (on_progress) on_progress(++done / 9);
  };
  const auto gbs = [&](const Pass& pass, int active) {
    return static_cast<double>(crew.rows() * kRowBytes) * active / crew.seconds(pass, active, crew.rows(), share / 2) * 1e-9;
  };
  for (const bool sums : {false, true}) {
    RowRates& rates = sums ? out.sum : out.copy;
    rates.worker = row_rate(crew, 1, sums, share);
    step();
    rates.all = out.workers == 1 ? rates.worker : row_rate(crew, out.workers, sums, share);
    step();
  }
  out.quantize_gbs = quantize_rate(crew, 1, out.copy.worker.write_gbs, share / 2);
  out.all_quantize_gbs =
      out.workers == 1 ? out.quantize_gbs : quantize_rate(crew, out.workers, out.copy.all.write_gbs, share / 2);
  step();
  const Pass to_next = [](Worker& mine, Worker& next, size_t n) { link_pass(mine, next, n); };
  out.link_gbs = gbs(to_next, out.workers) / out.workers;
  step();
  out.flag_us = flag_time(machine, out.workers);
  out.wake_us = wake_time(machine, out.workers);
  step();
  out.planning = measure_planning(machine, share);
  step();
  return out;
}

}  // namespace switchyard::measure
