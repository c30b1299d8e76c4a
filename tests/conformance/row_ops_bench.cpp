// SPDX-License-Identifier: Apache-2.0
// Speed of the CPU row ops compared with the machine's copy limit, for 14 KiB rows (hidden 7168, bf16) in random order and a
// working set far larger than the caches. Not a test. Usage: row_ops_bench [threads] [MiB per buffer] [samples]
//
// Byte counts include each row read and each row written once (for quantization, only the rows read). In each sample, all
// threads run concurrently and move 8 MiB each; the sample lasts from the first start to the last end. Samples of all cases
// alternate, and the best decile is shown, so other load on the machine has little influence. The limit is the fastest all-core
// copy, with either plain memcpy or the library's copy.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "arch/cpu/polite_wait.hpp"
#include "arch/cpu/row_ops.hpp"

namespace switchyard::detail {
namespace {

constexpr int64_t kHidden = 7168;
constexpr size_t kRowBytes = kHidden * 2;
constexpr size_t kRowsPerSample = (size_t{8} << 20) / kRowBytes;
constexpr int kMaxFan = 8;

/// One thread's rows, and a random walk over them that continues from sample to sample.
struct Rows {
  explicit Rows(size_t count, unsigned seed) : order(count), src(count * kRowBytes), dst(count * kRowBytes) {
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (size_t i = 0; i < src.size(); i += 2) {  // bf16 between 1 and 2
      src[i] = static_cast<std::byte>(i * 37);
      src[i + 1] = std::byte{0x3F};
    }
  }
  size_t advance() { return order[next++ % order.size()] * kRowBytes; }
  const void* next_source() { return src.data() + advance(); }
  void* next_destination() { return dst.data() + advance(); }

