// SPDX-License-Identifier: Apache-2.0
// Settings shared by all low-latency scripts, both for dispatches and combines and for whole exchanges.
#pragma once

#include <string>

#include "harness/routings.hpp"
#include "harness/run_cases.hpp"
#include "oracle/low_latency.hpp"
#include "oracle/rows.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {

using oracle::Pattern;
using switchyard::CombineOrder;
using switchyard::DType;
using switchyard::LowLatencyConfig;
using switchyard::ScaleKind;
using switchyard::ScaleOrder;
using switchyard::Sending;

struct LowLatencySettings {
  std::string name;  ///< appears in every mismatch
  int world = 1;
  LowLatencyConfig config;
  uint64_t seed = 1;
  uint64_t first_epoch = 1;
  int repeats = 1;       ///< of all calls, on one object
  int max_delay_us = 0;  ///< each rank sleeps a random time before each call
  int num_sms = 2;       ///< CUDA: of every call; 0: the library's choice, with dependent launches if the GPU is not shared

  /// Settings for an object that accepts the ids from make_ids().
  LowLatencyConfig counting() const {
    LowLatencyConfig counts = config;
    counts.invalid_ids = switchyard::InvalidIds::count;
    return counts;
  }
  /// Without ids and weights.
  oracle::Problem problem() const;
  int64_t row_bytes(DType type) const { return static_cast<int64_t>(switchyard::dtype_bytes(type, config.hidden)); }
  /// Type of the rows as sent, and scale bytes per row.
  DType sent_type() const { return config.scales == ScaleKind::none ? config.dtype : DType::fp8_e4m3; }
  int64_t sent_scale_bytes() const;
  /// Scale bytes per row as passed by the caller.
  int64_t given_scale_bytes() const;
  oracle::ScaleShape scale_shape() const;
};

/// The token's first choice that is the same expert as its k-th choice.
int first_choice(const oracle::Problem& problem, int rank, int64_t token, int k);

/// A low-latency Case has a `script` with these settings and a run_on function.
template <class Case>
concept LowLatencyObjectCase = requires(const Case& c) {
  static_cast<const LowLatencySettings&>(c.script);
};
CaseInfo info_of(const LowLatencySettings& settings);
template <LowLatencyObjectCase Case>
CaseInfo info_of(const Case& c) {
  return info_of(static_cast<const LowLatencySettings&>(c.script));
}
template <LowLatencyObjectCase Case>
void run_object(switchyard::Group& group, const Case& c, Failures& failures) {
  switchyard::LowLatencyExchange exchange(group, c.script.counting());
  run_on(group, exchange, c, failures);
}

}  // namespace harness
