// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "arch/cuda/ptx.cuh"
#include "measure/gpu/gpu_rank.hpp"
#include "exchange/group/impl.hpp"

namespace switchyard::measure {

namespace {

using detail::HeapView;
using detail::Scope;
using detail::SymPtr;
namespace ptx = detail::ptx;

constexpr int kMaxWarps = 14;
constexpr int kComputeThreads = 256;
constexpr size_t kFlushBytes = size_t{256} << 20;
constexpr uint64_t kDeadlineNs = 5'000'000'000;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct DeviceMoves {
  const int32_t* begin;
  const int32_t* rank;
  const int32_t* row;
};

/// One warp. If a rank is missing, the kernel ends after the deadline; its figures are then meaningless, and the next call to
/// the library reports the missing rank. `meetings` is the number of past meetings, kept in device memory because graphs are
/// replayed.
__global__ void meet_kernel(const __grid_constant__ HeapView heap, uint64_t at, uint64_t* meetings) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint64_t value = *meetings + 1;
  __syncwarp();
  if (lane == 0) *meetings = value;
  for (int r = lane; r < heap.world; r += 32)
    ptx::store_release<Scope::system>(heap.at(r, SymPtr<uint64_t>{at + static_cast<uint64_t>(heap.rank) * 64}), value);
  const uint64_t deadline = ptx::global_timer() + kDeadlineNs;
  for (int r = lane; r < heap.world; r += 32) {
    const uint64_t* mine = heap.local(SymPtr<uint64_t>{at + static_cast<uint64_t>(r) * 64});
    while (ptx::load_acquire<Scope::system>(mine) < value && ptx::global_timer() < deadline) {
    }
  }
}

/// One lane of each warp moves whole rows through shared memory.
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    push_kernel(const __grid_constant__ HeapView heap, DeviceMoves moves, const std::byte* src, uint64_t floor_at,
                int64_t tokens, uint32_t row_bytes, int stages) {
  extern __shared__ __align__(128) std::byte rows[];
  __shared__ uint64_t barriers[kMaxWarps][2];
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 != 0) return;
  const uint32_t bar = ptx::shared_address(&barriers[warp][0]);
  const uint32_t stage = ptx::shared_address(rows) + static_cast<uint32_t>(warp * stages) * row_bytes;
  for (int s = 0; s < stages; ++s) ptx::mbarrier_init(bar + static_cast<uint32_t>(s) * 8, 1);
  ptx::fence_mbarrier_init();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warps + warp, step = static_cast<int64_t>(gridDim.x) * warps;
  const auto load = [&](int64_t i) {
    const auto s = static_cast<uint32_t>(i % stages);
    ptx::mbarrier_expect(bar + s * 8, row_bytes);
    ptx::bulk_load(stage + s * row_bytes, src + (first + i * step) * row_bytes, row_bytes, bar + s * 8);
  };
  const int64_t count = first < tokens ? (tokens - first + step - 1) / step : 0;
  if (count > 0) load(0);
  for (int64_t i = 0; i < count; ++i) {
    const auto s = static_cast<uint32_t>(i % stages);
    const int64_t t = first + i * step;
    if (stages == 2 && i + 1 < count) {
      ptx::bulk_wait_read();
      load(i + 1);
    }
    const int32_t begin = moves.begin[t], end = moves.begin[t + 1];
    while (!ptx::mbarrier_try_wait(bar + s * 8, static_cast<uint32_t>(i / stages) & 1u)) {
    }
    for (int32_t m = begin; m < end; ++m)
      ptx::bulk_store(heap.base[moves.rank[m]] + floor_at + static_cast<int64_t>(moves.row[m]) * row_bytes,
                      stage + s * row_bytes, row_bytes);
    ptx::bulk_commit();
    if (stages == 1 && i + 1 < count) {
      ptx::bulk_wait_read();
      load(i + 1);
    }
  }
  ptx::bulk_wait();
}

__global__ void idle_kernel(uint64_t ns) {
  const uint64_t end = ptx::global_timer() + ns;
  while (ptx::global_timer() < end) {
  }
}

/// Executes `rounds` dependent multiplications and additions in each thread.
__global__ void compute_kernel(int64_t rounds, float* sink) {
  float a = static_cast<float>(threadIdx.x), b = 1;
  for (int64_t i = 0; i < rounds; ++i) {
    a = a * 0.5f + b;
    b = b * 0.5f + a * 0.25f;
  }
  if (a == -1.0f) *sink = b;  // prevents the compiler from removing the loop
}