  std::vector<size_t> order;
  std::vector<std::byte> src;
  std::vector<std::byte> dst;
  size_t next = 0;
};

struct Case {
  std::string name;
  size_t bytes;  // per thread and sample
  std::function<void(Rows&)> body;
  std::vector<double> seconds = {};
  double rate(size_t threads) const { return static_cast<double>(bytes * threads) / seconds[seconds.size() / 10] / 1e9; }
};

Case memcpy_case() {
  return {"memcpy", 2 * kRowsPerSample * kRowBytes, [](Rows& rows) {
            for (size_t i = 0; i < kRowsPerSample; ++i) std::memcpy(rows.next_destination(), rows.next_source(), kRowBytes);
          }};
}
Case multicast_case(int n) {
  const size_t calls = kRowsPerSample / static_cast<size_t>(n);
  return {n == 1 ? "copy" : "multicast to " + std::to_string(n), calls * static_cast<size_t>(n + 1) * kRowBytes,
          [n, calls](Rows& rows) {
            void* dsts[kMaxFan];
            for (size_t i = 0; i < calls; ++i) {
              for (int k = 0; k < n; ++k) dsts[k] = rows.next_destination();
              (void)multicast_row(dsts, n, rows.next_source(), kRowBytes);
            }
            flush_streams();
          }};
}
Case reduce_case(int n, bool weighted, DType type) {
  const size_t calls = kRowsPerSample / static_cast<size_t>(n);
  return {std::string(type == DType::f16 ? "f16" : "bf16") + (weighted ? " weighted" : "") + " sum of " + std::to_string(n),
          calls * static_cast<size_t>(n + 1) * kRowBytes, [n, calls, weighted, type](Rows& rows) {
            const float weights[kMaxFan] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f};
            const void* sources[kMaxFan];
            for (size_t i = 0; i < calls; ++i) {
              for (int k = 0; k < n; ++k) sources[k] = rows.next_source();
              (void)reduce_rows({rows.next_destination(), sources, weighted ? weights : nullptr, n, {}, type, kHidden});
            }
            flush_streams();
          }};
}
Case quantize_case() {  // into one row that stays in the caches, like a warp's scratch
  return {"bf16 to fp8 (scratch)", kRowsPerSample * kRowBytes, [](Rows& rows) {
            alignas(64) uint8_t q[kHidden];
            alignas(64) std::byte scales[kHidden / kScaleGroup * 4];
            for (size_t i = 0; i < kRowsPerSample; ++i) {
              quantize_row(q, scales, rows.next_source(), DType::bf16, kHidden, ScaleKind::f32);
            }
          }};
}

std::vector<Case> all_cases() {
  std::vector<Case> cases = {memcpy_case()};
  for (const int n : {1, 2, 3, 4, 6, 8}) cases.push_back(multicast_case(n));
  for (const int n : {1, 2, 3, 4, 6, 8}) cases.push_back(reduce_case(n, false, DType::bf16));
  cases.push_back(reduce_case(8, true, DType::bf16));
  cases.push_back(reduce_case(8, true, DType::f16));
  cases.push_back(quantize_case());
  return cases;
}

/// Threads that repeatedly run the same body concurrently.
class Team {
 public:
  Team(size_t threads, size_t rows_per_buffer) : threads_(threads), begin_(threads), end_(threads), rows_(threads) {
    for (size_t t = 0; t < threads; ++t) workers_.emplace_back([this, t, rows_per_buffer] { work(t, rows_per_buffer); });
    await(done_, threads_);
  }
  ~Team() {
    body_ = nullptr;
    round_.fetch_add(1, std::memory_order_release);
    for (std::thread& worker : workers_) worker.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  double seconds(const std::function<void(Rows&)>& body) {
    body_ = &body;
    ready_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    await(done_, threads_);
    return static_cast<double>(*std::max_element(end_.begin(), end_.end()) - *std::min_element(begin_.begin(), begin_.end())) *
           1e-9;
  }

 private:
  static void await(const std::atomic<size_t>& counter, size_t value) {
    for (int64_t polls = 0; counter.load(std::memory_order_acquire) != value; ++polls) polite_wait(polls);
  }
  void work(size_t t, size_t rows_per_buffer) {
    rows_[t] = std::make_unique<Rows>(rows_per_buffer, static_cast<unsigned>(t + 1));  // on the thread's own memory node
    done_.fetch_add(1, std::memory_order_acq_rel);
    for (size_t round = 1;; ++round) {
      await(round_, round);
      if (body_ == nullptr) return;
      ready_.fetch_add(1, std::memory_order_acq_rel);
      await(ready_, threads_);
      begin_[t] = monotonic_ns();
      (*body_)(*rows_[t]);
      end_[t] = monotonic_ns();
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  size_t threads_;
  std::vector<int64_t> begin_;
  std::vector<int64_t> end_;
  std::vector<std::unique_ptr<Rows>> rows_;
  std::vector<std::thread> workers_;
  const std::function<void(Rows&)>* body_ = nullptr;
  std::atomic<size_t> round_{0};
  std::atomic<size_t> ready_{0};
  std::atomic<size_t> done_{0};
};

void run(size_t threads, size_t mib, int samples) {
  Team team(threads, (mib << 20) / kRowBytes);
  std::vector<Case> streamed = all_cases();
  std::vector<Case> plain = all_cases();
  for (int sample = 0; sample < samples; ++sample) {
    for (const bool streaming : {true, false}) {
      set_streaming(streaming);
      for (Case& one : streaming ? streamed : plain) one.seconds.push_back(team.seconds(one.body));
    }
  }
  set_streaming(true);
  for (auto* cases : {&streamed, &plain}) {
    for (Case& one : *cases) std::sort(one.seconds.begin(), one.seconds.end());
  }
  const double memcpy_rate = std::max(streamed[0].rate(threads), plain[0].rate(threads));
  const double limit = std::max(memcpy_rate, streamed[1].rate(threads));
  std::printf("%zu threads, %s, %zu MiB per buffer, rows of %zu bytes; copy limit %.1f GB/s, plain memcpy %.1f GB/s\n", threads,
              current_simd_target().name, mib, kRowBytes, limit, memcpy_rate);
  std::printf("%-22s %10s %8s %8s %14s\n", "", "GB/s", "limit", "memcpy", "no streaming");
  for (size_t i = 1; i < streamed.size(); ++i) {
    const double rate = streamed[i].rate(threads);
    std::printf("%-22s %10.1f %7.0f%% %7.0f%% %14.1f\n", streamed[i].name.c_str(), rate, 100 * rate / limit,
                100 * rate / memcpy_rate, plain[i].rate(threads));
  }
}

}  // namespace
}  // namespace switchyard::detail

int main(int argc, char** argv) {
  const auto argument = [&](int i, long otherwise) { return argc > i ? std::strtol(argv[i], nullptr, 10) : otherwise; };
  const auto threads = static_cast<size_t>(argument(1, static_cast<long>(std::thread::hardware_concurrency())));
  switchyard::detail::run(std::max<size_t>(threads, 1), static_cast<size_t>(argument(2, 256)),
                          static_cast<int>(argument(3, 60)));
}
