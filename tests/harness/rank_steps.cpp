// SPDX-License-Identifier: Apache-2.0
#include "harness/rank_steps.hpp"

#include <chrono>
#include <sstream>
#include <thread>

#include "exchange/group/impl.hpp"

namespace harness {

std::string first_difference(const char* what, int64_t first, switchyard::DType type, int64_t hidden, const void* expected,
                             const void* got, int64_t elements) {
  const int64_t n = oracle::first_difference(type, expected, got, elements);
  if (n == elements) return {};
  std::ostringstream text;
  text << what << " " << first + n / hidden << " column " << n % hidden << ": expected " << oracle::load(type, expected, n)
       << ", got " << oracle::load(type, got, n);
  return text.str();
}

void random_delay(int max_us, uint64_t seed, int rank, uint64_t step) {
  constexpr uint64_t kDelays = 0xDE1A7;  // a separate stream of random numbers
  const uint64_t bits = oracle::mix(seed ^ kDelays, static_cast<uint64_t>(rank), step);
  if (max_us <= 0 || bits % 3 == 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(bits / 3 % static_cast<uint64_t>(max_us)));
}

void RankSteps::meet() {
  if (!memory_.on_device() || !group_.impl().bootstrap->same_process()) return;
  memory_.read(nullptr, nullptr, 0);
  group_.barrier();
}

void RankSteps::check_traffic(const switchyard::CallStatistics& stats, const oracle::Traffic& rows, uint64_t row_bytes) {
  f_.equal(rows.remote * row_bytes, stats.remote_bytes, "remote_bytes");
  f_.equal(rows.local * row_bytes, stats.local_bytes, "local_bytes");
  f_.equal(rows.local + rows.remote, stats.payload_rows, "payload_rows");
}

}  // namespace harness