/// Each warp sums the rows of one token; each lane has kUnroll vectors of each row in flight.
template <int kUnroll, int kMax, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    pull_kernel(const __grid_constant__ HeapView heap, DeviceMoves moves, std::byte* out, uint64_t floor_at, int64_t tokens,
                uint32_t row_bytes) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  const int64_t vectors = row_bytes / 16;
  for (int64_t t = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; t < tokens; t += warps) {
    const uint4* from[kMax];
    const int32_t begin = moves.begin[t], n = moves.begin[t + 1] - begin;
#pragma unroll
    for (int d = 0; d < kMax; ++d) {
      const int32_t m = begin + (d < n ? d : 0);
      from[d] = n == 0 ? nullptr
                       : reinterpret_cast<const uint4*>(heap.base[moves.rank[m]] + floor_at +
                                                        static_cast<int64_t>(moves.row[m]) * row_bytes);
    }
    for (int64_t j = lane; j < vectors; j += 32 * kUnroll) {
      uint4 v[kUnroll][kMax];
#pragma unroll
      for (int d = 0; d < kMax; ++d)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (d < n && j + u * 32 < vectors) v[u][d] = __ldcs(from[d] + j + u * 32);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (j + u * 32 >= vectors) continue;
        float sum[8] = {};
#pragma unroll
        for (int d = 0; d < kMax; ++d) {
          if (d >= n) continue;
          const uint32_t words[4] = {v[u][d].x, v[u][d].y, v[u][d].z, v[u][d].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[2 * i] += __uint_as_float(words[i] << 16);
            sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
          }
        }
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
          packed[i] = static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y))
                                                                                << 16;
        }
        reinterpret_cast<uint4*>(out + t * row_bytes)[j + u * 32] = uint4{packed[0], packed[1], packed[2], packed[3]};
      }
    }
  }
}

/// Calls f.operator()<unroll, max rows per token, threads>() for the kernel that supports `max` rows per token.
template <class F>
void pull_shaped(int max, int shape, F&& f) {
  if (max > 16) return f.template operator()<1, 32, 256>();
  if (max > 8) return f.template operator()<1, 16, 512>();
  if (max > 4) return shape == 0 ? f.template operator()<1, 8, 768>() : f.template operator()<2, 8, 512>();
  if (shape == 0) return f.template operator()<1, 4, 1024>();
  if (shape == 1) return f.template operator()<2, 4, 768>();
  f.template operator()<4, 4, 512>();
}

}  // namespace

struct GpuRank::Impl {
  Group* group;
  int device = 0;
  HeapView heap;
  uint64_t control_at = 0, floor_at = 0;
  cudaStream_t stream = nullptr;
  std::vector<void*> owned;
  std::byte* flush = nullptr;
  std::byte* rows = nullptr;  ///< source of push, result of pull
  size_t rows_bytes = 0;
  uint64_t* meetings = nullptr;  ///< in device memory
  int multiprocessors = 1;       ///< of this rank
  double rounds_per_us = 1;      ///< rounds of compute_kernel
  cudaGraphExec_t graph = nullptr;
  int flushes = 0;
  std::vector<cudaEvent_t> events;
  size_t used = 0;
  DeviceMoves moves{}, pulled{};
  int max_pulled = 0;  ///< rows of a token
  DeviceMoves upload(GpuRank& rank, const RowMoves& given) const;
};

