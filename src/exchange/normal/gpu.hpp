// SPDX-License-Identifier: Apache-2.0
// Normal mode on a GPU: memory, stream order, launches, waiting for counts. The calls are in calls.cpp, the algorithms in
// protocol/ and plan/plan.cu.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "arch/gpu_runtime.hpp"
#include "exchange/gpu/call_order.hpp"
#include "exchange/gpu/pool.hpp"
#include "exchange/gpu/rank.hpp"
#include "exchange/normal/hosts/gpu_links.hpp"
#include "exchange/normal/impl.hpp"
#include "exchange/normal/launch.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

/// Tables of one dispatch, stored in the pool.
class CudaHandle final : public DeviceHandle {
 public:
  const HandleData& host() const override;

  HandleData shape;  ///< copy of the host's data, without `device`
  Tables tables;
  Received received;
  std::shared_ptr<CudaBlock> tables_block, received_block;
  std::shared_ptr<GpuHostTables> hosts;  ///< several hosts: the rows that cross
  std::weak_ptr<CudaRank*> gpu;
  Group::Impl* group = nullptr;
  bool with_weights = false;
  CallStream made;  ///< stream on which the dispatch ran
  Point until;      ///< end of the dispatch; null: captured

 private:
  mutable std::mutex mutex_;
  mutable std::unique_ptr<HandleData> host_;
};

/// Copies the tables of `h`, which are in host memory, to `tables` and `received`. Waits for the copies on `stream`.
void upload_handle(const HandleData& h, const Tables& tables, const Received& received, gpu::Stream stream);

class CudaNormal final : public NormalImpl {
 public:
  CudaNormal(Group& group, CudaRank& gpu, const NormalConfig& config);
  ~CudaNormal() override;

  std::shared_ptr<void> make_graph_memory() override;
  void use_graph_memory(std::shared_ptr<void> memory) override;
  CallStatistics last_call() override;
  int64_t invalid_ids() override { return order_->invalid_ids(); }

 private:
  struct CudaCall final : Call {
    explicit CudaCall(int device) : guard(device) {}
    gpu::Stream stream() const { return at.stream; }
    const DeviceGuard guard;
    CallStream at;
    LaunchShape launch;
    bool sms_named = false;  ///< the caller set num_sms
    int send_blocks = 0;     ///< MoveWork::send_blocks, if rows are copied as they arrive
    RankWords words;
    std::vector<std::shared_ptr<CudaBlock>> foreign;  ///< memory of other objects that the call uses
    // Set only for a fresh dispatch.
    PlanParams plan;
    std::shared_ptr<CudaBlock> received;
    Received carved;             ///< `received`
    CudaHandle* made = nullptr;  ///< the handle that ends with this call
    // Several hosts.
    TablesHeader counts{};                 ///< of a fresh dispatch, for which the host has waited
    std::shared_ptr<GpuHostTables> hosts;  ///< tables that the call uses
  };

  void reserve_slots() override;

  // gpu.cpp: memory and the frame of every call.
  SelectedSlots selected_slots() override { return SelectedSlots::in(slots_.as<std::byte>(), config.max_tokens * config.topk); }
  std::unique_ptr<Call> begin(const Frame& frame) override;
  void end(Call& call) override;
  std::shared_ptr<OutputBlock> allocate(Call& call, size_t bytes, Content content) override;
  std::shared_ptr<OutputBlock> allocate_for(const RowStream& stream, size_t bytes) override;
  TablesShape shape_of(int64_t tokens) const;
  /// Marks `block`, which may belong to another object, as used by the call.
  void use(const std::shared_ptr<CudaBlock>& block, CudaCall& call) const;
  /// Marks the memory at `address` as used by the call if it is library memory.
  void use(const void* address, CudaCall& call) const;
  /// Returns the memory of the graph being captured.
  GraphArena& arena_of(const CaptureState& capture);
  /// Throws Error(pool_exhausted). A block of a captured call belongs to its graph.
  std::shared_ptr<CudaBlock> take(size_t bytes, Content content, const CallStream& at);
  std::shared_ptr<CudaBlock> take(size_t bytes, Content content, const Taker& taker);
  std::shared_ptr<CudaBlock> checked_block(std::shared_ptr<CudaBlock> block, size_t bytes);
  ObjectState* state() const { return state_.as<ObjectState>(); }
  RingParts ring_parts() const;
  void build();
  void make_pool();

