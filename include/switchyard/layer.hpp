// SPDX-License-Identifier: Apache-2.0
/// \file
/// A whole MoE layer: tokens go to the ranks of their experts, through the experts, and their weighted sums come back, in one
/// call. Library switchyard_layer (CMake: switchyard::layer). The CPU, and GPUs of compute capability 9.0 (H100, H200).
///
///     out[t] = sum over k of weights[t, k] * mlp_(ids[t, k])(x[t])          mlp: as ExpertMlp says
///
/// Notation: W ranks, T tokens on this rank, H hidden, I intermediate, K topk, E experts, L those of this rank. Expert e
/// belongs to the rank that first_expert() of normal.hpp says.
///
///     MoeLayerConfig config;             // hidden, intermediate, num_experts, topk, max_tokens
///     options.heap_bytes = MoeLayer::heap_bytes_for(config, world, options.backend);
///     Group group = Group::from_environment(options);
///     MoeLayer layer(group, config, w13, w2);
///     layer.forward(x, ExpertIds::of(ids, T, K), weights, out, {.stream = stream});
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "switchyard/expert.hpp"
#include "switchyard/group.hpp"
#include "switchyard/held.hpp"
#include "switchyard/names.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Which exchange moves the rows of a layer.
enum class MoeExchange : uint8_t {
  automatic = 0,    ///< low_latency where kMostDecodeTokens and kMostDecodeRows allow it and no capacity is given, else normal
  normal = 1,       ///< NormalExchange, expert-major rows: prefill and training
  low_latency = 2,  ///< LowLatencyExchange: decoding
};
template <>
struct NamesOf<MoeExchange> {
  static constexpr Named<MoeExchange> kAll[] = {
      {MoeExchange::automatic, "automatic"}, {MoeExchange::normal, "normal"}, {MoeExchange::low_latency, "low_latency"}};
};

/// MoeExchange::automatic is low_latency if max_tokens is in [1, kMostDecodeTokens] and the rows that are kept for a rank's
/// experts, experts of rank 0 * W * max_tokens, are at most kMostDecodeRows.
inline constexpr int64_t kMostDecodeTokens = 256, kMostDecodeRows = 65536;

/// How a layer is computed. The results of all forms are the same bits.
enum class MoeForm : uint8_t {
  automatic = 0,  ///< fused on GPUs in bf16 around normal mode, per_route, if its sizes allow it; else separate
  separate = 1,   ///< dispatch, two products and combine, one call after the other on one stream
  /// Normal mode, CombineOrder::per_route, bf16, and on GPUs fp8_e4m3: in one kernel, in which rows travel while products run;
  /// on the CPU in one run of the group's workers, all of which compute products (fused.hpp).
  fused = 2,
};
template <>
struct NamesOf<MoeForm> {
  static constexpr Named<MoeForm> kAll[] = {
      {MoeForm::automatic, "automatic"}, {MoeForm::separate, "separate"}, {MoeForm::fused, "fused"}};
};

/// Fixed properties of a layer; equal on all ranks but for pointers and `storage`.
struct MoeLayerConfig {
  int64_t hidden = 0;        ///< H >= 1; rows of normal mode, and of GPUs, are whole 16 bytes
  int64_t intermediate = 0;  ///< I >= 1; GPUs: a multiple of 8, fp8: of 16, as is H
  int num_experts = 0;       ///< E >= 1, of all ranks; need not divide by W
  int topk = 0;              ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;    ///< largest T on any rank; low_latency: in [1, 65535]
  DType type = DType::bf16;  ///< of weights: bf16; GPUs: or f16, or fp8_e4m3. Tokens and results: row_type()
  CombineOrder order = CombineOrder::per_route;  ///< of the sum, as the exchange's combine says it
  MoeExchange exchange = MoeExchange::automatic;
  MoeForm form = MoeForm::automatic;
  /// Normal mode: most rows, one for each route, that a rank takes in a call; memory is for no more. 0: those of the worst
  /// routing.
  int64_t capacity = 0;
  Overflow overflow = Overflow::fail;  ///< of routes beyond a rank's capacity; drop_and_report: see MoeLayer::dropped()
  /// GPUs, normal mode: calls are captured in graphs. All graphs of the layer share one set of rows, beside that of other
  /// calls.
  bool captured = true;
  WeightStorage storage = WeightStorage::packed;  ///< GPUs: view, given so, because the weights stay the caller's
  ScaleKind row_scales = ScaleKind::f32;  ///< fp8: tokens become fp8 on the way, with these scales of 128 columns: f32 or ue8m0
  ScaleKind weight_scales = ScaleKind::f32;  ///< fp8: of w13_scales and w2_scales, which are as ExpertOptions has them
  const void* w13_scales = nullptr;
  const void* w2_scales = nullptr;
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank

