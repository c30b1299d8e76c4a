// SPDX-License-Identifier: Apache-2.0
// How the flat exchange splits unbalanced work (E19) among a GPU's warps (flat_object_test tests this on the CPU); row
// functions in graphs; and rejected row functions. tests/modes/flat/flat_test.cpp checks the results of the exchange.
#include <algorithm>
#include <memory>
#include <optional>

#include "exchange/low_latency/impl.hpp"
#include "exchange/low_latency/launch.hpp"
#include "gpu/harness/captured_calls.hpp"
#include "gpu/kernels/split_kernel.hpp"
#include "modes/flat/flat_function.hpp"

namespace harness {
namespace {

namespace detail = switchyard::detail;
using switchyard::LowLatencyExchange;

/// One of four ranks holds nine tenths of the tokens.
struct UnevenCall {
  static constexpr int kWorld = 4, kUnits = 2000;  // maximum units of a rank: 1000 tokens, or 2000 routes
  static constexpr int64_t kTokens[kWorld] = {900, 31, 0, 69};

  UnevenCall(Station& me, int num_pieces, switchyard::Sending sending) : pieces(num_pieces) {
    switchyard::LowLatencyConfig config;
    config.hidden = 128 * pieces;
    config.num_experts = 8;
    config.topk = 2;
    config.max_tokens = 1000;
    config.scales = switchyard::ScaleKind::none;
    config.pieces = pieces;
    config.sending = sending;
    layout = detail::low_latency_layout(config, kWorld, 0);
    call.epoch = 7;
    call.heap.world = kWorld;
    std::vector<uint64_t> flags(static_cast<size_t>(layout.flags_bytes()) / 8);
    for (int s = 0; s < kWorld; ++s)
      flags[layout.header(call.epoch, s).offset / 8] = detail::flag_word(call.epoch, static_cast<uint64_t>(kTokens[s]));
    call.heap.base[0] = static_cast<std::byte*>(me.upload(flags.data(), flags.size() * 8));
  }

  void check(Station& me, int blocks, int warps) const {
    std::vector<uint32_t> seen(static_cast<size_t>(kWorld * kUnits * pieces)), share(static_cast<size_t>(blocks * warps));
    auto* const device_seen = static_cast<uint32_t*>(me.upload(seen.data(), seen.size() * 4));
    auto* const device_share = static_cast<uint32_t*>(me.upload(share.data(), share.size() * 4));
    launch_split(call, layout, pieces, kUnits, device_seen, device_share, blocks, warps, me.stream());
    me.meet();
    me.read(seen.data(), device_seen, seen.size() * 4);
    me.read(share.data(), device_share, share.size() * 4);
    const auto [min, max] = std::minmax_element(share.begin(), share.end());
    me.f.check(*max - *min <= 1, "shares from " + std::to_string(*min) + " to " + std::to_string(*max));
    for (size_t i = 0; i < seen.size(); ++i) {
      const auto message = static_cast<int64_t>(i) / pieces;
      const bool sent = message % kUnits < kTokens[message / kUnits] * layout.units_per_token();
      if (!me.f.equal(sent ? 1u : 0u, seen[i], "warps that have message " + std::to_string(i))) return;
    }
  }

