// SPDX-License-Identifier: Apache-2.0
/// \file
/// A complete MoE layer in one GPU kernel, or in one run of a CPU group's workers: row transfers, both expert matrix products
/// and the return of outputs form a single task graph. Runs on GPUs of compute capability 9.0 (H100, H200) with peer access,
/// and on the CPU. Internal: users select it with MoeForm::fused of MoeLayer, whose library links to this class, which
/// libswitchyard exports for it. Errors name the arguments of MoeLayer. docs/concepts/fused.md describes the
/// implementation.
///
///     out[t] = sum over k of topk_weights[t, k] * mlp_(topk_ids[t, k])(x[t])          mlp: see ExpertMlp (expert.hpp)
///
/// Notation: W ranks, T tokens on this rank, H hidden, I intermediate, K topk, E experts, L local experts.
///
/// Results are bit-identical to those of separate calls to NormalExchange::dispatch with expert-major rows, ExpertMlp::forward
/// and a combine in the configured order. They do not depend on num_sms, the number of workers, or timing. On the CPU, this
/// holds for the products that MoeLayer supplies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gemm/cpu/fused_interface.hpp"
#include "switchyard/group.hpp"
#include "switchyard/detail/held.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/types.hpp"

namespace switchyard {
struct MoeWeights;
class SlotSelector;
}  // namespace switchyard

namespace switchyard::detail {

/// Fixed properties of a FusedMoe; identical on all ranks.
struct FusedMoeConfig {
  int64_t hidden = 0;        ///< H: a multiple of 8
  int64_t intermediate = 0;  ///< I: a multiple of 8
  int num_experts = 0;       ///< E >= 1; need not divide by W
  int topk = 0;              ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;    ///< maximum T on any rank
  int64_t capacity = 0;      ///< maximum number of rows, one per route, that a rank accepts in a call; 0: worst-case routing
  /// For routes beyond a rank's capacity. split: a call in which a rank would exceed it runs in passes over ranges of tokens,
  /// with the bits of a call without a capacity; only forward.
  Overflow overflow = Overflow::fail;
  /// Type of the weights and hence of the matrix products: bf16 or fp8_e4m3. Tokens and results are bf16 in both cases. fp8: H
  /// and I are multiples of 128, H at most 65536; a token is quantized before it is sent, as by NormalExchange.
  DType dtype = DType::bf16;
  ScaleKind row_scales = ScaleKind::f32;     ///< fp8: for tokens, one per 128 columns: f32 or ue8m0
  ScaleKind weight_scales = ScaleKind::f32;  ///< fp8: kind of w13_scales and w2_scales
  /// fp8: one scale per 128 x 128 weights, as in ExpertOptions: [L, 2 * I / 128, H / 128] and [L, H / 128, I / 128]. They are
  /// read when the object is created; writes to them must have completed.
  const void* w13_scales = nullptr;
  const void* w2_scales = nullptr;
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank
  /// per_route or per_rank: the order of the sums, and whether one row returns per route or per (token, rank).
  CombineOrder order = CombineOrder::per_route;
};

/// Settings of one call.
struct FusedMoeCall {
  void* stream = nullptr;  ///< CUDA: cudaStream_t; null: the legacy default stream
  /// CUDA: multiprocessors, in [1, those of the GPU / ranks on it]; fp8: at least 2, and odd numbers are rounded down to even;
  /// 0: all.
  int num_sms = 0;
  /// Pointer to T in the rank's memory (CUDA: in GPU memory), or null. T is read when the call runs and is clamped to [0,
  /// topk_ids.num_tokens]. All of x and the ids must be readable. Rows T and above of `out` are not written.
  const int32_t* device_tokens = nullptr;
  bool add = false;                  ///< the sums start with the rows in `out` instead of +0
  int weight_set = 0;                ///< index of the weight set; identical on all ranks and in both halves of a layer
  bool known_memory = false;         ///< CUDA: exchange/normal/known_memory.hpp
  SlotSelector* selector = nullptr;  ///< MoeLayerCall::selector, also of dispatch_up
  bool read_scales = false;  ///< CUDA, fp8: copies the scales of the weight set again, in stream order; not during capture
};

/// Memory used by a FusedMoe on the rank with the most experts, in bytes. R is the capacity, or W * max_tokens * K.
struct FusedMoeMemory {
  /// In the group's symmetric heap: max_tokens rows, max_tokens * K returned rows, and R * (8 + 4 K) bytes, excluding counts
  /// and flags. per_rank: max_tokens * min(W, K) returned rows and R * (8 + 8 K) bytes.
  size_t heap_bytes = 0;
  /// R rows of H bf16 elements, which hold a row as received and later its output, and R rows of I elements; fp8: the latter at
  /// one byte per element, and scales, (H + I) / 32 bytes per row. In addition: flags; 8 bytes per route of a rank, for the
  /// slots of a selector; on GPUs, tables; and for fp8, 16 bytes per 128 x 128 weights of each weight set.
  size_t private_bytes = 0;
};

/// Rows of a rank's experts between the two halves of a layer: the output of the up product and input of the down product. The
/// memory belongs to the rank (CUDA: to its GPU, written when the call runs) and is owned by the object; the address does not
/// change.
struct FusedMoeRows {
  void* data = nullptr;     ///< [R, I] bf16, or e4m3
  float* scales = nullptr;  ///< fp8: scale of columns [128 b, 128 b + 128) of row r at b * scale_pitch + r; else null
  int64_t scale_pitch = 0;
  /// [L]: expert e has rows [first_row[e], first_row[e] + num_rows[e]).
  const int64_t* first_row = nullptr;
  const int64_t* num_rows = nullptr;
  int64_t max_rows = 0;  ///< R: capacity, or W * max_tokens * K
};

class FusedImpl;
inline constexpr char kFusedObject[] = "FusedMoe";

/// Construction and forward are collective, under the rules of normal.hpp. Destruction is local. If a rank does not arrive, the
/// call ends with PeerTimeout within GroupOptions::timeout.
///
/// CUDA: pointers refer to memory of the rank's GPU, and rows are aligned to 16 bytes. Calls are enqueued and never wait for
/// the host, so they can be captured and replayed. Calls on one object, including graph launches, must be ordered one after
/// another.
///
/// CPU: a call runs on the calling thread and all other workers of the group, and is complete on return. With Overflow::fail,
/// exceeding the capacity results in Error(capacity_exceeded) on all ranks; the object stays usable.
class FusedMoe {
 public:
  /// `w13` is [L, 2 * I, H]: for each expert, the I gate rows followed by the I up rows. `w2` is [L, H, I]. Both have the
  /// configured type and are owned by the caller. fp8: the scales are read in stream order on `stream` (cudaStream_t); calls on
  /// any stream are ordered after that. \throws on all ranks, even if the error originates on only some of them:
  /// Error(invalid_argument) naming the field; Error(unsupported) for other GPUs and for CPU groups; Error(heap_exhausted);
  /// Error(system); Error(mismatch).
  FusedMoe(Group& group, const FusedMoeConfig& config, const void* w13, const void* w2, void* stream = nullptr);
  /// For CPU groups. `products` may be null on a rank without experts. \throws as the other constructor, and Error(unsupported)
  /// for GPU groups.
  FusedMoe(Group& group, const FusedMoeConfig& config, std::shared_ptr<FusedProducts> products);
  FusedMoe(FusedMoe&&) noexcept;
  FusedMoe& operator=(FusedMoe&&) noexcept;
  /// Does not wait; memory is freed once the enqueued calls and graphs that use it are done.
  ~FusedMoe();

