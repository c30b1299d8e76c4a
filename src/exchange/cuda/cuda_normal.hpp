// SPDX-License-Identifier: Apache-2.0
// Normal mode on a GPU: checks, memory, order of streams, launches. The algorithms are in protocol/ and plan.cu.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "arch/gpu_runtime.hpp"
#include "exchange/cuda/call_order.hpp"
#include "exchange/cuda/cuda_pool.hpp"
#include "exchange/cuda/cuda_rank.hpp"
#include "exchange/cuda/launch.hpp"
#include "exchange/normal_impl.hpp"
#include "heap/cuda/device_guard.hpp"

namespace switchyard::detail {

/// Tables of one dispatch in the pool.
class CudaHandle final : public DeviceHandle {
 public:
  const HandleData& host() const override;

  HandleData shape;  ///< copy of what the host knows, without `device`
  Tables tables;
  Received received;
  std::shared_ptr<CudaBlock> tables_block, received_block;
  std::weak_ptr<CudaRank*> gpu;
  Group::Impl* group = nullptr;
  bool with_weights = false;
  CallStream made;  ///< the dispatch
  Point until;      ///< its end; null: captured

 private:
  mutable std::mutex mutex_;
  mutable std::unique_ptr<HandleData> host_;
};

/// Copies the tables of `h`, which are in host memory, to `tables` and `received`. Returns when `stream` has done it.
void upload_handle(const HandleData& h, const Tables& tables, const Received& received, gpu::Stream stream);

class CudaNormal final : public NormalImpl {
 public:
  CudaNormal(Group& group, CudaRank& gpu, const NormalConfig& config);
  ~CudaNormal() override;

  Dispatched dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& options) override;
  Dispatched redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options) override;
  RowBuffer allocate_rows(const Handle& handle, DType type, const RowStream& stream) override;
  std::shared_ptr<void> make_graph_memory() override;
  void use_graph_memory(std::shared_ptr<void> memory) override;
  void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options, float* out_weights) override;
  CallStatistics last_call() override;

 private:
  /// One collective call from its checks to its last launch. Makes the device current.
  struct Call {
    /// Orders `stream` after this object's last call and after foreign users of freed blocks.
    Call(CudaNormal& object, void* stream, int num_sms, Operation operation);
    bool capturing() const { return at.capture.active; }
    gpu::Stream stream() const { return at.stream; }
    CallStream at;
    LaunchShape launch;
    CallContext context;
    RankWords words;
    std::vector<std::shared_ptr<CudaBlock>> foreign;  ///< memory of other objects that it uses
  };
  struct Outputs {
    std::shared_ptr<CudaBlock> rows, received;
    Received carved;
    Placement place{};
    std::exception_ptr error;
  };

  // cuda_normal.cpp
  TablesShape shape_of(int64_t tokens) const;
  void end(const Call& call);
  /// The call uses `block`, which may be another object's.
  void use(const std::shared_ptr<CudaBlock>& block, Call& call) const;
  /// The same for what lies at these addresses, if it is memory of the library.
  void use(std::initializer_list<const void*> addresses, Call& call) const;
  /// The memory of the graph that is captured.
  GraphArena& arena_of(const CaptureState& capture);
  /// Of a dispatch: no more multiprocessors than are of use.
  void spare_sms(Call& call, bool quantize) const;
  /// Throws Error(pool_exhausted). A block of a captured call belongs to its graph.
  std::shared_ptr<CudaBlock> allocate(size_t bytes, Content content, const CallStream& at);
  std::shared_ptr<CudaBlock> allocate(size_t bytes, Content content, const Taker& taker);
  std::shared_ptr<CudaBlock> checked_block(std::shared_ptr<CudaBlock> block, size_t bytes);
  ObjectState* state() const { return state_.as<ObjectState>(); }
  bool through_rings() const { return config.staging == Staging::ring; }
  RingParts ring_parts() const;
  void build();
  void make_pool();

  // cuda_combine.cpp
  /// `error`: this rank cannot take part, and all ranks' calls move nothing.
  void enqueue_combine(Call& call, const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options,
                       float* out_weights, std::exception_ptr& error);

  /// Says where this rank's outputs are, and takes temporary blocks for what must be staged; they go back to the pool when the
  /// call has been enqueued, because later calls of this object come after it.
  std::vector<std::shared_ptr<CudaBlock>> stage_outputs(const Call& call, const HandleData& h, CombineOrder order,
                                                        CudaCombineParams& p, std::exception_ptr& error);

  // cuda_dispatch.cpp
  void enqueue_dispatch(Call& call, const ConstRows& x, const ExpertIds& ids, const float* weights,
                        const DispatchOptions& options, const RowFormat& format, uint64_t sig, std::shared_ptr<HandleData>& h,
                        Outputs& outputs);
  std::shared_ptr<HandleData> new_handle(int64_t tokens, const Call& call, std::exception_ptr& error);
  PlanParams plan_params(const Call& call, const CudaHandle& handle, const ExpertIds& ids, const float* weights,
                         const DispatchOptions& options, uint64_t sig) const;
  CudaDispatchParams move_params(const Call& call, const HandleData& h, const ConstRows& x, const RowFormat& format,
                                 const DispatchOptions& options, const Outputs& outputs, uint64_t sig, bool fresh) const;
  /// The kernel that moves rows. `after_plan`: as in launch_dispatch.
  void launch_move(const Call& call, const CudaDispatchParams& params, const Outputs& outputs, bool after_plan) const;
  /// SizePolicy::exact: waits for the plan. False: the call was left out, and `error` says why.
  bool read_counts(const Call& call, HandleData& h, std::exception_ptr& error);
  void choose_sizes(HandleData& h, const DispatchOptions& options) const;
  /// Takes blocks for rows and, if `fresh`, for what comes with them; says where, or why not.
  Outputs offer_blocks(const Call& call, const RowFormat& format, const HandleData& h, bool fresh, uint64_t sig);
  Dispatched deliver(const std::shared_ptr<const HandleData>& h, const Outputs& outputs, const RowFormat& format) const;
  static const CudaHandle& tables_of(const HandleData& h);
  /// The handle's data with tables on this GPU; uploads those of a handle from the host (serialized, or of a CPU group).
  std::shared_ptr<const HandleData> device_data(const Handle& handle, Call& call);

  CudaRank& gpu_;
  TuningValues tuned_;
  uint64_t heap_offset_ = 0;
  ControlLayout control_;
  std::byte* pool_base_ = nullptr;  ///< what the pool's offsets count from: this rank's segment, or private_pool_
  std::shared_ptr<CudaPool> pool_;
  std::weak_ptr<GraphArena> arena_;           ///< of the capture under way, or the last one
  std::shared_ptr<GraphArena> shared_arena_;  ///< of graphs that share, if it is set
  std::shared_ptr<CudaBlock> spare_tables_;   ///< for a call that ends in pool_exhausted on all ranks
  DeviceMemory state_;                        ///< ObjectState, the plan's scratch, the states of ring streams
  size_t streams_at_ = 0;                     ///< of these, in state_
  DeviceMemory private_pool_;                 ///< ring staging
  std::optional<CallOrder> order_;
};

}  // namespace switchyard::detail
