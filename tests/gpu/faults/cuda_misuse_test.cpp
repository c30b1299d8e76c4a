// SPDX-License-Identifier: Apache-2.0
// Invalid arguments on one rank of a CUDA group: a typed error that names the argument on that rank, PeerFailed on the others
// long before any deadline (which would cause PeerTimeout), and a context that the next group can use.
#include <algorithm>
#include <tuple>

#include "exchange/normal/known_memory.hpp"
#include "gpu/harness/gpu_ranks.hpp"
#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

/// A valid call, and the change that makes it invalid.
struct Call {
  Station& me;
  NormalExchange& exchange;
  NormalExchange& other_shape;  ///< has one more expert
  const Case& c;
  Inputs in;
  bool bad;
  std::byte* spare;           ///< device memory, 8192 bytes
  std::byte* foreign;         ///< memory of another GPU or null
  std::vector<float> host{};  ///< host memory

  DispatchOptions dispatch_options() const { return me.dispatch_options(c, me.stream()); }
  CombineOptions combine_options() const { return me.combine_options(c, me.stream()); }
  Dispatched dispatch() { return exchange.dispatch(in.x, in.ids, in.weights, dispatch_options()); }
};

struct GpuMisuse {
  const char* name;
  const char* in_text;
  std::function<void(Call&)> body;
  ErrorCode code = ErrorCode::invalid_argument;
};

GpuMisuse of_dispatch(const char* name, const char* in_text, std::function<void(Call&, DispatchOptions&)> spoil) {
  return {name, in_text, [spoil](Call& call) {
            DispatchOptions o = call.dispatch_options();
            if (call.bad) spoil(call, o);
            (void)call.exchange.dispatch(call.in.x, call.in.ids, call.in.weights, o);
          }};
}

struct CombineArguments {
  switchyard::ConstRows y;
  void* out;
  CombineOptions options;
  float* out_weights = nullptr;
};
/// A dispatch, followed by a combine of its rows with arguments modified by set(arguments).
template <class Set>
void combine_with(Call& call, Set&& set) {
  const Dispatched d = call.dispatch();
  CombineArguments a{d.x, call.in.out, call.combine_options()};
  set(a);
  call.exchange.combine(a.y, d.handle, a.out, a.options, a.out_weights);
}

GpuMisuse of_combine(const char* name, const char* in_text, std::function<void(Call&, CombineArguments&)> spoil) {
  return {name, in_text, [spoil](Call& call) {
            combine_with(call, [&](CombineArguments& a) {
              if (call.bad) spoil(call, a);
            });
          }};
}

/// Memory on the GPU after this rank's GPU, or null if there is only one; freed when the process ends. Must be called while no
/// rank waits.
std::byte* memory_of_another_gpu(const Station& me) {
  int devices = 0;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  std::byte* memory = nullptr;
  if (devices < 2) return memory;
  must(cudaSetDevice((me.device() + 1) % devices), "cudaSetDevice");
  must(cudaMalloc(reinterpret_cast<void**>(&memory), 4096), "cudaMalloc");
  must(cudaSetDevice(me.device()), "cudaSetDevice");
  return memory;
}