  /// Of tokens and results: bf16, also of a layer in fp8; or f16.
  DType row_type() const { return type == DType::fp8_e4m3 ? DType::bf16 : type; }
};

/// Settings of one call; `add` and that there are device_tokens are equal on all ranks.
struct MoeLayerCall {
  void* stream = nullptr;  ///< CUDA: cudaStream_t; null: the legacy default stream
  /// CUDA: most multiprocessors of each kernel of the call, in [1, those of the GPU / ranks on it]. 0: the exchange takes what
  /// is tuned, or its default; the products take all, or where ranks share a GPU, the rank's part of them, and no more than
  /// GroupOptions::num_sms.
  int num_sms = 0;
  /// Memory of the rank (CUDA: of its GPU), or null: T when the call runs, so that it can vary in a graph; clamped to [0,
  /// tokens of the ids]. All of the ids must be readable. Rows of `out` from T on are not written.
  const int32_t* device_tokens = nullptr;
  /// `out` holds rows already, of a shared expert for example, and the layer is added to them. Normal mode: the sum begins with
  /// the row of `out` instead of +0 and is rounded where it is without (CombineOptions::bias). Low latency: the layer is
  /// rounded to row_type() as it is without, and the row becomes round(float32(out) + float32(layer)): one rounding more.
  bool add = false;
};

/// Memory of a layer on the rank with most experts, in bytes, beside the caller's arrays. docs/layer.md has the formulas.
struct MoeLayerMemory {
  size_t heap_bytes = 0;     ///< of the group's symmetric heap, its header aside
  size_t private_bytes = 0;  ///< low latency: rows that come, rows that go back, and a call's sums; at most this
  size_t weight_bytes = 0;   ///< CPU, WeightStorage::packed
  /// Of the experts; GPUs: rows between the two products. Fused: FusedMoeMemory::private_bytes, on the CPU with the scratch of
  /// one worker; each further worker of the group has as much again (docs/layer.md).
  size_t scratch_bytes = 0;
  size_t total() const { return heap_bytes + private_bytes + weight_bytes + scratch_bytes; }
};

