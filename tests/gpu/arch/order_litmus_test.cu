// SPDX-License-Identifier: Apache-2.0
// Message passing between two blocks of one GPU, and of two GPUs if available, with the memory orders used by the library's
// kernels. ThreadSanitizer cannot check these, because the copy engine's accesses go through a different proxy than loads and
// stores.
//
// A writer fills a payload and sets a flag to the round number. A reader waits for the flag, checks every word of the payload,
// poisons the payload and returns it to the writer. Either side uses the copy engine (bulk copies) or its threads (ordinary
// loads and stores). With the memory order, no word may be wrong. Each case also runs without the order; the number of failures
// is then only printed, because hardware may order more than it guarantees.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "arch/cuda/ptx.cuh"

namespace {

namespace ptx = switchyard::detail::ptx;
using switchyard::detail::Scope;

enum class By { copies, threads };

constexpr int kPairs = 32, kRounds = 10000;
constexpr int kVectors = 512, kPiece = kVectors / 32;  // 16-byte vectors: of a payload, and of the part copied by a lane
constexpr uint32_t kBytes = kVectors * 16, kPieceBytes = kPiece * 16;
constexpr int kFlagStride = 32;  // words
constexpr uint64_t kLimitNs = 5'000'000'000;
constexpr uint32_t kPoison = 0xdeadbeef;

/// Memory of all pairs. A pair consists of corresponding blocks of the writer's and the reader's kernels.
struct Litmus {
  uint64_t* announced;  ///< [kPairs * kFlagStride], at the reader: the round of the payload
  uint64_t* taken;      ///< [kPairs * kFlagStride], at the writer: the last round that the reader has completed
  uint4* payload;       ///< [kPairs, kVectors]
  uint64_t* wrong;      ///< [kPairs], at the reader: rounds with a wrong word
  uint64_t* done;       ///< [kPairs], at the reader: completed rounds
};

__device__ int lane() { return static_cast<int>(threadIdx.x); }
__device__ uint4 word_of(uint64_t round, int vector) {
  const uint32_t v = static_cast<uint32_t>(round) * 0x9e3779b9U + static_cast<uint32_t>(blockIdx.x) * 0x85ebca6bU +
                     static_cast<uint32_t>(vector) * 4;
  return {v, v + 1, v + 2, v + 3};
}
__device__ bool equal(const uint4& a, const uint4& b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }

/// All lanes: wait until `flag`, read by lane 0, equals `round`. Returns false if the deadline passes.
template <Scope S, bool kAcquires>
__device__ bool await(const uint64_t* flag, uint64_t round) {
  bool there = true;
  if (lane() == 0) {
    const uint64_t begin = ptx::global_timer();
    while ((kAcquires ? ptx::load_acquire<S>(flag) : ptx::load_relaxed<S>(flag)) < round) {
      if (ptx::global_timer() - begin < kLimitNs) continue;
      there = false;
      break;
    }
  }
  there = __shfl_sync(~0u, there, 0);
  __syncwarp();
  return there;
}

/// With bulk copies from shared memory, each lane copies one piece and waits for its own copy before lane 0 releases the flag.
template <By kBy, Scope S, bool kOrdered>
__global__ void __launch_bounds__(32) write_payloads(const __grid_constant__ Litmus l) {
  __shared__ alignas(128) uint4 shared[kVectors];
  uint64_t* const announced = l.announced + blockIdx.x * kFlagStride;
  uint4* const payload = l.payload + blockIdx.x * kVectors;
  uint4* const to = kBy == By::copies ? shared : payload;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    if (!await<S, true>(l.taken + blockIdx.x * kFlagStride, round - 1)) return;
    for (int v = lane(); v < kVectors; v += 32) to[v] = word_of(round, v);
    if constexpr (kBy == By::copies) {
      ptx::fence_proxy_async_shared();
      __syncwarp();
      ptx::bulk_store(payload + lane() * kPiece, ptx::shared_address(shared + lane() * kPiece), kPieceBytes);
      ptx::bulk_commit();
      if constexpr (kOrdered) ptx::bulk_wait();
    }
    __syncwarp();
    if (lane() == 0) {
      if constexpr (kOrdered)
        ptx::store_release<S>(announced, round);
      else
        ptx::store_relaxed<S>(announced, round);
    }
    ptx::bulk_wait();  // not part of the order: waits before the shared memory is reused
    __syncwarp();
  }
}

