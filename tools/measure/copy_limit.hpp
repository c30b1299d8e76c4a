// SPDX-License-Identifier: Apache-2.0
// The limit for exchanges: the rate at which this machine's cores copy memory that is not in any cache.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "measure/machine.hpp"

namespace switchyard::measure {

/// Measurement of a single copy method. Bytes are counted as read plus written: a copy of n bytes counts as 2 n.
struct CopyRate {
  std::string method;
  double gbs = 0;  ///< median pass, slowest thread, 1e9 bytes per second
  double gbs_min = 0;
  double gbs_max = 0;
  int passes = 0;
};

struct CopyLimit {
  int threads = 0;
  size_t bytes = 0;  ///< source bytes of all threads
  std::vector<CopyRate> rates;
  const CopyRate& best() const;
};

struct CopyLimitOptions {
  int threads = 1;        ///< thread i is pinned to share_of_cpus(machine, i, threads)
  size_t row_bytes = 0;   ///< > 0: also measure copies of rows of this size, as in an exchange
  double seconds = 1.0;   ///< approximate duration of all methods together
  double llc_factor = 4;  ///< source bytes = factor * last-level cache; the destination has the same size. Together they take
                          ///< at most a quarter of the available memory, and the source at most the number of bytes that 10
                          ///< GB/s copies twice per method in `seconds`; with little memory or time, caches may hold them
};

/// The methods are the C library's memcpy over long blocks (which usually bypasses the caches), memcpy row by row, and a loop
/// of ordinary vector stores. The fastest method defines the limit. `on_progress`, if given, receives the fraction that is
/// finished.
CopyLimit measure_copy_limit(const Machine& machine, const CopyLimitOptions& options,
                             const std::function<void(double)>& on_progress = {});

}  // namespace switchyard::measure
