// SPDX-License-Identifier: Apache-2.0
// The primitives of exchanges on a CPU, each measured separately: copies and sums of rows with the library's own row functions,
// route planning, and flags sent from one rank to another. No exchange runs here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "measure/machine.hpp"
#include "measure/planning.hpp"

namespace switchyard::measure {

/// Rates at which bytes are read and written, in 1e9 per second, for rows that are read once and written several times, or read
/// several times and written once. The time for a row is the sum of both parts.
struct RowRate {
  double read_gbs = 0;
  double write_gbs = 0;
};
/// One worker by itself, and the combined rate of all workers of the machine running at once.
struct RowRates {
  RowRate worker;
  RowRate all;
};

struct HostPrimitives {
  int workers = 1;              ///< number of threads that ran at once
  size_t row_bytes = 0;         ///< size of the rows
  RowRates copy;                ///< rows copied to one or several places
  RowRates sum;                 ///< bf16 rows summed
  double quantize_gbs = 0;      ///< bf16 bytes read and converted to fp8 rows, less the time to write these rows: one worker
  double all_quantize_gbs = 0;  ///< all workers
  double link_gbs = 0;          ///< cached rows to memory of another worker while all workers do this: rate of one worker
  double flag_us = 0;           ///< a flag from one thread to another, one way; 0 with one worker
  double wake_us = 0;           ///< until a worker that has slept for a while runs; 0 with one worker
  PlanningTimes planning;
};

struct PrimitiveOptions {
  int workers = 1;        ///< thread i is pinned to share_of_cpus(machine, i, workers)
  double seconds = 3;     ///< approximate total time
  double llc_factor = 4;  ///< bytes read in a pass = factor * last-level cache, at most an eighth of the available memory
};

/// \throws std::runtime_error if memory is insufficient. `on_progress`, if given, receives the fraction that is finished.
HostPrimitives measure_primitives(const Machine& machine, const PrimitiveOptions& options,
                                  const std::function<void(double)>& on_progress = {});

/// Rates per byte of a row, from a least-squares line through the times with one, two and four rows on the other side.
/// `many_read`: the rows on the other side are read, as in a sum; otherwise, they are written. A negative or implausibly high
/// rate is replaced with the overall rate at one row.
RowRate rate_of_line(const double (&ns_per_byte)[3], bool many_read);

}  // namespace switchyard::measure
