// SPDX-License-Identifier: Apache-2.0
/// \file
/// A complete MoE layer in one call: sends tokens to their experts' ranks, applies the experts, and returns the weighted sums.
/// Library switchyard_layer (CMake: switchyard::layer). Runs on the CPU and on GPUs of compute capability 9.0 (H100, H200).
///
///     out[t] = sum over k of topk_weights[t, k] * mlp_(topk_ids[t, k])(x[t])          mlp: see ExpertMlp
///
/// Notation: W ranks, T tokens on this rank, H hidden, I intermediate, K topk, E experts, L local experts. first_expert() of
/// normal.hpp defines the rank of an expert.
///
///     MoeLayerConfig config;             // hidden, intermediate, num_experts, topk, max_tokens
///     options.heap_bytes = MoeLayer::heap_bytes(config, world, options.backend);
///     Group group = Group::from_environment(options);
///     MoeLayer layer(group, config, w13, w2);
///     layer.forward(x, ExpertIds::of(topk_ids, T, K), topk_weights, out, {.stream = stream});
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "switchyard/expert.hpp"
#include "switchyard/group.hpp"
#include "switchyard/detail/held.hpp"
#include "switchyard/names.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

class SlotSelector;
namespace detail {
struct LayerCalls;
}

/// Exchange that transfers the rows of a layer.
enum class MoeExchange : uint8_t {
  /// low_latency if kMaxDecodeTokens and kMaxDecodeRows allow it, no capacity is given, the order is not per_host and the
  /// scaling is not per_channel; else normal
  automatic = 0,
  normal = 1,       ///< NormalExchange, expert-major rows: prefill and training
  low_latency = 2,  ///< LowLatencyExchange: decoding
};
template <>
struct NamesOf<MoeExchange> {
  static constexpr Named<MoeExchange> kAll[] = {
      {MoeExchange::automatic, "automatic"}, {MoeExchange::normal, "normal"}, {MoeExchange::low_latency, "low_latency"}};
};

/// MoeExchange::automatic selects low_latency only if max_tokens is in [1, kMaxDecodeTokens] and the rows reserved for a rank's
/// experts, (experts of rank 0) * W * max_tokens, are at most kMaxDecodeRows.
inline constexpr int64_t kMaxDecodeTokens = 256, kMaxDecodeRows = 65536;

/// Fused form: a layer without a capacity allocates memory for at least this many rows per rank, or for worst-case routing if
/// that needs fewer.
inline constexpr int64_t kMoeSplitRows = 65536;

/// Implementation of a layer. All forms give bit-identical results.
enum class MoeForm : uint8_t {
  automatic = 0,  ///< fused on GPUs in bf16 around normal mode, per_route, if its sizes allow it; else separate
  separate = 1,   ///< dispatch, two products and combine, as separate calls on one stream
  /// Normal mode, CombineOrder::per_route or per_rank, bf16, and on GPUs fp8_e4m3. GPU: one kernel that overlaps row transfers
  /// with matrix products. CPU: one run of the group's workers, all of which compute matrix products (docs/concepts/fused.md).
  fused = 2,
};
template <>
struct NamesOf<MoeForm> {
  static constexpr Named<MoeForm> kAll[] = {
      {MoeForm::automatic, "automatic"}, {MoeForm::separate, "separate"}, {MoeForm::fused, "fused"}};
};

/// Fixed properties of a layer; identical on all ranks except for pointers and `storage`.
struct MoeLayerConfig {
  int64_t hidden = 0;         ///< H >= 1; in normal mode, and on GPUs, the row size must be a multiple of 16 bytes
  int64_t intermediate = 0;   ///< I >= 1; GPUs: a multiple of 8; fp8: I and H are multiples of 16
  int num_experts = 0;        ///< E >= 1, total of all ranks; need not divide by W
  int topk = 0;               ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;     ///< maximum T on any rank; low_latency: in [1, 65535]
  DType dtype = DType::bf16;  ///< of weights: bf16; GPUs: also f16 or fp8_e4m3. Tokens and results: token_dtype()
  CombineOrder order = CombineOrder::per_route;  ///< of the sum, as in the exchange's combine
  MoeExchange exchange = MoeExchange::automatic;
  MoeForm form = MoeForm::automatic;
  /// Normal mode: maximum number of rows, one per route, that a rank accepts in a call; memory is allocated for this many. 0:
  /// the number for worst-case routing, W * max_tokens * K; in the fused form, unless overflow is drop_and_report, at most
  /// max(kMoeSplitRows, 2 * max_tokens * K), with overflow = split if this is fewer.
  int64_t capacity = 0;
  /// For routes beyond a rank's capacity. drop_and_report: see MoeLayer::dropped(). split, only in the fused form: a call in
  /// which a rank would exceed it runs in passes over ranges of at most capacity / (W * K) tokens of every rank, with the same
  /// results; at most 64 passes must suffice.
  Overflow overflow = Overflow::fail;
  /// GPUs, normal mode: calls will be captured in graphs. All graphs of the layer share one set of rows, separate from that of
  /// other calls.
  bool captured = true;
  WeightStorage storage = WeightStorage::packed;  ///< GPUs: must be view, because the weights stay in the caller's memory
  ScaleKind row_scales = ScaleKind::f32;     ///< fp8: tokens are quantized in transit, one scale per 128 columns: f32 or ue8m0
  ScaleKind weight_scales = ScaleKind::f32;  ///< fp8: kind of w13_scales and w2_scales, whose shapes are those of ExpertOptions
  const void* w13_scales = nullptr;
  const void* w2_scales = nullptr;
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank
  Accumulate accumulate = Accumulate::exact;   ///< of both products; fast: only fp8_e4m3 with scaling block, separate form
  /// Scales of tokens and weights, and of the rows between the products, as in ExpertOptions. Values other than block: only
  /// fp8_e4m3 in the separate form. per_channel: normal mode; tokens are quantized before the exchange, with one scale each.
  ScaleGranularity scaling = ScaleGranularity::block;
  OutputScaling intermediate_scaling = OutputScaling::per_group;
  const float* intermediate_scale = nullptr;  ///< as ExpertOptions::intermediate_scale; null unless fixed

