// SPDX-License-Identifier: Apache-2.0
/// \file
/// Low-latency mode: exchanges of fixed shape for decoding, at most a few hundred tokens per rank.
///
/// Notation as in normal.hpp: W ranks, T tokens on this rank (T <= max_tokens, may differ by rank, may be 0), H hidden, K topk,
/// E experts. R = W * max_tokens rows are kept for each local expert, whatever the routing, so that no count is needed to place
/// a row, nothing can overflow and every call can be captured in a graph.
///
/// A layer, whose experts read what dispatch delivers and write where combine reads (examples/04_decode_layer.cpp):
///   LowLatencyExchange exchange(group, config);
///   LowLatencyOutput received = exchange.make_output();   // once
///   LowLatencyRows y = exchange.make_rows(DType::bf16);   // once
///   exchange.dispatch({x, T, H, DType::bf16}, ExpertIds::of(ids, T, K), received, {.weights = weights});
///   my_experts(received.x, received.rows_of_expert, y.data);  // masked: row i of y from row i of received.x
///   exchange.combine(y, received, out);                       // no copy of y; out: bf16 [T, H]
///
/// dispatch and combine are collective: all ranks make the same calls on an object in the same order; a rank that makes another
/// call ends all of them with Error(mismatch) or PeerTimeout. Each is one launch. Each can be split: dispatch_send and
/// combine_send return at once with nothing held, and receive() enqueues the rest; between the two the caller may compute, and
/// no other call on the object may be made.
///
/// CPU: calls are synchronous on the calling thread, a send half does not wait for peers. CUDA: pointers are device memory of
/// the rank's GPU, rows are aligned to 16 bytes; calls enqueue on `stream` and return; nothing waits for the GPU except
/// last_call() and destruction; every call can be captured in a graph and replayed. Calls on one object are ordered, also on
/// different streams (launches of a graph are ordered by their stream only). The blocks of a call wait for each other's peers,
/// so they must all be resident: two objects whose calls run at the same time must together fit the GPU, by a num_sms given for
/// each, or be ordered by a stream or by events, alike on all ranks. A call without num_sms that has the GPU to itself lets the
/// next call on its stream begin while it ends.
///
/// Errors: as in normal.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "switchyard/normal.hpp"
#include "switchyard/row_function.hpp"

