// SPDX-License-Identifier: Apache-2.0
// Construction of a MoeLayer: the chosen exchange, its memory, and rejected configurations, identical on all ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exchange/fused/fused_moe.hpp"
#include "harness/outcome.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/low_latency.hpp"
#include "unit/expert/host_rig.hpp"
#include "unit/layer/moe_rank.hpp"

namespace switchyard {
namespace {

using detail::FusedMoe;
using detail::FusedMoeConfig;
using detail::FusedMoeMemory;
using harness::expect_text;
using harness::Outcome;
using harness::outcome_of;
using testing::HostRig;
using testing::MoeCase;

MoeLayerConfig small() {
  MoeLayerConfig c;
  c.hidden = 32;
  c.intermediate = 16;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 8;
  return c;
}

MoeLayerConfig on_gpus(DType type = DType::bf16) {
  MoeLayerConfig c = small();
  c.dtype = type;
  c.storage = WeightStorage::view;
  return c;
}

/// The exchange of a layer on `world` ranks, inferred from its heap use.
MoeExchange exchange_of(MoeLayerConfig config, int world) {
  const auto bytes = [&](MoeExchange exchange) {
    config.exchange = exchange;
    return MoeLayer::heap_bytes(config, world);
  };
  const size_t chosen = bytes(MoeExchange::automatic);
  const bool low_latency =
      config.max_tokens >= 1 && config.max_tokens <= 65535 && config.capacity == 0 && chosen == bytes(MoeExchange::low_latency);
  EXPECT_TRUE(low_latency || chosen == bytes(MoeExchange::normal));
  return low_latency ? MoeExchange::low_latency : MoeExchange::normal;
}

TEST(MoeLayerSetup, ChoosesTheExchange) {
  MoeLayerConfig c = small();
  const auto chosen = [&](int64_t tokens, int experts, int world) {
    c.max_tokens = tokens;
    c.num_experts = experts;
    return exchange_of(c, world);
  };
  EXPECT_EQ(chosen(1, 4, 1), MoeExchange::low_latency);
  EXPECT_EQ(chosen(256, 4, 2), MoeExchange::low_latency);
  EXPECT_EQ(chosen(257, 4, 2), MoeExchange::normal);
  EXPECT_EQ(chosen(0, 4, 2), MoeExchange::normal);
  EXPECT_EQ(chosen(256, 256, 8), MoeExchange::low_latency);  // 32 * 8 * 256 = 65536 rows
  EXPECT_EQ(chosen(256, 257, 8), MoeExchange::normal);       // rank 0 has 33 experts
  EXPECT_EQ(chosen(128, 256, 8), MoeExchange::low_latency);
  c.capacity = 100;
  EXPECT_EQ(chosen(1, 4, 1), MoeExchange::normal);
}

TEST(MoeLayerSetup, SaysWhatWasChosen) {
  MoeLayerConfig config = small();
  GroupOptions options;
  options.heap_bytes = MoeLayer::heap_bytes(config, 1);
  std::vector<Group> groups = Group::in_process(1, options);
  HostRig rig;
  void* const weights = rig.allocate(4 * 2 * 16 * 32 * 2);
  MoeLayer layer(groups[0], config, weights, weights);
  EXPECT_EQ(layer.config().exchange, MoeExchange::low_latency);
  EXPECT_EQ(layer.config().form, MoeForm::separate);
  EXPECT_EQ(layer.config().capacity, 0);
  const std::string text = layer.implementation();
  EXPECT_EQ(text.find("separate, low_latency, "), 0u) << text;
  EXPECT_TRUE(layer.dropped().empty());
}

// The formulas of docs/layer.md.
TEST(MoeLayerSetup, SaysItsMemory) {
  constexpr int kWorld = 2;
  MoeLayerConfig c = on_gpus();
  c.exchange = MoeExchange::normal;
  c.form = MoeForm::separate;
  NormalConfig normal;
  normal.hidden = c.hidden;
  normal.num_experts = c.num_experts;
  normal.topk = c.topk;
  normal.max_tokens = c.max_tokens;
  normal.layout = Layout::expert_major;
  const MemoryRequirement defaults = NormalExchange::memory_required(normal, kWorld, Backend::cuda);
  const int64_t rows = max_rows(normal, kWorld);
  EXPECT_EQ(rows, kWorld * 8 * 2);
  c.captured = false;
  MoeLayerMemory m = MoeLayer::memory_required(c, kWorld, Backend::cuda);
  EXPECT_EQ(m.heap_bytes, defaults.total());
  constexpr size_t kSlots = 8 * (8 * 2 + 1);  // of a call's routes, and the version of their map
  EXPECT_EQ(m.scratch_bytes, static_cast<size_t>(rows) * 16 * 2 + kSlots);
  EXPECT_EQ(m.private_bytes + m.weight_bytes, 0u);
  c.captured = true;
  EXPECT_EQ(MoeLayer::memory_required(c, kWorld, Backend::cuda).heap_bytes, defaults.total() + defaults.pool_bytes);
  c.capacity = 10;
  m = MoeLayer::memory_required(c, kWorld, Backend::cuda);
  const auto round = [](size_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  const size_t pool = defaults.pool_bytes - 2 * static_cast<size_t>(rows - 10) * 32 * 2;
  EXPECT_EQ(m.heap_bytes, defaults.control_bytes + round(2 * pool));
  EXPECT_EQ(m.scratch_bytes, 10u * 16 * 2 + kSlots);
  c.capacity = 1000;
  EXPECT_EQ(MoeLayer::memory_required(c, kWorld, Backend::cuda).scratch_bytes, static_cast<size_t>(rows) * 16 * 2 + kSlots);

  c = on_gpus(DType::fp8_e4m3);
  c.exchange = MoeExchange::low_latency;
  LowLatencyConfig low;
  low.hidden = c.hidden;
  low.num_experts = c.num_experts;
  low.topk = c.topk;
  low.max_tokens = c.max_tokens;
  m = MoeLayer::memory_required(c, kWorld, Backend::cuda);
  EXPECT_EQ(m.heap_bytes, LowLatencyExchange::memory_required(low, kWorld).total());
  const size_t kept = 2 * kWorld * 8;  // experts of rank 0 * ranks * tokens
  EXPECT_EQ(m.scratch_bytes, kept * (16 + 16));
  const size_t tables = kept * 8 + 2 * (4 + 8 * kWorld) + (kWorld + 2) * 8 * 2 * 8 + kWorld * 8 + 4096;
  EXPECT_EQ(m.private_bytes, kept * (32 + 16 + 64) + tables + 8 * 64);
  EXPECT_EQ(m.total(), m.heap_bytes + m.scratch_bytes + m.private_bytes);
}

void refused(const std::string& part, const std::function<void(MoeLayerConfig&)>& change, Backend backend = Backend::cpu,
             ErrorCode code = ErrorCode::invalid_argument) {
  MoeLayerConfig c = backend == Backend::cuda ? on_gpus() : small();
  change(c);
  expect_text(outcome_of([&] { (void)MoeLayer::memory_required(c, 2, backend); }), code, part);
  expect_text(outcome_of([&] { (void)MoeLayer::heap_bytes(c, 2, backend); }), code, part);
}

TEST(MoeLayerSetup, ErrorsNameTheField) {
  refused("MoeLayerConfig::hidden = 0: must be in [1, 16777216]", [](auto& c) { c.hidden = 0; });
  refused("MoeLayerConfig::intermediate = -1: must be in [1, ", [](auto& c) { c.intermediate = -1; });
  refused("MoeLayerConfig::num_experts = 0: must be in [1, 1048576]", [](auto& c) { c.num_experts = 0; });
  refused("MoeLayerConfig::topk = 33: must be in [1, 32]", [](auto& c) { c.topk = 33; });
  refused("MoeLayerConfig::max_tokens = -1: must be in [0, ", [](auto& c) { c.max_tokens = -1; });
  refused("MoeLayerConfig::capacity = -5: must be in [0, ", [](auto& c) { c.capacity = -5; });
  refused("MoeLayerConfig::dtype = f32: must be bf16, and on GPUs f16 or fp8_e4m3", [](auto& c) { c.dtype = DType::f32; });
  refused(
      "MoeLayerConfig::dtype = f16: must be bf16 on the CPU", [](auto& c) { c.dtype = DType::f16; }, Backend::cpu,
      ErrorCode::unsupported);
  refused("MoeLayerConfig::dtype = 9: must be bf16 (0)", [](auto& c) { c.dtype = static_cast<DType>(9); });
  refused("MoeLayerConfig::order = 7: must be per_rank (0), per_route (1) or per_host (2)",
          [](auto& c) { c.order = static_cast<CombineOrder>(7); });
  refused("MoeLayerConfig::exchange = 3: must be automatic (0), normal (1) or low_latency (2)",
          [](auto& c) { c.exchange = static_cast<MoeExchange>(3); });
  refused("::form = 3: must be automatic (0), separate (1) or fused (2)", [](auto& c) { c.form = static_cast<MoeForm>(3); });
  refused("MoeLayerConfig::overflow = 3", [](auto& c) { c.overflow = static_cast<Overflow>(3); });
  refused("MoeLayerConfig::storage = 2", [](auto& c) { c.storage = static_cast<WeightStorage>(2); });
  refused("MoeLayerConfig::row_scales = 3", [](auto& c) { c.row_scales = static_cast<ScaleKind>(3); });
  refused("MoeLayerConfig::weight_scales = 3", [](auto& c) { c.weight_scales = static_cast<ScaleKind>(3); });
  refused("MoeLayerConfig::accumulate = 2", [](auto& c) { c.accumulate = static_cast<Accumulate>(2); });
  refused("MoeLayerConfig::scaling = 3", [](auto& c) { c.scaling = static_cast<ScaleGranularity>(3); });
  refused("MoeLayerConfig::intermediate_scaling = 3", [](auto& c) { c.intermediate_scaling = static_cast<OutputScaling>(3); });
  const auto low_latency = [](auto& c) { c.exchange = MoeExchange::low_latency; };
  refused("MoeLayerConfig::max_tokens (low_latency) = 0: must be in [1, 65535]", [&](auto& c) {
    low_latency(c);
    c.max_tokens = 0;
  });
  refused("MoeLayerConfig::capacity = 4: must be 0 for low_latency", [&](auto& c) {
    low_latency(c);
    c.capacity = 4;
  });
  refused(
      "backend = 5: must be cpu (0) or cuda (1)", [](auto&) {}, static_cast<Backend>(5));
  expect_text(outcome_of([] { (void)MoeLayer::memory_required(small(), 65); }), ErrorCode::invalid_argument,
              "world = 65: must be in [1, 64]");
}

TEST(MoeLayerSetup, ErrorsOfGpusNameTheField) {
  refused(
      "MoeLayerConfig::storage = packed: must be view on GPUs", [](auto& c) { c.storage = WeightStorage::packed; },
      Backend::cuda);
  const auto fp8 = [](auto& c) { c.dtype = DType::fp8_e4m3; };
  refused(
      "MoeLayerConfig::row_scales = none: must be f32 or ue8m0 for fp8_e4m3",
      [&](auto& c) {
        fp8(c);
        c.row_scales = ScaleKind::none;
      },
      Backend::cuda);
  refused(
      "MoeLayerConfig::weight_scales = none: must be f32 or ue8m0 for fp8_e4m3",
      [&](auto& c) {
        fp8(c);
        c.weight_scales = ScaleKind::none;
      },
      Backend::cuda);
  for (const auto form : {MoeForm::automatic, MoeForm::fused})
    refused(
        "MoeLayerConfig::accumulate = fast: must be exact, but for fp8_e4m3 in the separate form",
        [&](auto& c) {
          if (form == MoeForm::fused) fp8(c);
          c.form = form;
          c.accumulate = Accumulate::fast;
        },
        Backend::cuda, ErrorCode::unsupported);
}

// On the CPU, the requirement covers the rows of FusedMoe and the memory for one worker's products. This memory is enough to
// construct a layer of this size.
TEST(MoeLayerSetup, FusedFormOfTheCpuHasProducts) {
  MoeLayerConfig c = small();
  c.form = MoeForm::fused;
  FusedMoeConfig f;
  f.hidden = c.hidden;
  f.intermediate = c.intermediate;
  f.num_experts = c.num_experts;
  f.topk = c.topk;
  f.max_tokens = c.max_tokens;
  const FusedMoeMemory rows = FusedMoe::memory_required(f, 2, Backend::cpu);
  const MoeLayerMemory packed = MoeLayer::memory_required(c, 2);
  EXPECT_EQ(packed.heap_bytes, rows.heap_bytes);
  EXPECT_GT(packed.scratch_bytes, rows.private_bytes + 256 * (32 * 2 + 2 * 16 * 4 + 32 * 4));  // plus oneDNN's own
  EXPECT_EQ(packed.private_bytes, 0u);
  ExpertOptions options;
  EXPECT_EQ(packed.weight_bytes, ExpertMlp::memory_required({32, 16, 2}, options).weight_bytes);
  c.storage = WeightStorage::view;
  EXPECT_EQ(MoeLayer::memory_required(c, 2).weight_bytes, 0u);

  GroupOptions group_options;
  group_options.heap_bytes = MoeLayer::heap_bytes(c, 1);
  std::vector<Group> groups = Group::in_process(1, group_options);
  HostRig rig;
  void* const weights = rig.allocate(4 * 2 * 16 * 32 * 2);
  MoeLayer layer(groups[0], c, weights, weights);
  EXPECT_EQ(layer.config().exchange, MoeExchange::normal);
  EXPECT_EQ(layer.config().form, MoeForm::fused);
  EXPECT_EQ(layer.implementation(),
            "fused, normal, " + ExpertMlp({32, 16, 4}, weights, weights, {.storage = c.storage}).implementation());
}

// A fused layer requires the memory of FusedMoe for any exchange setting, and no additional memory for separate calls.
TEST(MoeLayerSetup, FusedFormHasTheMemoryOfFusedMoe) {
  MoeLayerConfig c = on_gpus();
  c.form = MoeForm::fused;
  FusedMoeConfig f;
  f.hidden = c.hidden;
  f.intermediate = c.intermediate;
  f.num_experts = c.num_experts;
  f.topk = c.topk;
  f.max_tokens = c.max_tokens;
  for (const MoeExchange exchange : {MoeExchange::automatic, MoeExchange::normal}) {
    for (const int64_t capacity : {int64_t{0}, int64_t{5}}) {
      for (const int world : {1, 2, 3}) {
        c.exchange = exchange;
        c.capacity = f.capacity = capacity;
        const FusedMoeMemory fused = FusedMoe::memory_required(f, world);
        const MoeLayerMemory layer = MoeLayer::memory_required(c, world, Backend::cuda);
        EXPECT_EQ(layer.heap_bytes, fused.heap_bytes);
        EXPECT_EQ(layer.scratch_bytes, fused.private_bytes);
        EXPECT_EQ(layer.total(), fused.heap_bytes + fused.private_bytes);
        EXPECT_EQ(MoeLayer::heap_bytes(c, world, Backend::cuda), FusedMoe::heap_bytes(f, world));
        c.order = f.order = CombineOrder::per_rank;
        EXPECT_EQ(MoeLayer::heap_bytes(c, world, Backend::cuda), FusedMoe::heap_bytes(f, world));
        c.order = f.order = CombineOrder::per_route;
      }
    }
  }
  c.hidden = 36;
  expect_text(outcome_of([&] { (void)MoeLayer::memory_required(c, 2, Backend::cuda); }), ErrorCode::invalid_argument,
              "hidden = 36: must be a multiple of 8");
}

TEST(MoeLayerSetup, FusedFormInFp8) {
  MoeLayerConfig c = on_gpus();
  c.form = MoeForm::fused;
  c.hidden = 1024;
  c.intermediate = 256;
  const size_t bf16 = MoeLayer::memory_required(c, 2, Backend::cuda).total();
  c.dtype = DType::fp8_e4m3;
  EXPECT_LT(MoeLayer::memory_required(c, 2, Backend::cuda).total(), bf16);
  const auto refused = [&](const std::string& part, const std::function<void(MoeLayerConfig&)>& change) {
    MoeLayerConfig other = c;
    change(other);
    expect_text(outcome_of([&] { (void)MoeLayer::memory_required(other, 2, Backend::cuda); }), ErrorCode::invalid_argument,
                part);
  };
  refused("hidden = 1088: must be a multiple of 128 for fp8_e4m3", [](auto& o) { o.hidden = 1088; });
  refused("intermediate = 192: must be a multiple of 128 for fp8_e4m3", [](auto& o) { o.intermediate = 192; });
  refused("hidden (fp8) = 65664: must be in [128, 65536]", [](auto& o) { o.hidden = 65664; });
}

// The memory reveals the form: separate calls have a pool, and the fused form has none.
TEST(MoeLayerSetup, AutomaticFormIsFusedForBf16OnGpus) {
  const auto chosen = [](Backend backend, const std::function<void(MoeLayerConfig&)>& change) {
    MoeLayerConfig c = backend == Backend::cuda ? on_gpus() : small();
    c.exchange = MoeExchange::normal;
    change(c);
    const auto heap = [&](MoeForm form) {
      c.form = form;
      return MoeLayer::memory_required(c, 2, backend).heap_bytes;
    };
    const size_t automatic = heap(MoeForm::automatic), separate = heap(MoeForm::separate);
    if (automatic == separate) return MoeForm::separate;
    EXPECT_EQ(automatic, heap(MoeForm::fused));
    return MoeForm::fused;
  };
  EXPECT_EQ(chosen(Backend::cuda, [](auto&) {}), MoeForm::fused);
  EXPECT_EQ(chosen(Backend::cuda, [](auto& c) { c.exchange = MoeExchange::automatic, c.max_tokens = 4096; }), MoeForm::fused);
  EXPECT_EQ(chosen(Backend::cpu, [](auto&) {}), MoeForm::separate);
  EXPECT_EQ(chosen(Backend::cuda, [](auto& c) { c.exchange = MoeExchange::low_latency; }), MoeForm::separate);
  EXPECT_EQ(chosen(Backend::cuda, [](auto& c) { c.exchange = MoeExchange::automatic; }), MoeForm::separate);
  EXPECT_EQ(chosen(Backend::cuda, [](auto& c) { c.order = CombineOrder::per_rank; }), MoeForm::separate);
  EXPECT_EQ(chosen(Backend::cuda, [](auto& c) { c.dtype = DType::f16; }), MoeForm::separate);
  EXPECT_EQ(chosen(Backend::cuda, [](auto& c) { c.dtype = DType::fp8_e4m3, c.hidden = 256, c.intermediate = 128; }),
            MoeForm::separate);
  MoeLayerConfig c = on_gpus();  // more experts than the fused form supports
  c.exchange = MoeExchange::normal;
  c.num_experts = 5000;
  const size_t automatic = MoeLayer::memory_required(c, 3, Backend::cuda).heap_bytes;
  c.form = MoeForm::separate;
  EXPECT_EQ(automatic, MoeLayer::memory_required(c, 3, Backend::cuda).heap_bytes);
}

// The error names the field that requests the form, even if changing another field would also help.
TEST(MoeLayerSetup, FusedFormIsRefusedWhereThereIsNone) {
  const auto refused = [](Backend backend, const std::function<void(MoeLayerConfig&)>& change) {
    MoeLayerConfig c = backend == Backend::cuda ? on_gpus() : small();
    c.form = MoeForm::fused;
    change(c);
    const std::string part = "MoeLayerConfig::form = fused: must be separate or automatic, ";
    expect_text(outcome_of([&] { (void)MoeLayer::memory_required(c, 2, backend); }), ErrorCode::unsupported, part);
    expect_text(outcome_of([&] { (void)MoeLayer::heap_bytes(c, 2, backend); }), ErrorCode::unsupported, part);
  };
  refused(Backend::cpu, [](auto& c) { c.order = CombineOrder::per_host; });
  refused(Backend::cpu, [](auto& c) { c.exchange = MoeExchange::low_latency; });
  refused(Backend::cuda, [](auto& c) { c.dtype = DType::f16; });
  refused(Backend::cuda, [](auto& c) { c.order = CombineOrder::per_host; });
  refused(Backend::cuda, [](auto& c) { c.exchange = MoeExchange::low_latency; });
}

/// Size in bytes of the larger of a layer's two weight arrays, for all its experts.
size_t weight_bytes(const MoeLayerConfig& c) {
  return 2 * static_cast<size_t>(c.num_experts) * 2 * static_cast<size_t>(c.intermediate * c.hidden);
}

/// Outcome of constructing a layer on each of two ranks; `change` modifies the settings of a rank. If the group is still
/// usable, each rank then constructs another layer.
std::vector<Outcome> constructions(const std::function<void(int, MoeLayerConfig&)>& change, size_t heap_bytes = 0,
                                   bool without_weights = false) {
  if (heap_bytes == 0) heap_bytes = 2 * MoeLayer::heap_bytes(small(), 2);
  return harness::outcomes(2, harness::options_with(std::chrono::seconds(20), heap_bytes), [&](Group& group) {
    HostRig rig;
    MoeLayerConfig config = small();
    change(group.rank(), config);
    void* const weights = rig.allocate(std::max(weight_bytes(small()), weight_bytes(config)));
    const Outcome end = outcome_of([&] { MoeLayer layer(group, config, without_weights ? nullptr : weights, weights); });
    group.barrier();  // the group is still usable
    if (heap_bytes >= MoeLayer::heap_bytes(small(), 2)) MoeLayer(group, small(), weights, weights);
    if (end.code != ErrorCode::ok) throw Error(end.code, end.text);
  });
}

/// Ranks may load their weights at very different times, although the call deadline may be short.
TEST(MoeLayerSetup, WaitsForTheRendezvousDeadline) {
  for (const MoeForm form : {MoeForm::separate, MoeForm::fused})
    for (const MoeExchange exchange : {MoeExchange::normal, MoeExchange::low_latency}) {
      if (form == MoeForm::fused && exchange == MoeExchange::low_latency) continue;
      const size_t heap_bytes = 2 * MoeLayer::heap_bytes(small(), 2) + (size_t{1} << 20);
      const auto all =
          harness::outcomes(2, harness::options_with(std::chrono::milliseconds(100), heap_bytes), [&](Group& group) {
            HostRig rig;
            MoeLayerConfig config = small();
            config.form = form;
            config.exchange = exchange;
            void* const weights = rig.allocate(weight_bytes(config));
            if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
            MoeLayer layer(group, config, weights, weights);
          });
      for (const Outcome& o : all) EXPECT_EQ(harness::code_name(o.code), "ok") << o.text;
    }
}

TEST(MoeLayerSetup, FailsOnAllRanksAlike) {
  const auto both = [](const std::vector<Outcome>& all, ErrorCode code, const std::string& part) {
    for (const Outcome& found : all) expect_text(found, code, part);
  };
  both(constructions([](int rank, MoeLayerConfig& c) { c.topk = rank == 1 ? 0 : 2; }), ErrorCode::invalid_argument,
       "MoeLayer, rank 1: MoeLayerConfig::topk = 0: must be in [1, 32]");
  both(constructions([](int rank, MoeLayerConfig& c) { c.intermediate = rank == 1 ? 24 : 16; }), ErrorCode::mismatch,
       "MoeLayerConfig::intermediate = 16 on rank 0 and 24 on rank 1: must be equal on all ranks");
  const auto fuse = [](MoeLayerConfig& c) { c.form = MoeForm::fused; };
  both(constructions([&](int rank, MoeLayerConfig& c) {
         fuse(c);
         if (rank == 1) c.order = CombineOrder::per_host;
       }),
       ErrorCode::unsupported, "MoeLayer, rank 1: MoeLayerConfig::form = fused: must be ");
  both(constructions([&](int rank, MoeLayerConfig& c) {
         fuse(c);
         if (rank == 1) c.order = CombineOrder::per_rank;
       }),
       ErrorCode::mismatch, "MoeLayerConfig::order = per_route on rank 0 and per_rank on rank 1: must be equal on all ranks");
  both(constructions([&](int rank, MoeLayerConfig& c) {
         c.exchange = MoeExchange::normal;
         if (rank == 1) fuse(c);
       }),
       ErrorCode::mismatch, "MoeLayerConfig::form = separate on rank 0 and fused on rank 1: must be equal on all ranks");
  both(constructions([&](int, MoeLayerConfig& c) {
         fuse(c);
         c.intermediate = 20;
       }),
       ErrorCode::invalid_argument, "MoeLayer, rank 0: MoeLayerConfig::intermediate = 20: must be a multiple of 8");
  both(constructions([&](int, MoeLayerConfig& c) { fuse(c); }, 0, true), ErrorCode::invalid_argument,
       "MoeLayer, rank 0: MoeLayer: w13 is null");
  const auto many_tokens = [&](int, MoeLayerConfig& c) {
    fuse(c);
    c.max_tokens = 600;
  };
  both(constructions(many_tokens, size_t{1} << 14), ErrorCode::heap_exhausted, "");
  both(constructions([](int, MoeLayerConfig&) {}, 0, true), ErrorCode::invalid_argument,
       "MoeLayer, rank 0: ExpertMlp: w13 is null");
  both(constructions([](int, MoeLayerConfig&) {}, size_t{1} << 14), ErrorCode::heap_exhausted, "");
  both(constructions([](int, MoeLayerConfig& c) {
         c.exchange = MoeExchange::normal;
         c.hidden = 36;
       }),
       ErrorCode::invalid_argument, "hidden = 36");
}

/// Outcome of a call on each of two ranks. The first rank passes an invalid argument.
std::vector<Outcome> calls(MoeExchange exchange, MoeForm form,
                           const std::function<void(MoeLayer&, const void*, void*)>& wrong) {
  MoeLayerConfig config = small();
  config.exchange = exchange;
  config.form = form;
  const size_t bytes = MoeLayer::heap_bytes(config, 2);
  return harness::outcomes(2, harness::options_with(std::chrono::seconds(20), bytes), [&](Group& group) {
    HostRig rig;
    void* const weights = rig.allocate(2 * 2 * 16 * 32 * 2);
    const void* const x = rig.allocate(8 * 32 * 2);
    void* const out = rig.allocate(8 * 32 * 2);
    const std::vector<int32_t> ids(16, 3);
    MoeLayer layer(group, config, weights, weights);
    group.barrier();
    if (group.rank() == 0) return wrong(layer, x, out);
    layer.forward(x, ExpertIds::of(ids.data(), 8, 2), nullptr, out, {});
  });
}

TEST(MoeLayerSetup, ACallThatIsRefusedEndsThoseOfItsPeers) {
  const std::vector<int32_t> ids(24, 3);
  const std::pair<MoeExchange, MoeForm> kinds[] = {{MoeExchange::normal, MoeForm::separate},
                                                   {MoeExchange::low_latency, MoeForm::separate},
                                                   {MoeExchange::normal, MoeForm::fused}};
  for (const auto& [exchange, form] : kinds) {
    const char* const rows = form == MoeForm::fused ? "x is null" : "x.data";
    const auto refused = [&, exchange = exchange, form = form](
                             const std::string& part, const std::function<void(MoeLayer&, const void*, void*)>& wrong) {
      const std::vector<Outcome> found = calls(exchange, form, wrong);
      expect_text(found[0], ErrorCode::invalid_argument, part);
      expect_text(found[1], ErrorCode::peer_failed, "rank 0");
    };
    refused("topk_ids.topk = 3",
            [&](MoeLayer& l, const void* x, void* out) { l.forward(x, ExpertIds::of(ids.data(), 8, 3), nullptr, out); });
    refused("topk_ids.num_tokens = 9",
            [&](MoeLayer& l, const void* x, void* out) { l.forward(x, ExpertIds::of(ids.data(), 9, 2), nullptr, out); });
    refused("topk_ids.num_tokens = 9", [&](MoeLayer& l, const void* x, void* out) {
      const int32_t tokens = 3;
      l.forward(x, ExpertIds::of(ids.data(), 9, 2), nullptr, out, {.device_tokens = &tokens});
    });
    refused(rows,
            [&](MoeLayer& l, const void*, void* out) { l.forward(nullptr, ExpertIds::of(ids.data(), 8, 2), nullptr, out); });
    for (const bool add : {false, true}) {
      refused("out is null", [&](MoeLayer& l, const void* x, void*) {
        l.forward(x, ExpertIds::of(ids.data(), 8, 2), nullptr, nullptr, {.add = add});
      });
    }
  }
}

}  // namespace
}  // namespace switchyard
