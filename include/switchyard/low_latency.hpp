// SPDX-License-Identifier: Apache-2.0
/// \file
/// Low-latency mode: fixed-shape exchanges for decoding, with at most a few hundred tokens per rank.
///
/// Notation as in normal.hpp: W ranks, T tokens on this rank (T <= max_tokens, may differ by rank, may be 0), H hidden, K topk,
/// E experts. Each local expert has R = W * max_tokens rows for any routing, so rows are placed without counts, no buffer can
/// overflow, and every call can be captured in a graph.
///
/// A layer whose experts read the dispatched rows in place and write to the rows that combine reads
/// (examples/04_decode_layer.cpp):
///   LowLatencyExchange exchange(group, config);
///   LowLatencyOutput received = exchange.make_output();   // once
///   LowLatencyRows y = exchange.make_rows(DType::bf16);   // once
///   exchange.dispatch({x, T, H, DType::bf16}, ExpertIds::of(topk_ids, T, K), received, {.topk_weights = topk_weights});
///   my_experts(received.x, received.rows_of_expert, y.data);  // masked: row i of y from row i of received.x
///   exchange.combine(y, received, out);                       // no copy of y; out: bf16 [T, H]
///
/// dispatch and combine are collective: all ranks make the same calls on an object in the same order; if one rank makes a
/// different call, all ranks' calls fail with Error(mismatch) or PeerTimeout. Each call is one launch and can be split:
/// dispatch_send and combine_send return immediately without holding resources, and receive() enqueues the rest. Between the
/// halves, the caller may compute but must make no other call on the object.
///
/// CPU: calls run synchronously on the calling thread; a send half does not wait for peers. CUDA: pointers refer to memory of
/// the rank's GPU, and rows are aligned to 16 bytes. Calls enqueue their work on `stream` and return; only last_call() and, in
/// a group of several hosts, destruction wait for the GPU. Every call can be captured in a graph and replayed. Calls on one
/// object are ordered, even across streams (graph launches only by their stream). The blocks of a call wait for peers, so all
/// of them must be resident. Two objects whose calls run concurrently must therefore fit on the GPU together (set num_sms for
/// each); otherwise, a stream or events must order the calls, in the same order on all ranks. If a call without num_sms has the
/// GPU to itself, the next call on its stream may start before it ends.
///
/// Errors are as in normal.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "switchyard/normal.hpp"
#include "switchyard/row_function.hpp"

