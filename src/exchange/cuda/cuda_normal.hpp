// SPDX-License-Identifier: Apache-2.0
// Normal mode on a GPU: checks, memory, order of streams, launches. The algorithms are in protocol/ and plan.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "exchange/cuda/cuda_rank.hpp"
#include "exchange/cuda/launch.hpp"
#include "exchange/normal_impl.hpp"
#include "heap/cuda/device_guard.hpp"
#include "heap/offset_allocator.hpp"

namespace switchyard::detail {

/// An object's part of the heap for outputs, and events of streams that must end before blocks are used again.
struct CudaPool {
  CudaPool(size_t begin, size_t end, int gpu) : memory(begin, end), device(gpu) {}
  ~CudaPool();
  /// Makes `stream` wait for all events so far.
  void order_after_users(cudaStream_t stream);
  void add_user_event(cudaStream_t stream) noexcept;

  OffsetAllocator memory;
  const int device;

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> pending_, free_;
};

struct CudaBlock final : OutputBlock {
  std::shared_ptr<CudaPool> pool;  ///< null: empty block
  std::vector<cudaStream_t> users;
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
  CudaRank* gpu = nullptr;
  Group::Impl* group = nullptr;
  cudaStream_t stream = nullptr;  ///< of the dispatch
  bool captured = false;

 private:
  mutable std::mutex mutex_;
  mutable std::unique_ptr<HandleData> host_;
};

/// Copies the tables of `h`, which are in host memory, to `tables` and `received`. Returns when `stream` has done it.
void upload_handle(const HandleData& h, const Tables& tables, const Received& received, cudaStream_t stream);

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
    int blocks = 0;
    CallContext context;
  };
  struct Outputs {
    std::shared_ptr<CudaBlock> rows, received;
    Received carved;
    Placement place{};
    std::exception_ptr error;
  };

  // cuda_normal.cpp
  TablesShape shape_of(int64_t tokens) const;
  void end(const Call& call, int warps);
  bool reserve(CudaBlock& block, size_t bytes) const;
  /// Throws Error(pool_exhausted). A block of a captured call belongs to its graph.
  std::shared_ptr<CudaBlock> allocate(size_t bytes, const Call* call);
  static void give_to_graph(const std::shared_ptr<CudaBlock>& block, cudaGraph_t graph);
  void check_pointer(const char* name, const void* p, size_t alignment) const;
  void check_sms(const char* name, int num_sms) const;
  ObjectState* state() const { return state_.as<ObjectState>(); }

  // cuda_dispatch.cpp
  std::shared_ptr<HandleData> new_handle(int64_t tokens, const Call& call, std::exception_ptr& error);
  PlanParams plan_params(const Call& call, const CudaHandle& handle, const ExpertIds& ids, const float* weights,
                         const DispatchOptions& options, uint64_t sig) const;
  CudaDispatchParams move_params(const Call& call, const HandleData& h, const ConstRows& x, const RowFormat& format,
                                 const DispatchOptions& options, const Outputs& outputs, uint64_t sig, bool fresh) const;
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
  uint64_t heap_offset_ = 0;
  ControlLayout control_;
  std::shared_ptr<CudaPool> pool_;
  std::shared_ptr<CudaBlock> spare_tables_;  ///< for a call that ends in pool_exhausted on all ranks
  DeviceMemory state_;                       ///< ObjectState, then the plan's scratch
  cudaEvent_t done_ = nullptr;               ///< after the last call that was not captured
  cudaStream_t last_stream_ = nullptr;
  bool called_ = false;
  int last_warps_ = 0;
};

}  // namespace switchyard::detail
