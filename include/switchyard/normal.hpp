// SPDX-License-Identifier: Apache-2.0
/// \file
/// Normal mode: high-throughput dispatch and combine for training and prefill.
///
/// Notation: W ranks, T tokens on this rank, H hidden, K topk, E experts, M received rows. Rank `owner(e)` holds expert e: each
/// rank holds consecutive experts, and the first `E mod W` ranks hold one more than the others.
///
/// Every call below is collective unless marked local: all ranks must make the same calls in the same order with the same
/// options; otherwise they throw Error(mismatch). T may differ by rank and may be 0.
///
/// CPU: calls run synchronously on the calling thread. CUDA: pointers refer to memory of the rank's GPU, and rows are aligned
/// to 16 bytes; calls enqueue their work on DispatchOptions::stream and return. Only SizePolicy::exact (which requires the
/// counts), the members of Handle and last_call() wait for the GPU; destruction does so only in a group of several hosts. Calls
/// on one object are ordered, even across streams (graph launches only by their stream). All calls except those with
/// SizePolicy::exact can be captured. Memory that a captured call allocates or uses belongs to the graph; memory released
/// before the capture ends is reused by later calls of that capture. Sticky faults detected by a kernel are thrown by the next
/// call, Group::check() or Handle::counts(). Other faults are thrown only by Group::check() and Handle::counts(), so all ranks
/// keep making the same calls.
///
/// Errors of collective calls: invalid_argument, and Error(system) on a rank without memory for its tables, are thrown
/// immediately on the rank that detects them and make the peers' calls fail with PeerFailed. capacity_exceeded and
/// pool_exhausted (no room for rows; ring staging on the CPU: no memory for them) are thrown by all ranks together and leave
/// the object usable. mismatch is thrown by all ranks. PeerTimeout, PeerFailed and mismatch are sticky: a new group must be
/// formed. CUDA: the rank without room throws pool_exhausted immediately; it takes part in that call but transfers nothing.
/// Until the other ranks observe the error (Group::check(), Handle::counts()), the calls that they enqueue on this object do
/// nothing and are not counted; then all ranks continue with the same next call. A call that uses the handle of a dispatch that
/// transferred nothing also does nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "switchyard/group.hpp"
#include "switchyard/plan_tables.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Settings of Staging::ring, in rows. A channel is a range of tokens that is transferred independently of other channels; each
/// pair (channel, source rank) has its own ring. The library chooses each value that is 0; see default_ring().
struct RingSettings {
  int num_channels = 0;  ///< in [1, 256]; num_channels * W at most 1024
  int send_chunk = 6;    ///< rows appended per announcement, in [1, slots]
  int slots = 0;         ///< rows per ring, >= K; a full ring blocks its producer
  /// Maximum ring memory per rank, in bytes; 0: unlimited. If the rings do not fit:
  ///   - values left at 0 are chosen to fit;
  ///   - a given num_channels is kept; one left at 0 is reduced to 1 before given slots are reduced;
  ///   - given slots are reduced last, but not below K.
  size_t max_bytes = 0;
};

/// Fixed properties of an exchange object; identical on all ranks.
struct NormalConfig {
  int64_t hidden = 0;   ///< H; rows must be a multiple of 16 bytes for every row type used
  int num_experts = 0;  ///< E >= 1; need not divide by W
  int topk = 0;         ///< K in [1, kMaxTopk]
  /// Maximum T on any rank, in [0, 2^26]; expert-major at most 2^24 - 1; with ring staging, max_tokens * K is at most 2^23 - 1.
  /// The routes of all ranks (W * max_tokens * K) must number fewer than 2^31 - 2^28.
  int64_t max_tokens = 0;
  Layout layout = Layout::rank_major;
  int expert_alignment = 1;  ///< expert-major: rows per expert are padded to a multiple; rank-major: counts are rounded up only
  DType dtype = DType::bf16;  ///< widest row type that is dispatched or combined; determines the memory size
  Staging staging = Staging::direct;
  RingSettings ring;
  size_t pool_bytes = 0;  ///< memory for outputs and row buffers (direct staging; CUDA: any); 0: as memory_required computes
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank
};

