// SPDX-License-Identifier: Apache-2.0
// Normal mode on the CPU: memory, launch, waiting for counts, faults. The calls are in calls.cpp, the algorithms in protocol/.
#pragma once

#include <memory>
#include <vector>

#include "exchange/normal/impl.hpp"
#include "exchange/group/recycler.hpp"
#include "exchange/normal/hosts/links.hpp"
#include "heap/offset_allocator.hpp"
#include "layout/control.hpp"
#include "protocol/normal/chunks.hpp"
#include "protocol/normal/ring.hpp"

namespace switchyard::detail {

/// Memory for rows: a block of the (symmetric) pool, or private memory with ring staging.
struct CpuBlock final : OutputBlock {
  std::shared_ptr<OffsetAllocator> pool;  ///< null: private memory
  std::shared_ptr<BufferRecycler> recycler;
  PrivateBuffer owned;
  ~CpuBlock() override {
    if (pool) pool->release(offset);
    if (recycler) recycler->give(std::move(owned));
  }
};

template <class A>
class CpuNormal final : public NormalImpl {
 public:
  CpuNormal(Group& group, const NormalConfig& config);

  CallStatistics last_call() override { return stats_; }

 private:
  struct CpuCall final : Call {
    CpuCall(const CallContext& given, const Frame& frame);
    const char* const name;  ///< in errors
    const uint64_t start_ns;
    const TraceSpan span;
    // Tables read by kernels, built for each call.
    std::vector<int64_t> record_begin, padding;
    std::vector<int32_t> chunk_records;
  };

  void reserve_slots() override {
    slots_.resize(static_cast<size_t>(SelectedSlots::bytes(config.max_tokens * config.topk)) / 8);
  }
  SelectedSlots selected_slots() override {
    return SelectedSlots::in(reinterpret_cast<std::byte*>(slots_.data()), config.max_tokens * config.topk);
  }
  void build();
  /// With several hosts: collective.
  void connect_hosts();

  // cpu.cpp: memory and the frame of every collective call.
  std::unique_ptr<Call> begin(const Frame& frame) override;
  void end(Call& call) override;
  std::shared_ptr<OutputBlock> allocate(Call&, size_t bytes, Content) override { return allocate(bytes); }
  std::shared_ptr<OutputBlock> allocate_for(const RowStream&, size_t bytes) override { return allocate(bytes); }
  void take_output(Call& call, Dispatch& d) override;
  void copy_out(Call& call, const Dispatch& d) override;
  std::shared_ptr<HandleData> make_handle(Call&, int64_t, std::exception_ptr&) override { return handles_->take(); }
  std::shared_ptr<const HandleData> use_handle(Call& call, const Handle& handle) override;
  HandleArrays arrays_of(const HandleData& h) const override;
  std::shared_ptr<CpuBlock> allocate(size_t bytes);
  /// Throws the fault recorded by warps.
  void raise(const char* operation);
  [[noreturn]] void throw_mismatch(const char* operation, int rank, const CallDifference& difference);
  /// Of ranks that make the same call, only some of which pass weights.
  [[noreturn]] void throw_weights_mismatch(const CpuCall& call, int rank) {
    throw_mismatch(call.name, rank, {Site::counts, call.signature, call.signature});
  }
  /// Exchanges placements in calls that move rows only after all placements have arrived: dispatch, ring staging, and all calls
  /// on several hosts.
  void exchange_placements(const CpuCall& call, const SumStaging& staging, const std::exception_ptr& own);
  void exchange_placements(const CpuCall& call, const Placement& place, const std::exception_ptr& own) {
    SumStaging staging;
    staging.place = place;
    exchange_placements(call, staging, own);
  }
  /// With several hosts: forwards to other hosts a message that all ranks of this host have received, and passes the messages
  /// of other hosts to deliver(source, number, message). Returns false after a (recorded) fault.
  template <class Number, class Deliver>
  bool pass_on(const CallContext& call, const void* message, size_t bytes, Number&& number, Deliver&& deliver) {
    const uint64_t round = hosts_->take_round();
    post_relay(call, hosts_->carrier(), round, hosts_->peers(), message, bytes, number);
    return take_relay<A>(solo_, call, hosts_->carrier(), round, hosts_->peers(), bytes, deliver);
  }
  /// With several hosts: handles a missing rank of another host. If its proxy is missing too, changes the fault to refer to the
  /// proxy.
  void name_proxy(FaultRecord& fault) const;
  /// Call after the placements have been exchanged; throws on all ranks if a rank cannot take part or made a different call.
  /// `own`: this rank's error, which is thrown if this rank is the one that failed.
  void check_placements(const CpuCall& call, const std::exception_ptr& own);
  /// Runs body(warp) on all workers, or on the calling thread as the only warp.
  template <class F>
  void launch(F&& body) {
    on_workers(body);
  }
  template <class F>
  void on_one_warp(F&& body) {
    body(solo_);
  }