/// All lanes: load the payload into shared memory, one piece per lane. Returns false if the deadline passes.
__device__ bool load_payload(uint4* shared, const uint4* payload, uint32_t bar, uint64_t round) {
  if (lane() == 0) ptx::mbarrier_expect(bar, kBytes);
  __syncwarp();
  ptx::bulk_load(ptx::shared_address(shared + lane() * kPiece), payload + lane() * kPiece, kPieceBytes, bar);
  const uint64_t begin = ptx::global_timer();
  while (!ptx::mbarrier_try_wait(bar, static_cast<uint32_t>(round - 1) & 1))
    if (ptx::global_timer() - begin > kLimitNs) return false;
  return true;
}

/// With bulk copies, after lane 0 has acquired the flag, all lanes fence the proxies, and each loads one piece.
template <By kBy, Scope S, bool kOrdered>
__global__ void __launch_bounds__(32) read_payloads(const __grid_constant__ Litmus l) {
  __shared__ alignas(128) uint4 shared[kVectors];
  __shared__ uint64_t barrier;
  const uint32_t bar = ptx::shared_address(&barrier);
  uint4* const payload = l.payload + blockIdx.x * kVectors;
  uint64_t wrong = 0, round = 1;
  if (lane() == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  for (; round <= kRounds; ++round) {
    if (!await<S, kOrdered>(l.announced + blockIdx.x * kFlagStride, round)) break;
    const uint4* from = payload;
    if constexpr (kBy == By::copies) {
      if constexpr (kOrdered) ptx::fence_proxy_async_global();
      if (__any_sync(~0u, !load_payload(shared, payload, bar, round))) break;
      from = shared;
    }
    bool right = true;
    for (int v = lane(); v < kVectors; v += 32) right = right && equal(from[v], word_of(round, v));
    if (!__all_sync(~0u, right)) ++wrong;
    const uint4 poison{kPoison, kPoison, kPoison, kPoison};
    for (int v = lane(); v < kVectors; v += 32) payload[v] = shared[v] = poison;
    ptx::fence_proxy_async_global();  // the next round's copies overwrite this memory
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) ptx::store_release<S>(l.taken + blockIdx.x * kFlagStride, round);
  }
  if (lane() != 0) return;
  l.wrong[blockIdx.x] = wrong;
  l.done[blockIdx.x] = round - 1;
}

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

