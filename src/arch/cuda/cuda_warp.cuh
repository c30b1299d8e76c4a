// SPDX-License-Identifier: Apache-2.0
// A warp of 32 lanes and its share of the shared memory.
//
// The shared memory of a block contains one mbarrier per stage, followed by the stages (rows in flight) and the scratch of each
// warp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/cuda/ptx.cuh"
#include "base/macros.hpp"

namespace switchyard::detail {

inline constexpr int kLanes = 32;
inline constexpr int kMaxStages = 2;

/// Partition of a kernel's dynamic shared memory. Trivially copyable; the launcher and the kernel use the same value.
struct CudaShape {
  int warps = 14;  ///< per block
  int stages = 1;  ///< bulk-copy stages per warp: 0 (copies by lanes only), 1, or 2 (next row loads while one is stored)
  uint32_t stage_bytes = 0;    ///< multiple of 16; longer rows are sent in pieces of this size
  uint32_t scratch_bytes = 0;  ///< multiple of 16; size of CudaWarp::scratch()
  uint32_t block_bytes = 0;    ///< last part: shared state of the kernel's warps

  SWITCHYARD_FN constexpr uint32_t barrier_bytes() const {
    return static_cast<uint32_t>(warps * kMaxStages * 8 + 127) / 128 * 128;
  }
  SWITCHYARD_FN constexpr uint32_t warp_bytes() const { return static_cast<uint32_t>(stages) * stage_bytes + scratch_bytes; }
  SWITCHYARD_FN constexpr uint32_t shared_bytes() const { return block_at() + block_bytes; }
  SWITCHYARD_FN constexpr uint32_t block_at() const { return barrier_bytes() + static_cast<uint32_t>(warps) * warp_bytes(); }
};

/// Returns the shape with the largest stage, at most `row_bytes` rounded up to 16, for which a block of `warps` warps fits in
/// `shared_limit` bytes. The stage size is 0 if none fits.
constexpr CudaShape fit_cuda_shape(int warps, int stages, uint64_t row_bytes, uint32_t scratch_bytes, uint32_t shared_limit) {
  CudaShape shape{warps, stages, 0, (scratch_bytes + 15) / 16 * 16};
  const uint32_t fixed = shape.shared_bytes();
  if (stages == 0 || fixed >= shared_limit) return shape;
  const uint64_t bytes_per_stage = (shared_limit - fixed) / static_cast<uint32_t>(warps * stages) / 128 * 128;
  const uint64_t wanted = (row_bytes + 15) / 16 * 16;
  shape.stage_bytes = static_cast<uint32_t>(wanted < bytes_per_stage ? wanted : bytes_per_stage);
  return shape;
}

/// One warp of a running kernel. Constructed once by all lanes; every member except `pending_dst_` has the same value in all
/// lanes.
class CudaWarp {
 public:
  /// `shared` is the block's dynamic shared memory, aligned to 128 bytes and `shape.shared_bytes()` bytes long.
  __device__ CudaWarp(std::byte* shared, const CudaShape& shape)
      : lane_(static_cast<int>(threadIdx.x) % kLanes),
        warp_(static_cast<int>(threadIdx.x) / kLanes),
        stages_(shape.stages),
        stage_bytes_(shape.stage_bytes) {
    const uint32_t base = ptx::shared_address(shared);
    const uint32_t own = shape.barrier_bytes() + static_cast<uint32_t>(warp_) * shape.warp_bytes();
    bars_ = base + static_cast<uint32_t>(warp_ * kMaxStages * 8);
    stage_ = base + own;
    scratch_ = shared + own + static_cast<uint32_t>(stages_) * stage_bytes_;
    if (stages_ > 0 && lane_ == 0) {
      for (int s = 0; s < kMaxStages; ++s) ptx::mbarrier_init(bars_ + static_cast<uint32_t>(s) * 8, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }
  /// Tag for a warp that has only a position and cannot move rows in bulk. It is used by code that is called out of line
  /// (Cuda::out_of_line).
  struct Bare {};
  __device__ explicit CudaWarp(Bare)
      : lane_(static_cast<int>(threadIdx.x) % kLanes),
        warp_(static_cast<int>(threadIdx.x) / kLanes),
        stages_(0),
        stage_bytes_(0) {}
  CudaWarp(const CudaWarp&) = delete;
  CudaWarp& operator=(const CudaWarp&) = delete;

  // May be used in code that is also compiled for the host, where it is never called.
  SWITCHYARD_FN int block() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(blockIdx.x);
#else
    return 0;
#endif
  }
  SWITCHYARD_FN int num_blocks() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(gridDim.x);
#else
    return 1;
#endif
  }
  SWITCHYARD_FN int warps_per_block() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(blockDim.x) / kLanes;
#else
    return 1;
#endif
  }
  SWITCHYARD_FN int warp() const { return warp_; }
  SWITCHYARD_FN int index() const { return block() * warps_per_block() + warp(); }
  SWITCHYARD_FN int total() const { return num_blocks() * warps_per_block(); }
  SWITCHYARD_FN std::byte* scratch() const { return scratch_; }

 private:
  template <bool kBulk, bool kInlineAll>
  friend struct CudaArch;
  template <bool kBulk>
  friend struct CudaMover;

  int lane_;
  int warp_;
  int stages_;
  uint32_t stage_bytes_;
  uint32_t bars_ = 0;   // shared address of this warp's barriers
  uint32_t stage_ = 0;  // shared address of this warp's first stage
  std::byte* scratch_ = nullptr;

  // The latest bulk copy, whose load has been issued but not its stores. The next op that moves or settles issues them.
  void* pending_dst_ = nullptr;  // in the lanes of `pending_lanes_`: a destination
  unsigned pending_lanes_ = 0;   // lanes with a destination; 0: none pending
  uint32_t pending_bytes_ = 0;
  int pending_stage_ = 0;
  uint32_t parity_ = 0;  // bit s: parity of the next completion of stage s

  bool lane_writes_ = false;  // ordinary stores since the last settle
};

}  // namespace switchyard::detail
