// SPDX-License-Identifier: Apache-2.0
// Registration of the caller's buffers: every rank can access every buffer, and memory that cannot be shared is rejected on all
// ranks with an error that names its allocator.
#include "gpu/harness/gpu_ranks.hpp"
#include "heap/gpu/cuda_heap.hpp"
#include "heap/gpu/driver.cuh"

namespace switchyard {
namespace {

using namespace detail;
using namespace test;

constexpr size_t kChunk = 2 * kMiB;

/// The caller's driver memory: `chunks` allocations mapped contiguously.
class CallersVmm {
 public:
  CallersVmm(int device, int chunks, bool exportable) : bytes_(kChunk * static_cast<size_t>(chunks)), chunks_(chunks) {
    const Driver& d = driver();
    ok(d.reserve(&at_, bytes_, kChunk, 0, 0), "cuMemAddressReserve");
    CUmemAllocationProp p = {};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = device;
    p.requestedHandleTypes = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
    for (int c = 0; c < chunks; ++c) {
      CUmemGenericAllocationHandle handle = 0;
      ok(d.create(&handle, kChunk, &p, 0), "cuMemCreate");
      ok(d.map(at_ + kChunk * static_cast<size_t>(c), kChunk, 0, handle, 0), "cuMemMap");
      ok(d.release(handle), "cuMemRelease");
    }
    CUmemAccessDesc access = {};
    access.location = p.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    ok(d.set_access(at_, bytes_, &access, 1), "cuMemSetAccess");
  }
  ~CallersVmm() {
    for (int c = 0; c < chunks_; ++c) driver().unmap(at_ + kChunk * static_cast<size_t>(c), kChunk);
    driver().free_address(at_, bytes_);
  }
  CallersVmm(const CallersVmm&) = delete;
  CallersVmm& operator=(const CallersVmm&) = delete;
  std::byte* data() const { return reinterpret_cast<std::byte*>(at_); }

 private:
  static void ok(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + ": " + describe(result));
  }
  CUdeviceptr at_ = 0;
  size_t bytes_;
  int chunks_;
};

std::byte* allocate(size_t bytes) {
  void* p = nullptr;
  cuda(cudaMalloc(&p, bytes), "cudaMalloc");
  cuda(cudaMemset(p, 0xee, bytes), "cudaMemset");
  cuda(cudaDeviceSynchronize(), "cudaMemset");
  return static_cast<std::byte*>(p);
}

uint32_t seed_of(int writer, int owner) { return static_cast<uint32_t>(5000 + writer * 64 + owner); }

/// Every rank writes its share of every buffer, and then checks all shares.
void exchange(const GpuRank& me, const PeerRange& range) {
  const auto world = static_cast<size_t>(me.world());
  const auto share = [&](int owner) { return range.bytes(owner) / 4 / world; };
  for (int owner = 0; owner < me.world(); ++owner) {
    write_pattern(range.at(owner) + static_cast<size_t>(me.rank()) * share(owner) * 4, share(owner), seed_of(me.rank(), owner));
  }
  me.meet();
  for (int owner = 0; owner < me.world(); ++owner) {
    for (int writer = 0; writer < me.world(); ++writer) {
      require_pattern(range.at(owner) + static_cast<size_t>(writer) * share(owner) * 4, share(owner), seed_of(writer, owner),
                      "buffer of " + std::to_string(owner) + ", written by " + std::to_string(writer) + ", read by " +
                          std::to_string(me.rank()));
    }
  }
  me.meet();
}

class CudaRegister : public testing::TestWithParam<Setting> {};

TEST_P(CudaRegister, PartsOfCudaMalloc) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, nullptr, [](const GpuRank& me) {
    auto heap = CudaHeap::create(me.link, 2 * kMiB, me.device, kLong);
    for (const size_t allocation : {8 * kMiB, size_t{100000}}) {  // the second shares a block with other allocations
      std::byte* const neighbour = allocate(1000);
      std::byte* const mine = allocate(allocation);
      // Rank r passes (r + 1) * 16 KiB, except rank 1, which passes nothing.
      const size_t bytes = me.rank() == 1 ? 0 : static_cast<size_t>(me.rank() + 1) * 16384;
      auto range = heap->register_range(me.link, me.rank() == 1 ? nullptr : mine + 4112, bytes, kLong);
      auto second = heap->register_range(me.link, mine, 4096, kLong);  // the same allocation again
      require(range->world() == me.world(), "world");
      for (int r = 0; r < me.world(); ++r) {
        require(range->bytes(r) == (r == 1 ? 0 : static_cast<size_t>(r + 1) * 16384), "size of another rank's buffer");
        require(r != 1 || range->at(r) == nullptr, "no address for no bytes");
      }
      require(me.rank() == 1 || range->at(me.rank()) == mine + 4112, "the own buffer keeps its address");
      exchange(me, *range);
      exchange(me, *second);
      range.reset();
      exchange(me, *second);
      std::vector<unsigned char> around(16);
      cuda(cudaMemcpy(around.data(), mine + 4096, 16, cudaMemcpyDeviceToHost), "cudaMemcpy");
      for (const unsigned char c : around) require(c == 0xee, "bytes before the buffer are untouched");
      second.reset();
      me.meet();
      cuda(cudaFree(mine), "cudaFree");
      cuda(cudaFree(neighbour), "cudaFree");
    }
  });
}

