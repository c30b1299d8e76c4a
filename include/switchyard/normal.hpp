// SPDX-License-Identifier: Apache-2.0
/// \file
/// Normal mode: high-throughput dispatch and combine for training and prefill.
///
/// Notation: W ranks, T tokens on this rank, H hidden, K topk, E experts, M received rows. Expert e belongs to rank
/// `owner(e)`: ranks hold consecutive experts, the first `E mod W` ranks one more than the others.
///
/// Every call below is collective unless marked local: all ranks make the same calls in the same order with the same options
/// (checked; Error(mismatch)). T may differ by rank and may be 0.
///
/// CPU: calls are synchronous on the calling thread. CUDA: pointers are device memory of the rank's GPU, rows are aligned to 16
/// bytes; calls enqueue on DispatchOptions::stream and return; nothing waits for the GPU except SizePolicy::exact (which needs
/// the counts), Handle's members, last_call() and destruction. Calls on one object are ordered, also on different streams
/// (launches of a graph are ordered by their stream only). All but `exact` can be captured; memory that a captured call takes
/// or uses belongs to the graph; what is let go before the capture ends serves its later calls. Sticky faults that a kernel
/// finds are thrown by the next call, Group::check() or Handle::counts(); the others by the latter two only, so that all ranks
/// go on making the same calls.
///
/// Errors of collective calls: invalid_argument throws at once on that rank and ends the peers' calls with PeerFailed, and so
/// does Error(system) of a rank that has no memory left for its tables; capacity_exceeded and pool_exhausted (no room for rows;
/// ring staging on the CPU: no memory for them) are raised by all ranks together and leave the object usable; mismatch is
/// thrown by all ranks; PeerTimeout, PeerFailed and mismatch are sticky: the group must be formed again. CUDA: pool_exhausted
/// is thrown at once by the rank without room, which takes part in that call but moves nothing. Until the other ranks have
/// heard of it (Group::check(), Handle::counts()), what they enqueue on this object does nothing and is not counted; then all
/// ranks go on with the same next call. What is enqueued by the handle of a dispatch that moved nothing does nothing either.
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

/// Settings of Staging::ring, in rows. A channel is a range of tokens that travels independently of the others; there is a ring
/// for each pair (channel, source rank). A number that is 0 is chosen by the library: usual_ring() says how.
struct RingSettings {
  int num_channels = 0;  ///< in [1, 256]; num_channels * W at most 1024
  int send_chunk = 6;    ///< rows appended per announcement, in [1, slots]
  int slots = 0;         ///< rows per ring, >= K; a full ring holds its producer back
  /// Largest ring memory per rank, in bytes; 0: no bound. What wins where the rings do not fit:
  ///   - numbers that are left 0 are chosen to fit;
  ///   - a given num_channels is kept; one that is left 0 goes down to 1 before given slots are touched;
  ///   - given slots are lowered last, down to K.
  size_t max_bytes = 0;
};

/// Fixed properties of an exchange object; equal on all ranks.
struct NormalConfig {
  int64_t hidden = 0;   ///< H; rows must be a multiple of 16 bytes for every row type used
  int num_experts = 0;  ///< E >= 1; need not divide by W
  int topk = 0;         ///< K in [1, kMaxTopk]
  /// Largest T on any rank, >= 0: up to 2^26, expert-major 2^24 - 1, ring staging (times K) 2^23 - 1; with all ranks' routes (W
  /// * max_tokens * K) fewer than 2^31 - 2^28.
  int64_t max_tokens = 0;
  Layout layout = Layout::rank_major;
  int expert_alignment = 1;  ///< expert-major: rows per expert are padded to a multiple; rank-major: counts are rounded up only
  DType row_type = DType::bf16;  ///< widest row type that will be dispatched or combined; sizes the memory
  Staging staging = Staging::direct;
  RingSettings ring;
  size_t pool_bytes = 0;  ///< memory for outputs and row buffers (direct staging; CUDA: any); 0: as memory_required computes
  InvalidIds invalid_ids = InvalidIds::raise;  ///< may differ by rank
};

