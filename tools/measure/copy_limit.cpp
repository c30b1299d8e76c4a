// SPDX-License-Identifier: Apache-2.0
#include "measure/copy_limit.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "measure/stream_copy.hpp"

namespace switchyard::measure {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kBlock = size_t{8} << 20;  // one memcpy: long enough for the C library to use its streaming path
constexpr int kMinPasses = 5;
constexpr int kMaxPasses = 200;

/// Anonymous memory, on large pages if they are available.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED)
      throw std::runtime_error("copy limit: " + std::to_string(bytes >> 20) + " MiB of memory are not available");
    madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~Buffer() { munmap(data_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

void copy_in_pieces(std::byte* to, const std::byte* from, size_t bytes, size_t piece) {
  for (size_t at = 0; at < bytes; at += piece) std::memcpy(to + at, from + at, std::min(piece, bytes - at));
}

/// Copies with ordinary 16-byte loads and stores, which allocate lines in the caches. volatile prevents the compiler from
/// turning the loop into a memcpy.
void copy_with_stores(std::byte* to, const std::byte* from, size_t bytes) {
  typedef long long Vector __attribute__((vector_size(16)));
  const auto* source = reinterpret_cast<const Vector*>(from);
  auto* target = reinterpret_cast<volatile Vector*>(to);
  for (size_t i = 0; i < bytes / sizeof(Vector); ++i) target[i] = source[i];
}

struct Method {
  std::string name;
  std::function<void(std::byte*, const std::byte*, size_t)> copy;
};

std::vector<Method> copy_methods(size_t row) {
  std::vector<Method> methods;
  methods.push_back({"memcpy, long blocks", [](auto* to, const auto* from, size_t n) { copy_in_pieces(to, from, n, kBlock); }});
  if (row > 0) {
    methods.push_back({"memcpy, rows of " + std::to_string(row) + " bytes",
                       [row](auto* to, const auto* from, size_t n) { copy_in_pieces(to, from, n, row); }});
  }
  methods.push_back({"streaming stores", stream_copy});
  methods.push_back({"ordinary stores", copy_with_stores});
  return methods;
}

CopyRate rate_of(const std::string& name, size_t bytes, std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const auto gbs = [&](double s) { return 2.0 * static_cast<double>(bytes) / s / 1e9; };
  return {name, gbs(seconds[seconds.size() / 2]), gbs(seconds.back()), gbs(seconds.front()), static_cast<int>(seconds.size())};
}

}  // namespace

const CopyRate& CopyLimit::best() const {
  return *std::max_element(rates.begin(), rates.end(), [](const CopyRate& a, const CopyRate& b) { return a.gbs < b.gbs; });
}

CopyLimit measure_copy_limit(const Machine& machine, const CopyLimitOptions& options,
                             const std::function<void(double)>& on_progress) {
  const auto num_threads = static_cast<size_t>(std::max(1, options.threads));
  const std::vector<Method> methods = copy_methods(options.row_bytes);
  const auto wanted = static_cast<size_t>(
      std::min({options.llc_factor * static_cast<double>(machine.llc_bytes), static_cast<double>(machine.memory_available) / 8,
                options.seconds * 10e9 / static_cast<double>(2 * methods.size())}));
  const size_t slice = (wanted / num_threads + kPage) / kPage * kPage;
  CopyLimit limit{static_cast<int>(num_threads), slice * num_threads, {}};
  const Buffer source(limit.bytes);
  const Buffer target(limit.bytes);
  std::barrier<> gate(static_cast<std::ptrdiff_t>(num_threads) + 1);
  const Method* method = nullptr;  // this thread writes it between two passes
  const auto work = [&](size_t index) {
    pin_thread(share_of_cpus(machine, static_cast<int>(index), static_cast<int>(num_threads)));
    std::byte* from = source.data() + index * slice;
    std::byte* to = target.data() + index * slice;
    std::memset(from, static_cast<int>(index + 1), slice);  // the thread that uses a page touches it first
    std::memset(to, 0, slice);
    while (true) {
      gate.arrive_and_wait();
      if (method == nullptr) return;
      method->copy(to, from, slice);
      gate.arrive_and_wait();
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < num_threads; ++i) threads.emplace_back(work, i);
  for (const Method& m : methods) {
    std::vector<double> seconds;
    double sum = 0;
    const double share = options.seconds / static_cast<double>(methods.size());
    for (int pass = -1; pass < kMaxPasses && (pass < kMinPasses || sum < share); ++pass) {
      method = &m;
      const Clock::time_point begin =
          Clock::now();  // before the gate: the first pass also includes page faults and is discarded
      gate.arrive_and_wait();
      gate.arrive_and_wait();
      const double took = std::chrono::duration<double>(Clock::now() - begin).count();
      if (pass < 0) continue;
      seconds.push_back(took);
      sum += took;
      const auto methods_done = static_cast<double>(&m - methods.data());
      if (on_progress) on_progress((methods_done + std::min(1.0, sum / share)) / static_cast<double>(methods.size()));
    }
    limit.rates.push_back(rate_of(m.name, limit.bytes, std::move(seconds)));
  }
  method = nullptr;
  gate.arrive_and_wait();
  for (std::thread& t : threads) t.join();
  return limit;
}

}  // namespace switchyard::measure
