// SPDX-License-Identifier: Apache-2.0
// The layer of the tool: weights that a GPU writes by a closed form, and a check that finds what is wrong.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "tools/layer/layer_rank.hpp"
#include "tools/run/ranks.hpp"

namespace switchyard::tool {
namespace {

/// One element of [rows, cols] as the kernel computes it.
uint16_t element(const measure::WeightForm& form, int64_t expert, int64_t row, int64_t col) {
  const uint64_t bytes = measure::weight_bytes(measure::weight_row_key(form.key, expert, row), col / 8);
  return form.levels[bytes >> (col % 8 * 8) & 0xFF];
}

TEST(LayerWeights, TheFormOfTheKernelIsThatOfExpertWeights) {
  for (const uint64_t seed : {uint64_t{1}, uint64_t{77}}) {
    const int64_t hidden = 264, intermediate = 40;
    const ExpertWeights weights(seed, hidden, intermediate);
    const WeightForms forms = weight_forms(seed, hidden, intermediate);
    for (const int64_t expert : {0, 5, 200}) {
      for (int64_t row = 0; row < 2 * intermediate; row += 7)
        for (int64_t col = 0; col < hidden; ++col)
          ASSERT_EQ(element(forms.gate_up, expert, row, col), weights.w13(expert, row, col))
              << expert << " " << row << " " << col;
      for (int64_t row = 0; row < hidden; row += 13)
        for (int64_t col = 0; col < intermediate; ++col)
          ASSERT_EQ(element(forms.down, expert, row, col), weights.w2(expert, row, col)) << expert << " " << row << " " << col;
    }
  }
}

LayerSpec spec_of(bool masked) {
  LayerSpec spec;
  Scenario& s = spec.scenario;
  s.world = 2;
  s.experts = 5;
  s.topk = 2;
  s.hidden = 64;
  s.layout = Layout::expert_major;
  s.routing = {{5, 2, 3, {0, 1, 2, 3, 4, -1}, {0.5f, 0.5f, 1, 0.25f, 0.75f, 1}}, {5, 2, 1, {3, 0}, {1, 0.5f}}};
  spec.intermediate = 32;
  spec.exchange = masked ? LayerExchangeConfig(layer_low_latency_config(s)) : LayerExchangeConfig(layer_normal_config(s));
  return spec;
}

/// What each rank finds: its layer, the same with one wrong element in its last token, and outputs that nothing wrote.
std::vector<nlohmann::json> checked(const LayerSpec& spec, int64_t most_tokens) {
  RankJob job;
  job.world = spec.scenario.world;
  job.group.heap_bytes = layer_heap_bytes(spec);
  return run_ranks(job, [&](Group& group, RankLink&) {
    const std::shared_ptr<RankDevice> device = rank_device(group.rank(), 0, 0);
    LayerRank rank(spec, group, *device);
    rank.prepare(1);
    const CheckResult unwritten = rank.check("unwritten", rank.outputs(), most_tokens, 1);
    group.barrier();
    rank.layer(CombineOrder::per_rank);
    std::vector<std::byte> out = rank.outputs();
    const CheckResult right = rank.check("right", out, most_tokens, 2);
    const uint16_t large = 0x4120;  // 10
    std::memcpy(out.data() + out.size() - 2, &large, 2);
    const CheckResult wrong = rank.check("wrong", out, most_tokens, 1);
    group.barrier();
    return nlohmann::json{unwritten.passed, right.passed, right.compared, wrong.passed, wrong.detail};
  });
}

TEST(LayerRank, FindsWrongAndUnwrittenOutputs) {
  for (const bool masked : {false, true}) {
    const std::vector<nlohmann::json> ranks = checked(spec_of(masked), 100);
    for (size_t r = 0; r < ranks.size(); ++r) {
      EXPECT_FALSE(ranks[r][0].get<bool>()) << masked << r;
      EXPECT_TRUE(ranks[r][1].get<bool>()) << masked << r;
      EXPECT_EQ(ranks[r][2].get<int>(), r == 0 ? 3 * 64 : 64) << masked;
      EXPECT_FALSE(ranks[r][3].get<bool>()) << masked << r;
      EXPECT_EQ(ranks[r][4].get<std::string>().rfind(r == 0 ? "token 2: off by " : "token 0: off by ", 0), 0u) << ranks[r][4];
    }
    EXPECT_EQ(checked(spec_of(masked), 1)[0][2], 64) << "as many tokens as asked for";
  }
}

}  // namespace
}  // namespace switchyard::tool