/// Memory used by one object, in bytes per rank; all except private_bytes is in the heap. docs/concepts/layouts.md gives the
/// formulas.
struct MemoryRequirement {
  size_t control_bytes = 0;  ///< flags, counts, placements
  size_t pool_bytes = 0;     ///< outputs, row buffers, staging (direct)
  size_t ring_bytes = 0;     ///< rings (ring staging)
  size_t private_bytes = 0;  ///< CUDA, ring staging: outputs, row buffers and handles, in private memory of the rank's GPU
  /// Bytes that the object allocates from the heap.
  size_t total() const { return control_bytes + pool_bytes + ring_bytes; }
};

/// default_ring() chooses RingSettings that are 0 as follows:
///   - num_channels is kDefaultChannels, with one warp per channel. It is reduced if a channel would have fewer than four
///     tokens, if the channels of all ranks would exceed 1024, or if the slots of all channels (the given slots; else K, or two
///     send chunks) would exceed kDefaultRingRows or max_bytes.
///   - slots is kDefaultRingRows divided among the channels of a source: at least K, and normally two send chunks, but no more
///     than a channel's rows in a call.
inline constexpr int kDefaultChannels = 128, kDefaultRingRows = 2560;

/// Returns `config.ring` with every value chosen, for a group of `world` ranks. Passing the result is equivalent to leaving the
/// values at 0. \throws Error(invalid_argument) if `config` is invalid or its max_bytes cannot hold K slots of each ring.
RingSettings default_ring(const NormalConfig& config, int world);

/// Number of rows in Dispatched::x with SizePolicy::worst_case; identical on all ranks of a group of size `world`. Related
/// sizes, such as ExpertOptions::max_rows, must be at least this number. \throws Error(invalid_argument) if `config` is
/// invalid.
int64_t max_rows(const NormalConfig& config, int world);

/// Options of one dispatch; identical on all ranks except `capacity` and `out`.
struct DispatchOptions {
  ScaleKind quantize = ScaleKind::none;  ///< not none: bf16, f16 or f32 rows are sent as fp8 e4m3 with these scales
  SizePolicy size = SizePolicy::automatic;
  /// SizePolicy::capacity: maximum number of rows that this rank accepts, padding included. Dispatched::x has room for this
  /// many rows, or for the worst_case number if that is smaller.
  int64_t capacity = 0;
  Overflow overflow = Overflow::fail;
  Padding padding = Padding::zero;
  /// Destination for the rows, or null for the object's pool. Training keeps the rows of every layer; with `out`, they do not
  /// occupy the pool. *out must have the delivered type and scales, and room for the allocated rows; too little room is an
  /// invalid_argument error (worst_case, capacity, cached) or a pool_exhausted error (exact). It may be any memory that combine
  /// accepts, at the cost of one local copy of the delivered rows (CUDA, rank-major rows without scales: only rows of other
  /// ranks' tokens). With direct staging, rank-major rows are copied as they arrive; all other rows are copied after the
  /// exchange. The pool memory is free again when the call is done. With direct staging, rows without scales are written to a
  /// RowBuffer without a copy. Dispatched::x is then in *out, and Dispatched::block is empty. The struct is read only during
  /// the call.
  const Rows* out = nullptr;
  // CUDA only.
  void* stream = nullptr;  ///< cudaStream_t on which all work is enqueued; null: the legacy default stream
  /// Maximum number of multiprocessors that transfer rows, in [1, those of the GPU / ranks on it]; 0: the tuned number, else
  /// kDefaultSms (kDefaultQuantizingSms with direct staging and `quantize`). Rank-major rows that the call does not quantize
  /// use at most 32, because more would slow down the link.
  int num_sms = 0;
  /// Pointer to T in device memory, or null. T is read when the kernel runs, so it may vary between graph launches, and is
  /// clamped to [0, topk_ids.num_tokens].
  const int32_t* device_tokens = nullptr;
};

/// Default number of multiprocessors for a call on a GPU if it is not set by an option or a tuning (tuning.hpp). Does not apply
/// to quantizing dispatches with direct staging. docs/design gives the reason.
inline constexpr int kDefaultSms = 24;

/// Default number of multiprocessors for a quantizing dispatch with direct staging if it is not set by an option or a tuning;
/// at most the number available to the rank. Two such calls on two streams fit on a GPU with 132 multiprocessors.
/// docs/tuning.md describes the gain from using more.
inline constexpr int kDefaultQuantizingSms = 64;

