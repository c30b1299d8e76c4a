// SPDX-License-Identifier: Apache-2.0
// Normal mode on a GPU: checks, memory, order of streams, launches. The algorithms are in protocol/ and plan.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "exchange/cuda/call_order.hpp"
#include "exchange/cuda/cuda_rank.hpp"
#include "exchange/cuda/launch.hpp"
#include "exchange/normal_impl.hpp"
#include "heap/cuda/device_guard.hpp"
#include "heap/offset_allocator.hpp"

namespace switchyard::detail {

struct CudaBlock;

/// An object's part of the heap for outputs, and freed blocks that other streams may still use.
struct CudaPool {
  CudaPool(size_t begin, size_t end) : memory(begin, end) {}
  ~CudaPool();
  /// Takes the blocks of free_later back; `stream` waits for the work so far on the streams that used them. Not while it is
  /// captured.
  void take_back(cudaStream_t stream);
  /// The same, but this thread waits.
  void take_back_now();
  /// Any thread, also in a callback of the driver: calls no CUDA function.
  void free_later(size_t offset, std::vector<cudaStream_t> users) noexcept;
  /// For holder_of.
  void remember(const std::shared_ptr<CudaBlock>& block);
  /// The remembered block that `p` lies in and that somebody holds, or null.
  std::shared_ptr<CudaBlock> holder_of(const std::byte* p);

  OffsetAllocator memory;

 private:
  struct Freed {
    size_t offset;
    std::vector<cudaStream_t> users;
  };
  std::mutex mutex_;
  std::vector<Freed> freed_;
  std::vector<std::weak_ptr<CudaBlock>> remembered_;
  cudaEvent_t event_ = nullptr;
};

struct CudaBlock final : OutputBlock {
  std::shared_ptr<CudaPool> pool;  ///< null: empty block
  size_t bytes = 0;
  std::vector<cudaStream_t> users;
  std::vector<std::weak_ptr<CudaBlock>> companions;  ///< what is delivered with these rows, and used with them
  ~CudaBlock() override;
  void used_by(void* stream) override;
};

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
  cudaStream_t stream = nullptr;  ///< of the dispatch
  bool captured = false;

 private:
  mutable std::mutex mutex_;
  mutable std::unique_ptr<HandleData> host_;
};

/// Copies the tables of `h`, which are in host memory, to `tables` and `received`. Returns when `stream` has done it.
void upload_handle(const HandleData& h, const Tables& tables, const Received& received, cudaStream_t stream);

/// Keeps `object` until the graph is destroyed; `release` frees it and calls no CUDA function.
void retain_in_graph(cudaGraph_t graph, void* object, void (*release)(void*));

class CudaNormal final : public NormalImpl {
 public:
  CudaNormal(Group& group, CudaRank& gpu, const NormalConfig& config);
  ~CudaNormal() override;

  Dispatched dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& options) override;
  Dispatched redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options) override;
  RowBuffer allocate_rows(const Handle& handle, DType type) override;
  void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options, float* out_weights) override;
  CallStatistics last_call() override;

 private:
  /// One collective call from its checks to its last launch. Makes the device current.
  struct Call {
    /// Orders `stream` after this object's last call and after foreign users of freed blocks.
    Call(CudaNormal& object, void* stream, int num_sms, Operation operation);
    bool capturing() const { return graph != nullptr; }
    DeviceGuard guard;
    cudaStream_t stream;
    cudaGraph_t graph = nullptr;  ///< null: not captured
    LaunchShape launch;
    CallContext context;
  };
  struct Outputs {
    std::shared_ptr<CudaBlock> rows, received;
    Received carved;
    Placement place{};
    std::exception_ptr error;
  };

  enum class Content { rows, handle };  ///< what a handle needs survives Group::sleep

  // cuda_normal.cpp
  TablesShape shape_of(int64_t tokens) const;
  void end(const Call& call);
  /// Of a dispatch: no more multiprocessors than are of use.
  void spare_sms(Call& call, bool quantize) const;
  bool reserve(CudaBlock& block, size_t bytes, Content content) const;
  /// Throws Error(pool_exhausted). A block of a captured call belongs to its graph.
  std::shared_ptr<CudaBlock> allocate(size_t bytes, const Call* call, Content content);
  /// `owner` (a block, a handle) lives as long as the graph.
  template <class Owner>
  static void give_to_graph(const Owner& owner, cudaGraph_t graph);
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
  /// SizePolicy::exact: waits for the plan.
  void read_counts(const Call& call, HandleData& h);
  void choose_sizes(HandleData& h, const DispatchOptions& options) const;
  /// Takes blocks for rows and, if `fresh`, for what comes with them; says where, or why not.
  Outputs offer_blocks(const Call& call, const RowFormat& format, const HandleData& h, bool fresh, uint64_t sig);
  Dispatched deliver(const std::shared_ptr<const HandleData>& h, const Outputs& outputs, const RowFormat& format) const;
  static const CudaHandle& tables_of(const HandleData& h);
  /// The handle's data with tables on this GPU; uploads those of a handle from the host (serialized, or of a CPU group).
  std::shared_ptr<const HandleData> device_data(const Handle& handle, const Call& call);

  CudaRank& gpu_;
  TuningValues tuned_;
  uint64_t heap_offset_ = 0;
  ControlLayout control_;
  std::byte* pool_base_ = nullptr;  ///< what the pool's offsets count from: this rank's segment, or private_pool_
  std::shared_ptr<CudaPool> pool_;
  std::shared_ptr<CudaBlock> spare_tables_;  ///< for a call that ends in pool_exhausted on all ranks
  DeviceMemory state_;                       ///< ObjectState, the plan's scratch, the states of ring streams
  size_t streams_at_ = 0;                    ///< of these, in state_
  DeviceMemory private_pool_;                ///< ring staging
  std::optional<CallOrder> order_;
};

template <class Owner>
void CudaNormal::give_to_graph(const Owner& owner, cudaGraph_t graph) {
  retain_in_graph(graph, new Owner(owner), [](void* p) { delete static_cast<Owner*>(p); });
}

}  // namespace switchyard::detail
