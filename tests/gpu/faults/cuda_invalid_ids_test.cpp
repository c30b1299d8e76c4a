// SPDX-License-Identifier: Apache-2.0
// Ids on a GPU that are neither -1 nor an expert. Calls, including replayed ones, drop and count their routes. For objects with
// InvalidIds::raise, Group::check() raises an error that states the count. The suites in tests/modes compare the counts of each
// call with the oracle.
#include <functional>
#include <string>
#include <vector>

#include "exchange/fused/fused_moe.hpp"
#include "gpu/harness/object_rig.hpp"
#include "harness/small_arguments.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {
namespace {

using switchyard::ExpertIds;
using switchyard::InvalidIds;

/// Calls on one object with ids on the GPU; T = 6, K = 2, E = 8.
struct Counted {
  std::function<void(const ExpertIds&)> call;
  std::function<int64_t()> invalid_ids;
};

/// A rank's arguments on its GPU.
struct OnGpu : SmallArguments {
  explicit OnGpu(Station& station) : SmallArguments(station.rank()), me(station) {
    x_ = me.upload(rows.data(), rows.size() * 2);
    weights_ = static_cast<const float*>(me.upload(weights.data(), weights.size() * 4));
    out_ = me.allocate(rows.size() * 2);
  }
  switchyard::ConstRows x() const { return {x_, kTokens, kHidden, switchyard::DType::bf16}; }
  /// The rank's ids: the first `invalid` are invalid, and one is -1.
  template <class Id>
  ExpertIds ids_with(int invalid) {
    std::vector<Id> all(ids.begin(), ids.end());
    const int64_t outside[] = {kExperts, -2, sizeof(Id) == 8 ? kWideId : 1 << 30};
    for (int i = 0; i < invalid; ++i) all[static_cast<size_t>(i)] = static_cast<Id>(outside[i % 3]);
    all.back() = -1;
    return ExpertIds::of(static_cast<const Id*>(me.upload(all.data(), all.size() * sizeof(Id))), kTokens, kTopk);
  }

