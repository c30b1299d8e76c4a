// SPDX-License-Identifier: Apache-2.0
// The two halves of a fused layer on GPUs (FusedMoe::dispatch_up, down_combine) produce the same bits as forward: called
// directly, in graphs, with T on the device, beyond capacity, and adding to the output. Two ranks, which may share a GPU.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "exchange/fused/fused_moe.hpp"
#include "gpu/gemm/moe_calls.hpp"

namespace harness {
namespace {

using switchyard::ExpertIds;
using switchyard::Overflow;
using switchyard::detail::FusedMoe;
using switchyard::detail::FusedMoeCall;
using switchyard::detail::FusedMoeConfig;
using switchyard::testing::LayerInput;
using switchyard::testing::MoeCase;

FusedMoeConfig config_of(const MoeCase& m) {
  FusedMoeConfig c;
  c.hidden = m.c.hidden;
  c.intermediate = m.c.intermediate;
  c.num_experts = m.c.experts;
  c.topk = m.c.topk;
  c.max_tokens = m.c.max_tokens();
  c.capacity = m.capacity;
  c.overflow = m.overflow;
  c.dtype = m.type();
  c.row_scales = m.row_scales;
  c.order = m.order;
  return c;
}

/// A rank's layer and memory. Construction is collective.
class HalvesRank {
 public:
  HalvesRank(Station& me, const MoeCase& m) : me_(me), rig_(me), m_(m), weights_of_(weights(me)), layer_(make(me)) {
    const auto tokens = static_cast<size_t>(m.c.max_tokens()), routes = tokens * static_cast<size_t>(m.c.topk);
    for (void** rows : {&x_, &whole_, &halves_}) *rows = rig_.allocate(tokens * m.c.row_bytes());
    ids_ = static_cast<int32_t*>(rig_.allocate(routes * 4));
    weights_ = static_cast<float*>(rig_.allocate(routes * 4));
    tokens_ = static_cast<int32_t*>(rig_.allocate(4));
  }

  /// Call while idle.
  void write(uint32_t call, int32_t t) {
    const LayerInput input(m_.c, call, me_.rank());
    rig_.write(x_, input.x.data(), input.x.size());
    rig_.write(ids_, input.ids.data(), input.ids.size() * 4);
    rig_.write(weights_, input.weights.data(), input.weights.size() * 4);
    const auto base = switchyard::testing::normal_rows(m_.c.type, tokens() * m_.c.hidden, 1, 31000 + call);
    for (void* to : {whole_, halves_}) rig_.write(to, base.data(), base.size());
    rig_.write(tokens_, &t, 4);
  }
  void whole(bool add) { layer_.forward(x_, ids(), weights_, whole_, settings(true, add)); }
  void up() { layer_.dispatch_up(x_, ids(), per_rank() ? weights_ : nullptr, settings(true, false)); }
  void down(bool add) { layer_.down_combine(per_rank() ? nullptr : weights_, halves_, settings(false, add)); }
  /// Call while idle. The rows of an expert, or of all experts of this rank.
  int64_t rows_between() {
    const int local_experts = switchyard::first_expert(m_.c.experts, m_.c.world(), me_.rank() + 1) -
                              switchyard::first_expert(m_.c.experts, m_.c.world(), me_.rank());
    std::vector<int64_t> rows(static_cast<size_t>(local_experts));
    if (local_experts > 0) rig_.read(rows.data(), layer_.rows().num_rows, rows.size() * 8);
    int64_t sum = 0;
    for (const int64_t r : rows) sum += r;
    return sum;
  }
  void judge(const std::string& what) {
    std::vector<std::byte> whole(static_cast<size_t>(tokens()) * m_.c.row_bytes()), halves(whole.size());
    rig_.read(whole.data(), whole_, whole.size());
    rig_.read(halves.data(), halves_, halves.size());
    me_.f.check(whole == halves, what + ": the halves give other bits than forward");
  }
  int64_t tokens() const { return m_.c.tokens[static_cast<size_t>(me_.rank())]; }

