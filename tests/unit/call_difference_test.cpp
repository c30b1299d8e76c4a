// SPDX-License-Identifier: Apache-2.0
// Errors about calls with different options: what is named for pairs of signatures and of low-latency headers.
#include <gtest/gtest.h>

#include "base/call_signature.hpp"
#include "exchange/group/call_difference.hpp"
#include "protocol/low_latency/call.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {
namespace {

template <class... Values>
uint64_t signature(Operation operation, Values... values) {
  return make_signature(0x123456789abcdef0, pack_options(operation, {static_cast<int64_t>(values)...}));
}
uint64_t dispatch(DType type, ScaleKind x_scales, ScaleKind quantize, Padding padding = Padding::zero) {
  return signature(Operation::dispatch, 0, 0, type, x_scales, quantize, padding, SizePolicy::exact, Overflow::fail);
}
uint64_t cached(DType type, ScaleKind x_scales) {
  return signature(Operation::cached_dispatch, 0, 0, type, x_scales, ScaleKind::none, Padding::zero);
}
uint64_t combine(bool apply_weights) {
  return signature(Operation::combine, DType::bf16, CombineOrder::per_rank, apply_weights, 0);
}
std::string difference(uint64_t mine, uint64_t theirs, Site site = Site::placement) {
  return describe_difference({site, mine, theirs}, 3, 5);
}

TEST(CallDifference, NamesOptions) {
  EXPECT_EQ(difference(dispatch(DType::bf16, ScaleKind::none, ScaleKind::none),
                       dispatch(DType::bf16, ScaleKind::none, ScaleKind::ue8m0, Padding::unspecified)),
            "DispatchOptions::quantize = none on rank 3 and ue8m0 on rank 5, "
            "DispatchOptions::padding = zero on rank 3 and unspecified on rank 5");
  EXPECT_EQ(difference(combine(true), combine(false)), "CombineOptions::apply_weights = true on rank 3 and false on rank 5");
  const auto layer = [](int set) { return signature(Operation::layer, 0, 0, 0, 1, set); };
  EXPECT_EQ(difference(layer(0), layer((1 << 16) - 1)),
            "the set of weights (0: those of the constructor) = 0 on rank 3 and 65535 on rank 5");
}

/// The version that a device adds to the signature is at the place of the option.
TEST(CallDifference, OfMaps) {
  const auto sent = [](int selects, uint32_t version) {
    return with_map_version(signature(Operation::dispatch, selects, 0, DType::bf16, ScaleKind::none, ScaleKind::none,
                                      Padding::zero, SizePolicy::exact, Overflow::fail),
                            version);
  };
  const auto layer = [](int selects, uint32_t version) {
    return with_map_version(signature(Operation::layer, selects, 0, 1, 1, 5), version);
  };
  const std::string other =
      "map of MoeLayerCall::selector (its version + 3 * the selector's number, modulo 8) = 7 on rank 3 and 1 on rank 5";
  EXPECT_EQ(difference(sent(1, 7), sent(1, 9)), other);
  EXPECT_EQ(difference(layer(1, 15), layer(1, 1)), other);
  EXPECT_EQ(difference(layer(0, 0), layer(1, 3)), "MoeLayerCall::selector = null on rank 3 and given on rank 5");
  EXPECT_EQ(layer(1, 3), signature(Operation::layer, 1, 3, 1, 1, 5));
}

TEST(CallDifference, ScalesOfGivenRowsAreNotCalledAnOption) {
  EXPECT_EQ(difference(dispatch(DType::fp8_e4m3, ScaleKind::f32, ScaleKind::none),
                       dispatch(DType::fp8_e4m3, ScaleKind::ue8m0, ScaleKind::none, Padding::unspecified)),
            "x.scale_kind = f32 on rank 3 and ue8m0 on rank 5, "
            "DispatchOptions::padding = zero on rank 3 and unspecified on rank 5");
  EXPECT_EQ(difference(cached(DType::fp8_e4m3, ScaleKind::f32), cached(DType::fp8_e4m3, ScaleKind::ue8m0)),
            "x.scale_kind = f32 on rank 3 and ue8m0 on rank 5");
  EXPECT_EQ(difference(dispatch(DType::bf16, ScaleKind::none, ScaleKind::none),
                       dispatch(DType::fp8_e4m3, ScaleKind::f32, ScaleKind::none)),
            "x.dtype = bf16 on rank 3 and fp8_e4m3 on rank 5, x.scale_kind = none on rank 3 and f32 on rank 5");
}

TEST(CallDifference, OptionsOfDifferentCallsAreNotCompared) {
  EXPECT_EQ(difference(combine(false), dispatch(DType::f32, ScaleKind::none, ScaleKind::none)),
            "rank 3 called combine and rank 5 dispatch");
  EXPECT_EQ(difference(cached(DType::bf16, ScaleKind::none), combine(false)),
            "rank 3 called cached dispatch and rank 5 combine");
}

TEST(CallDifference, WithoutAnOption) {
  const uint64_t one = cached(DType::bf16, ScaleKind::none);
  EXPECT_EQ(difference(mix_signature(one, 1), mix_signature(one, 2)),
            "the handles are of different dispatches, or the calls have different sites");
  const uint64_t fresh = dispatch(DType::bf16, ScaleKind::none, ScaleKind::none);
  EXPECT_EQ(difference(mix_signature(fresh, 1), mix_signature(fresh, 2)), "");
  EXPECT_EQ(difference(fresh, fresh), "");
  EXPECT_EQ(difference(fresh, fresh, Site::counts), "some ranks passed topk_weights and others did not");
  EXPECT_EQ(difference(0, 0, Site::counts), "");
  EXPECT_EQ(difference(one, fresh, Site::none), "");
  EXPECT_EQ(difference(1, 2, Site::ledger_rows), "");
}

TEST(CallDifference, OfLowLatency) {
  const auto sum = [](CombineOrder order, DType type, uint64_t number) {
    return header_value(combine_kind(order, type), number);
  };
  const auto sent = [](LowLatencyKind kind, bool selects, uint64_t tokens) {
    return header_value(low_latency_kind(kind, selects ? 1 : 0, DType::bf16), tokens);
  };
  const auto of_map = [](LowLatencyKind kind, uint32_t version, int tokens) {
    return header_value(low_latency_kind(kind, 1, DType::bf16), sent_detail(version, tokens));
  };
  EXPECT_EQ(difference(of_map(LowLatencyKind::dispatch, 7, 65535), of_map(LowLatencyKind::dispatch, 8, 3), Site::call_header),
            "map of LowLatencyDispatchOptions::selector (its version + 3 * the selector's number, modulo 8) = 7 on rank 3 and "
            "0 on rank 5");
  EXPECT_EQ(
      difference(of_map(LowLatencyKind::all_to_all, 1, 0), of_map(LowLatencyKind::all_to_all, 2, 1), Site::call_header),
      "map of AllToAllOptions::selector (its version + 3 * the selector's number, modulo 8) = 1 on rank 3 and 2 on rank 5");
  EXPECT_EQ(tokens_in(of_map(LowLatencyKind::dispatch, 7, 65535)), 65535);
  const uint64_t plain = sum(CombineOrder::per_route, DType::bf16, 7);
  EXPECT_EQ(difference(plain, sum(CombineOrder::per_rank, DType::f32, 7), Site::call_header),
            "LowLatencyCombineOptions::order = per_route on rank 3 and per_rank on rank 5, "
            "y.dtype = bf16 on rank 3 and f32 on rank 5");
  EXPECT_EQ(difference(plain, sum(CombineOrder::per_route, DType::bf16, 8), Site::call_header),
            "the rows to sum are of different dispatches");
  for (const bool selects : {false, true})
    EXPECT_EQ(
        difference(sent(LowLatencyKind::dispatch, selects, 100), sum(CombineOrder::per_rank, DType::f32, 7), Site::call_header),
        "rank 3 called dispatch and rank 5 combine");
  EXPECT_EQ(difference(sent(LowLatencyKind::dispatch, true, 100), sent(LowLatencyKind::dispatch, false, 7), Site::call_header),
            "LowLatencyDispatchOptions::selector = given on rank 3 and null on rank 5");
  EXPECT_EQ(
      difference(sent(LowLatencyKind::all_to_all, false, 100), sent(LowLatencyKind::all_to_all, true, 7), Site::call_header),
      "AllToAllOptions::selector = null on rank 3 and given on rank 5");
  EXPECT_EQ(difference(sent(LowLatencyKind::all_to_all, true, 1), sent(LowLatencyKind::dispatch, true, 1), Site::call_header),
            "rank 3 called moe_all_to_all and rank 5 dispatch");
}

/// No option is lost: values at the end of their fields stay apart.
TEST(CallDifference, OptionsDoNotOverlap) {
  const uint64_t all = pack_options(Operation::layer, {1, 7, 1, 1, (1 << 16) - 1});
  EXPECT_EQ(all >> kSignatureOptionBits, 0u);
  EXPECT_NE(pack_options(Operation::layer, {0, 0, 0, 1, 1}), pack_options(Operation::layer, {0, 0, 1, 0, 1}));
  EXPECT_EQ(make_signature(~uint64_t{0}, 0) & all, 0u);
}

}  // namespace
}  // namespace switchyard::detail
