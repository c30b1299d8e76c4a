// SPDX-License-Identifier: Apache-2.0
/// \file
/// Ledger combine: combine driven by an explicit route ledger (LedgerTables) instead of a handle. The caller may build the
/// ledger or take it from a dispatch (Handle::ledger). docs/concepts/ledger.md describes the tables.
///
/// Notation: W ranks, M tokens on this rank, H hidden, K topk, E experts; owner of an expert as in normal mode. The rank that
/// holds an expert writes the expert's rows, in ledger order, to the *return buffer* of the rank that owns their tokens. The
/// owner sums `probs[f] * return_buffer[expanded_row_idx[f]]` over each token's K routes.
///
/// The sum is float32 from +0: multiply, then add, k ascending, with one rounding to the row type. Routes with index -1 are
/// skipped; the result of a token without a route is exactly +0. Rows may have any length, including lengths that are not a
/// multiple of 16 bytes. M may differ by rank and may be 0. Identical inputs give bit-identical results on every backend and
/// with any number of workers.
///
/// CPU: calls run synchronously on the calling thread. CUDA: pointers refer to memory of the rank's GPU; combine enqueues its
/// work on LedgerCombineOptions::stream, allocates nothing, does not wait and can be captured in a graph. Calls on one object
/// are ordered, even across streams (graph launches only by their stream).
///
/// Errors are those of normal mode. Error(invalid_argument) is thrown immediately on the rank that detects it and, in a
/// collective call, makes the peers' calls fail with PeerFailed. PeerTimeout, PeerFailed and mismatch (including different
/// ledgers on the ranks) are sticky. CUDA: sticky faults detected by a kernel are thrown by the next call or Group::check().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/group.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Fixed properties of a LedgerCombine; identical on all ranks.
struct LedgerConfig {
  int64_t hidden = 0;        ///< H >= 1
  int num_experts = 0;       ///< E >= 1; need not divide by W
  int topk = 0;              ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;    ///< maximum M on any rank, >= 0; two or three return buffers of max_tokens * K rows
  DType dtype = DType::f16;  ///< of expert outputs, return buffers and results: f16, bf16 or f32
  int64_t max_rows = 0;      ///< maximum number of expert output rows in a ledger; 0: the int32 maximum
  int max_ledgers = 4;       ///< CUDA: maximum number of PreparedLedgers alive at once, those of graphs included, >= 1
};

/// Throws Error(invalid_argument) naming the field and index of the first value of `tables` that is invalid for rank `rank` of
/// `world`: sizes that differ from `config`, negative counts, an incorrect inclusive prefix, segments of expert rows that
/// overlap or exceed max_rows, or a row of the return buffer that is out of range or used twice. Rows of the return buffer that
/// no route uses are allowed; they are returned and ignored. Local.
void check_ledger(const LedgerTables& tables, const LedgerConfig& config, int world, int rank);

/// Buffer sizes, in bytes, of the published ledger format, for comparison and for callers that allocate the buffers.
/// LedgerCombine::memory_required gives the symmetric memory that this library itself uses.
struct LedgerFormatBytes {
  size_t workspace = 0;   ///< int32 [max(64, blocks * (8 + Ep))]; Ep: E rounded up to 16
  size_t route_meta = 0;  ///< the five tables, each rounded up to 64 bytes
  size_t window = 0;      ///< return buffer and two int32 [W], each rounded up to 64 bytes
  size_t guard = 0;       ///< unused bytes before the window
};
/// Sizes for max_tokens tokens. `blocks` is the number of workers that synchronize through the workspace, in [1, 2^16].
LedgerFormatBytes ledger_format_bytes(const LedgerConfig& config, int world, int blocks);

/// Byte offsets of the tables in the published format's route meta, in memory order: int32, little endian, each padded to a
/// multiple of 64 bytes. `bytes` is the total size.
struct RouteMetaLayout {
  size_t peer_token_per_expert = 0;  ///< [W, Ep]
  size_t expanded_row_idx = 0;       ///< [tokens * K]
  size_t cumsum_per_expert = 0;      ///< [W, Ep]
  size_t dispatch_offset = 0;        ///< [local experts]
  size_t prev_sum_before_rank = 0;   ///< [W, local experts]
  size_t bytes = 0;
};
/// Layout for rank `rank` with `num_tokens` tokens, 0 to max_tokens. Local.
RouteMetaLayout route_meta_layout(const LedgerConfig& config, int world, int rank, int64_t num_tokens);

/// Returns the tables of rank `rank` in the published format; padding is zero. Local. \throws as check_ledger.
std::vector<std::byte> pack_route_meta(const LedgerTables& tables, const LedgerConfig& config, int world, int rank);
/// Inverse of pack_route_meta(): reads the tables from at least route_meta_layout().bytes bytes in host memory, from any
/// producer. Local. \throws Error(invalid_argument) if there are too few bytes, and as check_ledger.
LedgerTables unpack_route_meta(std::span<const std::byte> route_meta, const LedgerConfig& config, int world, int rank,
                               int64_t num_tokens);

namespace detail {
struct LedgerData;
class LedgerImpl;
}  // namespace detail

