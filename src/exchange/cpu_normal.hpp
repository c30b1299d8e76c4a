// SPDX-License-Identifier: Apache-2.0
// Normal mode on the CPU: plan, launch, faults. The algorithms are in protocol/.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <vector>

#include "exchange/normal_impl.hpp"
#include "exchange/recycler.hpp"
#include "heap/offset_allocator.hpp"
#include "layout/control.hpp"
#include "protocol/chunks.hpp"
#include "protocol/ring.hpp"

namespace switchyard::detail {

/// Memory for rows: a block of the pool (symmetric), or private memory under ring staging.
struct CpuBlock final : OutputBlock {
  std::shared_ptr<OffsetAllocator> pool;  ///< null: private memory
  std::shared_ptr<BufferRecycler> recycler;
  PrivateBuffer owned;
  ~CpuBlock() override;
};

/// Records here by source, cut at what fits: [W + 1].
std::vector<int64_t> record_ranges(const HandleData& h);

class CpuNormal final : public NormalImpl {
 public:
  CpuNormal(Group& group, const NormalConfig& config);

  Dispatched dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& options) override;
  Dispatched redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options) override;
  RowBuffer allocate_rows(const Handle& handle, DType type, const RowStream& stream) override;
  void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options, float* out_weights) override;
  CallStatistics last_call() override { return stats_; }

 private:
  void build();

  // cpu_normal.cpp: the frame of every collective call.
  CallContext begin_call(Operation operation);
  uint64_t call_number() const;
  /// Throws what warps recorded.
  void raise(const char* operation);
  void end_call(uint64_t start_ns);
  [[noreturn]] void throw_mismatch(const char* operation, int rank);
  std::shared_ptr<CpuBlock> allocate(size_t bytes);
  /// After placements have been exchanged: throws alike on all ranks if one cannot take part or made another call. `own` is
  /// this rank's error, if it is the one.
  void check_placements(const CallContext& call, uint64_t sig, const char* operation, const std::exception_ptr& own);
  /// Runs body.operator()<Arch>(warp) on all workers, or on the calling thread as the only warp.
  template <class F>
  void launch(F&& body) {
    on_workers([&](CpuWarp& w) { on_arch(w, body); });
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

  // cpu_dispatch.cpp
  void gather_counts(const CallContext& call, uint64_t sig, int64_t capacity, GatheredCounts& counts);
  void check_capacity(const GatheredCounts& counts, const DispatchOptions& options) const;
  void choose_sizes(const DispatchOptions& options, HandleData& h) const;
  Dispatched move_rows(const CallContext& call, uint64_t sig, const ConstRows& x, const RowFormat& format,
                       const DispatchOptions& options, const std::shared_ptr<HandleData>& fresh,
                       const std::shared_ptr<const HandleData>& known);
  /// Takes a block for the rows and says where it is; if there is no room, `error` is set and the placement says so.
  Placement offer_block(uint64_t sig, const OutputLayout& layout, const RecordLayout& records, bool sends_weights,
                        std::shared_ptr<CpuBlock>& block, std::exception_ptr& error);
  void exchange_placements(const CallContext& call, const Placement& place, const std::exception_ptr& own);
  /// Whether this call carries weights. Throws alike on all ranks if only some of those with tokens gave any.
  bool agree_on_weights(const CallContext& call, const GatheredCounts& counts);
  struct DispatchParams dispatch_params(const CallContext& call, const ConstRows& x, const RowFormat& format,
                                        const HandleData& h);
  Dispatched deliver(std::shared_ptr<const HandleData> h, std::shared_ptr<CpuBlock> block, const OutputLayout& layout,
                     const RowFormat& format) const;

  // cpu_combine.cpp
  void combine_direct(const CallContext& call, uint64_t sig, struct CombineParams& params);
  void combine_ring(const CallContext& call, uint64_t sig, struct CombineParams& params);

  CallStatistics stats_;
  uint64_t epoch_ = 0;  // of the last call
  ControlLayout control_;
  uint64_t heap_offset_ = 0;  // of this object's block in the heap
  std::shared_ptr<OffsetAllocator> pool_;
  std::shared_ptr<BufferRecycler> buffers_ = std::make_shared<BufferRecycler>();
  std::shared_ptr<Recycler<HandleData>> handles_ = std::make_shared<Recycler<HandleData>>();
  struct alignas(64) Counter {
    uint64_t value = 0;
  };
  uint64_t sends_done_[kRowChunks] = {}, sums_done_[kSumChunks] = {};
  Counter outputs_done_, pulls_done_, sends_next_, places_next_, sums_next_, pulls_next_;
  std::vector<int32_t> chunk_records_;
  std::vector<RingStream> ring_streams_;
  CpuWarp solo_{0, 0, 1, 1, nullptr};
  LocalPlan local_;
  std::vector<std::byte> counts_row_;
};

}  // namespace switchyard::detail