  /// Local; requires no group. The heap size is the same on both backends.
  static FusedMoeMemory memory_required(const FusedMoeConfig& config, int world, Backend backend = Backend::cuda);
  static size_t heap_bytes(const FusedMoeConfig& config, int world);

  /// Collective. `x` is [T, H], where T is topk_ids.num_tokens; `topk_ids` is [T, K]; `topk_weights` is float32 [T, K], or null
  /// (all 1). An id of -1 means no expert (others outside [0, E): FusedMoeConfig::invalid_ids); the result of a token without
  /// an expert is +0 (with `add`, its row is unchanged). `out` is [T, H] and must not overlap anything else.
  void forward(const void* x, const ExpertIds& topk_ids, const float* topk_weights, void* out, const FusedMoeCall& call = {});

  /// The two halves of forward as separate calls, between which rows() can be read and changed. Together they are bit-identical
  /// to forward. Both are collective; on all ranks, the next call after dispatch_up must be down_combine.
  ///
  /// Dispatch and the up product in one launch: sends tokens to their experts' rows and applies SwiGLU. `topk_weights`:
  /// per_rank: as in forward, because the ranks of the experts weight the outputs; per_route: null.
  void dispatch_up(const void* x, const ExpertIds& topk_ids, const float* topk_weights, const FusedMoeCall& call = {});
  /// The down product and combine in one launch, with the ids and T of the preceding dispatch_up: `topk_weights` [T, K], or
  /// null (per_rank: always); `out` [T, H]. `call.device_tokens` must be null. \throws Error(invalid_argument) without a
  /// preceding dispatch_up.
  void down_combine(const float* topk_weights, void* out, const FusedMoeCall& call = {});
  FusedMoeRows rows() const;

  /// Local. Adds the weights of another layer of the model, which shares all other memory of this object;
  /// FusedMoeCall::weight_set selects the weights for a call. The weights are as in the constructor and owned by the caller.
  /// fp8: the scales are read in stream order on weights.stream. \returns the index of the set. The constructor's set is 0 and
  /// later sets count up; the index is identical on all ranks that make the same additions. \throws Error(invalid_argument)
  /// naming the argument; Error(unsupported) on CPU groups; Error(system).
  int add_weights(const MoeWeights& weights);
  /// add_weights() for CPU groups. \throws Error(unsupported) on GPU groups.
  int add_products(std::shared_ptr<FusedProducts> products);
  /// Local. Calls and graphs that use the set may still be in flight; its memory is freed once they are done. Later calls must
  /// not use the set.
  void remove_weights(int set);

  /// [max_tokens, H]: memory from which other ranks read this rank's tokens. An `x` elsewhere is first copied here; to avoid
  /// the copy, the producer of the tokens may write them here after the previous call. fp8: null.
  void* tokens() const;
  /// With Overflow::drop_and_report: [T, K] for the last forward or dispatch_up, 1 if a route was dropped. Written when the
  /// call runs and valid until the next call. Otherwise empty.
  std::span<const uint8_t> dropped() const;
  const FusedMoeConfig& config() const;
  CallStatistics last_call() const;
  /// Number of ids in this rank's calls so far that are neither -1 nor a valid expert id. Local. CUDA: counts calls that have
  /// run, including graph replays; waits only for a copy of the count, not for kernels.
  int64_t invalid_ids() const;

 private:
  Held<std::unique_ptr<FusedImpl>, kFusedObject> impl_;
};

}  // namespace switchyard::detail