GpuRank::GpuRank(Group& group, size_t floor_bytes) : impl_(std::make_unique<Impl>()) {
  Impl& i = *impl_;
  i.group = &group;
  i.heap = group.impl().heap->view();
  cudaPointerAttributes a{};
  check(cudaPointerGetAttributes(&a, i.heap.base[i.heap.rank]), "cudaPointerGetAttributes");
  i.device = a.device;
  check(cudaSetDevice(i.device), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&i.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  i.control_at = group.impl().heap->allocate(size_t{64} << 10, 4096);
  i.floor_at = group.impl().heap->allocate(floor_bytes > 0 ? floor_bytes : 1, 4096);
  i.flush = static_cast<std::byte*>(allocate(kFlushBytes));
  i.meetings = static_cast<uint64_t*>(allocate(sizeof(uint64_t)));
  for (int e = 0; e < 2 * kMaxSections; ++e) {
    i.events.emplace_back();
    check(cudaEventCreate(&i.events.back()), "cudaEventCreate");
  }
  check(cudaFuncSetAttribute(push_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 226 * 1024), "push kernel");
  push_kernel<<<1, 32, 0, i.stream>>>(i.heap, {}, nullptr, 0, 0, 16, 1);  // loads the kernels before any rank waits
  for (const int max : {4, 8, 16, 32})
    for (int shape = 0; shape < kFloorShapes; ++shape)
      pull_shaped(max, shape, [&]<int kUnroll, int kMax, int kThreads>() {
        pull_kernel<kUnroll, kMax, kThreads><<<1, 32, 0, i.stream>>>(i.heap, {}, nullptr, 0, 0, 16);
      });
  check(cudaStreamSynchronize(i.stream), "first launch");
  calibrate();
  group.barrier();
  meet();
  check(cudaStreamSynchronize(i.stream), "first meeting");
}

GpuRank::~GpuRank() {
  Impl& i = *impl_;
  cudaSetDevice(i.device);
  cudaStreamSynchronize(i.stream);
  if (i.graph) cudaGraphExecDestroy(i.graph);
  for (cudaEvent_t event : i.events) cudaEventDestroy(event);
  for (void* p : i.owned) cudaFree(p);
  cudaStreamDestroy(i.stream);
  i.group->impl().heap->release(i.floor_at);
  i.group->impl().heap->release(i.control_at);
}

void GpuRank::calibrate() {
  Impl& i = *impl_;
  int devices = 1, world = i.group->size();
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  check(cudaDeviceGetAttribute(&i.multiprocessors, cudaDevAttrMultiProcessorCount, i.device), "device attribute");
  i.multiprocessors = std::max(1, i.multiprocessors / ((world + devices - 1) / devices));
  constexpr int64_t kRounds = 1 << 17;
  for (int turn = 0; turn < 2; ++turn) {  // the first turn loads the kernel
    begin();
    compute_kernel<<<i.multiprocessors, kComputeThreads, 0, i.stream>>>(kRounds, reinterpret_cast<float*>(i.flush));
    check(cudaGetLastError(), "arithmetic");
    end();
    i.rounds_per_us = static_cast<double>(kRounds) / (seconds().front() * 1e6);
  }
}

void GpuRank::compute(double microseconds) {
  Impl& i = *impl_;
  const auto rounds = static_cast<int64_t>(microseconds * i.rounds_per_us);
  compute_kernel<<<i.multiprocessors, kComputeThreads, 0, i.stream>>>(rounds, reinterpret_cast<float*>(i.flush));
  check(cudaGetLastError(), "arithmetic");
}

void GpuRank::idle(double microseconds) {
  idle_kernel<<<1, 1, 0, impl_->stream>>>(static_cast<uint64_t>(microseconds * 1e3));
  check(cudaGetLastError(), "idle");
}

void* GpuRank::stream() const { return impl_->stream; }

void* GpuRank::allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes > 0 ? bytes : 1), "cudaMalloc");
  impl_->owned.push_back(p);
  check(cudaMemsetAsync(p, 0, bytes, impl_->stream), "cudaMemset");
  check(cudaStreamSynchronize(impl_->stream), "cudaMemset");
  return p;
}

void GpuRank::write(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, impl_->stream), "copy to the GPU");
  check(cudaStreamSynchronize(impl_->stream), "copy to the GPU");
}
void GpuRank::read(void* host, const void* device, size_t bytes) const {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, impl_->stream), "copy from the GPU");
  check(cudaStreamSynchronize(impl_->stream), "copy from the GPU");
}

void GpuRank::align() {
  check(cudaMemsetAsync(impl_->flush, impl_->flushes++, kFlushBytes, impl_->stream), "flush");
  meet();
}
void GpuRank::meet() {
  if (impl_->group->hosts() > 1) {  // stores do not reach GPUs of other hosts
    wait();
    impl_->group->barrier();
    return;
  }
  meet_kernel<<<1, 32, 0, impl_->stream>>>(impl_->heap, impl_->control_at, impl_->meetings);
  check(cudaGetLastError(), "meeting");
}
void GpuRank::begin() { check(cudaEventRecord(impl_->events.at(impl_->used), impl_->stream), "cudaEventRecord"); }
void GpuRank::end() {
  check(cudaEventRecord(impl_->events.at(impl_->used + 1), impl_->stream), "cudaEventRecord");
  impl_->used += 2;
}
std::vector<double> GpuRank::seconds() {
  check(cudaStreamSynchronize(impl_->stream), "wait for the measured calls");
  std::vector<double> out;
  for (size_t e = 0; e < impl_->used; e += 2) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, impl_->events[e], impl_->events[e + 1]), "cudaEventElapsedTime");
    out.push_back(ms * 1e-3);
  }
  impl_->used = 0;
  return out;
}