/// A validated ledger in the form used by combine (CUDA: in device memory). Immutable and cheap to copy; may be used any number
/// of times with the LedgerCombine that prepared it. CUDA: must not outlive that object.
class PreparedLedger {
 public:
  PreparedLedger() = default;
  explicit operator bool() const noexcept { return static_cast<bool>(data_); }
  int64_t num_tokens() const;     ///< M
  int64_t rows() const;           ///< minimum number of rows of the expert output
  int64_t returned_rows() const;  ///< rows returned to this rank

  explicit PreparedLedger(std::shared_ptr<const detail::LedgerData> data) : data_(std::move(data)) {}
  const detail::LedgerData& data() const { return *data_; }                                            ///< library internal
  const std::shared_ptr<const detail::LedgerData>& share() const noexcept { return data_.pointer(); }  ///< library internal

 private:
  detail::Held<std::shared_ptr<const detail::LedgerData>, detail::kPreparedObject> data_;
};

/// Options of one call. May differ by rank.
struct LedgerCombineOptions {
  void* stream = nullptr;  ///< CUDA: cudaStream_t on which the work is enqueued; null: the legacy default stream
  int num_sms = 0;         ///< CUDA: multiprocessors, in [1, those of the GPU / ranks on it]; 0: as tuned, or all
};

/// Ledger combine over one Group. Construction is collective; destruction is local. See the top of this file.
class LedgerCombine {
 public:
  /// Waits up to GroupOptions::rendezvous_timeout for the other ranks. \throws Error(invalid_argument) naming the field,
  /// Error(heap_exhausted) if the group's heap is too small, or Error(mismatch) if configurations differ. Errors are thrown on
  /// all ranks, even if they originate on only some of them. The group stays usable, its heap is unchanged, and another object
  /// may be created.
  LedgerCombine(Group& group, const LedgerConfig& config);
  LedgerCombine(LedgerCombine&&) noexcept;
  LedgerCombine& operator=(LedgerCombine&&) noexcept;
  ~LedgerCombine();

  /// Symmetric memory that an object with this config allocates from each rank's heap. Local.
  static MemoryRequirement memory_required(const LedgerConfig& config, int world, Backend backend = Backend::cpu);
  /// Heap size for a group whose only object has this config.
  static size_t heap_bytes(const LedgerConfig& config, int world, Backend backend = Backend::cpu);

  /// Checks `tables` (check_ledger) and prepares them for combine. Local. Takes O(M * K + W * E + rows) time. CUDA: waits for
  /// all earlier calls and for a copy to the GPU; must not be called while the calling thread is capturing a stream. \throws
  /// Error(pool_exhausted) if max_ledgers prepared ledgers are alive.
  PreparedLedger prepare(const LedgerTables& tables);

  /// Returns the rows of `expert_output` to their owners and sums this rank's tokens into `out` [M, H]. `expert_output` has at
  /// least ledger.rows() rows of H elements of dtype. `probs` is float32 [M, K], or null to add the rows unweighted.
  /// `peer_token_per_expert` must be identical on all ranks (otherwise mismatch).
  void combine(const ConstRows& expert_output, const float* probs, const PreparedLedger& ledger, void* out,
               const LedgerCombineOptions& options = {});
  /// prepare() and combine() in one call. On CUDA, it blocks and cannot be captured.
  void combine(const ConstRows& expert_output, const float* probs, const LedgerTables& tables, void* out,
               const LedgerCombineOptions& options = {});

  /// This rank's return buffer after the last combine: [returned_rows of its ledger, H]. Valid until this rank's next combine.
  /// Local. CUDA: the buffer is in device memory; waits for the last call (after a graph launch, synchronize its stream first).
  ConstRows returned() const;

  const LedgerConfig& config() const;
  /// Local. CUDA: waits for the call. Covers replayed graphs only if their calls used the same number of multiprocessors as the
  /// last enqueued call.
  CallStatistics last_call() const;

 private:
  friend void combine_by_ledger(const ConstRows&, const float*, std::span<const std::byte>, LedgerCombine&, int64_t, void*,
                                const LedgerCombineOptions&);
  detail::Held<std::unique_ptr<detail::LedgerImpl>, detail::kLedgerObject> impl_;
};

/// The published form of the operator: equivalent to LedgerCombine::combine with the tables of unpack_route_meta(route_meta,
/// window.config(), W, rank, tokens). Collective. `route_meta` is in host memory on both backends and may be reused when the
/// call returns.
///
/// `window` is the object whose symmetric memory receives the returned rows. Its buffers alternate between calls, so the rows
/// cannot be written to a caller's buffer; design 0011 gives the reason. The return buffer `ptrD` is window.returned() after
/// the call.
///
/// On CUDA, it blocks and cannot be captured; for many calls, use prepare(unpack_route_meta(...)) once.
/// \throws as unpack_route_meta and LedgerCombine::combine; an error also makes the peers' calls fail.
void combine_by_ledger(const ConstRows& expert_output, const float* probs, std::span<const std::byte> route_meta,
                       LedgerCombine& window, int64_t num_tokens, void* out, const LedgerCombineOptions& options = {});

}  // namespace switchyard