namespace switchyard {

/// Order of the scales in memory.
enum class ScaleOrder : uint8_t {
  row_major = 0,  ///< a scale row of scale_row_bytes(H, kind, group) per row
  /// Per expert: groups, then rows. float32 [G, Rs]; UE8M0 with four groups in an int32: [ceil(G / 4), Rs], missing groups 0.
  /// Rs is R rounded up to 4, so that every column begins at 16 bytes, as tensor maps (TMA) ask.
  column_major = 1,
};
template <>
struct NamesOf<ScaleOrder> {
  static constexpr Named<ScaleOrder> kAll[] = {{ScaleOrder::row_major, "row_major"},
                                               {ScaleOrder::column_major, "column_major"}};
};

/// How often a row crosses the link.
enum class Sending : uint8_t {
  per_rank = 0,   ///< once per (token, rank), placed for each of its experts on arrival
  per_route = 1,  ///< once per (token, expert)
};
template <>
struct NamesOf<Sending> {
  static constexpr Named<Sending> kAll[] = {{Sending::per_rank, "per_rank"}, {Sending::per_route, "per_route"}};
};

/// Fixed properties of a low-latency object; equal on all ranks.
struct LowLatencyConfig {
  int64_t hidden = 0;                 ///< H; any if rows travel as they are, else a multiple of 16
  int num_experts = 0;                ///< E >= 1; need not divide by W
  int topk = 0;                       ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;             ///< largest T on any rank, in [1, 65535]
  DType row_type = DType::bf16;       ///< of `x` unless it comes quantised, and the widest that is combined: bf16, f16, f32
  ScaleKind scales = ScaleKind::f32;  ///< rows travel as fp8 e4m3 with these scales; none: as they are
  int scale_group = kScaleGroup;      ///< columns that share one scale: 32, 64 or 128
  ScaleOrder scale_order = ScaleOrder::row_major;
  Sending sending = Sending::per_rank;
  /// Pieces of a row: parts that are placed, answered and returned on their own, in [1, 16]. 0: the number that a tuning has
  /// (tuning.hpp). Without one, a rank receives about kPiecesAtOnce pieces: at most kMostUsualPieces of a row, of
  /// kFewestPieceColumns to kMostPieceColumns columns each.
  int pieces = 0;
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank
};

/// What LowLatencyConfig::pieces is chosen by, unless it or a tuning says otherwise.
inline constexpr int64_t kPiecesAtOnce = 2048, kMostUsualPieces = 7, kFewestPieceColumns = 512, kMostPieceColumns = 3584;

/// The pieces that are chosen where LowLatencyConfig::pieces is 0, in a group of `world` ranks. \throws Error(invalid_argument)
/// naming the value.
int usual_pieces(const LowLatencyConfig& config, int world);

/// Options of one dispatch.
struct LowLatencyDispatchOptions {
  const float* weights = nullptr;  ///< float32 [T, K]: go with the rows, for CombineOrder::per_rank
  void* stream = nullptr;          ///< CUDA: cudaStream_t; null: the legacy default stream
  int num_sms = 0;                 ///< CUDA: in [1, those of the GPU / ranks on it]; 0: as tuned, or all
  /// Memory of the rank (CUDA: of its GPU), or null: T at the time the call runs, so that it can vary in a graph; clamped to
  /// [0, tokens of the ids]. All of the ids must be readable: they are asked for before T is known.
  const int32_t* device_tokens = nullptr;
  /// CUDA: the caller knows that all memory it gives to the call is of this rank's GPU, as a framework does of its tensors: the
  /// driver is not asked, which takes the host longer than all other checks. Everything else is checked.
  bool known_memory = false;
};

/// Options of one combine.
struct LowLatencyCombineOptions {
  /// per_route: one row back per (token, expert), multiplied and summed by the token's owner. per_rank: summed where the
  /// experts are, one row back per (token, rank): fewer bytes, one more rounding (docs/concepts/low_latency.md bounds it).
  CombineOrder order = CombineOrder::per_route;
  /// float32 [T, K], per_route only; null: the weights given to dispatch, or none (rows are summed as they are).
  const float* weights = nullptr;
  /// float32 [experts here], per_route only, or null: each row goes back as round(y * scale of its expert), straight from the
  /// registers that computed it.
  const float* expert_scale = nullptr;
  void* stream = nullptr;     ///< CUDA: as in LowLatencyDispatchOptions
  int num_sms = 0;            ///< CUDA: as in LowLatencyDispatchOptions
  bool known_memory = false;  ///< CUDA: as in LowLatencyDispatchOptions
};

/// Options of moe_all_to_all.
struct AllToAllOptions {
  const float* weights = nullptr;       ///< float32 [T, K]; null: 1
  const float* expert_scale = nullptr;  ///< float32 [experts here]: expert e returns round(x * scale); null: the row as it is
  /// Instead of expert_scale: expert e returns round(f(x)), element by element. For the group's backend; null: none. Ranks may
  /// give different functions, or none.
  const RowFunction* row_function = nullptr;
  void* stream = nullptr;                  ///< CUDA: as in LowLatencyDispatchOptions
  int num_sms = 0;                         ///< CUDA: as in LowLatencyDispatchOptions
  const int32_t* device_tokens = nullptr;  ///< as in LowLatencyDispatchOptions
};

namespace detail {
class LowLatencyImpl;
struct LowLatencyBlock;
}  // namespace detail

/// What dispatches deliver, and what combine needs of one. Memory of fixed shape, made once by make_output(), overwritten by
/// each dispatch into it, private to the rank. Movable; must not outlive its group, nor be destroyed while a call uses it.
struct LowLatencyOutput {
  Rows x;                       ///< [experts here * R, H]: expert e's rows are [e * R, e * R + rows_of_expert[e])
  int64_t rows_per_expert = 0;  ///< R
  int64_t scale_rows = 0;       ///< Rs: words from a column of scales to the next; row-major: R
  ScaleOrder scale_order = ScaleOrder::row_major;  ///< and scale_group: as configured
  int scale_group = kScaleGroup;
  int32_t* rows_of_expert = nullptr;  ///< [experts here]; a "masked" grouped GEMM takes it as it is
  int64_t* source_range = nullptr;    ///< [experts here, W] rows of a source: first << 32 | count; sources ascending
  /// [experts here, R] source rank << 48 | k << 32 | token, k the first of the token's choices that is this expert. Beyond
  /// rows_of_expert unspecified, like the rows themselves.
  int64_t* row_source = nullptr;
  std::shared_ptr<detail::LowLatencyBlock> block;  ///< owns the memory; to be held as long as calls or graphs use it
};

/// Room for what the experts make of an output's rows, [experts here * R, H]: the result for row i of LowLatencyOutput::x is
/// row i. Expert kernels write there, combine takes it as it is and reads it where it lies. Made once by make_rows(), private
/// to the rank, aligned to 256 bytes; copies share it. The last one must not go while a call or a graph uses it, nor outlive
/// the group.
struct LowLatencyRows : Rows {
  std::shared_ptr<void> memory;
};

/// Enqueues the receiving half of the call that returned it. Local; use once, while the object lives. Until that half has ended
/// the call keeps the output, `out` and LowLatencyCombineOptions::weights; all else that it was given is the caller's again. No
/// call of another object may use the output before the hook has been called.
using ReceiveHook = std::function<void()>;

class LowLatencyExchange {
 public:
  /// Collective. Waits for the others for GroupOptions::rendezvous_timeout. \throws Error(invalid_argument) naming the field,
  /// Error(heap_exhausted) if the group's heap is too small, Error(mismatch) if configurations differ: on all ranks alike, also
  /// if only some have cause to. The group can be used afterwards, its heap is as before, and another object may be made.
  LowLatencyExchange(Group& group, const LowLatencyConfig& config);
  LowLatencyExchange(LowLatencyExchange&&) noexcept;
  LowLatencyExchange& operator=(LowLatencyExchange&&) noexcept;
  ~LowLatencyExchange();

