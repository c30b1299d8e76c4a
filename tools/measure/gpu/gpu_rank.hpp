// SPDX-License-Identifier: Apache-2.0
// One rank's GPU in a benchmark: device buffers, a barrier between the GPUs, timed sections, and the limits of the links: the
// rows of a given routing moved by bare kernels without any bookkeeping. Sees the library's internals for the symmetric memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/group.hpp"

struct CUgraph_st;  // *cudaGraph_t

namespace switchyard::measure {

/// Where the row of each token of one rank goes (dispatch), or which rows it sums (combine): entries [begin[t], begin[t + 1]).
struct RowMoves {
  std::vector<int32_t> begin;
  std::vector<int32_t> rank;
  std::vector<int32_t> row;  ///< row at that rank
};

/// Best of several block shapes, to be chosen by the caller's measuring.
inline constexpr int kFloorShapes = 3;

class GpuRank {
 public:
  /// Collective. Takes `floor_bytes` of every rank's heap for the rows of the limits, and 64 KiB.
  GpuRank(Group& group, size_t floor_bytes);
  ~GpuRank();
  static size_t heap_bytes(size_t floor_bytes) { return floor_bytes + (size_t{1} << 20); }

  void* stream() const;
  /// Device memory, zero, freed with this object. Not while a kernel of any rank may wait for this one.
  void* allocate(size_t bytes);
  void write(void* device, const void* host, size_t bytes);
  void read(void* host, const void* device, size_t bytes) const;

  /// Enqueues: the L2 cache is filled with other lines, then all ranks' GPUs meet. In a group of several hosts the ranks'
  /// threads meet instead, each when its GPU is done; nothing can be captured then, and push and pull are not for such groups.
  void align();
  void meet();
  /// Enqueue the ends of a timed section; at most `max_sections` since the last seconds().
  void begin();
  void end();
  static constexpr int kMaxSections = 256;
  /// Waits; durations in order.
  std::vector<double> seconds();

  /// Waits for stream().
  void wait() const;
  /// Captures into a graph: the L2 cache is filled with other lines, all ranks' GPUs meet, and, timed inside the graph, what
  /// `enqueue` puts on stream(). Replaces the graph before.
  void capture(const std::function<void()>& enqueue);
  /// capture(), but only the first kernel of what `enqueue` puts on stream() is timed; it must be the first thing there. Timed
  /// is from an event before the kernel to one behind it, for which all that follows waits.
  void capture_first_kernel(const std::function<void()>& enqueue);
  /// Lets go of the graph and what it holds.
  void drop_graph();
  /// Replays it `n` times; durations of the timed part in order. Collective in effect: all ranks meet in each replay.
  std::vector<double> replay(int n);

  /// Enqueues arithmetic that takes about so long if nothing disturbs it, on all multiprocessors of this rank.
  void compute(double microseconds);
  /// Enqueues nothing for so long: a thread that looks at the clock.
  void idle(double microseconds);

  /// Uploads the moves of this rank, whose ranks ascend in each token; at most 32 for a token.
  void set_moves(const RowMoves& moves);
  /// What pull sums, if not the rows that push sends. After set_moves.
  void set_pulled(const RowMoves& moves);
  /// Enqueues one limit over `sms` blocks: rows are read once and written to all their places (push), or read from all their
  /// places, summed in float32 and written once (pull; bf16). `shape` in [0, kFloorShapes).
  void push(int64_t tokens, size_t row_bytes, int sms, int shape);
  void pull(int64_t tokens, size_t row_bytes, int sms, int shape);

 private:
  void calibrate();
  void instantiate(CUgraph_st* graph);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace switchyard::measure