/// Memory of one object, in bytes per rank; all but private_bytes in the heap. docs/concepts/layouts.md gives the formulas.
struct MemoryRequirement {
  size_t control_bytes = 0;  ///< flags, counts, placements
  size_t pool_bytes = 0;     ///< outputs, row buffers, staging (direct)
  size_t ring_bytes = 0;     ///< rings (ring staging)
  size_t private_bytes = 0;  ///< CUDA, ring staging: outputs, row buffers and handles, in memory of the rank's GPU alone
  /// What the object takes from the heap.
  size_t total() const { return control_bytes + pool_bytes + ring_bytes; }
};

/// How usual_ring() chooses RingSettings that are 0:
///   - num_channels is kUsualChannels, one warp for each. It is lower where a channel would have fewer than four tokens, where
///     all ranks' channels would exceed 1024, or where the slots (the given ones; else K, or two send chunks) of all channels
///     would exceed kUsualRingRows or max_bytes.
///   - slots share kUsualRingRows among the channels of a source: at least K, and usually two send chunks, but no more than a
///     channel has rows in a call.
inline constexpr int kUsualChannels = 128, kUsualRingRows = 2560;

/// `config.ring` with every number chosen, in a group of `world` ranks. Giving the result means the same as leaving 0. Throws
/// Error(invalid_argument) if `config` is not allowed, or its max_bytes have no room for K slots of each ring.
RingSettings usual_ring(const NormalConfig& config, int world);

/// Rows of Dispatched::x where the size is SizePolicy::worst_case, alike on all ranks of a group of `world`: what memory beside
/// them, as ExpertOptions::max_rows, has to hold. \throws Error(invalid_argument) if `config` is not allowed.
int64_t most_rows(const NormalConfig& config, int world);

/// Options of one dispatch; equal on all ranks except `capacity` and `out`.
struct DispatchOptions {
  ScaleKind quantize = ScaleKind::none;  ///< not none: bf16, f16 or f32 rows are sent as fp8 e4m3 with these scales
  SizePolicy size = SizePolicy::automatic;
  /// SizePolicy::capacity: most rows this rank takes, padding included. Dispatched::x has room for this
  /// many rows, or for those of worst_case if that is less.
  int64_t capacity = 0;
  Overflow overflow = Overflow::fail;
  Padding padding = Padding::zero;
  /// Where the rows go instead of to the object's pool; null: they stay there. Rows of training, of which every layer keeps its
  /// own, need no pool for them. Of the type and with the scales that are delivered, and with room for the rows that are
  /// allocated (worst_case, capacity, cached: invalid_argument if there is less; exact: pool_exhausted). Any memory that
  /// combine takes, at the cost of one local copy of the delivered rows only (CUDA, rank-major rows without scales: of those of
  /// other ranks' tokens): rank-major under direct staging as they come, else behind the exchange; the pool has its room back
  /// when the call is done. Rows without scales reach a RowBuffer of direct staging without a copy. Dispatched::x is then in
  /// *out and Dispatched::block empty. The struct is read during the call only.
  const Rows* out = nullptr;
  // CUDA only.
  void* stream = nullptr;  ///< cudaStream_t on which all work is enqueued; null: the legacy default stream
  /// Most multiprocessors that move rows, in [1, those of the GPU / ranks on it]; 0: as tuned, or kDefaultSms, or under direct
  /// staging with `quantize` kDefaultQuantizingSms. Rank-major rows that are not quantised on the way take no more than 32:
  /// more slow the link down.
  int num_sms = 0;
  /// Device memory, or null: T at the time the kernel runs, so that it can vary in a graph; clamped to [0, tokens of the ids].
  const int32_t* device_tokens = nullptr;
  /// The caller knows that all memory it gives to the call is of this rank's GPU, as a framework does of its tensors: the
  /// driver is not asked, which takes the host longer than all other checks. Everything else is checked.
  bool known_memory = false;
};

/// Multiprocessors that a call on a GPU uses unless told otherwise, or tuned (tuning.hpp), or it is a dispatch under direct
/// staging that quantises. docs/design says why.
inline constexpr int kDefaultSms = 24;