  /// Symmetric memory that an object with this config takes from each rank's heap, outputs not included. Local, needs no group.
  /// docs/concepts/low_latency.md gives the formula. The same for any number of pieces.
  static MemoryRequirement memory_required(const LowLatencyConfig& config, int world);
  /// Heap size for a group whose only object has this config: header and alignment slack included.
  static size_t heap_bytes_for(const LowLatencyConfig& config, int world);

  /// Local. Allocates; not to be called on the hot path. \throws Error(system) naming the bytes that are not to be had; nothing
  /// has changed then, and peers are not told.
  LowLatencyOutput make_output();
  /// The same with rows and scales in memory of the caller, who frees it after the output: of the shape and type of
  /// LowLatencyOutput::x, rows and scales at multiples of 16 bytes (rows that are not of whole 16 bytes: of their elements).
  /// Scales have scale_row_bytes a row or, column-major, scale_rows words a column, expert after expert. Any memory of the rank
  /// (CUDA: of its GPU); dispatches place their rows there as in the library's own. \throws Error(invalid_argument).
  LowLatencyOutput make_output(const Rows& memory);
  /// Rows for what experts return. Local. Allocates, as make_output() does. `type`: bf16, f16 or f32, not wider than
  /// LowLatencyConfig::row_type. \throws Error(invalid_argument), Error(unsupported) for fp8.
  LowLatencyRows make_rows(DType type = DType::bf16);

  /// Sends row t of `x` to every expert of token t. `x` is [T, H] of row_type, or fp8 with row-major scales of the config's
  /// kind and group. The same expert twice in a token is one row, read twice by combine.
  void dispatch(const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output,
                const LowLatencyDispatchOptions& options = {});
  ReceiveHook dispatch_send(const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output,
                            const LowLatencyDispatchOptions& options = {});

  /// Sums what the experts made of the tokens of `output`'s last dispatch into `out` [T, H] of `y`'s type. `y` has the shape of
  /// `output.x` in bf16, f16 or f32 and is read where it lies (zero copy): make_rows(), or any other memory of the rank. `out`
  /// must not overlap it, nor anything in `options`. All ranks combine the rows of the same dispatch, else Error(mismatch). A
  /// token without a route yields +0.
  void combine(const ConstRows& y, const LowLatencyOutput& output, void* out, const LowLatencyCombineOptions& options = {});
  ReceiveHook combine_send(const ConstRows& y, const LowLatencyOutput& output, void* out,
                           const LowLatencyCombineOptions& options = {});

  /// Collective. Dispatch, experts and combine (per_route) in one launch, for experts that turn each element of a row by
  /// itself, as AllToAllOptions says (a factor per expert, or any function): rows go out, each expert's result goes back to its
  /// token as soon as its row has come, and tokens are summed as results arrive. `x` and `out` are [T, H] of row_type. `out`
  /// must not overlap `x`, the ids or anything in `options`. Needs LowLatencyConfig::scales = none. A token without a route
  /// yields +0. The same bits as dispatch and combine with expert_scale. last_call() counts the rows of both ways.
  void moe_all_to_all(const ConstRows& x, const ExpertIds& ids, void* out, const AllToAllOptions& options = {});

  const LowLatencyConfig& config() const;
  CallStatistics last_call() const;  ///< local; CUDA: waits for the call
  /// Ids of this rank's calls so far that are neither -1 nor an expert. Local. CUDA: of the calls that have run, replays of
  /// graphs included; waits for a copy of the number and for no kernel.
  int64_t invalid_ids() const;

 private:
  detail::Held<std::unique_ptr<detail::LowLatencyImpl>, detail::kLowLatencyObject> impl_;
};

}  // namespace switchyard