 private:
  bool per_rank() const { return m_.order == switchyard::CombineOrder::per_rank; }
  switchyard::testing::RankWeights weights(Station& me) {
    return make_weights(rig_, m_, switchyard::first_expert(m_.c.experts, m_.c.world(), me.rank()),
                        switchyard::first_expert(m_.c.experts, m_.c.world(), me.rank() + 1));
  }
  FusedMoe make(Station& me) {
    FusedMoeConfig c = config_of(m_);
    c.w13_scales = weights_of_.w13_scales;
    c.w2_scales = weights_of_.w2_scales;
    return {me.group, c, weights_of_.w13, weights_of_.w2};
  }
  ExpertIds ids() const { return ExpertIds::of(ids_, tokens(), m_.c.topk); }
  FusedMoeCall settings(bool stated, bool add) const {
    return {.stream = rig_.stream(), .device_tokens = stated ? tokens_ : nullptr, .add = add};
  }

  Station& me_;
  GpuRig rig_;
  MoeCase m_;
  switchyard::testing::RankWeights weights_of_;
  FusedMoe layer_;
  void *x_ = nullptr, *whole_ = nullptr, *halves_ = nullptr;
  int32_t *ids_ = nullptr, *tokens_ = nullptr;
  float* weights_ = nullptr;
};

std::vector<MoeCase> halves_cases() {
  std::vector<MoeCase> all = fused_cases();
  for (const MoeCase& m : fused_fp8_cases()) all.push_back(m);
  MoeCase drops{.c = {.name = "fused_drops", .tokens = {40, 30}, .only = 4}, .capacity = 140};
  drops.overflow = Overflow::drop_and_report;
  switchyard::testing::add_fused(all, drops);
  return all;
}

class GpuFusedHalves : public testing::TestWithParam<MoeCase> {};

TEST_P(GpuFusedHalves, GiveTheBitsOfForward) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), FusedMoe::heap_bytes(config_of(m), m.c.world()), [&](Station& me) {
    HalvesRank rank(me, m);
    for (uint32_t call = 0; call < 4; ++call) {
      const bool add = call % 2 == 1;
      rank.write(call, call == 2 ? 3 : 1000);
      me.meet();
      rank.whole(add);
      me.meet();
      const int64_t rows = rank.rows_between();
      me.meet();
      rank.up();
      me.meet();
      me.f.equal(rows, rank.rows_between(), "rows between the halves");
      me.meet();
      rank.down(add);
      me.meet();
      rank.judge("call " + std::to_string(call));
      me.group.check();
      me.meet();
    }
  });
}

// One graph per half, replayed alternately with different tokens, routing and T; and both halves in one graph.
TEST_P(GpuFusedHalves, InGraphs) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), FusedMoe::heap_bytes(config_of(m), m.c.world()), [&](Station& me) {
    HalvesRank rank(me, m);
    rank.write(0, 1000);
    me.meet();
    rank.whole(false);
    me.meet();
    Graph up(me, [&] { rank.up(); });
    Graph down(me, [&] { rank.down(false); });
    Graph both(me, [&] {
      rank.up();
      rank.down(true);
    });
    for (uint32_t call = 1; call < 6; ++call) {
      const bool add = call % 2 == 0;
      rank.write(call, call == 3 ? 5 : 1000);
      me.meet();
      rank.whole(add);
      me.meet();
      if (add) {
        both.launch();
      } else {
        up.launch();
        down.launch();
      }
      me.meet();
      rank.judge("call " + std::to_string(call));
      me.group.check();
      me.meet();
    }
    for (Graph* graph : {&up, &down, &both}) graph->destroy();
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuFusedHalves, testing::ValuesIn(halves_cases()), [](const auto& c) { return c.param.c.name; });

}  // namespace
}  // namespace harness