  /// Type of tokens and results: bf16 (also for an fp8 layer) or f16.
  DType token_dtype() const { return dtype == DType::fp8_e4m3 ? DType::bf16 : dtype; }
};

/// Settings of one call. All ranks must pass the same `add`, and agree on whether selector and device_tokens are null.
struct MoeLayerCall {
  void* stream = nullptr;  ///< CUDA: cudaStream_t; null: the legacy default stream
  /// CUDA: maximum number of multiprocessors for each kernel of the call, in [1, those of the GPU / ranks on it], for the
  /// fused form with fp8 weights at least 2. 0: the exchange uses the tuned number or its default; the matrix products and the
  /// fused kernel use all multiprocessors, or the rank's share if ranks share a GPU, but no more than GroupOptions::num_sms.
  int num_sms = 0;
  /// Pointer to T in the rank's memory (CUDA: in GPU memory), or null. T is read when the call runs, so it may vary between
  /// graph launches, and is clamped to [0, topk_ids.num_tokens]. All ids must be readable. Rows T and above of `out` are not
  /// written.
  const int32_t* device_tokens = nullptr;
  /// Adds the layer to the rows that `out` already contains, for example those of a shared expert. Normal mode: the sum starts
  /// with the row of `out` instead of +0 and is rounded at the same points (CombineOptions::bias). Low latency: the layer is
  /// rounded to token_dtype() as without `add`, and the row becomes round(float32(out) + float32(layer)), which adds one
  /// rounding.
  bool add = false;
  /// If not null, `topk_ids` are expert ids, which the call replaces with slots as SlotSelector::select() does; the layer's
  /// experts are the slots of the map: `num_experts` is num_slots(). The call counts as a call of select() on all ranks, and
  /// the routes of tokens below T are counted. GPUs: a replay uses the map in force; in normal mode and in the fused
  /// form, a separate kernel selects the slots. LowLatencyDispatchOptions::selector describes low latency and the comparison of
  /// selectors between ranks.
  SlotSelector* selector = nullptr;
  /// CUDA: cudaEvent_t after which the weights are complete, for example SlotWeights::ready_event(), or null. The separate form
  /// waits for it on the stream between dispatch and the experts, the fused form before its kernel. Not during stream capture.
  /// The fused form copies the scales of fp8 weights in the constructor, in with_weights(), and in each call with
  /// `weights_ready`; they must be valid until that call ends. The first call after a change of scales must pass it.
  void* weights_ready = nullptr;
};

/// Memory used by a layer on the rank with the most experts, in bytes, excluding the caller's arrays. docs/layer.md gives the
/// formulas.
struct MoeLayerMemory {
  size_t heap_bytes = 0;     ///< in the group's symmetric heap, excluding its header
  size_t private_bytes = 0;  ///< low latency: upper bound for received rows, returned rows and a call's sums
  size_t weight_bytes = 0;   ///< CPU, WeightStorage::packed
  /// Scratch memory of the experts; GPUs: rows between the two matrix products and, with per_channel, quantized tokens. Fused:
  /// rows, flags and tables (docs/layer.md), and on the CPU the scratch of one worker; each additional worker of the group
  /// requires the same scratch again.
  size_t scratch_bytes = 0;
  size_t total() const { return heap_bytes + private_bytes + weight_bytes + scratch_bytes; }
};

