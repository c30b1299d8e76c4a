// SPDX-License-Identifier: Apache-2.0
// Normal mode on the CPU: checks, plan, launch, faults. The algorithms are in protocol/.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <vector>

#include "exchange/group_impl.hpp"
#include "exchange/recycler.hpp"
#include "heap/offset_allocator.hpp"
#include "layout/control.hpp"
#include "layout/ring_layout.hpp"
#include "plan/plan.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::detail {

/// Memory for rows: a block of the pool (symmetric), or private memory under ring staging. Given back by the destructor, on any
/// thread. Keeps the bookkeeping alive, not the heap: rows of a pool must not be touched after their group is gone.
struct OutputBlock {
  std::shared_ptr<OffsetAllocator> pool;  ///< null: private memory
  size_t offset = 0;                      ///< heap offset, if from the pool
  std::shared_ptr<BufferRecycler> recycler;
  PrivateBuffer owned;
  std::byte* data = nullptr;

  OutputBlock() = default;
  OutputBlock(const OutputBlock&) = delete;
  OutputBlock& operator=(const OutputBlock&) = delete;
  ~OutputBlock();
};

/// Row types of one call.
struct RowFormat {
  DType src_type, type;  ///< given, sent
  ScaleKind scales;
  bool quantize;
  int64_t src_row_bytes, row_bytes, scale_bytes;
};

/// Throws invalid_argument naming the field.
void check_config(const NormalConfig& config, int world);
/// Most rows that a rank can receive, whatever the routing.
int64_t worst_case_rows(const NormalConfig& config, int world);

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
  int send_chunk() const { return static_cast<int>(std::min<int64_t>(config.ring.send_chunk, rings_.slots)); }

  // normal_checks.cpp: throw invalid_argument or unsupported.
  RowFormat check_rows(const ConstRows& x, const DispatchOptions& options, int64_t tokens) const;
  void check_ids(const ExpertIds& ids) const;
  void check_options(const DispatchOptions& options) const;
  void check_handle(const Handle& handle) const;
  void check_combine(const ConstRows& y, const Handle& handle, const void* out, const CombineOptions& options,
                     const float* out_weights) const;

  // normal.cpp: the frame of every collective call.
  void agree_on_construction();
  CallContext begin_call();
  uint64_t call_number() const;
  uint64_t signature(Operation op, std::initializer_list<int64_t> values) const;
  /// Throws what warps recorded.
  void raise(const char* operation);
  void end_call(uint64_t start_ns);
  [[noreturn]] void throw_mismatch(const char* operation);
  std::shared_ptr<OutputBlock> allocate(size_t bytes);
  /// After placements have been exchanged: throws alike on all ranks if one cannot take part or made another call. `own` is
  /// this rank's error, if it is the one.
  void check_placements(const CallContext& call, uint64_t sig, const char* operation, const std::exception_ptr& own);
  /// Runs `check`; if it throws, the peers' waits end before the exception goes on.
  template <class F>
  void checked(F&& check) {
    try {
      check();
    } catch (const Error& error) {
      group_.post_abort(static_cast<int>(error.code()), 255);
      throw;
    }
  }
  /// Runs body.operator()<Arch>(warp) on all workers, or on the calling thread as the only warp.
  template <class F>
  void launch(F&& body) {
    group_.pool.run([&](CpuWarp& w) { on_arch(w, body); });
  }
  template <class F>
  void on_one_warp(F&& body) {
    on_arch(solo_, body);
  }
  template <class F>
  void on_arch(CpuWarp& w, F& body) {
    if (group_.options.deferred_copies)
      body.template operator()<CpuDeferred>(w);
    else
      body.template operator()<Cpu>(w);
  }

  // normal_dispatch.cpp
  void gather_counts(const CallContext& call, uint64_t sig, int64_t capacity, GatheredCounts& counts);
  void check_capacity(const GatheredCounts& counts, const DispatchOptions& options) const;
  void choose_sizes(const DispatchOptions& options, HandleData& h) const;
  Dispatched move_rows(const CallContext& call, uint64_t sig, const ConstRows& x, const RowFormat& format,
                       const DispatchOptions& options, const std::shared_ptr<HandleData>& fresh,
                       const std::shared_ptr<const HandleData>& known);
  /// Takes a block for the rows and says where it is; if there is no room, `error` is set and the placement says so.
  Placement offer_block(uint64_t sig, const OutputLayout& layout, bool sends_weights, std::shared_ptr<OutputBlock>& block,
                        std::exception_ptr& error);
  void exchange_placements(const CallContext& call, const Placement& place, const std::exception_ptr& own);
  /// Whether this call carries weights. Throws alike on all ranks if only some of those with tokens gave any.
  bool agree_on_weights(const CallContext& call, const GatheredCounts& counts);
  struct DispatchParams dispatch_params(const CallContext& call, const ConstRows& x, const RowFormat& format,
                                        const HandleData& h);
  Dispatched deliver(std::shared_ptr<const HandleData> h, std::shared_ptr<OutputBlock> block, const OutputLayout& layout,
                     const RowFormat& format) const;

  // normal_combine.cpp
  void combine_direct(const CallContext& call, uint64_t sig, struct CombineParams& params);
  void combine_ring(const CallContext& call, uint64_t sig, struct CombineParams& params, const HandleData& h);

  Group::Impl& group_;
  uint64_t epoch_ = 0;  // of the last call
  ControlLayout control_;
  RingLayout rings_;
  uint64_t heap_offset_ = 0;  // of this object's block in the heap
  std::shared_ptr<OffsetAllocator> pool_;
  std::shared_ptr<BufferRecycler> buffers_ = std::make_shared<BufferRecycler>();
  std::shared_ptr<Recycler<HandleData>> handles_ = std::make_shared<Recycler<HandleData>>();
  struct alignas(64) Counter {
    uint64_t value = 0;
  };
  Counter sends_done_, outputs_done_, pulls_done_;
  CpuWarp solo_{0, 0, 1, 1, nullptr};
  LocalPlan local_;
  std::vector<std::byte> counts_row_;
};

}  // namespace switchyard::detail
