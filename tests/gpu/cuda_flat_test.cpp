// SPDX-License-Identifier: Apache-2.0
// The flat exchange's split of uneven work (E19) as a GPU's warps make it; on the CPU: flat_object_test. What the exchange
// computes: tests/protocol/flat_test.cpp.
#include <algorithm>

#include "exchange/low_latency_impl.hpp"
#include "gpu/object_rig.hpp"
#include "gpu/split_kernel.hpp"

namespace harness {
namespace {

namespace detail = switchyard::detail;

/// One of four ranks holds nine tenths of the tokens.
struct UnevenCall {
  static constexpr int kWorld = 4, kUnits = 2000;  // most units of a rank: 1000 tokens, twice if each route is a message
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
    const auto [least, most] = std::minmax_element(share.begin(), share.end());
    me.f.check(*most - *least <= 1, "shares from " + std::to_string(*least) + " to " + std::to_string(*most));
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

}  // namespace
}  // namespace harness