std::vector<GpuMisuse> other_misuses() {
  using switchyard::ConstRows;
  return {
      of_dispatch("too_many_sms", "num_sms", [](Call&, DispatchOptions& o) { o.num_sms = 100000; }),
      of_dispatch("negative_sms", "num_sms", [](Call&, DispatchOptions& o) { o.num_sms = -1; }),
      of_dispatch("too_many_tokens", "topk_ids.num_tokens = 13",
                  [](Call& c, DispatchOptions&) { c.in.ids.num_tokens = c.in.x.rows = 13; }),
      of_dispatch("wrong_hidden", "x.cols = 72", [](Call& c, DispatchOptions&) { c.in.x.cols = 72; }),
      of_combine("combine_sms", "num_sms", [](Call&, CombineArguments& a) { a.options.num_sms = 1 << 20; }),
      {"misaligned_in_known_memory", "x.data: address must be a multiple of 16",
       [](Call& call) {
         const DispatchOptions o = call.dispatch_options();
         if (call.bad) call.in.x.data = static_cast<const std::byte*>(call.in.x.data) + 8;
         (void)switchyard::detail::NormalCalls::dispatch(call.exchange, call.in.x, call.in.ids, call.in.weights, o, true);
       }},
      {"handle_of_another_shape", "handle",
       [](Call& call) {
         const Dispatched d = call.dispatch();
         const Dispatched other = call.other_shape.dispatch(call.in.x, call.in.ids, call.in.weights, call.dispatch_options());
         (void)call.exchange.dispatch(call.in.x, call.bad ? other.handle : d.handle, call.dispatch_options());
       }},
      {"empty_handle", "handle",
       [](Call& call) {
         const Dispatched d = call.dispatch();
         call.exchange.combine(d.x, call.bad ? Handle() : d.handle, call.in.out, call.combine_options());
       }},
  };
}

/// A tensor argument: the required alignment of its address, and a call that passes `at` as this argument (null: a valid
/// address).
struct Tensor {
  const char* name;
  size_t alignment;
  std::function<void(Call&, std::byte* at)> body;
  const char* in_text = name;
};

void make_fp8(switchyard::ConstRows& x, std::byte* scales) {
  x.dtype = DType::fp8_e4m3;  // the memory of bf16 rows is large enough
  x.scale_kind = ScaleKind::f32;
  x.scales = scales;
}

Tensor of_cached(const char* name, const char* in_text, std::function<void(Call&, switchyard::ConstRows&, std::byte*)> set) {
  return {name, 16,
          [set](Call& c, std::byte* at) {
            const Dispatched d = c.dispatch();
            switchyard::ConstRows x = c.in.x;
            set(c, x, at);
            (void)c.exchange.dispatch(x, d.handle, c.dispatch_options());
          },
          in_text};
}

Tensor in_combine(const char* name, size_t alignment, std::function<void(Call&, CombineArguments&, std::byte*)> set) {
  return {name, alignment, [set](Call& c, std::byte* at) { combine_with(c, [&](CombineArguments& a) { set(c, a, at); }); }};
}

std::byte* given(std::byte* at, std::byte* valid) { return at ? at : valid; }
float* floats(std::byte* p) { return reinterpret_cast<float*>(p); }

/// All tensor arguments of a combine with rank-major rows.
std::vector<Tensor> tensors_of_combine() {
  return {
      in_combine("y.data", 16,
                 [](Call&, CombineArguments& a, std::byte* at) {
                   if (at) a.y.data = at;
                 }),
      in_combine("out", 16,
                 [](Call&, CombineArguments& a, std::byte* at) {
                   if (at) a.out = at;
                 }),
      in_combine("CombineOptions::bias[0]", 16,
                 [](Call& c, CombineArguments& a, std::byte* at) { a.options.bias[0] = given(at, c.spare); }),
      in_combine("CombineOptions::bias[1]", 16,
                 [](Call& c, CombineArguments& a, std::byte* at) {
                   a.options.bias[0] = c.spare;
                   a.options.bias[1] = given(at, c.spare + 2048);
                 }),
      in_combine("CombineOptions::topk_weights", 4,
                 [](Call& c, CombineArguments& a, std::byte* at) {
                   a.options.topk_weights = floats(given(at, c.spare));
                   a.out_weights = floats(c.spare + 2048);
                 }),
      in_combine("out_weights", 4,
                 [](Call& c, CombineArguments& a, std::byte* at) {
                   a.options.topk_weights = floats(c.spare);
                   a.out_weights = floats(given(at, c.spare + 2048));
                 }),
  };
}

