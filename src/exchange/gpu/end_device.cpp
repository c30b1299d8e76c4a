// SPDX-License-Identifier: Apache-2.0
// Release of a rank's memory: end_device and the host memory whose release it defers.
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "arch/gpu_runtime.hpp"
#include "exchange/gpu/memory.hpp"
#include "exchange/gpu/rank.hpp"
#include "heap/gpu/cuda_heap.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

/// Control memory of a departed rank.
struct Remains {
  std::unique_ptr<SymmetricHeap> control;
  std::unique_ptr<SharedHostMemory> shared;  // destroyed first
};

/// Memory left behind by GPU groups of this process. Lives until the process ends.
struct Leftovers {
  std::mutex mutex;
  int in_use = 0;  ///< number of SharedHostMemory in use
  std::vector<Remains> remains;
};
Leftovers& leftovers() {
  static auto* const made = new Leftovers;
  return *made;
}

/// Takes the memory of a departed rank. \returns the memory to free now: none while another group of the process is alive
std::vector<Remains> take_leftovers(Remains left) {
  Leftovers& all = leftovers();
  const std::lock_guard lock(
      all.mutex);  // held over both steps: if ranks end at the same time, the last one must see the memory that the others left
  all.in_use -= left.shared->retire();
  all.remains.push_back(std::move(left));
  if (all.in_use > 0) return {};
  return std::exchange(all.remains, {});
}

}  // namespace

SharedHostMemory::SharedHostMemory(int device, std::byte* memory, size_t bytes) : device_(device), memory_(memory) {
  check_cuda(gpu::share_host_memory(memory, bytes), "cudaHostRegister");
  const std::lock_guard lock(leftovers().mutex);
  ++leftovers().in_use;
}

SharedHostMemory::~SharedHostMemory() {
  {
    const std::lock_guard lock(leftovers().mutex);
    leftovers().in_use -= retire();
  }
  try {
    const DeviceGuard guard(device_);
    gpu::unshare_host_memory(memory_);
  } catch (const Error&) {
    // The context no longer exists, and neither does the registration.
  }
}

void end_device(DeviceParts given) noexcept {
  constexpr auto kGrace = std::chrono::seconds(1);
  struct End {
    DeviceParts parts;
    std::vector<Remains> remains;
  };
  try {
    const bool alone = static_cast<CudaHeap&>(*given.heap).closes_alone();
    auto shared = static_cast<CudaRank&>(*given.rank).take_control();
    auto remains = take_leftovers({std::move(given.control), std::move(shared)});
    std::packaged_task<void()> task([held = std::make_shared<End>(End{std::move(given), std::move(remains)})] {
      held->remains.clear();
      held->parts.rank.reset();
      held->parts.heap.reset();
    });
    if (!alone) return task();
    const std::future<void> ended = task.get_future();
    std::thread thread(std::move(task));
    if (ended.wait_for(kGrace) == std::future_status::ready)
      thread.join();
    else
      thread.detach();
  } catch (const std::exception&) {
    // If there is no memory or thread left, everything is freed here, which includes the waits.
  }
}

}  // namespace switchyard::detail
