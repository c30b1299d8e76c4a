// SPDX-License-Identifier: Apache-2.0
// Normal mode on the CPU: checks, plan, launch, faults. The algorithms are in protocol/.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "exchange/group_impl.hpp"
#include "heap/offset_allocator.hpp"
#include "layout/control.hpp"
#include "layout/ring_layout.hpp"
#include "plan/plan.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::detail {

/// Memory for rows: a block of the pool (symmetric), or private memory under ring staging. Freed by the destructor, on any thread.
/// Keeps the pool's bookkeeping alive, not the heap: rows must not be touched after their group is gone.
struct OutputBlock {
  std::shared_ptr<OffsetAllocator> pool;  ///< null: private memory
  size_t offset = 0;                      ///< heap offset, if from the pool
  std::byte* data = nullptr;

  OutputBlock() = default;
  OutputBlock(const OutputBlock&) = delete;
  OutputBlock& operator=(const OutputBlock&) = delete;
  ~OutputBlock();
};

/// What follows from the options and types of one call; part of its signature.
struct RowFormat {
  DType src_type, type;  ///< given, sent
  ScaleKind scales;
  bool quantize;
  int64_t src_row_bytes, row_bytes, scale_bytes;
};

class NormalImpl {
 public:
  NormalImpl(Group& group, const NormalConfig& config);
  ~NormalImpl();

  Dispatched dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& options);
  Dispatched redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options);
  RowBuffer allocate_rows(const Handle& handle, DType type);
  void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options, float* out_weights);

  NormalConfig config;
  CallStatistics stats;

 private:
  int rank() const { return group_.bootstrap->rank(); }
  int world() const { return group_.bootstrap->world(); }

  // normal_checks.cpp: throw invalid_argument.
  RowFormat check_rows(const ConstRows& x, const DispatchOptions& options, int64_t tokens) const;
  void check_ids(const ExpertIds& ids) const;
  void check_options(const DispatchOptions& options) const;
  void check_handle(const Handle& handle) const;
  void check_combine(const ConstRows& y, const Handle& handle, const void* out, const CombineOptions& options, const float* out_weights) const;

  // normal.cpp: the frame of every collective call.
  /// Runs `check`; if it throws, tells the peers before the exception goes on.
  template <class F>
  void checked(F&& check);
  CallContext begin_call();
  template <class F>
  void launch(int num_blocks, int num_warps, F&& body);  // body(arch tag, warp)
  template <class F>
  void on_one_warp(F&& body);
  void raise(const char* operation);
  void end_call(uint64_t start_ns);
  [[noreturn]] void throw_mismatch(const char* operation);

  // normal_dispatch.cpp
  std::shared_ptr<HandleData> new_handle();
  uint64_t signature(Operation op, const RowFormat& format, const DispatchOptions& options, bool with_weights) const;
  void gather_counts(const CallContext& call, const LocalPlan& local, uint64_t sig, int64_t capacity, GatheredCounts& counts);
  void check_capacity(const GatheredCounts& counts, const DispatchOptions& options) const;
  void choose_sizes(const DispatchOptions& options, HandleData& h) const;
  std::shared_ptr<OutputBlock> allocate(size_t bytes);
  /// Tells all ranks where rows go here, or that `error` occurred here, and waits for all. Throws alike on all ranks.
  void agree_on_placement(const CallContext& call, const Placement& place, const char* operation);
  Dispatched deliver(const std::shared_ptr<HandleData>& h, const std::shared_ptr<OutputBlock>& block, const OutputLayout& layout,
                     const RowFormat& format);
  void move_rows(const CallContext& call, const ConstRows& x, const RowFormat& format, const DispatchOptions& options, HandleData& h,
                 OutputBlock& block, const OutputLayout& layout, bool cached);
  void take_records(HandleData& h, const OutputBlock& block, const OutputLayout& layout);

  // normal_combine.cpp
  struct Staging;
  void combine_direct(const CallContext& call, const ConstRows& y, const HandleData& h, void* out, const CombineOptions& options,
                      float* out_weights, uint64_t sig);
  void combine_ring(const CallContext& call, const ConstRows& y, const HandleData& h, void* out, const CombineOptions& options,
                    float* out_weights, uint64_t sig);

  Group::Impl& group_;
  uint64_t epoch_;  // of the last call
  ControlLayout control_;
  RingLayout rings_;
  uint64_t heap_offset_ = 0;  // of this object's block in the heap
  std::shared_ptr<OffsetAllocator> pool_;
  struct alignas(64) Counter {
    uint64_t value = 0;
  };
  Counter sends_done_, outputs_done_, pulls_done_;
  LocalPlan local_;
  std::vector<std::byte> counts_row_;
  std::mutex recycled_mutex_;
};

}  // namespace switchyard::detail
