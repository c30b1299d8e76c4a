// SPDX-License-Identifier: Apache-2.0
// One rank's GPU in a benchmark: device buffers, a barrier between the GPUs, timed sections, and the limits of the links. For
// the limits, bare kernels move the rows of a given routing without any bookkeeping. Accesses the symmetric memory through
// library internals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/group.hpp"

struct CUgraph_st;  // *cudaGraph_t

namespace switchyard::measure {

/// Destinations of each token's row on one rank (dispatch), or the rows to sum for it (combine): entries [begin[t], begin[t +
/// 1]).
struct RowMoves {
  std::vector<int32_t> begin;
  std::vector<int32_t> rank;
  std::vector<int32_t> row;  ///< index of the row on that rank
};

/// Number of block shapes for a limit. The caller measures all of them and chooses the best.
inline constexpr int kFloorShapes = 3;

class GpuRank {
 public:
  /// Collective. Allocates `floor_bytes` of every rank's heap for the rows of the limits, plus 64 KiB.
  GpuRank(Group& group, size_t floor_bytes);
  ~GpuRank();
  static size_t heap_bytes(size_t floor_bytes) { return floor_bytes + (size_t{1} << 20); }

  void* stream() const;
  /// Zeroed device memory that is freed with this object. Do not call it while a kernel of any rank may be waiting for this
  /// rank.
  void* allocate(size_t bytes);
  void write(void* device, const void* host, size_t bytes);
  void read(void* host, const void* device, size_t bytes) const;

  /// align() enqueues a fill of the L2 cache with unrelated lines, then a meeting of all ranks' GPUs; meet() enqueues only the
  /// meeting. In a group with several hosts, the ranks' threads meet instead, each after its GPU has finished; in that case,
  /// nothing can be captured, and push and pull must not be used.
  void align();
  void meet();
  /// Enqueue the beginning and end of a timed section; at most `max_sections` sections since the last seconds().
  void begin();
  void end();
  static constexpr int kMaxSections = 256;
  /// Waits and returns the durations in order.
  std::vector<double> seconds();

  /// Waits for stream().
  void wait() const;
  /// Captures a graph that fills the L2 cache with unrelated lines, makes all ranks' GPUs meet, and runs the work that
  /// `enqueue` adds to stream(), which is timed inside the graph. Replaces the previous graph.
  void capture(const std::function<void()>& enqueue);
  /// Like capture(), but times only the first kernel that `enqueue` adds to stream(). `enqueue` must add this kernel first. The
  /// time is measured from an event before the kernel to an event after it; all later work waits for the second event.
  void capture_first_kernel(const std::function<void()>& enqueue);
  /// Releases the graph and its resources.
  void drop_graph();
  /// Replays the graph `n` times and returns the durations of its timed part in order. Effectively collective, because all
  /// ranks meet in each replay.
  std::vector<double> replay(int n);

  /// Enqueues computation on all multiprocessors of this rank that takes about the given time if nothing disturbs it.
  void compute(double microseconds);
  /// Enqueues an idle period in which one thread polls the clock.
  void idle(double microseconds);

  /// Uploads this rank's moves. Ranks are in ascending order within each token; a token has at most 32 moves.
  void set_moves(const RowMoves& moves);
  /// Sets the rows summed by pull if they differ from those sent by push. Call after set_moves.
  void set_pulled(const RowMoves& moves);
  /// Enqueue one limit over `sms` blocks: rows are read once and written to all their destinations (push), or they are read
  /// from all their locations, summed in float32 and written once (pull; bf16). `shape` in [0, kFloorShapes).
  void push(int64_t tokens, size_t row_bytes, int sms, int shape);
  void pull(int64_t tokens, size_t row_bytes, int sms, int shape);

 private:
  void calibrate();
  void instantiate(CUgraph_st* graph);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard::measure