/// An MoE layer of a group. Construction and forward are collective, under the rules of normal.hpp: all ranks make the same
/// calls in the same order; T may differ and may be 0. Destruction is local. The group must outlive the layer. Multiple layers
/// of a group are separate objects, each with its own part of the heap; layers created by with_weights() share that part.
///
/// Results are bit-identical to those of separate calls to dispatch, ExpertMlp::forward and combine with the same settings. On
/// GPUs, with CombineOrder::per_route and without `add`, they do not depend on the exchange or the capacity if nothing is
/// dropped.
///
/// CPU: forward runs synchronously on the calling thread; the exchange, and all of a fused layer, use the group's workers.
/// CUDA: pointers refer to memory of the rank's GPU, which need not be current; rows, weights and `out` are aligned to 16
/// bytes. Calls are enqueued and never require a count on the host, so every call can be captured in a graph and replayed with
/// different tokens, routing, weights and, through device_tokens, a different T. Calls on one layer, including graph launches,
/// must be ordered one after another.
///
/// Threads: all objects of a group must be used by one thread at a time.
///
/// Errors are as in normal.hpp and are thrown by the step that detects them. Arguments are rejected before any rank has
/// transferred a row, except `out`, which combine checks. If a rank rejects its arguments, its peers' calls fail with
/// PeerFailed. capacity_exceeded, which Group::check() reports on GPUs, leaves the layer usable and `out` unwritten.
class MoeLayer {
 public:
  /// `w13` [L, 2 * I, H] and `w2` [L, H, I] are the weights of this rank's experts, as in the constructor of ExpertMlp; they
  /// may be null on a rank without experts. Waits up to GroupOptions::timeout for the other ranks.
  /// GPUs, fp8: scales are read in stream order on `stream` (cudaStream_t; null: the legacy default stream). Calls are ordered
  /// after these reads, except in graphs launched on other streams, which the caller must order. \throws on all ranks, even if
  /// the error originates on only some of them: Error(invalid_argument) naming the field, or as ExpertMlp; Error(unsupported)
  /// for settings that the backend does not support; Error(heap_exhausted); Error(system) if memory is insufficient;
  /// Error(mismatch) if configurations differ. The group stays usable.
  MoeLayer(Group& group, const MoeLayerConfig& config, const void* w13, const void* w2, void* stream = nullptr);
  /// Local. Creates another layer of the model, which differs from this one only in its weights and shares all other memory
  /// with it (docs/layer.md gives its cost). Either may be destroyed first. The weights are as in the constructor, with
  /// MoeLayerConfig::storage. Calls on layers that share memory, including graph launches, must be ordered one after another,
  /// in the same order of layers on all ranks; the fused form detects violations (mismatch). All ranks must create the same
  /// layers in the same order. \throws Error(invalid_argument) naming the argument; Error(system) if memory is insufficient.
  MoeLayer with_weights(const MoeWeights& weights) const;
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;
  /// Does not wait; memory is freed once the enqueued calls and graphs that use it are done.
  ~MoeLayer();

  /// Local; requires no group. \throws Error(invalid_argument), Error(unsupported) as the constructor.
  static MoeLayerMemory memory_required(const MoeLayerConfig& config, int world, Backend backend = Backend::cpu);
  /// Heap size for a group whose only object is this layer, including the header and alignment slack.
  static size_t heap_bytes(const MoeLayerConfig& config, int world, Backend backend = Backend::cpu);

  /// Collective. `x` is [T, H] of token_dtype(), where T is topk_ids.num_tokens; `topk_ids` is [T, K]; `topk_weights` is
  /// float32 [T, K], or null (all weights 1). An id of -1 means no expert (others outside [0, E): MoeLayerConfig::invalid_ids);
  /// the result of a token without an expert is +0 (with `add`, its row is unchanged). `out` is [T, H] of token_dtype() and
  /// must not overlap anything else. All of them may be null if T is 0.
  void forward(const void* x, const ExpertIds& topk_ids, const float* topk_weights, void* out, const MoeLayerCall& call = {});

  /// With Overflow::drop_and_report: [T, K] for the last forward, 1 if this rank's route was dropped at capacity. A dropped
  /// route contributes nothing to the sum, and the other weights are used unchanged. The array is in the rank's memory (CUDA:
  /// in GPU memory, written when the call runs) and is valid until the next forward or, for a captured forward, as long as its
  /// graph exists. Empty with Overflow::fail and with low latency, which never drops routes.
  std::span<const uint8_t> dropped() const;
  /// Number of ids in this rank's calls so far that are neither -1 nor a valid expert id. Local. CUDA: counts calls that have
  /// run, including graph replays; waits only for a copy of the count, not for kernels.
  int64_t invalid_ids() const;

  /// The configuration passed to the constructor, with the selected exchange and form.
  const MoeLayerConfig& config() const;
  /// Returns the form, exchange and ExpertMlp::implementation(), for example "separate, normal, bf16 wgmma:sm_90a".
  std::string implementation() const;

  struct Impl;  ///< library internal

 private:
  friend struct detail::LayerCalls;
  explicit MoeLayer(std::unique_ptr<Impl> impl);
  detail::Held<std::unique_ptr<Impl>, detail::kMoeLayerObject> impl_;
};

}  // namespace switchyard
