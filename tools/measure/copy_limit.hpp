// SPDX-License-Identifier: Apache-2.0
// The limit that exchanges are compared with: how fast this machine's cores copy memory that no cache holds.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "measure/machine.hpp"

namespace switchyard::measure {

/// One way to copy, measured. Bytes are read + written: a copy of n bytes counts 2 n.
struct CopyRate {
  std::string method;
  double gbs = 0;  ///< median pass, slowest thread, 1e9 bytes per second
  double gbs_min = 0;
  double gbs_max = 0;
  int passes = 0;
};

struct CopyLimit {
  int threads = 0;
  size_t bytes = 0;  ///< source bytes, all threads together
  std::vector<CopyRate> rates;
  const CopyRate& best() const;
};

struct CopyLimitOptions {
  int threads = 1;        ///< thread i is pinned to share_of_cpus(machine, i, threads)
  size_t row_bytes = 0;   ///< > 0: also measure copies of rows of this size, which is how an exchange copies
  double seconds = 1.0;   ///< for all methods together, roughly
  double llc_factor = 4;  ///< source bytes = factor * last-level cache; the destination has the same size. Both together take
                          ///< no more than a quarter of the memory that is available, and the source no more than 10 GB/s
                          ///< copy twice by each method in `seconds`: with little memory or time, caches may hold them
};

/// Methods: the C library's memcpy over long blocks (it usually bypasses the caches), the same row by row, and a loop of
/// ordinary vector stores. The best of them is the limit. `on_progress`, if given, gets the fraction that is done.
CopyLimit measure_copy_limit(const Machine& machine, const CopyLimitOptions& options,
                             const std::function<void(double)>& on_progress = {});

}  // namespace switchyard::measure
