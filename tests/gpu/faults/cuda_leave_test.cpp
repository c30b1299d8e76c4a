// SPDX-License-Identifier: Apache-2.0
// A group is destroyed while foreign kernels run that never end, such as a collective of another library whose peer has died.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

constexpr size_t kBig = size_t{2} << 30;

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

size_t free_memory() {
  size_t free = 0, total = 0;
  must(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

/// A gate on a separate stream that outlives groups.
struct LastingGate {
  LastingGate() {
    must(cudaSetDevice(0), "cudaSetDevice");
    uint32_t* words = nullptr;
    must(cudaHostAlloc(reinterpret_cast<void**>(&words), 8, cudaHostAllocMapped), "cudaHostAlloc");
    gate = {words, words + 1};
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  Gate gate;
  cudaStream_t stream = nullptr;
};

/// A single-rank group with an object.
class Lane {
 public:
  Lane()
      : groups_(Group::in_process(1, options(config_))), me_(groups_[0], failures_, meeting_), exchange_(groups_[0], config_) {}
  void round() {
    me_.round(exchange_, *case_, 0);
    require(!failures_.any(), "a call went wrong");
  }

 private:
  static GroupOptions options(const NormalConfig& config) {
    GroupOptions options;
    options.backend = kBackend;
    options.heap_bytes = heap_for(config, 1) + kBig;
    options.num_sms = 32;
    return options;
  }
  std::shared_ptr<const Case> case_ = make_case(gpu_scenario("beside a kernel that stays", 1, Layout::rank_major, 20));
  NormalConfig config_ = make_config(*case_);
  Failures failures_;
  Meeting meeting_{1};
  std::vector<Group> groups_;
  Station me_;
  NormalExchange exchange_;
};

/// Destroys a lane while its GPU is still running the gate's kernel.
void live_beside(const LastingGate& beside, std::chrono::nanoseconds limit) {
  Lane lane;
  lane.round();
  beside.gate.close(beside.stream, limit);
  require(cudaStreamQuery(beside.stream) == cudaErrorNotReady, "the gate did not close");
}

TEST(GpuLeave, DoesNotWaitForKernelsOfOthers) {
  isolated([] {
    const LastingGate beside;
    live_beside(beside, 0s);  // makes sure that everything is loaded
    must(cudaStreamSynchronize(beside.stream), "cudaStreamSynchronize");
    const size_t before = free_memory();
    live_beside(beside, 30s);
    require(cudaStreamQuery(beside.stream) == cudaErrorNotReady, "the end of the group has waited for another's kernel");
    require(free_memory() + kBig / 2 < before, "the memory is gone although a kernel may use it");
    beside.gate.open();
    must(cudaStreamSynchronize(beside.stream), "cudaStreamSynchronize");
    for (int tries = 0; tries < 2000 && free_memory() + kBig / 2 < before; ++tries) std::this_thread::sleep_for(5ms);
    require(free_memory() + kBig / 2 >= before, "the group's memory was never freed");
  });
}

TEST(GpuLeave, AnotherLaneGoesOn) {
  isolated([] {
    const LastingGate beside;
    Lane stays;
    stays.round();
    live_beside(beside, 30s);
    stays.round();
    require(cudaStreamQuery(beside.stream) == cudaErrorNotReady, "a lane could not go on while another ended");
    beside.gate.open();
    must(cudaStreamSynchronize(beside.stream), "cudaStreamSynchronize");
    stays.round();
  });
}

TEST(GpuLeave, AProcessEndsBesideAKernelThatStays) {
  isolated([] {
    const pid_t child = ::fork();
    if (child == 0) {
      const LastingGate beside;
      live_beside(beside, 50s);
      std::exit(0);
    }
    int status = 0;
    for (int tries = 0; tries < 3000 && ::waitpid(child, &status, WNOHANG) == 0; ++tries) std::this_thread::sleep_for(10ms);
    (void)::kill(child, SIGKILL);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the process did not end well");
  });
}

}  // namespace
}  // namespace harness