void GpuRank::wait() const { check(cudaStreamSynchronize(impl_->stream), "wait for the GPU"); }

namespace {

/// The node most recently captured on the stream; there must be exactly one.
cudaGraphNode_t captured_last(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  const cudaGraphNode_t* last = nullptr;
  size_t count = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &last, nullptr, &count), "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive || count != 1) throw std::runtime_error("capture: not one node at the end");
  return last[0];
}

struct Dependents {
  std::vector<cudaGraphNode_t> nodes;
  std::vector<cudaGraphEdgeData> edges;
};
Dependents dependents_of(cudaGraphNode_t node) {
  size_t count = 0;
  check(cudaGraphNodeGetDependentNodes(node, nullptr, nullptr, &count), "cudaGraphNodeGetDependentNodes");
  Dependents d{std::vector<cudaGraphNode_t>(count), std::vector<cudaGraphEdgeData>(count)};
  if (count > 0)
    check(cudaGraphNodeGetDependentNodes(node, d.nodes.data(), d.edges.data(), &count), "cudaGraphNodeGetDependentNodes");
  return d;
}

cudaGraphNode_t kernel_behind(cudaGraphNode_t node) {
  const Dependents next = dependents_of(node);
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  if (next.nodes.size() == 1) check(cudaGraphNodeGetType(next.nodes[0], &type), "cudaGraphNodeGetType");
  if (type != cudaGraphNodeTypeKernel) throw std::runtime_error("capture: the call does not begin with one kernel");
  return next.nodes[0];
}

/// Inserts a record of `event` between `node` and all its dependents. The dependents then wait for `node` to finish.
void record_behind(cudaGraph_t graph, cudaGraphNode_t node, cudaEvent_t event) {
  const Dependents next = dependents_of(node);
  const size_t count = next.nodes.size();
  std::vector<cudaGraphNode_t> from(count, node);
  if (count > 0)
    check(cudaGraphRemoveDependencies(graph, from.data(), next.nodes.data(), next.edges.data(), count),
          "cudaGraphRemoveDependencies");
  cudaGraphNode_t record = nullptr;
  check(cudaGraphAddEventRecordNode(&record, graph, &node, 1, event), "cudaGraphAddEventRecordNode");
  from.assign(count, record);
  if (count > 0)
    check(cudaGraphAddDependencies(graph, from.data(), next.nodes.data(), nullptr, count), "cudaGraphAddDependencies");
}

}  // namespace

