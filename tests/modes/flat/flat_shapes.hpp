// SPDX-License-Identifier: Apache-2.0
// The shapes of the published all-to-all contest (f16, 8 ranks), E1 to E14: nine tests and five benchmarks.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "modes/flat/flat_script.hpp"

namespace harness {

struct ContestShape {
  int experts, topk;
  int64_t hidden, max_tokens;
  uint64_t seed;
};
inline constexpr ContestShape kContestShapes[] = {
    {8, 2, 6144, 4, 1236},    {64, 6, 2048, 4, 1234},  {64, 6, 2048, 8, 542},    {128, 4, 2880, 16, 347},
    {128, 4, 2880, 32, 51},   {128, 8, 4096, 64, 175}, {128, 8, 4096, 128, 534}, {256, 8, 7168, 64, 897},
    {256, 8, 7168, 128, 4},   {8, 2, 6144, 16, 6635},  {64, 6, 2048, 32, 1234},  {128, 4, 2880, 128, 51},
    {128, 8, 4096, 256, 175}, {256, 8, 7168, 256, 4},
};

/// Script in the contest's form: T in [1, max_tokens - 1], K distinct experts. Makes the calls three times in both forms,
/// starting with the whole form, on ranks that are late by varying amounts. `columns`: columns per row.
inline FlatScript contest_script(const ContestShape& shape, int world, int64_t columns) {
  FlatScript s;
  s.name = "E" + std::to_string(shape.experts) + " K" + std::to_string(shape.topk) + " H" + std::to_string(columns) + " max " +
           std::to_string(shape.max_tokens) + " seed " + std::to_string(shape.seed);
  s.world = world;
  s.seed = shape.seed;
  s.contest = true;
  s.repeats = 3;
  s.max_delay_us = 200;
  s.config.hidden = columns;
  s.config.num_experts = shape.experts;
  s.config.topk = shape.topk;
  s.config.max_tokens = shape.max_tokens;
  s.config.dtype = DType::f16;
  s.config.scales = ScaleKind::none;
  std::vector<int64_t> tokens;
  for (int r = 0; r < world; ++r)
    tokens.push_back(1 + static_cast<int64_t>(oracle::mix(shape.seed, static_cast<uint64_t>(r)) %
                                              static_cast<uint64_t>(shape.max_tokens - 1)));
  s.call(tokens);
  s.call(tokens).two_calls = true;
  return s;
}

struct ContestRun {
  ContestShape shape;
  int world;
  int num_sms;  ///< FlatScript::num_sms
};
inline std::ostream& operator<<(std::ostream& out, const ContestRun& r) {
  return out << "W" << r.world << "E" << r.shape.experts << "K" << r.shape.topk << "H" << r.shape.hidden << "max"
             << r.shape.max_tokens;
}
/// Every shape on 8 ranks, as in the contest, and on 1, 2 or 4 ranks.
inline std::vector<ContestRun> contest_runs(int num_sms) {
  std::vector<ContestRun> runs;
  for (const ContestShape& shape : kContestShapes) {
    runs.push_back({shape, 1 << (runs.size() / 2 % 3), num_sms});
    runs.push_back({shape, 8, num_sms});
  }
  return runs;
}
inline std::string contest_run_name(const testing::TestParamInfo<ContestRun>& info) {
  return (std::ostringstream() << info.param << "seed" << info.param.shape.seed).str();
}

}  // namespace harness
