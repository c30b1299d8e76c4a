// SPDX-License-Identifier: Apache-2.0
// Direct dispatch on CUDA, bit for bit against an oracle, over ranks x layouts x row sizes x routings x launch shapes. Ranks
// are the visible GPUs, also several on one GPU. Prints one line per group and "N passed, N failed"; fails if there is no GPU.
//
// Build:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -cudart static -I . -I src -I include
//     tests/gpu/cuda_dispatch_test.cu bench/cuda/cluster.cu src/plan/plan.cpp -o cuda_dispatch_test
#include <cstdio>
#include <string>
#include <vector>

#include "bench/cuda/cluster.cuh"

namespace {

using namespace switchyard;
using namespace switchyard::cuda_bench;

int passed = 0, failed = 0;

void check(const std::string& what, const std::string& difference) {
  if (difference.empty()) {
    ++passed;
    return;
  }
  ++failed;
  std::printf("FAILED %s: %s\n", what.c_str(), difference.c_str());
}

const char* name_of(Layout layout) { return layout == Layout::rank_major ? "rank-major" : "expert-major"; }

/// Three calls in a row into poisoned blocks; the last one is compared. Then one more from poison, compared.
void run_case(Cluster& cluster, const Problem& problem, const LaunchShape& shape, bool publish, const std::string& what) {
  cluster.prepare(problem, !publish);
  cluster.use(shape);
  std::string difference;
  for (const int calls : {3, 1}) {
    cluster.poison();
    std::vector<uint64_t> epochs, meets;
    for (int i = 0; i < calls; ++i) {
      epochs.push_back(cluster.next_call());
      meets.push_back(cluster.next_barrier());
    }
    cluster.on_all([&](int r) {
      for (size_t i = 0; i < epochs.size(); ++i) {
        cluster.enqueue_dispatch(r, epochs[i], publish);
        // Blocks are written again by the next call; with known placements nothing else tells a source that a receiver has
        // returned.
        cluster.enqueue_barrier(r, meets[i]);
      }
    });
    if (difference.empty()) difference = cluster.verify(problem.with_records);
  }
  check(what + " W=" + std::to_string(cluster.world()) + " " + name_of(problem.layout) + " row " +
            std::to_string(problem.row_bytes) + " K=" + std::to_string(problem.routing.topk) +
            " E=" + std::to_string(problem.routing.experts) + " " + std::to_string(shape.blocks) + "x" +
            std::to_string(shape.warps) + "w" + std::to_string(shape.stages) + "s" + (publish ? " published" : ""),
        difference);
}

std::vector<int64_t> ragged(int world, int64_t most) {
  std::vector<int64_t> tokens;
  for (int r = 0; r < world; ++r)
    tokens.push_back(static_cast<int64_t>(mix(static_cast<uint64_t>(r) + 7) % static_cast<uint64_t>(most + 1)));
  tokens[0] = most;
  return tokens;
}

Problem problem_of(Routing routing, Layout layout, int alignment, int64_t row_bytes, bool records = true) {
  Problem p;
  p.routing = std::move(routing);
  p.layout = layout;
  p.alignment = alignment;
  p.row_bytes = row_bytes;
  p.with_records = records;
  return p;
}

void token_counts(Cluster& cluster) {
  const int w = cluster.world();
  std::vector<std::vector<int64_t>> cases = {std::vector<int64_t>(static_cast<size_t>(w), 0),
                                             std::vector<int64_t>(static_cast<size_t>(w), 1),
                                             std::vector<int64_t>(static_cast<size_t>(w), 64), ragged(w, 97)};
  cases.push_back(std::vector<int64_t>(static_cast<size_t>(w), 0));
  cases.back().back() = 33;  // only the last rank has tokens
  for (const auto& tokens : cases)
    for (const Layout layout : {Layout::rank_major, Layout::expert_major})
      for (const bool publish : {false, true})
        run_case(cluster, problem_of(uniform_routing(16, 4, tokens, 3), layout, 8, 2048), {4, 4, 1}, publish, "tokens");
}

void row_sizes(Cluster& cluster) {
  const auto tokens = ragged(cluster.world(), 61);
  for (const int64_t row : {16, 32, 48, 272, 512, 1008, 1024, 1040, 2064, 4112, 14336, 14352, 40960})
    for (const Layout layout : {Layout::rank_major, Layout::expert_major})
      for (const int stages : {0, 1, 2})
        run_case(cluster, problem_of(uniform_routing(24, 6, tokens, 5, 9), layout, 4, row), {3, 14, stages}, false, "row size");
}

void topks(Cluster& cluster) {
  const auto tokens = ragged(cluster.world(), 53);
  for (const int k : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 32})
    for (const bool repeats : {false, true})
      for (const Layout layout : {Layout::rank_major, Layout::expert_major})
        run_case(cluster, problem_of(uniform_routing(37, k, tokens, 11, 7, repeats), layout, 1, 1536), {2, 7, 2}, true,
                 repeats ? "repeated experts" : "topk");
}

