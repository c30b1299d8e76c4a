// SPDX-License-Identifier: Apache-2.0
/// \file
/// Ledger combine: combine driven by an explicit route ledger (LedgerTables) instead of a handle. The caller may build the
/// ledger in any way, or take it from a dispatch (Handle::ledger). docs/concepts/ledger.md describes the tables.
///
/// Notation: W ranks, M tokens on this rank, H hidden, K topk, E experts; owner of an expert as in normal mode. The rank that
/// holds an expert returns the expert's rows to the *return buffer* of the rank that owns their tokens, in the order that the
/// ledger says; the owner sums `probs[f] * return_buffer[expanded_row_idx[f]]` over each token's K routes.
///
/// Contract of the sum: float32 from +0, multiply then add, k ascending, one rounding to the row type; routes of -1 are
/// skipped; a token without a route gives exactly +0. Rows of any length, also not a multiple of 16 bytes. M may differ by rank
/// and may be 0. Same input, same bits, on every backend and number of workers.
///
/// CPU: calls are synchronous on the calling thread. CUDA: pointers are device memory of the rank's GPU; combine enqueues on
/// LedgerCombineOptions::stream, allocates nothing, waits for nothing and can be captured in a graph. Calls on one object are
/// ordered, also on different streams (launches of a graph are ordered by their stream only).
///
/// Errors are those of normal mode: Error(invalid_argument) throws at once on that rank and, in a collective call, ends the
/// peers' calls with PeerFailed; PeerTimeout, PeerFailed and mismatch (among others: the ranks hold different ledgers) are
/// sticky. CUDA: sticky faults that a kernel finds are thrown by the next call or Group::check().
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

/// Fixed properties of a LedgerCombine; equal on all ranks.
struct LedgerConfig {
  int64_t hidden = 0;           ///< H >= 1
  int num_experts = 0;          ///< E >= 1; need not divide by W
  int topk = 0;                 ///< K in [1, kMaxTopk]
  int64_t max_tokens = 0;       ///< largest M on any rank, >= 0; sizes the return buffers: max_tokens * K rows, twice or thrice
  DType row_type = DType::f16;  ///< of expert outputs, return buffers and results: f16, bf16 or f32
  int64_t max_rows = 0;         ///< most rows of expert output that a ledger may speak of; 0: as many as int32 can number
  int max_ledgers = 4;          ///< CUDA: PreparedLedgers that are alive at once, graphs' included, >= 1
};

/// Throws Error(invalid_argument) naming field and index of the first value of `tables` that rank `rank` of `world` could not
/// use: other sizes than `config` has, counts below 0, a prefix that is not the inclusive one, segments of expert rows that
/// overlap or leave max_rows, a row of the return buffer that is out of range or named twice. Rows of the return buffer that no
/// route names are legal: they are returned and ignored. Local.
void check_ledger(const LedgerTables& tables, const LedgerConfig& config, int world, int rank);

/// Bytes of the buffers of the published ledger format, for comparison and for callers that lay them out themselves. This
/// library's own symmetric memory is LedgerCombine::memory_required.
struct LedgerFormatBytes {
  size_t workspace = 0;   ///< int32 [max(64, blocks * (8 + Ep))]; Ep: E rounded up to 16
  size_t route_meta = 0;  ///< the five tables, each rounded up to 64 bytes
  size_t window = 0;      ///< return buffer and two int32 [W], each rounded up to 64 bytes
  size_t guard = 0;       ///< unused bytes before the window
};
/// For max_tokens tokens. `blocks`: workers that synchronise through the workspace, in [1, 2^16].
LedgerFormatBytes ledger_format_bytes(const LedgerConfig& config, int world, int blocks);

/// Where the tables begin in the published format's route meta, in bytes, in the order in which they lie there: int32, little
/// endian, each rounded up to 64 bytes. `bytes`: of all.
struct RouteMetaLayout {
  size_t peer_token_per_expert = 0;  ///< [W, Ep]
  size_t expanded_row_idx = 0;       ///< [tokens * K]
  size_t cumsum_per_expert = 0;      ///< [W, Ep]
  size_t dispatch_offset = 0;        ///< [experts of the rank]
  size_t prev_sum_before_rank = 0;   ///< [W, experts of the rank]
  size_t bytes = 0;
};
/// The layout for rank `rank` with `tokens` tokens, 0 to max_tokens. Local.
RouteMetaLayout route_meta_layout(const LedgerConfig& config, int world, int rank, int64_t tokens);