/// Multiprocessors that a dispatch under direct staging that quantises rows on the way uses unless told otherwise, or tuned; at
/// most those that the rank has. Two such calls on two streams fit a GPU of 132. docs/tuning.md says what more of them gain.
inline constexpr int kDefaultQuantizingSms = 64;

/// Multiprocessors that a rank-major combine under direct staging uses, unless told otherwise or tuned to more, if its rows are
/// in memory that peers cannot read and are copied, and a dispatch to DispatchOptions::out with those that copy; at most those
/// that the rank has. docs/design/0053 says why.
inline constexpr int kDefaultCopyingSms = 64;

/// Options of one combine; equal on all ranks (pointers aside).
struct CombineOptions {
  CombineOrder order = CombineOrder::per_rank;
  /// Rank-major: float32 [M, K], returned as sums over ranks in `out_weights` (rows themselves are not multiplied).
  /// Expert-major: float32 [T, K] that replaces the weights given to dispatch; CombineOrder::per_route only.
  const float* weights = nullptr;
  bool apply_weights = true;  ///< expert-major: multiply rows by their weights (if dispatch or `weights` gave any)
  /// Rows [T, H] of the combined type, added before the sum; bias[1] needs bias[0]. `out` itself may be one of them.
  const void* bias[2] = {nullptr, nullptr};
  void* stream = nullptr;     ///< CUDA: as in DispatchOptions
  int num_sms = 0;            ///< CUDA: as in DispatchOptions
  bool known_memory = false;  ///< CUDA: as in DispatchOptions
};

/// What DeepEP's get_dispatch_layout returns. Local. \throws Error(invalid_argument) naming the argument.
struct RoutingLayout {
  std::vector<int32_t> num_tokens_per_rank;    ///< [W] distinct tokens
  std::vector<int32_t> num_tokens_per_expert;  ///< [E] routes
  std::vector<uint8_t> is_token_in_rank;       ///< [T, W]
};
RoutingLayout routing_layout(const ExpertIds& ids, int num_experts, int world);

/// Where routing_layout_on() writes: memory of the caller on one GPU.
struct RoutingLayoutView {
  int32_t* num_tokens_per_rank = nullptr;    ///< [W]
  int32_t* num_tokens_per_expert = nullptr;  ///< [E]
  uint8_t* is_token_in_rank = nullptr;       ///< [T, W], 0 or 1, at a multiple of 4 bytes; T = 0: not used
};
/// Most experts that routing_layout_on() counts.
inline constexpr int kMostCountedExperts = 32768;
/// The same of ids on a GPU, into memory there: one kernel, enqueued on `stream`, a cudaStream_t of that GPU. The call waits
/// for nothing, needs no group, and can be captured. \throws Error(invalid_argument) naming the argument, Error(unsupported)
/// without CUDA code in the library.
void routing_layout_on(const ExpertIds& ids, int num_experts, int world, const RoutingLayoutView& out, void* stream);

/// First expert of rank `rank`, and one past its last: [first_expert(r), first_expert(r + 1)). \throws Error(invalid_argument)
/// unless num_experts >= 1, world is in [1, kMaxRanks] and rank in [0, world].
int first_expert(int num_experts, int world, int rank);

namespace detail {
struct HandleData;
struct OutputBlock;
class NormalImpl;
}  // namespace detail

/// How many rows a dispatch delivered, on the host.
struct DispatchCounts {
  int64_t rows = 0;                         ///< M
  std::vector<int64_t> tokens_per_expert;   ///< [experts here]
  std::vector<int64_t> aligned_per_expert;  ///< [experts here]
  std::vector<int64_t> expert_first_row;    ///< [experts here], expert-major; else empty
};