/// An MoE layer of a group. Construction and forward are collective, with what normal.hpp says of collective calls: all ranks
/// make the same calls in the same order, T may differ and may be 0. Destruction is local. The group must outlive the layer.
/// Several layers of one group are objects of their own, each with its share of the heap; those of with_weights() share it.
///
/// Bits: those of dispatch, ExpertMlp::forward and combine, called one by one with the same settings. On GPUs they depend on
/// neither the exchange nor on capacity, where nothing is dropped, with CombineOrder::per_route and without `add`.
///
/// CPU: forward is synchronous on the calling thread (the exchange, and all of a fused layer, with the group's workers). CUDA:
/// pointers are memory of the rank's GPU, which need not be current, rows, weights and `out` at multiples of 16 bytes. Calls
/// are enqueued; nothing asks the host for a count, so that every call can be captured in a graph and replayed with other
/// tokens, routing and weights, also with another T by device_tokens. Calls of one layer, graphs included, come one after the
/// other.
///
/// Threads: one thread at a time for all objects of a group.
///
/// Errors: as in normal.hpp, of whichever step finds them; arguments are refused before any rank has moved a row, but for
/// `out`, which combine checks. A rank that refuses ends the call of its peers with PeerFailed. capacity_exceeded, which on
/// GPUs comes from Group::check(), leaves the layer usable; `out` is not written then.
class MoeLayer {
 public:
  /// `w13` [L, 2 * I, H] and `w2` [L, H, I] are those of this rank's experts, as the constructor of ExpertMlp takes them; they
  /// may be null on a rank without experts. Waits for the other ranks for GroupOptions::timeout.
  /// \throws on all ranks alike, also if only some have cause to: Error(invalid_argument) naming the field, or as ExpertMlp;
  /// Error(unsupported) for what the backend does not have; Error(heap_exhausted); Error(system) without memory;
  /// Error(mismatch) if configurations differ. The group can be used afterwards.
  /// GPUs, fp8: scales are read in the order of `stream` (cudaStream_t; null: the legacy default stream).
  MoeLayer(Group& group, const MoeLayerConfig& config, const void* w13, const void* w2, void* stream = nullptr);
  /// Local. Another layer of the model, which differs from this one in its weights alone and shares all memory with it but
  /// theirs (docs/layer.md says what a layer costs then). Either may end first. The weights are as the constructor takes them,
  /// with MoeLayerConfig::storage. Calls of layers that share, graphs included, come one after the other, on all ranks of the
  /// same layers in the same order; the fused form finds others (mismatch). All ranks make the same layers in the same order.
  /// \throws Error(invalid_argument) naming the argument; Error(system) without memory.
  MoeLayer with_weights(const MoeWeights& weights) const;
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;
  /// Waits for nothing: memory that enqueued calls and graphs use is freed after them.
  ~MoeLayer();

  /// Local, need no group. \throws Error(invalid_argument), Error(unsupported) as the constructor.
  static MoeLayerMemory memory_required(const MoeLayerConfig& config, int world, Backend backend = Backend::cpu);
  /// Heap size for a group whose only object is this layer: header and alignment slack included.
  static size_t heap_bytes_for(const MoeLayerConfig& config, int world, Backend backend = Backend::cpu);

  /// Collective. `x` is [T, H] of row_type(), T being ids.tokens; `ids` [T, K]; `weights` float32 [T, K], or null: all 1. An id
  /// of -1 is no expert (others outside [0, E): MoeLayerConfig::invalid_ids); a token without one gets +0 (add: keeps its row).
  /// `out` is [T, H] of row_type() and must not overlap anything else. All of them may be null if T is 0.
  void forward(const void* x, const ExpertIds& ids, const float* weights, void* out, const MoeLayerCall& call = {});

  /// Overflow::drop_and_report: [T, K] of the last forward, 1 where this rank's route was dropped at capacity: it added
  /// nothing, and the other weights are as given. In memory of the rank (CUDA: of its GPU, written when the call runs), until
  /// the next forward, or, of a captured one, as long as its graph. Empty with Overflow::fail and with low latency, which drops
  /// nothing.
  std::span<const uint8_t> dropped() const;
  /// Ids of this rank's calls so far that are neither -1 nor an expert. Local. CUDA: of the calls that have run, replays of
  /// graphs included; waits for a copy of the number and for no kernel.
  int64_t invalid_ids() const;

  /// As given, with the exchange and the form that were chosen.
  const MoeLayerConfig& config() const;
  /// For example "separate, normal, bf16 wgmma:sm_90a": form, exchange and ExpertMlp::implementation().
  std::string implementation() const;

  struct Impl;  ///< library internal

 private:
  explicit MoeLayer(std::unique_ptr<Impl> impl);
  detail::Held<std::unique_ptr<Impl>, detail::kMoeLayerObject> impl_;
};

}  // namespace switchyard