/// Default number of multiprocessors, including copying ones, for calls that copy rows: a dispatch to DispatchOptions::out, and
/// a rank-major combine with direct staging whose rows are in memory that peers cannot read. An option or a tuning can set
/// more. At most the number available to the rank. docs/design/0053 gives the reason.
inline constexpr int kDefaultCopyingSms = 64;

/// Options of one combine; identical on all ranks except for pointers.
struct CombineOptions {
  CombineOrder order = CombineOrder::per_rank;
  /// Rank-major: float32 [M, K], summed over ranks into `out_weights` (the rows themselves are not multiplied). Expert-major:
  /// float32 [T, K] that replaces the weights passed to dispatch; CombineOrder::per_route only.
  const float* topk_weights = nullptr;
  bool apply_weights = true;  ///< expert-major: multiply rows by their weights (if passed to dispatch or in `topk_weights`)
  /// Rows [T, H] of the combined type, added before the sum; bias[1] requires bias[0]. `out` itself may be one of them.
  const void* bias[2] = {nullptr, nullptr};
  void* stream = nullptr;  ///< CUDA: as in DispatchOptions
  int num_sms = 0;         ///< CUDA: as in DispatchOptions
};

/// Result of DeepEP's get_dispatch_layout. Local. \throws Error(invalid_argument) naming the argument.
struct RoutingLayout {
  std::vector<int32_t> num_tokens_per_rank;    ///< [W] distinct tokens
  std::vector<int32_t> num_tokens_per_expert;  ///< [E] routes
  std::vector<uint8_t> is_token_in_rank;       ///< [T, W]
};
RoutingLayout routing_layout(const ExpertIds& topk_ids, int num_experts, int world);

/// Output of enqueue_routing_layout(): caller's memory on one GPU.
struct RoutingLayoutView {
  int32_t* num_tokens_per_rank = nullptr;    ///< [W]
  int32_t* num_tokens_per_expert = nullptr;  ///< [E]
  uint8_t* is_token_in_rank = nullptr;       ///< [T, W], 0 or 1, aligned to 4 bytes; unused if T = 0
};
/// Maximum number of experts supported by enqueue_routing_layout().
inline constexpr int kMaxCountedExperts = 32768;
/// Computes routing_layout() for ids on a GPU, into memory of that GPU, with one kernel enqueued on `stream`, a cudaStream_t of
/// that GPU. The call does not wait, requires no group and can be captured. \throws Error(invalid_argument) naming the
/// argument, Error(unsupported) if the library was built without CUDA code.
void enqueue_routing_layout(const ExpertIds& topk_ids, int num_experts, int world, const RoutingLayoutView& out, void* stream);

/// First expert of rank `rank`; rank r owns experts [first_expert(r), first_expert(r + 1)). \throws Error(invalid_argument)
/// unless num_experts >= 1, world is in [1, kMaxRanks] and rank is in [0, world].
int first_expert(int num_experts, int world, int rank);

namespace detail {
struct HandleData;
struct OutputBlock;
class NormalImpl;
struct NormalCalls;
}  // namespace detail

/// Host-side counts of the rows that a dispatch delivered.
struct DispatchCounts {
  int64_t rows = 0;                         ///< M
  std::vector<int64_t> tokens_per_expert;   ///< [local experts]
  std::vector<int64_t> aligned_per_expert;  ///< [local experts]
  std::vector<int64_t> expert_first_row;    ///< [local experts], expert-major; else empty
};

/// The routing of one dispatch, for both senders and receivers; required by combine and cached dispatch. It is immutable and
/// cheap to copy, and may be used any number of times and in any order, with any object of the same group size, rank and shape.
/// The handles that the ranks pass to one call must come from the same dispatch; otherwise (including handles of other groups)
/// all ranks throw Error(mismatch). CPU: it holds no symmetric memory. CUDA: its tables are in the pool of the object that
/// created it, so it must not outlive that object. On CUDA, all members below wait for the dispatch; while its stream is being
/// captured, they throw Error(unsupported).
class Handle {
 public:
  Handle() = default;
  explicit operator bool() const noexcept { return static_cast<bool>(data_); }
  int64_t num_tokens() const;  ///< T
  int64_t rows() const;        ///< M: rows received, padding included
  /// Number of this rank's ids that are neither -1 nor a valid expert id; nothing was sent for them. 0 for a deserialized
  /// handle.
  int64_t invalid_ids() const;
  DispatchCounts counts() const;
  DispatchMatrices matrices(int num_channels) const;  ///< num_channels in [1, 2^20]
  LedgerTables ledger() const;  ///< \throws Error(unsupported) for a dispatch that dropped routes at capacity
  /// Converts to and from portable bytes (little endian, versioned). \throws Error(invalid_argument) if the bytes are corrupt.
  std::vector<std::byte> serialize() const;
  static Handle deserialize(std::span<const std::byte> bytes);

