// SPDX-License-Identifier: Apache-2.0
// Ranks on the GPUs of one process: segments, streams, plans on the device, launches, checks. Used by the bench and by the GPU
// tests. Nothing is allocated or loaded while a kernel that waits for a peer may be running.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/cuda/params.cuh"
#include "bench/cuda/routing.hpp"
#include "plan/plan.hpp"

#define SWITCHYARD_CUDA_CHECK(call)                                                                    \
  do {                                                                                                 \
    const cudaError_t status_ = (call);                                                                \
    if (status_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(2);                                                                                    \
    }                                                                                                  \
  } while (0)

namespace switchyard::cuda_bench {

inline constexpr uint64_t kTimeoutNs = 2'000'000'000;
inline constexpr int kPoison = 0xCD;
inline constexpr int64_t kGuardBytes = 4096;

/// Device memory of the current device.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) { reserve(count); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  void reserve(size_t count) {
    if (count <= count_) return;
    SWITCHYARD_CUDA_CHECK(cudaFree(data_));
    data_ = nullptr;
    SWITCHYARD_CUDA_CHECK(cudaMalloc(&data_, count * sizeof(T)));
    count_ = count;
  }
  void assign(const std::vector<T>& from) {
    reserve(from.empty() ? 1 : from.size());
    if (!from.empty()) SWITCHYARD_CUDA_CHECK(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* get() const { return data_; }
  size_t count() const { return count_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

/// Blocks, warps and stages of one launch.
struct LaunchShape {
  int blocks = 16;
  int warps = 14;
  int stages = 1;
};

/// One exchange: the same for all ranks.
struct Problem {
  Routing routing;
  Layout layout = Layout::rank_major;
  int alignment = 1;
  int64_t row_bytes = 0;
  bool with_records = true;
};

/// Number of visible GPUs, 0 without a usable driver. Call before any other CUDA call: sets what the driver reads from the
/// environment.
int find_gpus();

class Cluster {
 public:
  /// `ranks_per_gpu` ranks on every visible GPU. `heap_bytes` per rank.
  Cluster(int ranks_per_gpu, size_t heap_bytes);
  ~Cluster();
  int world() const { return static_cast<int>(ranks_.size()); }
  int gpus() const { return gpus_; }
  int device(int rank) const { return ranks_[static_cast<size_t>(rank)]->device; }
  cudaStream_t stream(int rank) const { return ranks_[static_cast<size_t>(rank)]->stream; }
  int multiprocessors() const { return multiprocessors_; }

  /// Plans `problem` with src/plan, uploads it, fills the sources. No call may be in flight. `placements_known`: dispatch need
  /// not be told where rows go; otherwise every call must publish it.
  void prepare(const Problem& problem, bool placements_known);
  /// Before the first call at this shape: launches on all ranks have the same number of warps from here on.
  void use(const LaunchShape& shape);
  /// Deadline of the waits of later calls; prepare() sets kTimeoutNs.
  void set_timeout(uint64_t ns);
  /// Poisons the blocks and guards of all ranks.
  void poison();

  // Enqueue on the stream of `rank`; any thread, one per rank. `call` counts all calls from 1, the same on all ranks.
  void enqueue_barrier(int rank, uint64_t value);
  void enqueue_dispatch(int rank, uint64_t call, bool publish_placement);
  /// Floors: the same rows to the same places (`all_to_all` false), or every row to every rank.
  void enqueue_push(int rank, bool all_to_all);

  /// Runs f(rank) on a thread per rank, with the device set, then waits for all streams.
  void on_all(const std::function<void(int)>& f);
  uint64_t next_call() { return ++calls_; }
  uint64_t next_barrier() { return ++barriers_; }

  /// Text of the first difference from the oracle; empty if all is as expected. `records`: also compare token, route and
  /// weight.
  std::string verify(bool records);
  std::string verify_all_to_all();
  /// Text of the first fault recorded by any rank; empty if none.
  std::string fault();
  /// Warps of `rank` that found a fault.
  uint64_t fault_claims(int rank);

  const Expected& expected(int rank) const { return ranks_[static_cast<size_t>(rank)]->expected; }
  /// Destinations per token, averaged over all tokens of all ranks.
  double mean_ranks() const { return mean_ranks_; }
  /// Largest number of bytes that a rank writes to other ranks.
  double max_remote_bytes() const { return max_remote_bytes_; }

 private:
  void warm_up(int r);
  struct Rank {
    int device = 0;
    cudaStream_t stream = nullptr;
    std::byte* heap = nullptr;
    DispatchParams params;
    FloorParams floor{};
    BarrierParams barrier{};
    detail::OutputLayout output;
    detail::HandleData handle;
    Expected expected;
    std::unique_ptr<DeviceArray<std::byte>> x;
    DeviceArray<int64_t> send_begin, record_begin, padding, expected_rows;
    DeviceArray<detail::SendEntry> sends;
    DeviceArray<int32_t> ids, route_row;
    DeviceArray<float> weights;
    DeviceArray<std::byte*> push_to;
    DeviceArray<detail::WaitCounter> waits;
    DeviceArray<detail::MoveCounter> moved;
    DeviceArray<detail::FaultRecord> fault;
    DeviceArray<uint64_t> sends_done;
    DeviceArray<Mismatches> mismatches;
  };

  void set_device(int rank) const { SWITCHYARD_CUDA_CHECK(cudaSetDevice(device(rank))); }
  void plan(const Problem& problem);
  void upload(int r);
  void write_placements(bool known);
  std::string compare_rows(int r, const std::vector<int64_t>& want);
  std::string compare_records(int r);
  std::string check_guard(int r);
  std::byte* block(int r) const { return ranks_[static_cast<size_t>(r)]->heap + block_at_; }

  int gpus_ = 0;
  int multiprocessors_ = 0;
  size_t heap_bytes_;
  uint64_t block_at_ = 0;
  Problem problem_;
  LaunchShape shape_;
  CudaShape cuda_shape_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  uint64_t calls_ = 0, barriers_ = 0;
  double mean_ranks_ = 0, max_remote_bytes_ = 0;
};

}  // namespace switchyard::cuda_bench