/// All tensor arguments of a dispatch and of a cached dispatch.
std::vector<Tensor> tensors_of_dispatch() {
  return {
      {"x.data", 16,
       [](Call& c, std::byte* at) {
         if (at) c.in.x.data = at;
         (void)c.dispatch();
       }},
      {"x.scales", 16,
       [](Call& c, std::byte* at) {
         make_fp8(c.in.x, given(at, c.spare));
         (void)c.dispatch();
       }},
      {"topk_ids.data", 4,
       [](Call& c, std::byte* at) {
         if (at) c.in.ids.data = at;
         (void)c.dispatch();
       }},
      {"topk_weights", 4,
       [](Call& c, std::byte* at) {
         if (at) c.in.weights = floats(at);
         (void)c.dispatch();
       }},
      {"DispatchOptions::device_tokens", 4,
       [](Call& c, std::byte* at) {
         DispatchOptions o = c.dispatch_options();
         o.device_tokens = reinterpret_cast<const int32_t*>(at);
         (void)c.exchange.dispatch(c.in.x, c.in.ids, c.in.weights, o);
       }},
      of_cached("cached x.data", "x.data",
                [](Call& c, switchyard::ConstRows& x, std::byte* at) { x.data = at ? at : c.in.x.data; }),
      of_cached("cached x.scales", "x.scales",
                [](Call& c, switchyard::ConstRows& x, std::byte* at) { make_fp8(x, given(at, c.spare)); }),
  };
}

enum class Wrong { host_memory, another_gpu, misaligned, other };
const char* name_of(Wrong wrong) {
  switch (wrong) {
    case Wrong::host_memory: return "host_memory";
    case Wrong::another_gpu: return "another_gpu";
    case Wrong::misaligned: return "misaligned";
    default: return "other";
  }
}

/// Passes every tensor argument at an invalid address of this kind, or makes other mistakes.
std::vector<GpuMisuse> gpu_misuses(Wrong wrong) {
  if (wrong == Wrong::other) return other_misuses();
  std::vector<GpuMisuse> all;
  std::vector<Tensor> tensors = tensors_of_dispatch();
  for (const Tensor& t : tensors_of_combine()) tensors.push_back(t);
  for (const Tensor& t : tensors) {
    all.push_back({t.name, t.in_text, [t, wrong](Call& c) {
                     std::byte* at = nullptr;
                     if (wrong == Wrong::host_memory) at = reinterpret_cast<std::byte*>(c.host.data());
                     if (wrong == Wrong::another_gpu) at = c.foreign;
                     if (wrong == Wrong::misaligned) at = c.spare + t.alignment / 2;
                     t.body(c, c.bad ? at : nullptr);
                   }});
  }
  return all;
}

class GpuMisuses : public testing::TestWithParam<std::tuple<int, Wrong>> {};

