// SPDX-License-Identifier: Apache-2.0
// main() of the GPU suites. Without a GPU, they fail unless SWITCHYARD_GPU_OPTIONAL=1. If ranks are processes, this process
// never uses CUDA, because a child forked from a process with a context has no context. Suites whose ranks are processes run in
// teams.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "harness/fleet.hpp"
#include "harness/rank_memory.hpp"
#include "harness/rank_team.hpp"

namespace {

int g_gpus = 0;

int count_in_child() {
  const pid_t child = fork();
  if (child == 0) _exit(harness::count_gpus());
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

}  // namespace

int harness::gpus_of_suite() { return g_gpus; }

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // a lazy load may wait for another rank's kernel
  testing::InitGoogleTest(&argc, argv);
  // Streams of ranks that are threads must not share a queue. Processes have their own queues, of which a GPU has few.
  if (harness::ranks_of_suite() == harness::Ranks::threads) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  g_gpus = count_in_child();
  if (g_gpus == 0) {
    const char* optional = std::getenv("SWITCHYARD_GPU_OPTIONAL");
    if (optional && *optional == '1') {
      std::printf("SKIPPED: no GPU is visible\n");
      return 0;
    }
    std::fprintf(stderr, "no GPU is visible: a GPU suite that tests nothing fails (SWITCHYARD_GPU_OPTIONAL=1 skips it)\n");
    return 1;
  }
  std::printf("%d GPUs\n", g_gpus);
  return harness::ranks_of_suite() == harness::Ranks::processes ? harness::run_tests_in_teams() : RUN_ALL_TESTS();
}
