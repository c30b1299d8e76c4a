// SPDX-License-Identifier: Apache-2.0
// The fused layer completes and produces the same bits on one multiprocessor, alongside kernels that occupy half of the GPU,
// with row offsets beyond 32 bits, and in thousands of consecutive calls of all kinds.
#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gpu/gemm/moe_calls.hpp"
#include "gpu/kernels/full_gpu.hpp"
#include "gpu/kernels/layer_rows.hpp"

namespace harness {
namespace {

using switchyard::Backend;
using switchyard::MoeForm;
using switchyard::MoeLayer;
using switchyard::MoeLayerCall;
using switchyard::MoeLayerConfig;
using switchyard::testing::MoeCase;

int gpus() {
  int count = 0;
  must(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

// ---- few blocks

class FusedOnFewMultiprocessors : public testing::TestWithParam<MoeCase> {};

/// One block, or in fp8 one cluster of two blocks, performs all roles for all tiles of its rank. The number of blocks may
/// differ by rank.
TEST_P(FusedOnFewMultiprocessors, GivesTheSameBits) {
  const MoeCase& m = GetParam();
  const int least = m.fp8 ? 2 : 1;
  on_gpus(m.c.world(), m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    for (uint32_t call = 0; call < 3; ++call) run_call(me, rank, call, false, [&] { rank.forward({.num_sms = least}); });
    run_call(me, rank, 3, true, [&] { rank.forward({.num_sms = least + 2 * me.rank(), .add = true}); });
    me.group.check();
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, FusedOnFewMultiprocessors, testing::ValuesIn(fused_cases()),
                         [](const auto& c) { return c.param.c.name; });
INSTANTIATE_TEST_SUITE_P(GpuInFp8, FusedOnFewMultiprocessors, testing::ValuesIn(fused_fp8_cases()),
                         [](const auto& c) { return c.param.c.name; });

TEST(FusedOnOneMultiprocessor, WithoutAnotherRank) {
  const MoeCase m{.c = {.name = "alone", .tokens = {90}}, .form = MoeForm::fused};
  on_gpus(1, m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    for (uint32_t call = 0; call < 3; ++call) run_call(me, rank, call, false, [&] { rank.forward({.num_sms = 1}); });
    me.group.check();
    me.meet();
  });
}

// ---- alongside another kernel

class FusedBesideAKernel : public testing::TestWithParam<int> {};

/// A foreign kernel occupies half of each GPU's multiprocessors until the layer has ended. A rank with a GPU to itself launches
/// more blocks than fit; ranks that share a GPU use a quarter each, so all blocks fit.
TEST_P(FusedBesideAKernel, ThatHoldsHalfOfTheGpu) {
  const int world = GetParam();
  MoeCase m{.c = {.name = "beside a kernel", .experts = 9, .topk = 4, .hidden = 512, .tokens = {300}}, .form = MoeForm::fused};
  if (world == 2) m.c.tokens = {300, 211};
  on_gpus(world, m.heap_bytes(Backend::cuda), [&](Station& me) {
    int all = 0;
    must(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, me.device()), "device attribute");
    const bool shared = me.rank() >= gpus() || me.rank() + gpus() < world;
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    std::optional<HeldMultiprocessors> held;
    if (me.rank() < gpus()) held.emplace(me, all / 2);
    me.meet();
    run_call(me, rank, 0, false, [&] { rank.forward(); });
    for (uint32_t call = 1; call < 4; ++call) {
      rank.write(call);
      me.meet();
      rank.by_hand(false);
      me.meet();
      if (held) held->hold(30s);
      me.gather();
      rank.forward({.num_sms = shared ? all / 4 : 0});
      const bool ended = idle_within(me.stream(), 5s);
      me.f.check(ended, "call " + std::to_string(call) + " waits for a kernel that holds half of the GPU");
      me.gather();
      if (held) {
        me.f.check(held->holding(), "the kernel did not hold its half until the layer had ended");
        held->release();
      }
      me.meet();
      me.f.equal(std::string(), rank.judge_bits(call, false), "call " + std::to_string(call));
      me.meet();
    }
    me.group.check();
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, FusedBesideAKernel, testing::Values(1, 2),
                         [](const auto& world) { return "W" + std::to_string(world.param); });

// ---- many rows

/// Device memory for data that does not fit into a station. Must be allocated while no rank waits for another.
class BigMemory {
 public:
  template <class T>
  T* take(int64_t count) {
    void* at = nullptr;
    must(cudaMalloc(&at, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
    all_.push_back(at);
    return static_cast<T*>(at);
  }
  BigMemory() = default;
  BigMemory(const BigMemory&) = delete;
  ~BigMemory() {
    for (void* at : all_) (void)cudaFree(at);
  }

 private:
  std::vector<void*> all_;
};

/// 300 000 rows of 14 336 bytes: offsets of rows, tiles and outputs exceed 32 bits. Every word is compared with the result of
/// the separate form.
TEST(FusedWithManyRows, OffsetsBeyond32Bits) {
  constexpr int64_t kTokens = 37500, kHidden = 7168, kIntermediate = 128;
  constexpr int kExperts = 16, kTopk = 8;
  static_assert(kTokens * kTopk * kHidden > int64_t{1} << 31);
  MoeLayerConfig config;
  config.hidden = kHidden;
  config.intermediate = kIntermediate;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.max_tokens = kTokens;
  config.exchange = switchyard::MoeExchange::normal;
  config.captured = false;
  config.storage = switchyard::WeightStorage::view;
  MoeLayerConfig fused = config;
  fused.form = MoeForm::fused;
  const size_t heap = MoeLayer::heap_bytes(config, 1, Backend::cuda) + MoeLayer::heap_bytes(fused, 1, Backend::cuda);
  const auto body = [&](Station& me) {
    BigMemory memory;
    auto* const x = memory.take<uint16_t>(kTokens * kHidden);
    auto* const outs = memory.take<uint16_t>(2 * kTokens * kHidden);
    auto* const w13 = memory.take<uint16_t>(int64_t{kExperts} * 2 * kIntermediate * kHidden);
    auto* const w2 = memory.take<uint16_t>(int64_t{kExperts} * kHidden * kIntermediate);
    auto* const ids = memory.take<int32_t>(kTokens * kTopk);
    auto* const weights = memory.take<float>(kTokens * kTopk);
    auto* const found = memory.take<unsigned long long>(2);
    launch_layer_rows(x, kTokens * kHidden, 1, 1.f, me.stream());
    launch_layer_rows(w13, int64_t{kExperts} * 2 * kIntermediate * kHidden, 2, 1.f / 32, me.stream());
    launch_layer_rows(w2, int64_t{kExperts} * kHidden * kIntermediate, 3, 1.f / 8, me.stream());
    launch_layer_ids(ids, kTokens, kTopk, kExperts, me.stream());
    launch_layer_weights(weights, kTokens * kTopk, 4, me.stream());
    must(cudaMemsetAsync(outs, 0xFF, static_cast<size_t>(2 * kTokens * kHidden) * 2, me.stream()), "memset");
    me.meet();
    {
      MoeLayer separate(me.group, config, w13, w2), at_once(me.group, fused, w13, w2);
      me.meet();
      const auto routes = switchyard::ExpertIds::of(ids, kTokens, kTopk);
      separate.forward(x, routes, weights, outs, {.stream = me.stream()});
      for (int call = 0; call < 2; ++call)
        at_once.forward(x, routes, weights, outs + kTokens * kHidden, {.stream = me.stream()});
      me.meet();
      me.group.check();
    }
    const unsigned long long none[2] = {0, ~0ull};
    must(cudaMemcpyAsync(found, none, sizeof none, cudaMemcpyHostToDevice, me.stream()), "copy to the device");
    launch_compare(reinterpret_cast<const uint32_t*>(outs), reinterpret_cast<const uint32_t*>(outs + kTokens * kHidden),
                   kTokens * kHidden / 2, found, found + 1, me.stream());
    me.meet();
    unsigned long long differ[2];
    me.read(differ, found, sizeof differ);
    me.f.equal(0ull, differ[0], "words that differ, the first in token " + std::to_string(differ[1] * 2 / kHidden));
    std::vector<uint16_t> last(kHidden);
    me.read(last.data(), outs + (2 * kTokens - 1) * kHidden, kHidden * 2);
    const auto odd = [](uint16_t v) { return (v & 0x7F80) == 0x7F80; };
    me.f.check(std::none_of(last.begin(), last.end(), odd), "outputs are not finite");
    me.f.check(std::any_of(last.begin(), last.end(), [](uint16_t v) { return (v & 0x7FFF) != 0; }), "outputs are zero");
    me.meet();
  };
  isolated([&] { on_gpus(1, heap, 30s, body); }, 120s);
}

// ---- thousands of calls

/// Kind of the next call, identical on all ranks. Only the token and multiprocessor counts may differ.
enum class Kind { plain, varying, adding };

/// Calls with one shape, each made directly or through one of three graphs.
class ManyCalls {
 public:
  ManyCalls(Station& me, MoeGpuRank& rank, uint32_t seed)
      : me_(me), rank_(rank), common_(seed), own_(seed * 64 + 1 + static_cast<uint32_t>(me.rank())) {
    for (const Kind kind : {Kind::plain, Kind::varying, Kind::adding})
      graphs_.push_back(std::make_unique<Graph>(me, [&] { rank_.forward(arguments(kind)); }));
  }
  void destroy() {
    for (const auto& graph : graphs_) graph->destroy();
  }

  /// Makes several consecutive calls, the last of which writes all rows, or a single call of another kind. Returns their
  /// number.
  int round(uint32_t number) {
    rank_.write(number);
    me_.meet();
    const bool burst = pick(3) != 0;
    const Kind last = burst ? Kind::plain : pick(2) == 0 ? Kind::varying : Kind::adding;
    const int calls = burst ? 2 + pick(9) : 1;
    int64_t rows = -1;
    for (int call = 1; call < calls; ++call) (void)enqueue(pick(2) == 0 ? Kind::plain : Kind::varying);
    rows = enqueue(last);
    me_.meet();
    if (number % 4 != 0 && burst) return calls;
    rank_.by_hand(last == Kind::adding);
    me_.meet();
    me_.f.equal(std::string(), rank_.judge_bits(number, last == Kind::adding, rows), "round " + std::to_string(number));
    me_.meet();
    return calls;
  }

 private:
  int pick(uint32_t below) { return static_cast<int>(common_() % below); }
  MoeLayerCall arguments(Kind kind) {
    MoeLayerCall call;
    if (kind != Kind::plain) call.device_tokens = rank_.device_tokens();
    call.add = kind == Kind::adding;
    return call;
  }
  /// \returns the number of tokens; -1: all
  int64_t enqueue(Kind kind) {
    int64_t rows = -1;
    if (kind != Kind::plain) {
      rows = static_cast<int64_t>(own_() % static_cast<uint32_t>(rank_.tokens() + 3));
      if (own_() % 5 == 0) rows = 0;
      launch_set(rank_.device_tokens(), static_cast<int32_t>(rows), me_.stream());
    }
    if (pick(2) == 0) {
      graphs_[static_cast<size_t>(kind)]->launch();
      return rows;
    }
    MoeLayerCall call = arguments(kind);
    constexpr int kSms[] = {0, 1, 3, 16};
    call.num_sms = kSms[own_() % 4];
    rank_.forward(call);
    return rows;
  }

  Station& me_;
  MoeGpuRank& rank_;
  std::mt19937 common_, own_;
  std::vector<std::unique_ptr<Graph>> graphs_;
};

std::vector<MoeCase> shapes_of_many_calls() {
  std::vector<MoeCase> all = {
      {.c = {.name = "two ranks", .tokens = {40, 25}}},
      {.c = {.name = "narrow", .experts = 7, .topk = 5, .hidden = 72, .intermediate = 8, .tokens = {33, 1}}},
      {.c = {.name = "one expert", .experts = 1, .topk = 1, .hidden = 128, .tokens = {5, 200}}},
      {.c = {.name = "a rank without tokens", .experts = 16, .topk = 8, .tokens = {0, 60}}},
      {.c = {.name = "alone", .experts = 33, .topk = 2, .intermediate = 264, .tokens = {120}}}};
  for (MoeCase& m : all) m.form = MoeForm::fused;
  return all;
}

/// 3000 calls of all kinds. Every fourth round, and every call with different tokens or with rows to add to, is compared bit by
/// bit.
TEST(FusedCalls, ThousandsOfAllKinds) {
  constexpr int kCalls = 600;  // of each shape
  isolated(
      [&] {
        uint32_t seed = 1;
        for (const MoeCase& m : shapes_of_many_calls()) {
          on_gpus(m.c.world(), m.heap_bytes(Backend::cuda), [&](Station& me) {
            me.f.set_context(m.c.name);
            GpuRig rig(me);
            MoeGpuRank rank(rig, me.group, m);
            me.meet();
            ManyCalls calls(me, rank, seed);
            me.meet();
            int made = 0;
            for (uint32_t number = 0; made < kCalls && !me.f.any(); ++number) made += calls.round(number);
            me.group.check();
            me.meet();
            calls.destroy();
            me.meet();
          });
          ++seed;
        }
      },
      120s);
}

}  // namespace
}  // namespace harness