/// The routing of one dispatch as both sides know it; needed by combine and cached dispatch. Cheap to copy, immutable, usable
/// any number of times and in any order, with any object of the same group size, rank and shape. What the ranks give to one
/// call must come from one dispatch: handles of several dispatches, also of other groups, are Error(mismatch) on all of them.
/// Holds no symmetric memory on the CPU; on CUDA its tables lie in the pool of the object that made it and must not outlive
/// that object. On CUDA all members below wait for the dispatch (Error(unsupported) while its stream is captured).
class Handle {
 public:
  Handle() = default;
  explicit operator bool() const noexcept { return static_cast<bool>(data_); }
  int64_t tokens() const;  ///< T
  int64_t rows() const;    ///< M: rows received, padding included
  /// Ids of this rank that are neither -1 nor an expert; their routes went nowhere. 0 of a handle from bytes.
  int64_t invalid_ids() const;
  DispatchCounts counts() const;
  DispatchMatrices matrices(int num_channels) const;  ///< num_channels in [1, 2^20]
  LedgerTables ledger() const;  ///< \throws Error(unsupported) for a dispatch that dropped routes at capacity
  /// Portable bytes (little endian, versioned) and back. \throws Error(invalid_argument) on damaged bytes.
  std::vector<std::byte> serialize() const;
  static Handle deserialize(std::span<const std::byte> bytes);

  explicit Handle(std::shared_ptr<const detail::HandleData> data) : data_(std::move(data)) {}
  const detail::HandleData& data() const { return *data_; }  ///< library internal

 private:
  detail::Held<std::shared_ptr<const detail::HandleData>, detail::kHandleObject> data_;
};

/// Rows in symmetric memory, for expert outputs: combine reads them where they lie. Freed by the destructor (local); not to be
/// used after the exchange that made it is gone. Under ring staging the memory is private.
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

/// What a dispatch delivers. Movable; the rows live until the object is destroyed (local), and no longer than the exchange that
/// made it.
struct Dispatched {
  Rows x;            ///< [allocated rows, H], scales included; direct staging: in symmetric memory. Row order: Layout
  int64_t rows = 0;  ///< M: rows delivered; beyond them (static sizes) payload is unspecified, ids and sources are -1. CUDA: -1
                     ///< unless the size is exact (the host does not know it; handle.counts() waits for it)
  Handle handle;

  // Rank-major. Pointers live as long as `handle`.
  std::span<const int32_t> topk_ids;    ///< [allocated rows, K] local expert ids, -1 if the route goes elsewhere or was dropped
  std::span<const float> topk_weights;  ///< [allocated rows, K] 0 where the id is -1; empty if dispatch got no weights
  std::span<const int32_t> source_token;  ///< [allocated rows] token index at its source

  // Expert-major.
  std::span<const int64_t> row_source;        ///< [allocated rows] source rank << 48 | k << 32 | token; -1 for padding
  std::span<const float> row_weights;         ///< [allocated rows]; empty if dispatch got no weights
  std::span<const int64_t> expert_first_row;  ///< [experts here]

  std::span<const int64_t> tokens_per_expert;   ///< [experts here] kept routes of all sources to each local expert
  std::span<const int64_t> aligned_per_expert;  ///< [experts here] the same, rounded up to expert_alignment

  // Overflow::drop_and_report: full length, all zero where nothing was dropped. Overflow::fail: empty. Cached dispatch: as the
  // dispatch that made the handle.
  std::span<const uint8_t> dropped;             ///< [T, K] 1 if this rank's route was dropped at capacity
  std::span<const int64_t> dropped_per_source;  ///< [W, experts here] routes dropped here

  /// One number, Handle::invalid_ids(), which no host has to wait for. As long as `handle`.
  std::span<const int64_t> invalid_ids;

  std::shared_ptr<detail::OutputBlock> block;  ///< keeps `x` alive
  /// CUDA: `stream` (cudaStream_t), other than the one that the rows were delivered on, uses them: their memory is not handed
  /// out again, to calls or to allocate_rows, before its work so far at the time of the destruction is done. The stream
  /// outlives the rows. If it is captured now, the rows belong to its graph as well. cudaStreamPerThread is the stream of the
  /// thread that says so; what it does after that counts only if the same thread destroys the rows. Local.
  void used_by(void* stream);
};