TEST_P(CudaRegister, PartsOfDriverMemory) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, nullptr, [](const GpuRank& me) {
    auto heap = CudaHeap::create(me.link, 2 * kMiB, me.device, kLong);
    const CallersVmm memory(me.device, 2, true);
    // Ranks pass memory in the second of two chunks; rank 1 passes cudaMalloc memory.
    std::byte* const plain = allocate(kMiB);
    std::byte* const mine = me.rank() == 1 ? plain + 512 : memory.data() + kChunk + 65536;
    auto range = heap->register_range(me.link, mine, 300000, kLong);
    exchange(me, *range);
    auto own = heap->register_range(me.link, heap->view().base[me.rank()] + 8192, 40000, kLong);  // the heap itself
    exchange(me, *own);
    require_pattern(heap->view().base[me.rank()] + 8192, 10000 / static_cast<size_t>(me.world()), seed_of(0, me.rank()),
                    "the heap through its own mapping");
    range.reset();
    own.reset();
    me.meet();
    cuda(cudaFree(plain), "cudaFree");
  });
}

TEST_P(CudaRegister, NothingIsLeft) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, nullptr, [](const GpuRank& me) {
    auto heap = CudaHeap::create(me.link, 2 * kMiB, me.device, kLong);
    const CallersVmm memory(me.device, 1, true);
    std::byte* const plain = allocate(kMiB);
    int fds = 0;
    for (int i = 0; i < 20; ++i) {
      heap->register_range(me.link, plain, kMiB, kLong);
      heap->register_range(me.link, memory.data(), kChunk, kLong);
      if (i == 0) fds = open_descriptors(me);
    }
    const int fds_left = open_descriptors(me);
    require(fds_left == fds, std::to_string(fds_left) + " descriptors, were " + std::to_string(fds));
    cuda(cudaFree(plain), "cudaFree");
  });
}

/// The last rank passes memory that cannot be shared: all ranks throw the same error and remain in step.
TEST_P(CudaRegister, RefusalsNameTheAllocator) {
  const Setting s = GetParam();
  run_gpu_ranks(s.as, s.world, nullptr, [](const GpuRank& me) {
    auto heap = CudaHeap::create(me.link, 2 * kMiB, me.device, kLong);
    std::byte* const good = allocate(kMiB);
    const auto refused = [&](void* p, size_t bytes, ErrorCode code, const char* name) {
      const bool bad = me.rank() == me.world() - 1;
      const auto text = text_of_error(code, [&] { heap->register_range(me.link, bad ? p : good, bad ? bytes : kMiB, kLong); });
      require_contains(text, name);
      require_contains(text, "rank " + std::to_string(me.world() - 1));
      cuda(cudaGetLastError(), "an error is pending");
    };
    std::vector<std::byte> host(4096);
    refused(host.data(), 4096, ErrorCode::invalid_argument, "ordinary host memory (malloc");
    void* p = nullptr;
    cuda(cudaMallocHost(&p, 4096), "cudaMallocHost");
    refused(p, 4096, ErrorCode::invalid_argument, "cudaMallocHost");
    cuda(cudaFreeHost(p), "cudaFreeHost");
    cuda(cudaMallocManaged(&p, 4096), "cudaMallocManaged");
    refused(p, 4096, ErrorCode::unsupported, "cudaMallocManaged");
    cuda(cudaFree(p), "cudaFree");
    cuda(cudaMallocAsync(&p, 4096, nullptr), "cudaMallocAsync");
    cuda(cudaStreamSynchronize(nullptr), "cudaMallocAsync");
    refused(p, 4096, ErrorCode::unsupported, "cudaMallocAsync");
    cuda(cudaFreeAsync(p, nullptr), "cudaFreeAsync");
    const CallersVmm closed(me.device, 1, false), chunks(me.device, 2, true);
    refused(closed.data(), 4096, ErrorCode::unsupported, "cannot be exported as a file descriptor");
    refused(chunks.data() + kChunk - 4096, 8192, ErrorCode::unsupported, "several chunks");
    refused(good + kMiB - 4096, 8192, ErrorCode::invalid_argument, "reaches beyond its allocation");
    refused(nullptr, 16, ErrorCode::invalid_argument, "buffer = null");

    auto range = heap->register_range(me.link, good, kMiB, kLong);
    exchange(me, *range);
    range.reset();
    me.meet();
    cuda(cudaFree(good), "cudaFree");
  });
}

INSTANTIATE_TEST_SUITE_P(Settings, CudaRegister,
                         testing::Values(Setting{As::processes, 1, ""}, Setting{As::processes, 2, ""},
                                         Setting{As::processes, 4, ""}, Setting{As::threads, 1, ""},
                                         Setting{As::threads, 2, ""}, Setting{As::threads, 4, ""}),
                         name_of_setting);

/// Registers a buffer on a GPU other than its rank's.
TEST(CudaRegisterErrors, WrongGpu) {
  if (count_gpus() < 2) GTEST_SKIP() << "needs two GPUs";
  run_gpu_ranks(As::processes, 2, nullptr, [](const GpuRank& me) {
    auto heap = CudaHeap::create(me.link, 2 * kMiB, me.device, kLong);
    cuda(cudaSetDevice(0), "cudaSetDevice");  // wrong on rank 1
    std::byte* const p = allocate(4096);
    const auto text = text_of_error(ErrorCode::invalid_argument, [&] { heap->register_range(me.link, p, 4096, kLong); });
    require_contains(text, "rank 1");
    require_contains(text, "must lie on GPU 1");
    cuda(cudaFree(p), "cudaFree");
  });
}

}  // namespace
}  // namespace switchyard