  int pieces;
  detail::LowLatencyLayout layout;
  detail::CallContext call;
};

TEST(GpuFlat, E19_MessagesPerWarpDifferByOne) {
  on_gpus(1, size_t{1} << 20, [&](Station& me) {
    for (const int pieces : {1, 3}) {
      for (const auto sending : {switchyard::Sending::per_rank, switchyard::Sending::per_route}) {
        const UnevenCall uneven(me, pieces, sending);
        for (const int blocks : {1, 2, 7, 40, 132}) {
          me.f.set_context(std::to_string(pieces) + " pieces, " + std::to_string(blocks) + " blocks");
          uneven.check(me, blocks, blocks == 7 ? 3 : 16);
        }
      }
    }
  });
}

// --- Row functions

using switchyard::RowFunction;

StreamedCase function_case(int world) {
  StreamedCase c;
  Form& f = c.form;
  f.seed = 41;
  f.world = world;
  f.experts = 4 * world + 1;
  f.topk = 6;
  f.max_tokens = 24;
  f.hidden = 1024;
  f.scales = ScaleKind::none;
  return c;
}

class RowFunctionsOnGpus : public testing::TestWithParam<int> {};

/// Each replay has a different T (in device memory), routing and rows. Runs on the number of multiprocessors chosen by the
/// library, and on few. The holder of the function is destroyed before the graph runs.
TEST_P(RowFunctionsOnGpus, InGraphs) {
  constexpr uint64_t kReplays = 300;
  const int world = GetParam();
  isolated(
      [&] {
        int devices = 0;
        must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
        for (const int sms : {0, 3}) {
          StreamedCase c = function_case(world);
          c.plan = {.lanes = 2, .num_sms = sms};
          const size_t expected = world <= devices && sms == 0 ? 2 : 0;
          on_gpus(world, LowLatencyExchange::heap_bytes(c.config(), world), [&](Station& me) {
            me.f.set_context(std::to_string(sms) + " multiprocessors");
            LowLatencyExchange exchange = c.make(me.group);
            StationRig rig(me);
            Calls streamed(rig, exchange, c);
            std::optional<RowFunction> function = factor_function(streamed.lane(0).a.factors, c.form.first_expert(me.rank()));
            streamed.function = &*function;
            const CapturedCalls graph(me, rig, [&](uint64_t* replays) {
              streamed.all_to_all_of_lanes({1'000'000, replays, 2}, {});
            });
            function.reset();
            streamed.function = nullptr;
            me.f.equal(expected, dependent_launches(graph.graph()), "dependent launches");
            for (uint64_t replay = 0; replay < kReplays; ++replay) {
              graph.launch();
              if (replay == kReplays / 2) streamed.all_to_all_of_lanes({1}, {});  // a call without the function
            }
            expect_verdict(me, streamed, 2 * (kReplays + 1), true);
          });
        }
      },
      120s);
}

INSTANTIATE_TEST_SUITE_P(Gpu, RowFunctionsOnGpus, testing::Values(1, 2, 4, 8),
                         [](const auto& w) { return "W" + std::to_string(w.param); });

/// A function as passed by an application compiled elsewhere. Never launched.
struct StrangeFunction final : detail::CudaRowFunction {
  StrangeFunction(uint64_t other_abi, int on_device) {
    abi = other_abi;
    device = on_device;
  }
  cudaError_t launch(const detail::CudaFlat&, int, const detail::DeviceLimits&, cudaStream_t) const override {
    return cudaErrorUnknown;
  }
};

struct RefusedFunction {
  const char* name;
  const char* in_text;
  RowFunction (*make)(int device);
  bool with_scale = false;
};
std::ostream& operator<<(std::ostream& out, const RefusedFunction& r) { return out << r.name; }

RowFunction strange_function(uint64_t abi, int device) {
  return RowFunction(std::make_shared<const StrangeFunction>(abi, device));
}
/// With only one GPU, simulates a second one.
RowFunction function_of_another_gpu(int device) {
  int devices = 0;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < 2) return strange_function(detail::CudaRowFunction::kAbi, device + 1);
  must(cudaSetDevice((device + 1) % devices), "cudaSetDevice");
  RowFunction made = flat_function(1);
  must(cudaSetDevice(device), "cudaSetDevice");
  return made;
}
const RefusedFunction kRefused[] = {
    {"other_version", "compiled against the headers of another version",
     [](int device) { return strange_function(detail::CudaRowFunction::kAbi + 1, device); }},
    {"other_structures", "compiled against the headers of another version",
     [](int device) { return strange_function(detail::CudaRowFunction::kAbi + (uint64_t{8} << 32), device); }},
    {"another_gpu", "was made for GPU", function_of_another_gpu},
    {"on_cpu", "made for the other backend: this group takes row_function_on_gpu",
     [](int) { return RowFunction::on_cpu([](float x, const switchyard::RowOrigin&, int64_t) { return x; }); }},
    {"none", "row_function is empty", [](int) { return RowFunction(); }},
    {"with_scale", "row_function and expert_scale are both given", [](int) { return flat_function(0); }, true},
};

class RefusedOnGpus : public testing::TestWithParam<RefusedFunction> {};

/// Checks the error on the rank that passes the function. The kernels of the other ranks, which wait for that rank, end.
TEST_P(RefusedOnGpus, NamesTheReason) {
  constexpr int kWorld = 2, kBad = 1;
  const RefusedFunction& refused = GetParam();
  const StreamedCase c = function_case(kWorld);
  on_gpus(kWorld, LowLatencyExchange::heap_bytes(c.config(), kWorld), 20s, [&](Station& me) {
    LowLatencyExchange exchange = c.make(me.group);
    StationRig rig(me);
    Calls streamed(rig, exchange, c);
    me.gather();
    const RowFunction function = refused.make(me.device());
    auto& a = streamed.lane(0).a;
    rig.enqueue(MakeInputs{c.form, {1}, me.rank(), a}, me.stream());
    me.meet();
    switchyard::AllToAllOptions o;
    o.stream = me.stream();
    if (me.rank() == kBad) o.row_function = &function;
    if (me.rank() == kBad && refused.with_scale) o.expert_scale = a.factors;
    Outcome end = outcome_of([&] {
      exchange.moe_all_to_all({a.x, 3, c.form.hidden, c.form.type}, {a.ids, 3, c.form.topk, a.int64_ids}, a.out, o);
    });
    me.meet();
    if (me.rank() == kBad) {
      me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(end.code), "code, " + shown(end));
      me.f.check(end.text.find(refused.in_text) != std::string::npos, "text: " + end.text);
    } else {
      if (end.code == ErrorCode::ok) end = outcome_of([&] { me.group.check(); });
      me.f.equal(static_cast<int>(ErrorCode::peer_failed), static_cast<int>(end.code), "code at a peer, " + shown(end));
      me.f.equal(kBad, end.failed_rank, "rank that failed");
      me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(end.reason), "reason at a peer");
    }
    me.gather();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, RefusedOnGpus, testing::ValuesIn(kRefused),
                         [](const auto& r) { return std::string(r.param.name); });

}  // namespace
}  // namespace harness