  explicit Handle(std::shared_ptr<const detail::HandleData> data) : data_(std::move(data)) {}
  const detail::HandleData& data() const { return *data_; }  ///< library internal

 private:
  detail::Held<std::shared_ptr<const detail::HandleData>, detail::kHandleObject> data_;
};

/// Rows in symmetric memory for expert outputs; combine reads them in place. The destructor frees them (local). Must not be
/// used after the exchange that created it is destroyed. With ring staging, the memory is private.
class RowBuffer {
 public:
  RowBuffer() = default;
  Rows rows() const noexcept { return rows_; }
  void used_by(void* stream);  ///< as in Dispatched
  RowBuffer(std::shared_ptr<detail::OutputBlock> block, const Rows& rows) : block_(std::move(block)), rows_(rows) {}

 private:
  std::shared_ptr<detail::OutputBlock> block_;
  Rows rows_;
};

/// Result of a dispatch. Movable. The rows live until this object or the exchange that created it is destroyed; destruction is
/// local.
struct Dispatched {
  Rows x;            ///< [allocated rows, H], scales included; direct staging: in symmetric memory. Row order: Layout
  int64_t rows = 0;  ///< M: rows delivered; beyond them (static sizes) payload is unspecified, ids and sources are -1. CUDA: -1
                     ///< unless the size is exact (the count is on the GPU; handle.counts() waits for it)
  Handle handle;

  // Rank-major. Pointers are valid as long as `handle`.
  std::span<const int32_t> topk_ids;    ///< [allocated rows, K] local expert ids, -1 if the route goes elsewhere or was dropped
  std::span<const float> topk_weights;  ///< [allocated rows, K] 0 where the id is -1; empty if dispatch had no weights
  std::span<const int32_t> source_token;  ///< [allocated rows] token index at its source

  // Expert-major.
  std::span<const int64_t> row_source;        ///< [allocated rows] source rank << 48 | k << 32 | token; -1 for padding
  std::span<const float> row_weights;         ///< [allocated rows]; empty if dispatch had no weights
  std::span<const int64_t> expert_first_row;  ///< [local experts]

  std::span<const int64_t> tokens_per_expert;   ///< [local experts] kept routes of all sources to each local expert
  std::span<const int64_t> aligned_per_expert;  ///< [local experts] the same, rounded up to expert_alignment

  // Overflow::drop_and_report: full length, all zero if nothing was dropped. Overflow::fail: empty. Cached dispatch: identical
  // to those of the dispatch that created the handle.
  std::span<const uint8_t> dropped;             ///< [T, K] 1 if this rank's route was dropped at capacity
  std::span<const int64_t> dropped_per_source;  ///< [W, experts here] routes dropped here

  /// Handle::invalid_ids() as one number that can be read without waiting on the host. Valid as long as `handle`.
  std::span<const int64_t> invalid_ids;

  std::shared_ptr<detail::OutputBlock> block;  ///< keeps `x` alive
  /// CUDA: declares that `stream` (cudaStream_t), other than the delivery stream, uses the rows. The rows' memory is not
  /// reused, by calls or by allocate_rows, until the work enqueued on `stream` before their destruction is done. The stream
  /// must outlive the rows. If `stream` is being captured, the rows also belong to its graph. cudaStreamPerThread denotes the
  /// calling thread's stream; its later work is considered only if the same thread destroys the rows. Local.
  void used_by(void* stream);
};

/// Memory shared by the captured calls of several graphs (CUDA); see NormalExchange::use_graph_memory. Cheap to copy. Freed
/// when no copy, graph or rows use it any longer.
class GraphMemory {
 public:
  GraphMemory() = default;
  explicit operator bool() const noexcept { return maker_ != nullptr; }

  GraphMemory(const detail::NormalImpl* maker, std::shared_ptr<void> memory) : maker_(maker), memory_(std::move(memory)) {}
  const detail::NormalImpl* maker() const noexcept { return maker_; }      ///< library internal
  const std::shared_ptr<void>& share() const noexcept { return memory_; }  ///< library internal