namespace switchyard {

class SlotSelector;

/// Order of the scales in memory.
enum class ScaleOrder : uint8_t {
  row_major = 0,  ///< one scale row of scale_row_bytes(H, kind, group) bytes per row
  /// For each expert: float32 [G, Rs], or int32 [ceil(G / 4), Rs] with the UE8M0 scales of four groups per int32; missing
  /// groups are 0. Rs is R rounded up to a multiple of 4, which aligns every column to 16 bytes, as tensor maps (TMA) require.
  column_major = 1,
};
template <>
struct NamesOf<ScaleOrder> {
  static constexpr Named<ScaleOrder> kAll[] = {{ScaleOrder::row_major, "row_major"},
                                               {ScaleOrder::column_major, "column_major"}};
};

/// Number of times each row is sent over the link.
enum class Sending : uint8_t {
  per_rank = 0,   ///< once per (token, rank), placed for each of its experts on arrival
  per_route = 1,  ///< once per (token, expert)
};
template <>
struct NamesOf<Sending> {
  static constexpr Named<Sending> kAll[] = {{Sending::per_rank, "per_rank"}, {Sending::per_route, "per_route"}};
};

/// Fixed properties of a low-latency object; identical on all ranks.
struct LowLatencyConfig {
  int64_t hidden = 0;                 ///< H; any if rows are sent unquantized, else a multiple of 16
  int num_experts = 0;                ///< E >= 1; need not divide by W
  int topk = 0;                       ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;             ///< maximum T on any rank, in [1, 65535]
  DType dtype = DType::bf16;          ///< of `x` unless already quantized, and the widest type combined: bf16, f16, f32
  ScaleKind scales = ScaleKind::f32;  ///< rows are sent as fp8 e4m3 with these scales; none: unquantized
  int scale_group = kScaleGroup;      ///< columns that share one scale: 32, 64 or 128
  ScaleOrder scale_order = ScaleOrder::row_major;
  Sending sending = Sending::per_rank;
  /// Number of pieces per row, in [1, 16], that are placed, answered and returned separately. 0: the tuned number (tuning.hpp)
  /// or, without a tuning, a number for which a rank receives about kPiecesAtOnce pieces: at most kMaxDefaultPieces per row,
  /// each with kMinPieceColumns to kMaxPieceColumns columns.
  int pieces = 0;
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank
};

/// Limits of the default LowLatencyConfig::pieces, used if neither the config nor a tuning sets a value.
inline constexpr int64_t kPiecesAtOnce = 2048, kMaxDefaultPieces = 7, kMinPieceColumns = 512, kMaxPieceColumns = 3584;

/// Number of pieces chosen for LowLatencyConfig::pieces == 0 in a group of `world` ranks. \throws Error(invalid_argument)
/// naming the value.
int default_pieces(const LowLatencyConfig& config, int world);

/// Options of one dispatch.
struct LowLatencyDispatchOptions {
  const float* topk_weights = nullptr;  ///< float32 [T, K]: sent with the rows, for CombineOrder::per_rank
  void* stream = nullptr;               ///< CUDA: cudaStream_t; null: the legacy default stream
  int num_sms = 0;                      ///< CUDA: in [1, those of the GPU / ranks on it]; 0: as tuned, or all
  /// Pointer to T in the rank's memory (CUDA: in GPU memory), or null. T is read when the call runs, so it may vary between
  /// graph launches, and is clamped to [0, topk_ids.num_tokens]. All ids must be readable because they are fetched before T.
  const int32_t* device_tokens = nullptr;
  /// If not null, `topk_ids` are expert ids, which the call replaces with slots as SlotSelector::select() does. The call counts
  /// as a call of select() on all ranks, and the routes of tokens below T are counted. The map's slots are the experts of this
  /// object: `num_experts` is num_slots(). CUDA: in common configurations on one host (bf16 or fp8 rows, `sending` per
  /// rank), the sending kernel of dispatch selects the slots; otherwise, a separate kernel selects them first. All ranks must
  /// pass the same selector with the same version of its map, or null. They compare (version + 3 * number of the selector)
  /// modulo 8, where the SlotSelectors and RouteCounters of a group are numbered in order of construction. All ranks get
  /// Error(mismatch) if the results differ or only some ranks pass null.
  SlotSelector* selector = nullptr;
};

/// Options of one combine.
struct LowLatencyCombineOptions {
  /// per_route: one row is returned per (token, expert), and the token's owner weights and sums them. per_rank: the experts'
  /// rank sums the rows and returns one per (token, rank), with fewer bytes and one more rounding (docs/concepts/low_latency.md
  /// gives a bound).
  CombineOrder order = CombineOrder::per_route;
  /// float32 [T, K], per_route only; null: the weights passed to dispatch or, without these, unweighted sums.
  const float* topk_weights = nullptr;
  /// float32 [local experts], per_route only, or null: each row is returned as round(y * its expert's scale), computed in
  /// registers.
  const float* expert_scale = nullptr;
  void* stream = nullptr;  ///< CUDA: as in LowLatencyDispatchOptions
  int num_sms = 0;         ///< CUDA: as in LowLatencyDispatchOptions
};

/// Options of moe_all_to_all.
struct AllToAllOptions {
  const float* topk_weights = nullptr;  ///< float32 [T, K]; null: 1
  const float* expert_scale = nullptr;  ///< float32 [local experts]: expert e returns round(x * scale); null: the row unchanged
  /// Alternative to expert_scale: expert e returns round(f(x)), element by element. Must be a function for the group's backend;
  /// null: none. Ranks may pass different functions, or none.
  const RowFunction* row_function = nullptr;
  void* stream = nullptr;                  ///< CUDA: as in LowLatencyDispatchOptions
  int num_sms = 0;                         ///< CUDA: as in LowLatencyDispatchOptions
  const int32_t* device_tokens = nullptr;  ///< as in LowLatencyDispatchOptions
  SlotSelector* selector = nullptr;  ///< as in LowLatencyDispatchOptions; CUDA: a kernel before the call selects the slots
};

namespace detail {
class LowLatencyImpl;
struct LowLatencyBlock;
struct LowLatencyCalls;
}  // namespace detail

/// Result of dispatches and input of combine: memory of fixed shape, private to the rank, created once by make_output() and
/// overwritten by each dispatch into it. Movable. It must not outlive its group; its memory is freed once the calls and graphs
/// that use it are done.
struct LowLatencyOutput {
  Rows x;                       ///< [local experts * R, H]: expert e's rows are [e * R, e * R + rows_of_expert[e])
  int64_t rows_per_expert = 0;  ///< R
  int64_t scale_rows = 0;       ///< Rs: distance in words between columns of scales; row-major: R
  ScaleOrder scale_order = ScaleOrder::row_major;  ///< as configured; so is scale_group
  int scale_group = kScaleGroup;
  int32_t* rows_of_expert = nullptr;  ///< [local experts]; valid as input of a "masked" grouped GEMM
  int64_t* source_range = nullptr;    ///< [local experts, W] rows of a source: first << 32 | count; sources ascending
  /// [local experts, R] source rank << 48 | k << 32 | token, where k is the first of the token's choices equal to this expert.
  /// Unspecified beyond rows_of_expert, like the rows themselves.
  int64_t* row_source = nullptr;
  std::shared_ptr<detail::LowLatencyBlock> block;  ///< owns the memory
};

/// Rows for the expert outputs, [local experts * R, H]; row i holds the result for row i of LowLatencyOutput::x. Expert kernels
/// write to this memory and combine reads it in place. It is created once by make_rows(), private to the rank and aligned to
/// 256 bytes; copies share it. The last copy must not outlive the group; the memory is freed once the calls and graphs that use
/// it are done.
struct LowLatencyRows : Rows {
  std::shared_ptr<void> memory;
};

/// Enqueues the receiving half of the call that returned the hook. Local; call it once, during the object's lifetime. Until
/// that half has ended, the call uses the output, `out` and LowLatencyCombineOptions::topk_weights; all other arguments may be
/// reused immediately. No call on another object may use the output before the hook has been called.
using ReceiveHook = std::function<void()>;

class LowLatencyExchange {
 public:
  /// Collective. Waits up to GroupOptions::rendezvous_timeout for the other ranks. \throws Error(invalid_argument) naming the
  /// field, Error(heap_exhausted) if the group's heap is too small, or Error(mismatch) if configurations differ. Errors are
  /// thrown on all ranks, even if they originate on only some of them. The group stays usable, its heap is unchanged, and
  /// another object may be created.
  LowLatencyExchange(Group& group, const LowLatencyConfig& config);
  LowLatencyExchange(LowLatencyExchange&&) noexcept;
  LowLatencyExchange& operator=(LowLatencyExchange&&) noexcept;
  ~LowLatencyExchange();

