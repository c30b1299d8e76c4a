// SPDX-License-Identifier: Apache-2.0
// Steps that a rank takes around its calls in any mode: pass inputs, fetch results, synchronize, arrive late, and
// compare the reported traffic.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/index.hpp"
#include "harness/failures.hpp"
#include "harness/rank_memory.hpp"
#include "oracle/low_latency.hpp"
#include "oracle/rows.hpp"
#include "switchyard/group.hpp"

namespace harness {

using switchyard::detail::idx;

/// Compares rows of `hidden` elements. Returns "" if they are equal; otherwise, the first difference: `what`, the row number
/// (counted from `first`), and the column.
std::string first_difference(const char* what, int64_t first, switchyard::DType type, int64_t hidden, const void* expected,
                             const void* got, int64_t elements);

/// Sleeps for up to `max_us` microseconds; in a third of all cases, does not sleep at all. The other arguments determine the
/// delay.
void random_delay(int max_us, uint64_t seed, int rank, uint64_t step);

class RankSteps {
 protected:
  RankSteps(switchyard::Group& group, Failures& failures)
      : group_(group), f_(failures), memory_(rank_memory(group)), rank_(idx(group.rank())) {}

  /// Converts an input for the backend; see RankMemory::give.
  template <class T>
  const T* give(const T* host, size_t count) {
    return static_cast<const T*>(memory_.give(host, count * sizeof(T)));
  }
  template <class T>
  const T* give(const std::vector<T>& host) {
    return give(host.data(), host.size());
  }
  template <class T>
  std::vector<T> fetch(const T* from, int64_t count) {
    std::vector<T> to(idx(count));
    memory_.read(to.data(), from, idx(count) * sizeof(T));
    return to;
  }
  /// Options of a call: the rank's stream and, on a GPU, the number of multiprocessors `num_sms`.
  template <class Options>
  Options on_stream(Options options, int num_sms) const {
    options.stream = memory_.stream();
    options.num_sms = memory_.on_device() ? num_sms : 0;
    return options;
  }

  /// For ranks of one process that share a GPU: a copy by the host may wait for other ranks' kernels, so those kernels must not
  /// wait for this rank.
  void meet();
  void arrive_late(int max_us, uint64_t seed) { random_delay(max_us, seed, group_.rank(), calls_++); }
  /// Checks the traffic of the previous call: `rows` rows of `row_bytes` each.
  void check_traffic(const switchyard::CallStatistics& stats, const oracle::Traffic& rows, uint64_t row_bytes);

  switchyard::Group& group_;
  Failures& f_;
  RankMemory& memory_;
  size_t rank_;

 private:
  uint64_t calls_ = 0;
};

}  // namespace harness