  // gpu_calls.cpp
  std::shared_ptr<HandleData> make_handle(Call& call, int64_t tokens, std::exception_ptr& error) override;
  void take_output(Call& call, Dispatch& d) override;
  void copy_out(Call& call, const Dispatch& d) override;
  void plan(Call& call, const Routing& routing, HandleData& h, const Placement* offer) override;
  bool await_counts(Call& call, HandleData& h, std::exception_ptr& error) override;
  void move(Call& call, Dispatch& d, const MoveShape& shape) override;
  HandleArrays arrays_of(const HandleData& h) const override;
  // With several hosts: counterparts of plan(), move() and sum(). All of them throw a call's error on all ranks.
  void plan_over_hosts(CudaCall& call, const Routing& routing, HandleData& h);
  void move_over_hosts(CudaCall& call, const Dispatch& d, const CudaDispatchParams& params);
  void sum_over_hosts(CudaCall& call, const HandleData& h, const CudaCombineParams& params, bool weighted,
                      const std::exception_ptr& error);
  /// Marks the tables of a handle as used by the call. Throws Error(unsupported) if it has none.
  const GpuHostTables& use_hosts(CudaCall& call, const HandleData& h) const;
  /// If a rank cannot take part, throws the error that all ranks agree on. `combine`: rounds to cut, or null. `own`: this
  /// rank's error.
  void settle_placements(CudaCall& call, const OfferParams& offer, GpuHostLinks::Summing* combine,
                         const std::exception_ptr& own);
  PlanParams plan_params(const CudaCall& call, const Routing& routing, const Tables& tables, const Placement* offer) const;
  MoveTables move_tables(const CudaCall& call, const Dispatch& d) const;
  /// Work parameters for the call's launch.
  MoveWork move_work(const MoveShape& shape, const CudaCall& call) const;
  CudaDispatchParams move_params(const CudaCall& call, const Dispatch& d, const MoveShape& shape, bool offers_place) const;
  static const CudaHandle& tables_of(const HandleData& h);

  void sum(Call& call, const HandleData& h, const SumShape& shape, const CombineOptions& options, const SumStaging& staging,
           const std::exception_ptr& error) override;
  SumWork sum_work(const SumShape& shape, int blocks) const;
  CudaCombineParams sum_params(const CudaCall& call, const HandleData& h, const SumShape& shape, const CombineOptions& options,
                               const SumStaging& staging, const std::exception_ptr& error) const;

  // gpu_handle.cpp
  /// Uploads the tables of a handle from host memory (deserialized or created by a CPU group).
  std::shared_ptr<const HandleData> use_handle(Call& call, const Handle& handle) override;

  CudaRank& gpu_;
  TuningValues tuned_;
  uint64_t heap_offset_ = 0;
  std::byte* pool_base_ = nullptr;  ///< base of the pool's offsets: this rank's segment, or private_pool_
  std::shared_ptr<CudaPool> pool_;
  std::weak_ptr<GraphArena> arena_;           ///< of the current capture, or the last one
  std::shared_ptr<GraphArena> shared_arena_;  ///< for graphs that share memory, if set
  std::shared_ptr<CudaBlock> spare_tables_;   ///< for a call that ends in pool_exhausted on all ranks
  DeviceMemory state_;                        ///< ObjectState, the plan's scratch, the states of ring streams
  size_t streams_at_ = 0;                     ///< offset of the ring streams in state_
  DeviceMemory slots_;                        ///< SelectedSlots, if reserved
  DeviceMemory private_pool_;                 ///< ring staging
  std::optional<CallOrder> order_;
  std::unique_ptr<GpuHostLinks> hosts_;  ///< null: all ranks are on this host
  uint64_t network_bytes_ = 0;           ///< of the last call; counted by the host
};

}  // namespace switchyard::detail