  /// Symmetric memory that an object with this config allocates from each rank's heap, excluding outputs. Local; requires no
  /// group. docs/concepts/low_latency.md gives the formula. The result does not depend on the number of pieces.
  static MemoryRequirement memory_required(const LowLatencyConfig& config, int world);
  /// Heap size for a group whose only object has this config, including the header and alignment slack.
  static size_t heap_bytes(const LowLatencyConfig& config, int world);

  /// Local. Allocates memory; do not call on the hot path. \throws Error(system) naming the number of unavailable bytes; the
  /// state is then unchanged, and peers are not notified.
  LowLatencyOutput make_output();
  /// Creates an output with rows and scales in the caller's memory, which must outlive the output. The memory has the shape and
  /// type of LowLatencyOutput::x. Rows and scales are aligned to 16 bytes; rows whose size is not a multiple of 16 bytes are
  /// aligned to their elements. For each expert in order, scales have scale_row_bytes() per row or, column-major, scale_rows
  /// words per column. Any memory of the rank (CUDA: of its GPU) is allowed; dispatches place rows there directly, as in the
  /// library's own memory. \throws Error(invalid_argument).
  LowLatencyOutput make_output(const Rows& memory);
  /// Rows for expert outputs. Local. Allocates, as make_output() does. `dtype` is bf16, f16 or f32, no wider than
  /// LowLatencyConfig::dtype. \throws Error(invalid_argument), Error(unsupported) for fp8.
  LowLatencyRows make_rows(DType dtype = DType::bf16);

  /// Sends row t of `x` to every expert of token t. `x` is [T, H] of dtype, or fp8 with row-major scales of the config's
  /// kind and group. If a token chooses an expert twice, the expert receives one row, which combine reads twice.
  void dispatch(const ConstRows& x, const ExpertIds& topk_ids, LowLatencyOutput& output,
                const LowLatencyDispatchOptions& options = {});
  ReceiveHook dispatch_send(const ConstRows& x, const ExpertIds& topk_ids, LowLatencyOutput& output,
                            const LowLatencyDispatchOptions& options = {});

  /// Sums the expert outputs for the tokens of the last dispatch to `output` and writes the sums to `out`, [T, H] of `y`'s
  /// type. `y` has the shape of `output.x` in bf16, f16 or f32 and is read in place (zero copy), from make_rows() or any other
  /// memory of the rank. `out` must not overlap `y` or anything in `options`. All ranks must combine the rows of the same
  /// dispatch, otherwise Error(mismatch). The result of a token without a route is +0.
  void combine(const ConstRows& y, const LowLatencyOutput& output, void* out, const LowLatencyCombineOptions& options = {});
  ReceiveHook combine_send(const ConstRows& y, const LowLatencyOutput& output, void* out,
                           const LowLatencyCombineOptions& options = {});

  /// Collective. Dispatch, experts and combine (per_route) in one launch, for experts that transform each element of a row
  /// independently, as described by AllToAllOptions (a factor per expert, or any function). Each expert's result is returned as
  /// soon as its row has arrived, and tokens are summed as results arrive. `x` and `out` are [T, H] of dtype. `out` must not
  /// overlap `x`, the ids or anything in `options`. Requires LowLatencyConfig::scales = none. The result of a token without a
  /// route is +0. The result is bit-identical to that of dispatch and combine with expert_scale. last_call() counts the rows of
  /// both directions.
  void moe_all_to_all(const ConstRows& x, const ExpertIds& topk_ids, void* out, const AllToAllOptions& options = {});

  const LowLatencyConfig& config() const;
  CallStatistics last_call() const;  ///< local; CUDA: waits for the call
  /// Number of ids in this rank's calls so far that are neither -1 nor a valid expert id. Local. CUDA: counts calls that have
  /// run, including graph replays; waits only for a copy of the count, not for kernels.
  int64_t invalid_ids() const;

 private:
  friend struct detail::LowLatencyCalls;
  detail::Held<std::unique_ptr<detail::LowLatencyImpl>, detail::kLowLatencyObject> impl_;
};

}  // namespace switchyard