/// The tables of rank `rank` as published kernels read them; zeros between the fields. Local. \throws as check_ledger
std::vector<std::byte> pack_route_meta(const LedgerTables& tables, const LedgerConfig& config, int world, int rank);
/// The tables back from such bytes in host memory, at least route_meta_layout().bytes of them, whoever made them. Local.
/// \throws Error(invalid_argument) if they are too few; as check_ledger
LedgerTables unpack_route_meta(std::span<const std::byte> route_meta, const LedgerConfig& config, int world, int rank,
                               int64_t tokens);

namespace detail {
struct LedgerData;
class LedgerImpl;
}  // namespace detail

/// A checked ledger in the form that combine uses (CUDA: in device memory). Cheap to copy, immutable; for the LedgerCombine
/// that prepared it, any number of times. CUDA: must not outlive that object.
class PreparedLedger {
 public:
  PreparedLedger() = default;
  explicit operator bool() const noexcept { return static_cast<bool>(data_); }
  int64_t tokens() const;         ///< M
  int64_t rows() const;           ///< least number of rows of the expert output
  int64_t returned_rows() const;  ///< rows that come back to this rank

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

/// The operator over one Group. Construction is collective; destruction is local. See the top of this file.
class LedgerCombine {
 public:
  /// Waits for the others for GroupOptions::rendezvous_timeout. \throws Error(invalid_argument) naming the field,
  /// Error(heap_exhausted) if the group's heap is too small, Error(mismatch) if configurations differ: on all ranks alike, also
  /// if only some have cause to. The group can be used afterwards, its heap is as before, and another object may be made.
  LedgerCombine(Group& group, const LedgerConfig& config);
  LedgerCombine(LedgerCombine&&) noexcept;
  LedgerCombine& operator=(LedgerCombine&&) noexcept;
  ~LedgerCombine();

  /// Symmetric memory that an object with this config takes from each rank's heap. Local.
  static MemoryRequirement memory_required(const LedgerConfig& config, int world, Backend backend = Backend::cpu);
  /// Heap size for a group whose only object has this config.
  static size_t heap_bytes_for(const LedgerConfig& config, int world, Backend backend = Backend::cpu);

  /// Checks `tables` (check_ledger) and makes them ready. Local. O(M * K + W * E + rows). CUDA: waits for the calls so far and
  /// for a copy to the GPU; not while the calling thread captures. \throws Error(pool_exhausted) if max_ledgers are alive.
  PreparedLedger prepare(const LedgerTables& tables);

  /// Returns the rows of `expert_output` ([at least ledger.rows(), H] of row_type) to their owners and sums this rank's tokens
  /// into `out` [M, H]. `probs` is float32 [M, K]; null: rows are added as they are. `peer_token_per_expert` must be the same
  /// on all ranks (else mismatch).
  void combine(const ConstRows& expert_output, const float* probs, const PreparedLedger& ledger, void* out,
               const LedgerCombineOptions& options = {});
  /// prepare() and combine() in one: on CUDA it waits and cannot be captured.
  void combine(const ConstRows& expert_output, const float* probs, const LedgerTables& tables, void* out,
               const LedgerCombineOptions& options = {});

  /// This rank's return buffer as the last combine left it: [returned_rows of its ledger, H]. Valid until this rank's next
  /// combine. Local. CUDA: device memory; waits for the last call (after a graph launch, wait for its stream first).
  ConstRows returned() const;

  const LedgerConfig& config() const;
  /// Local. CUDA: waits for the call; of replayed graphs only if their calls had as many multiprocessors as the last one
  /// enqueued.
  CallStatistics last_call() const;

 private:
  friend void combine_by_ledger(const ConstRows&, const float*, std::span<const std::byte>, LedgerCombine&, int64_t, void*,
                                const LedgerCombineOptions&);
  detail::Held<std::unique_ptr<detail::LedgerImpl>, detail::kLedgerObject> impl_;
};

/// The operator as it is published: LedgerCombine::combine by packed tables, unpack_route_meta(route_meta, window.config(), W,
/// rank, tokens), and by nothing else. Collective. `route_meta` lies in host memory on both backends and is the caller's again
/// when the call returns.
///
/// `window`: where rows return to. That is symmetric memory of the object, which takes turns in it, and not a buffer of the
/// caller's: design 0011 says why. The return buffer `ptrD` is window.returned() after the call.
///
/// On CUDA it waits and cannot be captured: prepare(unpack_route_meta(...)) once is the form for many calls.
/// \throws as unpack_route_meta and LedgerCombine::combine; peers are told
void combine_by_ledger(const ConstRows& expert_output, const float* probs, std::span<const std::byte> route_meta,
                       LedgerCombine& window, int64_t tokens, void* out, const LedgerCombineOptions& options = {});

}  // namespace switchyard
