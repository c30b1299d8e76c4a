// SPDX-License-Identifier: Apache-2.0
// Ranks as processes. When started directly, this program forks four ranks. When started by a launcher, it is one of the
// launcher's ranks:
//   torchrun --no-python --nproc-per-node 4 example_02_processes
//   mpirun -n 4 example_02_processes        srun -n 4 example_02_processes
//
// A bf16 dispatch in rank-major order: one row per (token, rank). Every rank returns the received rows unchanged, so combine
// yields each token multiplied by the number of ranks that received it.
#include <switchyard/normal.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

using namespace switchyard;

constexpr int kExperts = 16, kTopk = 4, kTokens = 64, kHidden = 128;

// Small integers are exact in bf16. A bf16 is the upper half of a float32.
uint16_t to_bf16(int number) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(number)) >> 16); }
int value(int rank, int t, int column) { return (rank * 5 + t + column) % 8; }
int expert(int rank, int t, int k) { return (rank * 3 + t + k * k) % kExperts; }

// Number of ranks that hold at least one of the token's experts.
int visited(int rank, int t, int world) {
  int count = 0;
  for (int r = 0; r < world; ++r) {
    bool here = false;
    for (int k = 0; k < kTopk; ++k)
      here |=
          expert(rank, t, k) >= first_expert(kExperts, world, r) && expert(rank, t, k) < first_expert(kExperts, world, r + 1);
    count += here;
  }
  return count;
}

// Runs one rank. Returns the exit status of its process.
int run_rank(Group group, const NormalConfig& config) {
  const int rank = group.rank(), world = group.size();
  std::vector<uint16_t> x(kTokens * kHidden), out(kTokens * kHidden);
  std::vector<int64_t> ids(kTokens * kTopk);
  for (int i = 0; i < kTokens * kHidden; ++i) x[static_cast<size_t>(i)] = to_bf16(value(rank, i / kHidden, i % kHidden));
  for (int f = 0; f < kTokens * kTopk; ++f) ids[static_cast<size_t>(f)] = expert(rank, f / kTopk, f % kTopk);

  NormalExchange exchange(group, config);
  const Dispatched received =
      exchange.dispatch({x.data(), kTokens, kHidden, DType::bf16}, ExpertIds::of(ids.data(), kTokens, kTopk));
  exchange.combine(received.x, received.handle, out.data());

  int wrong = 0;
  for (int i = 0; i < kTokens * kHidden; ++i)
    wrong += out[static_cast<size_t>(i)] != to_bf16(visited(rank, i / kHidden, world) * value(rank, i / kHidden, i % kHidden));
  std::vector<int> all(static_cast<size_t>(world));
  group.all_gather(&wrong, sizeof wrong, all.data());
  for (const int other : all) wrong |= other;
  if (rank == 0) std::printf("%d ranks as processes, %d tokens each: %s\n", world, kTokens, wrong == 0 ? "PASS" : "FAIL");
  return wrong == 0 ? 0 : 1;
}

// Joins the group and runs the rank. No exception may leave a forked process.
int guarded(const std::function<Group(const GroupOptions&)>& join) try {
  NormalConfig config;
  config.hidden = kHidden;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.max_tokens = kTokens;
  GroupOptions options;  // the size of a launcher's group is not known yet: reserve for the maximum
  options.heap_bytes = NormalExchange::heap_bytes(config, kMaxRanks);
  return run_rank(join(options), config);
} catch (const std::exception& error) {
  std::fprintf(stderr, "process %d: %s\n", static_cast<int>(::getpid()), error.what());
  return 1;
}

int main() {
  for (const char* variable : {"SWITCHYARD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"})
    if (std::getenv(variable)) return guarded(Group::from_environment);

  constexpr int kRanks = 4;
  const std::string store = "unix:@switchyard-example-" + std::to_string(::getpid());  // an abstract socket name, not a file
  const std::string token = std::to_string(std::random_device{}()) + "-" + std::to_string(std::random_device{}());
  for (int rank = 0; rank < kRanks; ++rank) {
    if (::fork() != 0) continue;
    const int status =
        guarded([&](const GroupOptions& options) { return Group::connect(rank, kRanks, store, token, options); });
    std::fflush(nullptr);
    ::_exit(status);
  }
  int failed = 0, status = 0;
  while (::wait(&status) > 0) failed += status != 0;
  return failed == 0 ? 0 : 1;
}