  // cpu_calls.cpp
  void plan(Call& call, const Routing& routing, HandleData& h, const Placement* offer) override;
  bool await_counts(Call&, HandleData&, std::exception_ptr&) override { return true; }  // plan() has waited
  void move(Call& call, Dispatch& d, const MoveShape& shape) override;
  /// With several hosts: counterparts of dispatch_direct and combine_direct, after all placements have arrived. A recorded
  /// fault ends them.
  void move_over_hosts(const DispatchParams& p, const HandleData& h);
  void sum_over_hosts(const CombineParams& p, const HandleData& h, bool weighted);
  /// Runs body(warp) on all workers as one phase of a call. \returns whether the call continues
  template <class F>
  bool run_phase(F&& body) {
    launch(body);
    return group_.fault.ready == 0;
  }
  void gather_counts(const CpuCall& call, int64_t capacity, HandleData& h);
  /// True if this call carries weights. Throws on all ranks if only some of the ranks that have tokens passed weights.
  bool agree_on_weights(const CpuCall& call, const GatheredCounts& counts);
  MoveTables move_tables(CpuCall& call, const Dispatch& d) const;
  /// True if any rank copies rows out as they arrive. Valid once all placements have arrived.
  bool any_rank_copies(const CallContext& call) const;
  MoveWork move_work(bool receives);

  void sum(Call& call, const HandleData& h, const SumShape& shape, const CombineOptions& options, const SumStaging& staging,
           const std::exception_ptr& error) override;
  SumTables sum_tables(CpuCall& call, const HandleData& h) const;
  SumWork sum_work();
  /// Rank-major layout: throws on all ranks that requested weights if a rank that holds rows passed none.
  void check_weights_present(const CpuCall& call, const HandleData& h);

  CallStatistics stats_;
  std::vector<int64_t> slots_;  // SelectedSlots, if reserved
  CallEpochs epochs_{first_epoch_};
  uint64_t heap_offset_ = 0;  // offset of this object's block in the heap
  std::shared_ptr<OffsetAllocator> pool_;
  std::shared_ptr<BufferRecycler> buffers_ = std::make_shared<BufferRecycler>();
  std::shared_ptr<Recycler<HandleData>> handles_ = std::make_shared<Recycler<HandleData>>();
  struct alignas(64) Counter {
    uint64_t value = 0;
  };
  uint64_t sends_done_[kRowChunks] = {}, sums_done_[kSumChunks] = {};
  /// Counters per block, first for sends and then for sums and pulls.
  static constexpr int kBlockCounters = 16;
  static_assert(kRowChunks + kSumChunks + 1 <= kBlockCounters);
  std::vector<uint64_t> block_counters_ =
      std::vector<uint64_t>(static_cast<size_t>(group_.options.num_blocks) * kBlockCounters);
  BlockCounters of_blocks(int first) { return {block_counters_.data() + first, kBlockCounters}; }
  Counter pulls_done_, sends_next_, places_next_, sums_next_, pulls_next_;
  std::vector<RingStream> ring_streams_;
  CpuWarp solo_{0, 0, 1, 1, nullptr};
  LocalPlan local_;
  std::vector<std::byte> counts_row_;
  std::unique_ptr<HostLinks> hosts_;  ///< null: all ranks are on this host
};

}  // namespace switchyard::detail
