// SPDX-License-Identifier: Apache-2.0
/// \file
/// A whole MoE layer in one GPU kernel, or one run of a CPU group's workers: rows travel, both products of the experts run and
/// outputs return in one graph of tasks. GPUs of compute capability 9.0 (H100, H200) that reach each other's memory, and the
/// CPU. MoeLayer (layer.hpp) has it as MoeForm::fused; this is the same for programs that link the exchange library alone.
/// docs/concepts/fused.md says how it works.
///
///     out[t] = sum over k of weights[t, k] * mlp_(ids[t, k])(x[t])          mlp: as ExpertMlp (expert.hpp) says
///
/// Notation: W ranks, T tokens on this rank, H hidden, I intermediate, K topk, E experts, L those of this rank.
///
/// Bits: those of NormalExchange::dispatch to expert-major rows, ExpertMlp::forward and a combine per_route, called one by one;
/// they depend on neither num_sms, nor the number of workers, nor timing. CPU: with the products that MoeLayer brings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "switchyard/group.hpp"
#include "switchyard/held.hpp"
#include "switchyard/moe_weights.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Fixed properties of a FusedMoe; equal on all ranks.
struct FusedMoeConfig {
  int64_t hidden = 0;        ///< H: a multiple of 8
  int64_t intermediate = 0;  ///< I: a multiple of 8
  int num_experts = 0;       ///< E >= 1; need not divide by W
  int topk = 0;              ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;    ///< largest T on any rank
  int64_t capacity = 0;      ///< most rows, one for each route, that a rank takes in a call; 0: those of the worst routing
  Overflow overflow = Overflow::fail;  ///< of routes beyond a rank's capacity
  /// Of weights, and so of what is multiplied: bf16 or fp8_e4m3. Tokens and results are bf16 either way. fp8: H and I are
  /// multiples of 128, H at most 65536; a token becomes fp8 before it travels, as NormalExchange quantises it.
  DType type = DType::bf16;
  ScaleKind row_scales = ScaleKind::f32;     ///< fp8: of tokens, of 128 columns each: f32 or ue8m0
  ScaleKind weight_scales = ScaleKind::f32;  ///< fp8: of w13_scales and w2_scales
  /// fp8: of 128 x 128 weights, as ExpertOptions has them: [L, 2 * I / 128, H / 128] and [L, H / 128, I / 128]. They are read
  /// when the object is made: what writes them has ended by then.
  const void* w13_scales = nullptr;
  const void* w2_scales = nullptr;
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank
};

/// Settings of one call.
struct FusedMoeCall {
  void* stream = nullptr;  ///< CUDA: cudaStream_t; null: the legacy default stream
  /// CUDA: multiprocessors, in [1, those of the GPU / ranks on it]; fp8: at least 2, of an odd number one less; 0: all.
  int num_sms = 0;
  /// Memory of the rank (CUDA: of its GPU), or null: T when the call runs, clamped to [0, tokens of the ids]. All of x and the
  /// ids must be readable. Rows of `out` from T on are not written.
  const int32_t* device_tokens = nullptr;
  bool add = false;    ///< the sums begin with the rows that `out` holds, instead of +0
  int weight_set = 0;  ///< which of the object's sets of weights; equal on all ranks, and in both halves of a layer
};

/// Memory of a FusedMoe on the rank with most experts, in bytes. R: capacity, or W * max_tokens * K.
struct FusedMoeMemory {
  /// Of the group's symmetric heap: max_tokens rows, max_tokens * K rows that come back, and R * (8 + 4 K) bytes, counts and
  /// flags aside.
  size_t heap_bytes = 0;
  /// R rows of H, twice, and of I, of two bytes each element; fp8: of H and of I, of one byte and 1 / 32, and of H of two;
  /// flags, on GPUs tables, and in fp8 16 bytes for every 128 x 128 weights: these again for each further set of weights.
  size_t private_bytes = 0;
};

/// Rows of a rank's experts between the two halves of a layer: what the product up left and the product down reads. Memory of
/// the rank (CUDA: of its GPU, written when the call runs), the object's own: it stays where it is.
struct FusedMoeRows {
  void* data = nullptr;     ///< [R, I] bf16, or e4m3
  float* scales = nullptr;  ///< fp8: of columns [128 b, 128 b + 128) of row r at b * scale_pitch + r; else null
  int64_t scale_pitch = 0;
  /// [L]: expert e has rows [first_row[e], first_row[e] + num_rows[e]).
  const int64_t* first_row = nullptr;
  const int64_t* num_rows = nullptr;
  int64_t most_rows = 0;  ///< R: capacity, or W * max_tokens * K
};

/// Both products of one rank's experts on the CPU, for a FusedMoe: the exchange library has none. MoeLayer brings those of
/// ExpertMlp. Rows are bf16, dense.
///
/// Workers of a call compute tiles of rows side by side. Calls with one number `worker`, in [0, GroupOptions::num_blocks *
/// num_warps), come one after the other; those with different ones at the same time, from different threads. What a function
/// throws ends the call on all ranks and leaves FusedMoe::forward, as Error.
class FusedProducts {
 public:
  virtual ~FusedProducts() = default;
  /// Rows of the next tile of an expert of which `left` >= 1 rows are in no tile yet: in [1, left], always the same for the
  /// same `left`. One thread.
  virtual int64_t tile_rows(int64_t left) const = 0;
  /// Rows `x` [rows, H] of local expert `expert` up to `h` [rows, I]: for a SwiGLU MLP silu(x W1^T) * (x W3^T).
  virtual void up(int worker, int expert, const void* x, int64_t rows, void* h) = 0;
  /// Rows `h` down to `y` [rows, H]: h W2^T.
  virtual void down(int worker, int expert, const void* h, int64_t rows, void* y) = 0;
};

