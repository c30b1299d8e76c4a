// SPDX-License-Identifier: Apache-2.0
// Bad arguments on one rank of a CUDA group: a typed error there that names the argument, PeerFailed elsewhere long before any
// deadline (which would be a PeerTimeout), and a context that the next group can use.
#include "gpu/object_rig.hpp"

namespace harness {
namespace {

/// A valid call and what spoils it.
struct Call {
  Station& me;
  NormalExchange& exchange;
  NormalExchange& other_shape;  ///< one expert more
  const Case& c;
  Inputs in;
  bool bad;
  std::byte* spare;           ///< device memory
  std::byte* foreign;         ///< of another GPU, or null
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
  int gpus = 1;
};

GpuMisuse of_dispatch(const char* name, const char* in_text, std::function<void(Call&, DispatchOptions&)> spoil, int gpus = 1) {
  return {name, in_text,
          [spoil](Call& call) {
            DispatchOptions o = call.dispatch_options();
            if (call.bad) spoil(call, o);
            (void)call.exchange.dispatch(call.in.x, call.in.ids, call.in.weights, o);
          },
          ErrorCode::invalid_argument, gpus};
}

GpuMisuse of_combine(const char* name, const char* in_text,
                     std::function<void(Call&, switchyard::ConstRows&, void*&, CombineOptions&)> spoil) {
  return {name, in_text, [spoil](Call& call) {
            const Dispatched d = call.dispatch();
            switchyard::ConstRows y = d.x;
            void* out = call.in.out;
            CombineOptions o = call.combine_options();
            if (call.bad) spoil(call, y, out, o);
            call.exchange.combine(y, d.handle, out, o);
          }};
}

template <class T>
void shift(T*& pointer, int bytes) {
  pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(bytes));
}

/// Memory of the GPU after this rank's, or null if there is only one; freed when the process ends. While nobody waits.
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

std::vector<GpuMisuse> gpu_misuses() {
  using switchyard::ConstRows;
  return {
      of_dispatch("host_rows", "x.data", [](Call& c, DispatchOptions&) { c.in.x.data = c.host.data(); }),
      of_dispatch("host_ids", "ids.data", [](Call& c, DispatchOptions&) { c.in.ids.data = c.host.data(); }),
      of_dispatch("host_weights", "weights", [](Call& c, DispatchOptions&) { c.in.weights = c.host.data(); }),
      of_dispatch("host_device_tokens", "device_tokens",
                  [](Call& c, DispatchOptions& o) { o.device_tokens = reinterpret_cast<const int32_t*>(c.host.data()); }),
      of_dispatch(
          "rows_of_another_gpu", "x.data", [](Call& c, DispatchOptions&) { c.in.x.data = c.foreign; }, 2),
      of_dispatch("misaligned_rows", "x.data", [](Call& c, DispatchOptions&) { shift(c.in.x.data, 8); }),
      of_dispatch("misaligned_ids", "ids.data", [](Call& c, DispatchOptions&) { shift(c.in.ids.data, 2); }),
      of_dispatch("too_many_sms", "num_sms", [](Call&, DispatchOptions& o) { o.num_sms = 100000; }),
      of_dispatch("negative_sms", "num_sms", [](Call&, DispatchOptions& o) { o.num_sms = -1; }),
      of_dispatch("too_many_tokens", "ids.tokens = 13", [](Call& c, DispatchOptions&) { c.in.ids.tokens = c.in.x.rows = 13; }),
      of_dispatch("wrong_hidden", "x.cols = 72", [](Call& c, DispatchOptions&) { c.in.x.cols = 72; }),
      of_combine("host_out", "out", [](Call& c, ConstRows&, void*& out, CombineOptions&) { out = c.host.data(); }),
      of_combine("misaligned_out", "out", [](Call&, ConstRows&, void*& out, CombineOptions&) { shift(out, 4); }),
      of_combine("host_y", "y.data", [](Call& c, ConstRows& y, void*&, CombineOptions&) { y.data = c.host.data(); }),
      of_combine("misaligned_bias", "bias[0]", [](Call& c, ConstRows&, void*&, CombineOptions& o) { o.bias[0] = c.spare + 2; }),
      of_combine("combine_sms", "num_sms", [](Call&, ConstRows&, void*&, CombineOptions& o) { o.num_sms = 1 << 20; }),
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

class GpuMisuses : public testing::TestWithParam<int> {};

/// All in one process: each leaves a context in which the next one's group, and at last a whole round, must work.
TEST_P(GpuMisuses, ThrowThereAndEndThePeers) {
  const int world = GetParam(), bad = world - 1;
  Scenario s = gpu_scenario("misuse", world, Layout::rank_major, 12);
  const auto c = make_case(s);
  const NormalConfig config = roomy_config(*c, 3);
  NormalConfig other = config;
  ++other.num_experts;
  isolated([&] {
    int devices = 0;
    must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    for (const GpuMisuse& m : gpu_misuses()) {
      if (devices < m.gpus) continue;
      on_gpus(world, heap_for(other, world, 3), 20s, [&](Station& me) {
        me.f.set_context(m.name);
        NormalExchange exchange(me.group, config), other_shape(me.group, other);
        RankData data(*c, me.rank(), 0);
        Call call{me,
                  exchange,
                  other_shape,
                  *c,
                  me.upload(*c, data),
                  me.rank() == bad,
                  me.room(4096),
                  memory_of_another_gpu(me),
                  std::vector<float>(4096)};
        me.meet();
        Outcome o = outcome_of([&] { m.body(call); });
        if (me.rank() == bad) {
          me.f.equal(static_cast<int>(m.code), static_cast<int>(o.code), "code, " + o.text);
          me.f.check(o.text.find(m.in_text) != std::string::npos, "text: " + o.text);
        }
        me.meet();  // their kernels end although nobody calls
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
      });
    }
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      me.f.set_context("after all misuses");
      NormalExchange exchange(me.group, config);
      me.round(exchange, *c);
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuMisuses, testing::Values(2, 3),
                         [](const auto& world) { return "W" + std::to_string(world.param); });

/// A pool too small for anything: an error that says so, no kernel without memory.
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

/// One rank's pool is full: all ranks hear of it, nobody waits for a deadline, and the object goes on.
TEST(GpuPool, ExhaustedOnOneRankFailsOnAllAndIsNotSticky) {
  Scenario s = gpu_scenario("pool", 3, Layout::rank_major, 12);
  const auto c = make_case(s);
  const NormalConfig config = roomy_config(*c, 2);
  on_gpus(3, heap_for(config, 3), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    const DispatchOptions options = me.dispatch_options(*c, me.stream());
    me.meet();
    for (int attempt = 0; attempt < 3; ++attempt) {
      me.f.set_context("attempt " + std::to_string(attempt));
      {
        const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, options);
        std::vector<switchyard::RowBuffer> fill;
        if (me.rank() == 1) {
          const Outcome full = outcome_of([&] {
            while (true) fill.push_back(exchange.allocate_rows(d.handle, DType::bf16));
          });
          me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(full.code), "code, " + full.text);
        }
        me.meet();
        Dispatched refused;
        Outcome o = outcome_of([&] { refused = exchange.dispatch(in.x, in.ids, in.weights, options); });
        me.meet();
        if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
        me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(o.code), "code, " + o.text);
        me.f.check(o.text.find("rank 1") != std::string::npos, "text: " + o.text);
        const Outcome again = outcome_of([&] { me.group.check(); });
        me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(again.code), "reported twice: " + again.text);
        me.meet();
      }
      me.round(exchange, *c, attempt);
    }
  });
}

/// The same under drop_and_report, where a kernel of its own counts what was kept.
TEST(GpuPool, ExhaustedWhileDroppingAtCapacity) {
  Scenario s = gpu_scenario("pool and drops", 2, Layout::rank_major, 40);
  s.problem.overflow = switchyard::Overflow::drop_and_report;
  s.capacity_percent = 60;
  const auto c = make_case(s);
  const NormalConfig config = roomy_config(*c, 2);
  on_gpus(2, heap_for(config, 2), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    const DispatchOptions options = me.dispatch_options(*c, me.stream());
    me.meet();
    {
      const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, options);
      std::vector<switchyard::RowBuffer> fill;
      if (me.rank() == 1)
        (void)outcome_of([&] {
          while (true) fill.push_back(exchange.allocate_rows(d.handle, DType::bf16));
        });
      me.meet();
      Dispatched refused;
      Outcome o = outcome_of([&] { refused = exchange.dispatch(in.x, in.ids, in.weights, options); });
      me.meet();
      if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
      me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(o.code), "code, " + o.text);
      me.meet();
    }
    me.f.check(cudaDeviceSynchronize() == cudaSuccess, "the context failed");
    me.round(exchange, *c);
  });
}

}  // namespace
}  // namespace harness
