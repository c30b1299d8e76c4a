// SPDX-License-Identifier: Apache-2.0
// One rank's GPU in a benchmark: device buffers, a barrier between the GPUs, timed sections, and the limits of the links. For
// the limits, bare kernels move the rows of a given routing without any bookkeeping. Uses library internals for the symmetric
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/group.hpp"

struct CUgraph_st;  // *cudaGraph_t

namespace switchyard::measure {

/// Destinations of each token's row on one rank (dispatch), or the rows to sum (combine): entries [begin[t], begin[t + 1]).
struct RowMoves {
  std::vector<int32_t> begin;
  std::vector<int32_t> rank;
  std::vector<int32_t> row;  ///< index of the row on that rank
};

/// Number of block shapes of a limit. The caller measures all of them and chooses the best.
inline constexpr int kFloorShapes = 3;

class GpuRank {
 public:
  /// Collective. Takes `floor_bytes` of every rank's heap for the rows of the limits, and 64 KiB.
  GpuRank(Group& group, size_t floor_bytes);
  ~GpuRank();
  static size_t heap_bytes(size_t floor_bytes) { return floor_bytes + (size_t{1} << 20); }

  void* stream() const;
  /// Zeroed device memory, freed with this object. Do not call it while a kernel of any rank may wait for this rank.
  void* allocate(size_t bytes);
  void write(void* device, const void* host, size_t bytes);
  void read(void* host, const void* device, size_t bytes) const;

  /// Enqueue a fill of the L2 cache with unrelated lines, then a meeting of all ranks' GPUs; meet() enqueues only the meeting.
  /// In a group with several hosts the ranks' threads meet instead, each after its GPU has finished; then nothing can be
  /// captured, and push and pull must not be used.
  void align();
  void meet();
  /// Enqueue the ends of a timed section; at most `max_sections` since the last seconds().
  void begin();
  void end();
  static constexpr int kMaxSections = 256;
  /// Waits; returns durations in order.
  std::vector<double> seconds();

  /// Waits for stream().
  void wait() const;
  /// Captures into a graph: a fill of the L2 cache with unrelated lines, a meeting of all ranks' GPUs, and, timed inside the
  /// graph, the work that `enqueue` adds to stream(). Replaces the previous graph.
  void capture(const std::function<void()>& enqueue);
  /// Like capture(), but times only the first kernel that `enqueue` adds to stream(). `enqueue` must add that kernel first. The
  /// time is from an event before the kernel to an event after it; all later work waits for the second event.
  void capture_first_kernel(const std::function<void()>& enqueue);
  /// Releases the graph and its resources.
  void drop_graph();
  /// Replays the graph `n` times; returns durations of the timed part in order. Effectively collective: all ranks meet in each
  /// replay.
  std::vector<double> replay(int n);

  /// Enqueues arithmetic on all multiprocessors of this rank that takes about the given time if nothing disturbs it.
  void compute(double microseconds);
  /// Enqueues an idle period: one thread polls the clock.
  void idle(double microseconds);

  /// Uploads the moves of this rank. Ranks ascend within each token; at most 32 moves per token.
  void set_moves(const RowMoves& moves);
  /// Sets the rows that pull sums, if they differ from those that push sends. Call after set_moves.
  void set_pulled(const RowMoves& moves);
  /// Enqueue one limit over `sms` blocks: rows are read once and written to all their destinations (push), or read from all
  /// their locations, summed in float32 and written once (pull; bf16). `shape` in [0, kFloorShapes).
  void push(int64_t tokens, size_t row_bytes, int sms, int shape);
  void pull(int64_t tokens, size_t row_bytes, int sms, int shape);

 private:
  void calibrate();
  void instantiate(CUgraph_st* graph);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard::measure