namespace detail {
class FusedImpl;
}

/// Construction and forward are collective, with what normal.hpp says of collective calls. Destruction is local. A rank that
/// does not come ends the call with PeerTimeout within GroupOptions::timeout.
///
/// CUDA: pointers are memory of the rank's GPU, rows at multiples of 16 bytes. Calls are enqueued: nothing waits for the host,
/// so that they can be captured and replayed. Calls of one object, graphs included, come one after the other.
///
/// CPU: a call runs on the calling thread and the group's other workers, any number of them, and is done on return.
/// Overflow::fail beyond a capacity is Error(capacity_exceeded) on all ranks, after which the object can be used.
class FusedMoe {
 public:
  /// `w13` is [L, 2 * I, H]: of each expert first the I gate rows, then the I up rows. `w2` is [L, H, I]. Of the type that the
  /// configuration says; they stay the caller's. \throws on all ranks alike, also if only some have cause to:
  /// Error(invalid_argument) naming the field; Error(unsupported) for other GPUs and for groups of CPUs; Error(heap_exhausted);
  /// Error(system); Error(mismatch).
  /// fp8: the scales are read in the order of `stream` (cudaStream_t), and calls on any stream come after that.
  FusedMoe(Group& group, const FusedMoeConfig& config, const void* w13, const void* w2, void* stream = nullptr);
  /// On a group of CPUs. `products` may be null on a rank without experts. \throws as the other one, Error(unsupported) for
  /// groups of GPUs.
  FusedMoe(Group& group, const FusedMoeConfig& config, std::shared_ptr<FusedProducts> products);
  FusedMoe(FusedMoe&&) noexcept;
  FusedMoe& operator=(FusedMoe&&) noexcept;
  /// Waits for nothing: memory that enqueued calls and graphs use is freed after them.
  ~FusedMoe();

  /// Local, need no group. The heap is the same on both backends.
  static FusedMoeMemory memory_required(const FusedMoeConfig& config, int world, Backend backend = Backend::cuda);
  static size_t heap_bytes_for(const FusedMoeConfig& config, int world);

  /// Collective. `x` is [T, H], T being ids.tokens; `ids` [T, K]; `weights` float32 [T, K], or null: all 1. An id of -1 is
  /// no expert (others outside [0, E): FusedMoeConfig::invalid_ids); a token without one gets +0 (add: keeps its row). `out` is
  /// [T, H] and must not overlap anything else.
  void forward(const void* x, const ExpertIds& ids, const float* weights, void* out, const FusedMoeCall& call = {});

  /// The two halves of forward, each a call of its own: what lies between them, rows() may be read and changed. Together they
  /// have the bits of forward. Both collective; after dispatch_up the next call is down_combine, on all ranks.
  ///
  /// Dispatch and the product up, in one launch: tokens to the rows of their experts, and those through SwiGLU.
  void dispatch_up(const void* x, const ExpertIds& ids, const FusedMoeCall& call = {});
  /// The product down and combine, in one launch, with the ids and T of the dispatch_up before: `weights` [T, K], or null;
  /// `out` [T, H]. `call.device_tokens` is null. \throws Error(invalid_argument) without a dispatch_up before.
  void down_combine(const float* weights, void* out, const FusedMoeCall& call = {});
  FusedMoeRows rows() const;

  /// Local. Weights of another layer of the model, which shares all memory of this object but theirs: calls say by
  /// FusedMoeCall::weight_set whose they compute with. They are as the constructor takes them and stay the caller's; fp8: the
  /// scales are read in the order of weights.stream. \returns their number: the constructor's have 0, then counted on; equal on
  /// all ranks if these make the same additions. \throws Error(invalid_argument) naming the argument; Error(unsupported) on
  /// groups of CPUs; Error(system).
  int add_weights(const MoeWeights& weights);
  /// The same on a group of CPUs. \throws Error(unsupported) on groups of GPUs.
  int add_products(std::shared_ptr<FusedProducts> products);
  /// Local. Calls and graphs that use the set may be under way: its memory is freed after them. No later call names it.
  void remove_weights(int set);

  /// [max_tokens, H]: where other ranks read this rank's tokens. An `x` that lies elsewhere is copied here first; whoever makes
  /// the tokens may write them here, after the call before. fp8: null.
  void* tokens() const;
  /// Overflow::drop_and_report: [T, K] of the last forward or dispatch_up, 1 where a route was dropped; written when the call
  /// runs, until the next. Else empty.
  std::span<const uint8_t> dropped() const;
  const FusedMoeConfig& config() const;
  CallStatistics last_call() const;
  /// Ids of this rank's calls so far that are neither -1 nor an expert. Local. CUDA: of the calls that have run, replays of
  /// graphs included; waits for a copy of the number and for no kernel.
  int64_t invalid_ids() const;

 private:
  detail::Held<std::unique_ptr<detail::FusedImpl>, detail::kFusedObject> impl_;
};

}  // namespace switchyard