void experts(Cluster& cluster) {
  const auto tokens = ragged(cluster.world(), 71);
  for (const int e : {1, 2, 3, 5, 7, 13, 64, 256})
    for (const Layout layout : {Layout::rank_major, Layout::expert_major})
      run_case(cluster, problem_of(uniform_routing(e, e < 8 ? 1 : 8, tokens, 13), layout, 16, 3072), {2, 5, 1}, false,
               "experts");
}

void launch_shapes(Cluster& cluster) {
  const auto tokens = ragged(cluster.world(), 301);
  for (const int blocks : {1, 2, 3, 8})
    for (const int warps : {1, 2, 3, 7, 14})
      for (const int stages : {0, 1, 2})
        run_case(cluster, problem_of(uniform_routing(32, 8, tokens, 17), Layout::expert_major, 128, 14336),
                 {blocks, warps, stages}, true, "shape");
}

void cached(Cluster& cluster) {
  for (const int stages : {1, 2})
    run_case(cluster, problem_of(uniform_routing(32, 8, ragged(cluster.world(), 400), 19), Layout::rank_major, 1, 14336, false),
             {8, 7, stages}, false, "without records");
}

/// One rank never calls: the others end with a fault that names it; only the first of the queued calls waits.
void missing_rank(int ranks_per_gpu) {
  Cluster cluster(ranks_per_gpu, size_t{64} << 20);
  const int absent = cluster.world() - 1;
  if (absent == 0) return;
  cluster.prepare(problem_of(uniform_routing(16, 4, std::vector<int64_t>(static_cast<size_t>(cluster.world()), 32), 23),
                             Layout::rank_major, 1, 2048),
                  true);
  cluster.use({2, 4, 1});
  cluster.set_timeout(100'000'000);
  std::vector<uint64_t> calls;
  for (int i = 0; i < 20; ++i) calls.push_back(cluster.next_call());
  cluster.on_all([&](int r) {
    if (r == absent) return;
    for (const uint64_t call : calls) cluster.enqueue_dispatch(r, call, false);
  });
  const std::string fault = cluster.fault();
  const std::string wanted = "for rank " + std::to_string(absent) + " at 'rows'";
  check("missing rank is named",
        fault.find(wanted) != std::string::npos ? "" : "the report is '" + fault + "', expected '" + wanted + "'");
  const uint64_t claims = cluster.fault_claims(0), warps = 2 * 4;
  check("only one of 20 queued calls waits",
        claims <= warps ? "" : std::to_string(claims) + " warps timed out, one call has " + std::to_string(warps));
}

}  // namespace

int main() {
  if (find_gpus() == 0) {
    std::printf("no GPU: 0 passed, 1 failed\n");
    return 1;
  }
  for (const int ranks_per_gpu : {1, 2, 4}) {
    {
      Cluster cluster(ranks_per_gpu, size_t{192} << 20);
      const struct {
        const char* name;
        void (*run)(Cluster&);
      } groups[] = {{"token counts", token_counts}, {"row sizes", row_sizes},         {"topk", topks},
                    {"experts", experts},           {"launch shapes", launch_shapes}, {"cached", cached}};
      for (const auto& group : groups) {
        const int before = failed;
        group.run(cluster);
        std::printf("%d ranks on %d GPUs, %s: %s\n", cluster.world(), cluster.gpus(), group.name,
                    failed == before ? "ok" : "FAILED");
        std::fflush(stdout);
      }
      check("no fault recorded", cluster.fault());
    }
    missing_rank(ranks_per_gpu);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