void GpuRank::capture(const std::function<void()>& enqueue) {
  Impl& i = *impl_;
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(i.stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  align();
  check(cudaEventRecordWithFlags(i.events.at(0), i.stream, cudaEventRecordExternal), "cudaEventRecord");
  enqueue();
  check(cudaEventRecordWithFlags(i.events.at(1), i.stream, cudaEventRecordExternal), "cudaEventRecord");
  check(cudaStreamEndCapture(i.stream, &graph), "end capture");
  instantiate(graph);
}

void GpuRank::capture_first_kernel(const std::function<void()>& enqueue) {
  Impl& i = *impl_;
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(i.stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  align();
  check(cudaEventRecordWithFlags(i.events.at(0), i.stream, cudaEventRecordExternal), "cudaEventRecord");
  const cudaGraphNode_t begin = captured_last(i.stream);
  enqueue();
  check(cudaStreamEndCapture(i.stream, &graph), "end capture");
  record_behind(graph, kernel_behind(begin), i.events.at(1));
  instantiate(graph);
}

void GpuRank::drop_graph() {
  if (impl_->graph) check(cudaGraphExecDestroy(impl_->graph), "cudaGraphExecDestroy");
  impl_->graph = nullptr;
}

void GpuRank::instantiate(cudaGraph_t graph) {
  Impl& i = *impl_;
  drop_graph();
  check(cudaGraphInstantiate(&i.graph, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaGraphUpload(i.graph, i.stream), "cudaGraphUpload");
  wait();
}

std::vector<double> GpuRank::replay(int n) {
  Impl& i = *impl_;
  std::vector<double> out;
  for (int r = 0; r < n; ++r) {
    check(cudaGraphLaunch(i.graph, i.stream), "cudaGraphLaunch");
    wait();
    float ms = 0;
    check(cudaEventElapsedTime(&ms, i.events.at(0), i.events.at(1)), "cudaEventElapsedTime");
    out.push_back(ms * 1e-3);
  }
  return out;
}

namespace {

int max_rows_per_token(const RowMoves& moves) {
  int max = 0;
  for (size_t t = 0; t + 1 < moves.begin.size(); ++t) max = std::max(max, moves.begin[t + 1] - moves.begin[t]);
  if (max > 32) throw std::runtime_error("a token has " + std::to_string(max) + " rows; the limits take 32");
  return max;
}

}  // namespace

DeviceMoves GpuRank::Impl::upload(GpuRank& rank, const RowMoves& given) const {
  RowMoves moves = given;  // ranks in cyclic order, this one last, like the library (docs/design/0020)
  for (size_t t = 0; t + 1 < moves.begin.size(); ++t) {
    const auto begin = moves.begin[t], end = moves.begin[t + 1];
    auto next = begin;
    while (next < end && moves.rank[static_cast<size_t>(next)] <= heap.rank) ++next;
    for (auto* list : {&moves.rank, &moves.row}) std::rotate(list->begin() + begin, list->begin() + next, list->begin() + end);
  }
  const auto copy = [&](const std::vector<int32_t>& v) {
    auto* p = static_cast<int32_t*>(rank.allocate(v.size() * 4));
    rank.write(p, v.data(), v.size() * 4);
    return p;
  };
  return {copy(moves.begin), copy(moves.rank), copy(moves.row)};
}

void GpuRank::set_moves(const RowMoves& given) {
  impl_->moves = impl_->pulled = impl_->upload(*this, given);
  impl_->max_pulled = max_rows_per_token(given);
}
void GpuRank::set_pulled(const RowMoves& given) {
  impl_->pulled = impl_->upload(*this, given);
  impl_->max_pulled = max_rows_per_token(given);
}

namespace {

struct PushShape {
  int warps, stages;
};
constexpr PushShape kPushShapes[kFloorShapes] = {{14, 1}, {7, 2}, {12, 1}};

}  // namespace

void GpuRank::push(int64_t tokens, size_t row_bytes, int sms, int shape) {
  Impl& i = *impl_;
  if (i.rows_bytes < static_cast<size_t>(tokens) * row_bytes) {
    i.rows_bytes = static_cast<size_t>(tokens) * row_bytes;
    i.rows = static_cast<std::byte*>(allocate(i.rows_bytes));
  }
  PushShape s = kPushShapes[shape];
  while (static_cast<size_t>(s.warps * s.stages) * row_bytes > 226 * 1024 - 512 && s.warps > 1) --s.warps;
  const size_t shared = static_cast<size_t>(s.warps * s.stages) * row_bytes;
  push_kernel<<<sms, s.warps * 32, shared, i.stream>>>(i.heap, i.moves, i.rows, i.floor_at, tokens,
                                                       static_cast<uint32_t>(row_bytes), s.stages);
  check(cudaGetLastError(), "push limit");
}

void GpuRank::pull(int64_t tokens, size_t row_bytes, int sms, int shape) {
  Impl& i = *impl_;
  if (i.rows_bytes < static_cast<size_t>(tokens) * row_bytes) {
    i.rows_bytes = static_cast<size_t>(tokens) * row_bytes;
    i.rows = static_cast<std::byte*>(allocate(i.rows_bytes));
  }
  const auto launch = [&]<int kUnroll, int kMax, int kThreads>() {
    pull_kernel<kUnroll, kMax, kThreads>
        <<<sms, kThreads, 0, i.stream>>>(i.heap, i.pulled, i.rows, i.floor_at, tokens, static_cast<uint32_t>(row_bytes));
  };
  pull_shaped(i.max_pulled, shape, launch);
  check(cudaGetLastError(), "pull limit");
}

}  // namespace switchyard::measure