 private:
  const detail::NormalImpl* maker_ = nullptr;
  std::shared_ptr<void> memory_;
};

/// Dispatch and combine over one Group. Construction is collective; destruction is local. See the top of this file.
class NormalExchange {
 public:
  /// Waits up to GroupOptions::rendezvous_timeout for the other ranks. \throws Error(invalid_argument) naming the field,
  /// Error(heap_exhausted) if the group's heap is too small, or Error(mismatch) if configurations differ. Errors are thrown on
  /// all ranks, even if they originate on only some of them. The group stays usable, its heap is unchanged, and another object
  /// may be created.
  NormalExchange(Group& group, const NormalConfig& config);
  NormalExchange(NormalExchange&&) noexcept;
  NormalExchange& operator=(NormalExchange&&) noexcept;
  ~NormalExchange();

  /// Symmetric memory that an object with this config allocates from each rank's heap. Local; requires no group.
  static MemoryRequirement memory_required(const NormalConfig& config, int world, Backend backend = Backend::cpu);
  /// Heap size for a group whose only object has this config: total() plus the header and alignment slack.
  static size_t heap_bytes(const NormalConfig& config, int world, Backend backend = Backend::cpu);

  /// Sends row t of `x` to every rank that owns one of token t's experts. `x` is [T, H]; fp8 rows must have scales.
  /// `topk_weights` is float32 [T, K] or null. A token is sent to a rank once, regardless of how many of the token's experts
  /// that rank owns.
  Dispatched dispatch(const ConstRows& x, const ExpertIds& topk_ids, const float* topk_weights = nullptr,
                      const DispatchOptions& options = {});
  /// Cached dispatch: repeats the routing of `handle` with different rows, without counting or exchanging counts. Capacity is
  /// taken from `handle`; only the options `quantize`, `padding`, `out`, `stream` and `num_sms` are used.
  Dispatched dispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options = {});

  /// Allocates rows for expert outputs, [rows of `handle`, H]. Local. CUDA: `stream` (cudaStream_t) is the first stream to
  /// access them; it waits for the previous users of the memory unless they also ran on `stream`. If `stream` is being
  /// captured, the rows belong to its graph. \throws Error(pool_exhausted).
  RowBuffer allocate_rows(const Handle& handle, DType dtype, void* stream);
  /// Allocates rows for expert outputs that any stream may access. CUDA: uses idle memory; the calling thread waits for it if
  /// necessary.
  RowBuffer allocate_rows(const Handle& handle, DType dtype);

  /// Sums the expert outputs of each token into `out` [T, H] of `y`'s type (bf16, f16 or f32). `y` has the rows of the dispatch
  /// that created `handle`. Rows in a RowBuffer or in Dispatched::x are read in place. With direct staging, rows elsewhere are
  /// first copied, except that expert-major rows with per_route are pushed to their owners from any memory. The result of a
  /// token without a route is the bias sum, or +0. `out_weights` is [T, K] (rank-major with options.topk_weights) or null.
  void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options = {},
               float* out_weights = nullptr);

  /// CUDA. Memory of captured calls belongs to their graph; within one capture, later calls reuse the memory of released rows
  /// and handles. Graphs captured while `memory` is set share this memory, whose size is that required by the largest of them.
  /// They must not be in flight at the same time, and launching one invalidates the results of the others. Rows and handles
  /// that are still held keep their memory. With `{}`, each graph has its own memory again. Local; ignored on the CPU.
  GraphMemory make_graph_memory();
  void use_graph_memory(const GraphMemory& memory);

  /// Sets the call site of later calls: a caller-chosen number from 1 to 32767, for example the layer of a model; 0, the
  /// default: none. Like options, sites are compared across ranks: if they differ, the calls fail with a mismatch error whose
  /// message contains both. Local. \throws Error(invalid_argument) if the number is larger.
  void set_site(uint32_t site);

  const NormalConfig& config() const;
  CallStatistics last_call() const;  ///< local; CUDA: waits for the call
  /// Number of ids in this rank's calls so far that are neither -1 nor a valid expert id. Local. CUDA: counts calls that have
  /// run, including graph replays; waits only for a copy of the count, not for kernels.
  int64_t invalid_ids() const;

 private:
  friend struct detail::NormalCalls;
  detail::Held<std::unique_ptr<detail::NormalImpl>, detail::kNormalObject> impl_;
};

}  // namespace switchyard