/// All mistakes are made in one process: each must leave a context in which the group for the next mistake works and, finally,
/// a whole round.
TEST_P(GpuMisuses, ThrowThereAndEndThePeers) {
  const auto [world, wrong] = GetParam();
  const int bad = world - 1;
  if (wrong == Wrong::another_gpu && switchyard::test::count_gpus() < 2) GTEST_SKIP() << "needs two GPUs";
  Scenario s = gpu_scenario("misuse", world, Layout::rank_major, 12);
  const auto c = make_case(s);
  const NormalConfig config = config_with_large_pool(*c, 3);
  NormalConfig other = config;
  ++other.num_experts;
  const std::vector<GpuMisuse> misuses = gpu_misuses(wrong);
  const auto one = [&](const GpuMisuse& m, Station& me) {
    me.f.set_context(m.name);
    NormalExchange exchange(me.group, config), other_shape(me.group, other);
    RankData data(*c, me.rank(), 0);
    Call call{me,
              exchange,
              other_shape,
              *c,
              me.upload(*c, data),
              me.rank() == bad,
              me.allocate(8192),
              memory_of_another_gpu(me),
              std::vector<float>(4096)};
    me.meet();
    Outcome o = outcome_of([&] { m.body(call); });
    if (me.rank() == bad) {
      me.f.equal(static_cast<int>(m.code), static_cast<int>(o.code), "code, " + o.text);
      me.f.check(o.text.find(m.in_text) != std::string::npos, "text: " + o.text);
    }
    me.meet();  // the kernels end although one rank does not call
    if (me.rank() != bad) {
      if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
      me.f.equal(static_cast<int>(ErrorCode::peer_failed), static_cast<int>(o.code), "code at a peer, " + o.text);
      me.f.equal(bad, o.failed_rank, "rank that failed");
      me.f.equal(static_cast<int>(m.code), static_cast<int>(o.reason), "reason at a peer");
    }
    const Outcome later = outcome_of([&] { (void)call.dispatch(); });
    me.f.equal(static_cast<int>(ErrorCode::peer_failed), static_cast<int>(later.code), "sticky, " + later.text);
    me.f.check(cudaStreamSynchronize(me.stream()) == cudaSuccess, "the stream failed");
    me.f.check(cudaGetLastError() == cudaSuccess, "a CUDA error is pending");
    me.gather();
  };
  isolated([&] {
    for (const GpuMisuse& m : misuses) on_gpus(world, heap_for(other, world, 3), 20s, [&](Station& me) { one(m, me); });
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      me.f.set_context("after all misuses");
      NormalExchange exchange(me.group, config);
      me.round(exchange, *c);
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuMisuses,
                         testing::Combine(testing::Values(2, 3), testing::Values(Wrong::host_memory, Wrong::another_gpu,
                                                                                 Wrong::misaligned, Wrong::other)),
                         [](const auto& p) {
                           return "W" + std::to_string(std::get<0>(p.param)) + "_" + name_of(std::get<1>(p.param));
                         });

/// T in device memory is clamped to all ids if it exceeds their capacity, and to none if it is negative.
TEST(GpuDeviceTokens, AreClamped) {
  constexpr int kWorld = 3;
  constexpr int64_t kMax = 12;
  const std::vector<int32_t> values{kMax + 1, INT32_MAX, -1, INT32_MIN, 5, kMax, 0};
  const auto value_of = [&](size_t step, int rank) { return values[(step + static_cast<size_t>(rank) * 2) % values.size()]; };
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    std::vector<std::shared_ptr<const Case>> cases;
    for (size_t step = 0; step < values.size(); ++step) {
      Scenario s = gpu_scenario("device tokens " + std::to_string(step), kWorld, layout, kMax, 81 + 2 * step);
      for (int r = 0; r < kWorld; ++r) s.tokens[static_cast<size_t>(r)] = std::clamp<int64_t>(value_of(step, r), 0, kMax);
      cases.push_back(make_case(s));
    }
    const NormalConfig config = config_with_large_pool(*cases[0], 3);
    on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      std::byte *const x = me.allocate(kMax * 128), *const ids = me.allocate(kMax * 12),
                       *const weights = me.allocate(kMax * 12), *const out = me.allocate(kMax * 128);
      auto* const tokens = reinterpret_cast<int32_t*>(me.allocate(4));
      for (size_t step = 0; step < cases.size(); ++step) {
        me.f.set_context("T is " + std::to_string(value_of(step, me.rank())));
        RankData data(*cases[step], me.rank(), 0);
        const Inputs in = me.upload(*cases[step], data);
        me.meet();
        CopyList list;
        list.add(x, in.x.data, in.x_bytes);
        list.add(ids, in.ids.data, in.ids_bytes);
        list.add(weights, in.weights, in.weights_bytes);
        launch_copies(list, me.stream());
        launch_set(tokens, value_of(step, me.rank()), me.stream());
        DispatchOptions options = me.dispatch_options(*cases[step], me.stream());
        options.device_tokens = tokens;
        const Dispatched d =
            exchange.dispatch({x, kMax, 64, DType::bf16}, switchyard::ExpertIds::of(reinterpret_cast<int32_t*>(ids), kMax, 3),
                              reinterpret_cast<const float*>(weights), options);
        const Shot shot = me.shoot(d, me.stream());
        exchange.combine(d.x, d.handle, out, me.combine_options(*cases[step], me.stream()));
        me.meet();
        me.f.equal(cases[step]->scenario.tokens[static_cast<size_t>(me.rank())], d.handle.num_tokens(), "tokens");
        me.check(*cases[step], data, shot, d.handle);
        me.check_combined(data, in, out);
        me.meet();
      }
    });
  }
}

