// SPDX-License-Identifier: Apache-2.0
// Comparisons for one rank of a script of low-latency calls.
#pragma once

#include <span>
#include <vector>

#include "harness/rank_steps.hpp"
#include "modes/low_latency/low_latency_settings.hpp"

namespace harness {

class LowLatencyRank : protected RankSteps {
 protected:
  /// Rows or scales as sent, by rank: [T].
  using ByRank = std::vector<std::vector<std::byte>>;

  LowLatencyRank(switchyard::Group& group, switchyard::LowLatencyExchange& exchange, const LowLatencySettings& settings,
                 Failures& failures)
      : RankSteps(group, failures), exchange_(exchange), settings_(settings) {}

  /// Checks the rows delivered to each expert, including every byte of the rows and their scales.
  void check_delivered(const oracle::LowLatencyView& view, const ByRank& sent, const ByRank& sent_scales,
                       const switchyard::LowLatencyOutput& output);
  void check_combined(DType type, std::span<const std::byte> expected, std::span<const std::byte> got);

  switchyard::LowLatencyExchange& exchange_;
  const LowLatencySettings& settings_;

 private:
  void check_shape(const oracle::LowLatencyView& view, const switchyard::LowLatencyOutput& output);
  void check_alignment(const switchyard::LowLatencyOutput& output);
  bool scales_equal(const std::vector<std::byte>& delivered, const std::vector<std::byte>& sent, int64_t token, int64_t expert,
                    int64_t row) const;
};

}  // namespace harness