/// Initially zero memory on a GPU, and a stream.
class Side {
 public:
  explicit Side(int device) : device_(device) {
    use();
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaMalloc(&memory_, kAll), "cudaMalloc");
    must(cudaMemset(memory_, 0, kAll), "cudaMemset");
    must(cudaDeviceSynchronize(), "cudaMemset");
  }
  ~Side() {
    (void)cudaSetDevice(device_);
    (void)cudaStreamSynchronize(stream_);
    (void)cudaFree(memory_);
    (void)cudaStreamDestroy(stream_);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  void use() const { must(cudaSetDevice(device_), "cudaSetDevice"); }
  cudaStream_t stream() const { return stream_; }
  uint4* payload() const { return static_cast<uint4*>(memory_); }
  uint64_t* words(int array) const {
    return reinterpret_cast<uint64_t*>(static_cast<char*>(memory_) + kPairs * kBytes) + array * kPairs * kFlagStride;
  }
  std::vector<uint64_t> read(int array) const {
    std::vector<uint64_t> to(kPairs);
    use();
    must(cudaMemcpy(to.data(), words(array), to.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return to;
  }

 private:
  static constexpr size_t kAll = size_t{kPairs} * (kBytes + 3 * kFlagStride * 8);
  int device_;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
};

struct Counted {
  uint64_t wrong = 0, done = 0;
};

/// Runs on GPU 0 and GPU `reader`. Pulled memory is on the writer's GPU, everything else on the reader's.
template <By kWriter, By kReader, Scope S, bool kOrdered>
Counted run_on(int reader_device) {
  const Side writer(0), reader(reader_device);
  const bool pulled = kWriter == By::threads && kReader == By::copies;
  Litmus l{};
  l.announced = reader.words(0);
  l.wrong = reader.words(1);
  l.done = reader.words(2);
  l.taken = writer.words(0);
  l.payload = (pulled ? writer : reader).payload();
  reader.use();
  read_payloads<kReader, S, kOrdered><<<kPairs, 32, 0, reader.stream()>>>(l);
  must(cudaGetLastError(), "the reader");
  writer.use();
  write_payloads<kWriter, S, kOrdered><<<kPairs, 32, 0, writer.stream()>>>(l);
  must(cudaGetLastError(), "the writer");
  must(cudaStreamSynchronize(writer.stream()), "the writer");
  reader.use();
  must(cudaStreamSynchronize(reader.stream()), "the reader");
  Counted sum;
  for (const uint64_t n : reader.read(1)) sum.wrong += n;
  for (const uint64_t n : reader.read(2)) sum.done += n;
  return sum;
}

/// Whether GPUs 0 and 1 exist and can access each other's memory. Enables the access.
bool have_two() {
  int devices = 0;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < 2) return false;
  for (const int device : {0, 1}) {
    int reaches = 0;
    must(cudaDeviceCanAccessPeer(&reaches, device, 1 - device), "cudaDeviceCanAccessPeer");
    if (reaches == 0) return false;
    must(cudaSetDevice(device), "cudaSetDevice");
    const cudaError_t status = cudaDeviceEnablePeerAccess(1 - device, 0);
    if (status != cudaErrorPeerAccessAlreadyEnabled) must(status, "cudaDeviceEnablePeerAccess");
    (void)cudaGetLastError();
  }
  return true;
}

template <By kWriter, By kReader, Scope S>
void judge(int reader_device) {
  constexpr uint64_t kAll = uint64_t{kPairs} * kRounds;
  const std::string where =
      std::string(S == Scope::system ? "system" : "device") + " scope, " + (reader_device == 0 ? "one GPU" : "two GPUs");
  const Counted kept = run_on<kWriter, kReader, S, true>(reader_device);
  EXPECT_EQ(kept.done, kAll) << where << ": a wait came to its deadline";
  EXPECT_EQ(kept.wrong, 0u) << where << ": rounds with a wrong word";
  const Counted without = run_on<kWriter, kReader, S, false>(reader_device);
  EXPECT_EQ(without.done, kAll) << where << ", without order: a wait came to its deadline";
  std::printf("%s: without order seen to fail %llu of %llu\n", where.c_str(), static_cast<unsigned long long>(without.wrong),
              static_cast<unsigned long long>(without.done));
}

template <By kWriter, By kReader>
void judge_everywhere() {
  judge<kWriter, kReader, Scope::device>(0);
  judge<kWriter, kReader, Scope::system>(0);
  if (have_two()) judge<kWriter, kReader, Scope::system>(1);
}

// As when the mover returns outputs that are then summed.
TEST(OrderLitmus, CopiesToThreads) { judge_everywhere<By::copies, By::threads>(); }
// As when threads stage tokens that the mover then pulls.
TEST(OrderLitmus, ThreadsToCopies) { judge_everywhere<By::threads, By::copies>(); }
// As when rows are pulled and the loader of their tile then reads them.
TEST(OrderLitmus, CopiesToCopies) { judge_everywhere<By::copies, By::copies>(); }
// As when warps without a tile return outputs that are then summed.
TEST(OrderLitmus, ThreadsToThreads) { judge_everywhere<By::threads, By::threads>(); }

}  // namespace
