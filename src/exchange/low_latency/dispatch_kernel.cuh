// SPDX-License-Identifier: Apache-2.0
// The body of the dispatch kernels of low-latency mode: protocol/low_latency/dispatch.hpp with one block per multiprocessor.
//
// Progress: all warps of a rank send before they wait, and they wait only for sends by other ranks. All blocks of a launch that
// receives must be able to run concurrently, because a block that has not started has not sent anything. The launcher therefore
// limits the grid to one block per multiprocessor. Other kernels may delay a block as long as they end.
#pragma once

#include "exchange/low_latency/known.cuh"
#include "exchange/low_latency/slot_lookup.cuh"

namespace switchyard::detail {

namespace low_latency {

/// `make_slots()`: NoLookup or SlotLookup.
template <class A, class P, class MakeSlots>
__device__ __forceinline__ void dispatch(const CudaLowLatencyDispatch& args, const CudaShape& shape,
                                         const LaunchedHalves halves, const MakeSlots& make_slots) {
  constexpr bool kSelects = std::is_same_v<decltype(make_slots()), SlotLookup>;
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(P)];
  ptx::launch_dependents();
  P& p = *reinterpret_cast<P*>(params);
  ptx::wait_for_previous();
  const CallWords words = load_call_words(args.d.call, args.state);
  EarlyIds ids{};
  if (halves.send) ids = load_ids(args.d.ids, static_cast<int>(threadIdx.x), args.d.tokens * args.d.layout.topk);
  auto slots = make_slots();
  if constexpr (kSelects)
    if (halves.send) slots.load();
  CudaWarp w(dynamic_shared, shape);
  const int tokens = tokens_now(args.d.tokens, args.device_tokens);
  const uint32_t version = version_now(args.map_version);
  if (halves.send) prefetch_first_part(w, args.d, tokens);
  share_params(args.d, p);
  if constexpr (kSelects) {
    if (halves.send) clear_sets(args.d, dynamic_shared, slots.without_table(shape));
    fence_entry(w);  // while the table is in flight
    if (halves.send) slots.share(dynamic_shared, shape);
    __syncthreads();
  } else {
    if (halves.send) clear_sets(args.d, dynamic_shared, shape);
    __syncthreads();
    fence_entry(w);
  }
  if (halves.send) stage_sending(args.d, ids, tokens, dynamic_shared, shape, p, slots);
  if (threadIdx.x == 0) {
    if constexpr (kSelects)
      p.map_version = halves.send ? slots.version() : 0;
    else
      p.map_version = version;
  }
  if (!begin_block(args.d.call, words, args.state, halves.receive, p.call)) return;
  const KernelTrace<A> trace(w, p.call.device_trace, Event::dispatch, pack_launch(p.call.epoch, args.state, tokens));
  if (halves.send) low_latency_send<A>(w, p);
  if constexpr (kSelects)
    if (halves.send) slots.count(args.d.ids, tokens * args.d.layout.topk);
  if (halves.receive) (void)low_latency_receive<A>(w, p);
  A::settle(w);
}

}  // namespace low_latency

/// Calls use(std::type_identity<P>) with the kind of parameters that `p` has; the general parameters come last.
template <class Use>
decltype(auto) with_kind(const LowLatencyDispatchParams& p, bool ids_staged, const Use& use) {
  using Fp8Rows = KnownDispatch<ScaleKind::f32>;
  using Fp8Columns = KnownDispatch<ScaleKind::f32, ScaleColumns>;
  using Ue8m0Columns = KnownDispatch<ScaleKind::ue8m0, ScaleColumns>;
  using CallerFp8 = KnownDispatch<ScaleKind::none, ScalePlace, DType::fp8_e4m3>;
  using AsIs = KnownDispatch<ScaleKind::none>;
  if (ids_staged) {
    if (Fp8Rows::holds(p)) return use(std::type_identity<Fp8Rows>());
    if (Fp8Columns::holds(p)) return use(std::type_identity<Fp8Columns>());
    if (Ue8m0Columns::holds(p)) return use(std::type_identity<Ue8m0Columns>());
    if (CallerFp8::holds(p)) return use(std::type_identity<CallerFp8>());
    if (AsIs::holds(p)) return use(std::type_identity<AsIs>());
  }
  return use(std::type_identity<LowLatencyDispatchParams>());
}

}  // namespace switchyard::detail