/// Memory that the captured calls of several graphs share (CUDA); see NormalExchange::use_graph_memory. Cheap to copy. Freed
/// with the last copy, graph and row that is of it.
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
  /// Waits for the others for GroupOptions::rendezvous_timeout. \throws Error(invalid_argument) naming the field,
  /// Error(heap_exhausted) if the group's heap is too small, Error(mismatch) if configurations differ: on all ranks alike, also
  /// if only some have cause to. The group can be used afterwards, its heap is as before, and another object may be made.
  NormalExchange(Group& group, const NormalConfig& config);
  NormalExchange(NormalExchange&&) noexcept;
  NormalExchange& operator=(NormalExchange&&) noexcept;
  ~NormalExchange();

  /// Symmetric memory that an object with this config takes from each rank's heap. Local, needs no group.
  static MemoryRequirement memory_required(const NormalConfig& config, int world, Backend backend = Backend::cpu);
  /// Heap size for a group whose only object has this config: total, header and alignment slack included.
  static size_t heap_bytes_for(const NormalConfig& config, int world, Backend backend = Backend::cpu);

  /// Sends row t of `x` to every rank that owns one of token t's experts. `x` is [T, H]; fp8 rows come with scales.
  /// `weights` is float32 [T, K] or null. A token is sent to a rank once, however many of its experts live there.
  Dispatched dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights = nullptr,
                      const DispatchOptions& options = {});
  /// A cached dispatch: the routing of `handle` again with other rows, no counting, no exchange of counts. Capacity comes from
  /// `handle`; of the options only `quantize`, `padding`, `out`, `stream` and `num_sms` are used.
  Dispatched dispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options = {});

  /// Rows for expert outputs, [rows of `handle`, H]. Local. CUDA: `stream` (cudaStream_t) is the one whose work touches them
  /// first; it waits for whatever used that memory before, unless that ran on `stream` too. While it is captured the rows
  /// belong to its graph. \throws Error(pool_exhausted).
  RowBuffer allocate_rows(const Handle& handle, DType type, void* stream);
  /// Rows for expert outputs that work on any stream may touch. CUDA takes memory that nothing uses any more. Only if there is
  /// none, the calling thread waits until some is idle.
  RowBuffer allocate_rows(const Handle& handle, DType type);

  /// Sums what the experts made of each token into `out` [T, H] of `y`'s type (bf16, f16, f32). `y` has the rows of the
  /// dispatch that made `handle`; rows in a RowBuffer or in Dispatched::x are read in place, other memory is first copied
  /// (direct staging), but expert-major rows of per_route are pushed to their owners from any memory. A token without a route
  /// yields the bias sum, or +0. `out_weights` is [T, K] (rank-major with options.weights) or null.
  void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options = {},
               float* out_weights = nullptr);

  /// CUDA. Memory of captured calls belongs to their graph; within one capture, memory of rows and handles that were let go
  /// serves later calls. Graphs that are captured while `memory` is set take theirs from it together, as much as the largest of
  /// them needs: they must not be in flight at the same time, and what one of them leaves must not be read after another was
  /// launched. Rows and handles that are held keep theirs. `{}`: each graph has its own again. Local; the CPU ignores it.
  GraphMemory make_graph_memory();
  void use_graph_memory(const GraphMemory& memory);

  /// Calls from now on are made at `site`, a number of the caller's from 1 to 32767, for example of the layer of a model that
  /// makes them; 0, the default: at none. Ranks compare sites as they compare options: calls of different sites are a mismatch,
  /// whose text has both. Local. \throws Error(invalid_argument) if the number is larger.
  void set_site(uint32_t site);

  const NormalConfig& config() const;
  CallStatistics last_call() const;  ///< local; CUDA: waits for the call
  /// Ids of this rank's calls so far that are neither -1 nor an expert. Local. CUDA: of the calls that have run, replays of
  /// graphs included; waits for a copy of the number and for no kernel.
  int64_t invalid_ids() const;

 private:
  detail::Held<std::unique_ptr<detail::NormalImpl>, detail::kNormalObject> impl_;
};

}  // namespace switchyard
