// SPDX-License-Identifier: Apache-2.0
// What exchanges on a CPU are made of, each measured by itself: copies and sums of rows by the library's own row functions, the
// planning of routes, and the flags that ranks set for one another. No exchange runs here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "measure/machine.hpp"
#include "measure/planning.hpp"

namespace switchyard::measure {

/// Rates of bytes read and of bytes written, 1e9 a second, when rows are read once and written several times, or read several
/// times and written once. The time of a row is the sum of both.
struct RowRate {
  double read_gbs = 0;
  double write_gbs = 0;
};
/// One worker by itself, and all workers of the machine at once, added up.
struct RowRates {
  RowRate worker;
  RowRate all;
};

struct HostPrimitives {
  int workers = 1;              ///< threads that ran at once
  size_t row_bytes = 0;         ///< of the rows
  RowRates copy;                ///< rows copied to one place or several
  RowRates sum;                 ///< bf16 rows added up
  double quantize_gbs = 0;      ///< bf16 bytes read that become fp8 rows, less the time of writing these: one worker
  double all_quantize_gbs = 0;  ///< all workers
  double link_gbs = 0;          ///< rows in the cache to memory of another worker while all do so: one worker's
  double flag_us = 0;           ///< a flag from one thread to another, one way; 0 with one worker
  double wake_us = 0;           ///< until a worker that slept for a while begins to work; 0 with one worker
  PlanningTimes planning;
};

struct PrimitiveOptions {
  int workers = 1;     ///< thread i is pinned to share_of_cpus(machine, i, workers)
  double seconds = 3;  ///< for all of it, roughly
  double llc_factor =
      4;  ///< bytes read in a pass = factor * last-level cache, within an eighth of the memory that is available
};

/// \throws std::runtime_error without memory. `on_progress`, if given, gets the fraction that is done.
HostPrimitives measure_primitives(const Machine& machine, const PrimitiveOptions& options,
                                  const std::function<void(double)>& on_progress = {});

/// Times of one, two and four rows on the other side, per byte of a row; the rates of the line through them, by least squares.
/// `many_read`: the rows are read, as in a sum; else written. A rate that comes out negative or absurdly high is that of the
/// whole at one row.
RowRate rate_of_line(const double (&ns_per_byte)[3], bool many_read);

}  // namespace switchyard::measure