  Station& me;
  const void* x_;
  const float* weights_;
  void* out_;
};

template <class Config>
Config counting(Config config, InvalidIds policy) {
  config = SmallArguments::sized(config);
  config.invalid_ids = policy;
  return config;
}

struct Mode {
  const char* name;
  const char* object;  ///< name of the object in errors
  std::function<Counted(OnGpu&, InvalidIds)> make;
};

Counted normal(OnGpu& on, InvalidIds policy, switchyard::Layout layout) {
  NormalConfig config = counting(NormalConfig(), policy);
  config.layout = layout;
  const auto exchange = std::make_shared<NormalExchange>(on.me.group, config);
  return {[=, &on](const ExpertIds& ids) {
            DispatchOptions o;
            o.stream = on.me.stream();
            o.num_sms = 2;
            const Dispatched d = exchange->dispatch(on.x(), ids, on.weights_, o);
            CombineOptions back;
            back.stream = on.me.stream();
            back.num_sms = 2;
            exchange->combine(d.x, d.handle, on.out_, back);
          },
          [=] { return exchange->invalid_ids(); }};
}

switchyard::LowLatencyConfig plain() {
  switchyard::LowLatencyConfig config;
  config.scales = switchyard::ScaleKind::none;
  return config;
}

std::vector<Mode> modes() {
  return {{"by_rank", "NormalExchange", [](OnGpu& on, InvalidIds p) { return normal(on, p, Layout::rank_major); }},
          {"by_expert", "NormalExchange", [](OnGpu& on, InvalidIds p) { return normal(on, p, Layout::expert_major); }},
          {"low_latency", "LowLatencyExchange",
           [](OnGpu& on, InvalidIds p) {
             const auto exchange = std::make_shared<switchyard::LowLatencyExchange>(on.me.group, counting(plain(), p));
             const auto output = std::make_shared<switchyard::LowLatencyOutput>(exchange->make_output());
             return Counted{[=, &on](const ExpertIds& ids) {
                              switchyard::LowLatencyDispatchOptions o;
                              o.stream = on.me.stream();
                              o.num_sms = 2;
                              exchange->dispatch(on.x(), ids, *output, o);
                              switchyard::LowLatencyCombineOptions back;
                              back.stream = on.me.stream();
                              back.num_sms = 2;
                              exchange->combine(output->x, *output, on.out_, back);
                            },
                            [=] { return exchange->invalid_ids(); }};
           }},
          {"flat", "LowLatencyExchange",
           [](OnGpu& on, InvalidIds p) {
             const auto exchange = std::make_shared<switchyard::LowLatencyExchange>(on.me.group, counting(plain(), p));
             return Counted{[=, &on](const ExpertIds& ids) {
                              switchyard::AllToAllOptions o;
                              o.stream = on.me.stream();
                              o.num_sms = 2;
                              exchange->moe_all_to_all(on.x(), ids, on.out_, o);
                            },
                            [=] { return exchange->invalid_ids(); }};
           }},
          {"fused", "MoeLayer", [](OnGpu& on, InvalidIds p) {
             auto config = counting(switchyard::detail::FusedMoeConfig(), p);
             config.intermediate = 64;
             const void* const w13 = on.me.allocate(2 * 64 * 64 * 2 * SmallArguments::kExperts);
             const void* const w2 = on.me.allocate(64 * 64 * 2 * SmallArguments::kExperts);
             const auto layer = std::make_shared<switchyard::detail::FusedMoe>(on.me.group, config, w13, w2);
             return Counted{[=, &on](const ExpertIds& ids) {
                              switchyard::detail::FusedMoeCall call;
                              call.stream = on.me.stream();
                              call.num_sms = 4;
                              layer->forward(on.x_, ids, on.weights_, on.out_, call);
                            },
                            [=] { return layer->invalid_ids(); }};
           }}};
}
void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

class GpuInvalidIds : public testing::TestWithParam<Mode> {};

/// `fresh`: the number of invalid ids since the last check.
void expect_check(Station& me, const Mode& mode, int64_t fresh) {
  const Outcome o = outcome_of([&] { me.group.check(); });
  if (fresh == 0) {
    me.f.equal(std::string("ok"), code_name(o.code), "check: " + o.text);
    return;
  }
  const std::string text =
      std::string(mode.object) + " (object 1 of the group): " + std::to_string(fresh) + " ids were neither";
  me.f.equal(std::string("invalid_argument"), code_name(o.code), "check: " + o.text);
  me.f.check(o.text.find(text) != std::string::npos, "'" + o.text + "' should contain '" + text + "'");
}

TEST_P(GpuInvalidIds, AreCountedAndRaisedByCheck) {
  constexpr int kWorld = 2, kReplays = 3;
  for (const InvalidIds policy : {InvalidIds::raise, InvalidIds::count}) {
    on_gpus(kWorld, size_t{64} << 20, [&](Station& me) {
      OnGpu on(me);
      const Counted counted = GetParam().make(on, policy);
      const int invalid = me.rank() + 2;
      const ExpertIds good = on.ids_with<int32_t>(0), narrow = on.ids_with<int32_t>(invalid),
                      wide = on.ids_with<int64_t>(invalid);
      const auto raised = [&](int64_t n) { return policy == InvalidIds::raise ? n : 0; };
      me.meet();
      counted.call(good);
      me.meet();
      expect_check(me, GetParam(), 0);
      me.f.equal(int64_t{0}, counted.invalid_ids(), "no invalid ids");
      me.gather();
      counted.call(narrow);
      counted.call(wide);
      me.meet();
      expect_check(me, GetParam(), raised(2 * invalid));
      expect_check(me, GetParam(), 0);
      me.f.equal(int64_t{2} * invalid, counted.invalid_ids(), "invalid ids");
      me.gather();
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "capture");
      counted.call(wide);
      must(cudaStreamEndCapture(me.stream(), &graph), "capture");
      must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
      me.meet();
      for (int i = 0; i < kReplays; ++i) must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
      me.meet();
      expect_check(me, GetParam(), raised(kReplays * invalid));
      me.f.equal(int64_t{2 + kReplays} * invalid, counted.invalid_ids(), "invalid ids of replays");
      me.meet();
      must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
      must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuInvalidIds, testing::ValuesIn(modes()),
                         [](const auto& m) { return std::string(m.param.name); });

}  // namespace
}  // namespace harness