/// A pool that is too small for any call: the error says so, and no kernel runs without memory.
TEST(GpuPool, TooSmallIsATypedError) {
  Scenario s = gpu_scenario("small pool", 2, Layout::rank_major, 400);
  const auto c = make_case(s);
  NormalConfig config = make_config(*c);
  const size_t heap = heap_for(config, 2);
  config.pool_bytes = 128;
  on_gpus(2, heap, [&](Station& me) {
    const Outcome o = outcome_of([&] {
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0);
      const Inputs in = me.upload(*c, data);
      me.gather();
      (void)exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
    });
    me.f.check(o.code == ErrorCode::pool_exhausted || o.code == ErrorCode::invalid_argument || o.code == ErrorCode::peer_failed,
               std::string("code ") + switchyard::to_string(o.code) + ": " + o.text);
    me.f.check(cudaDeviceSynchronize() == cudaSuccess, "the context failed");
    me.gather();
  });
}

/// Rank 1 has no room for a dispatch: every rank receives the error once, and none waits for a deadline.
void dispatch_without_memory(ExchangeRig& rig) {
  Station& me = rig.me;
  const Dispatched d = rig.dispatch();
  std::vector<switchyard::RowBuffer> fill;
  if (me.rank() == 1) fill = rig.fill_pool(d.handle);
  me.meet();
  Dispatched refused;
  Outcome o = outcome_of([&] { refused = rig.dispatch(); });
  me.meet();
  if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
  me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(o.code), "code, " + o.text);
  me.f.check(o.text.find("rank 1") != std::string::npos, "text: " + o.text);
  const Outcome again = outcome_of([&] { me.group.check(); });
  me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(again.code), "reported twice: " + again.text);
  me.meet();
}

/// The object stays usable.
TEST(GpuPool, ExhaustedOnOneRankFailsOnAllAndIsNotSticky) {
  Scenario s = gpu_scenario("pool", 3, Layout::rank_major, 12);
  const auto c = make_case(s);
  const NormalConfig config = config_with_large_pool(*c, 2);
  on_gpus(3, heap_for(config, 3), [&](Station& me) {
    ExchangeRig rig(me, c, config);
    for (int attempt = 0; attempt < 3; ++attempt) {
      me.f.set_context("attempt " + std::to_string(attempt));
      dispatch_without_memory(rig);
      me.round(rig.exchange, *c, attempt);
    }
  });
}

/// The same case with drop_and_report, where a separate kernel counts the kept routes.
TEST(GpuPool, ExhaustedWhileDroppingAtCapacity) {
  Scenario s = gpu_scenario("pool and drops", 2, Layout::rank_major, 40);
  s.problem.overflow = switchyard::Overflow::drop_and_report;
  s.capacity_percent = 60;
  const auto c = make_case(s);
  const NormalConfig config = config_with_large_pool(*c, 2);
  on_gpus(2, heap_for(config, 2), [&](Station& me) {
    ExchangeRig rig(me, c, config);
    dispatch_without_memory(rig);
    me.f.check(cudaDeviceSynchronize() == cudaSuccess, "the context failed");
    me.round(rig.exchange, *c);
  });
}

}  // namespace
}  // namespace harness
