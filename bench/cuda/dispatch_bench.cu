// SPDX-License-Identifier: Apache-2.0
// Direct dispatch on CUDA against the link: rank-major rows with placements known, and in the same run two floors made of bulk
// copies alone: `push`, the same rows to the same places, and `push all`, every row to every rank, scaled by the mean number of
// ranks a token reaches. Every figure is the slowest rank's, with a cold L2, between events around the launch, after all ranks
// have met; every row is compared with its closed form before and after it is timed.
//
// Build:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -cudart static -I . -I src -I include
//     bench/cuda/dispatch_bench.cu bench/cuda/cluster.cu src/plan/plan.cpp -o cuda_dispatch_bench
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "bench/cuda/cluster.cuh"

namespace {

using namespace switchyard;
using namespace switchyard::cuda_bench;

struct Options {
  int64_t hidden = 7168;
  int experts = 256;
  int topk = 8;
  int ranks_per_gpu = 1;
  uint64_t seed = 1;
  std::vector<int> tokens = {128, 4096, 32768};
  std::vector<int> sms = {8, 16, 24, 48, 132};
  std::string json, commit = "unknown";
};

enum class Kind { dispatch, cached, push, push_all };

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::dispatch: return "dispatch";
    case Kind::cached: return "dispatch, no records";
    case Kind::push: return "push floor";
    case Kind::push_all: return "push all floor";
  }
  return "?";
}

struct Result {
  Kind kind;
  int64_t tokens;
  LaunchShape shape;
  int reps;
  double median_us, p99_us;
  double remote_bytes;  ///< of the rank that sends most
  double mean_ranks;
  double percent = 0;  ///< dispatch: of the faster push floor at the same T and SM count
  std::string verdict;
  double gbps() const { return median_us > 0 ? remote_bytes / median_us / 1e3 : 0; }
};

std::vector<int> parse_list(const char* text) {
  std::vector<int> out;
  for (const char* at = text; *at != '\0';) {
    char* end = nullptr;
    out.push_back(static_cast<int>(std::strtol(at, &end, 10)));
    if (end == at || out.back() <= 0) {
      std::fprintf(stderr, "expected positive numbers separated by commas, got '%s'\n", text);
      std::exit(2);
    }
    at = *end == ',' ? end + 1 : end;
  }
  return out;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || i + 1 >= argc) {
      std::printf(
          "usage: %s [--tokens 128,4096,32768] [--sms 8,16,24,48,132] [--hidden 7168] [--experts 256] [--topk 8]\n"
          "          [--ranks-per-gpu 1] [--seed 1] [--json FILE] [--commit HASH]\n",
          argv[0]);
      std::exit(flag == "--help" ? 0 : 2);
    }
    const char* value = argv[++i];
    if (flag == "--tokens")
      o.tokens = parse_list(value);
    else if (flag == "--sms")
      o.sms = parse_list(value);
    else if (flag == "--hidden")
      o.hidden = std::atoll(value);
    else if (flag == "--experts")
      o.experts = std::atoi(value);
    else if (flag == "--topk")
      o.topk = std::atoi(value);
    else if (flag == "--ranks-per-gpu")
      o.ranks_per_gpu = std::atoi(value);
    else if (flag == "--seed")
      o.seed = static_cast<uint64_t>(std::atoll(value));
    else if (flag == "--json")
      o.json = value;
    else if (flag == "--commit")
      o.commit = value;
    else {
      std::fprintf(stderr, "unknown flag '%s'; see --help\n", flag.c_str());
      std::exit(2);
    }
  }
  const int64_t row_bytes = o.hidden * 2;
  if (o.topk < 1 || o.topk > kMaxTopk || o.experts < o.topk || o.ranks_per_gpu < 1 || row_bytes % 16 != 0 || row_bytes <= 0 ||
      row_bytes * kMaxWarps > kSharedLimit - 2048) {
    std::fprintf(
        stderr,
        "--topk must be in [1, %d] and at most --experts, --hidden a multiple of 8 up to %u, --ranks-per-gpu positive\n",
        kMaxTopk, (kSharedLimit - 2048) / kMaxWarps / 2);
    std::exit(2);
  }
  return o;
}

int repetitions(int64_t tokens) { return tokens <= 1024 ? 101 : tokens <= 8192 ? 41 : 15; }

class Bench {
 public:
  Bench(const Options& options, Cluster& cluster)
      : options_(options), cluster_(cluster), scratch_(static_cast<size_t>(cluster.world())) {
    for (int r = 0; r < cluster_.world(); ++r) {
      SWITCHYARD_CUDA_CHECK(cudaSetDevice(cluster_.device(r)));
      SWITCHYARD_CUDA_CHECK(cudaMalloc(&scratch_[static_cast<size_t>(r)], kFlushBytes));
    }
  }

  std::vector<Result> run() {
    for (const int tokens : options_.tokens) {
      Problem problem;
      const std::vector<int64_t> per_rank(static_cast<size_t>(cluster_.world()), tokens);
      problem.routing = uniform_routing(options_.experts, options_.topk, per_rank, options_.seed);
      problem.row_bytes = options_.hidden * 2;
      for (const bool records : {true, false}) {
        problem.with_records = records;
        cluster_.prepare(problem, true);
        for (const int sms : options_.sms) {
          if (sms * options_.ranks_per_gpu > cluster_.multiprocessors()) continue;
          for (const LaunchShape shape : {LaunchShape{sms, 14, 1}, LaunchShape{sms, 7, 2}}) {
            measure(records ? Kind::dispatch : Kind::cached, tokens, shape);
            if (records) continue;
            measure(Kind::push, tokens, shape);
            measure(Kind::push_all, tokens, shape);
          }
        }
      }
    }
    relate();
    return results_;
  }

 private:
  static constexpr size_t kFlushBytes = size_t{256} << 20;

  void enqueue(Kind kind, int rank, uint64_t call) {
    switch (kind) {
      case Kind::dispatch:
      case Kind::cached: return cluster_.enqueue_dispatch(rank, call, false);
      case Kind::push: return cluster_.enqueue_push(rank, false);
      case Kind::push_all: return cluster_.enqueue_push(rank, true);
    }
  }

  /// One untimed call into poisoned blocks, compared.
  std::string verified_call(Kind kind) {
    if (kind == Kind::push_all) return {};  // its rows go beyond the poisoned blocks; compared after the loop
    cluster_.poison();
    const uint64_t call = cluster_.next_call(), meet = cluster_.next_barrier();
    cluster_.on_all([&](int r) {
      enqueue(kind, r, call);
      cluster_.enqueue_barrier(r, meet);
    });
    return cluster_.verify(kind == Kind::dispatch);
  }

  void measure(Kind kind, int tokens, const LaunchShape& shape) {
    const int reps = repetitions(tokens), warmups = 2, world = cluster_.world();
    cluster_.use(shape);
    Result result{kind, tokens, shape, reps, 0, 0, cluster_.max_remote_bytes(), cluster_.mean_ranks(), 0, verified_call(kind)};
    if (kind == Kind::push_all)
      result.remote_bytes = static_cast<double>(tokens) * static_cast<double>(options_.hidden * 2 * (world - 1));
    if (result.verdict.empty()) {
      cluster_.poison();
      const std::vector<float> slowest = timed_loop(kind, reps, warmups);
      result.median_us = slowest[slowest.size() / 2] * 1e3;
      result.p99_us = slowest[static_cast<size_t>(std::ceil(0.99 * static_cast<double>(slowest.size()))) - 1] * 1e3;
      result.verdict = kind == Kind::push_all ? cluster_.verify_all_to_all() : cluster_.verify(kind == Kind::dispatch);
      if (result.verdict.empty()) result.verdict = cluster_.fault();
    }
    print(result);
    results_.push_back(result);
    if (const std::string fault = cluster_.fault(); !fault.empty()) {
      std::fprintf(stderr, "stopped: %s\n", fault.c_str());
      std::exit(1);
    }
  }

  /// Milliseconds of the slowest rank per repetition, sorted.
  std::vector<float> timed_loop(Kind kind, int reps, int warmups) {
    const int world = cluster_.world(), total = reps + warmups;
    std::vector<uint64_t> calls, meets;
    for (int i = 0; i < total; ++i) calls.push_back(cluster_.next_call());
    for (int i = 0; i < 2 * total; ++i) meets.push_back(cluster_.next_barrier());
    std::vector<std::vector<float>> ms(static_cast<size_t>(world), std::vector<float>(static_cast<size_t>(total)));
    const bool floor = kind == Kind::push || kind == Kind::push_all;
    std::vector<std::vector<cudaEvent_t>> all_events(static_cast<size_t>(world));
    for (int r = 0; r < world; ++r) {  // before any rank waits for another
      SWITCHYARD_CUDA_CHECK(cudaSetDevice(cluster_.device(r)));
      all_events[static_cast<size_t>(r)].resize(static_cast<size_t>(2 * total));
      for (auto& event : all_events[static_cast<size_t>(r)]) SWITCHYARD_CUDA_CHECK(cudaEventCreate(&event));
    }
    cluster_.on_all([&](int r) {
      const cudaStream_t stream = cluster_.stream(r);
      const auto& events = all_events[static_cast<size_t>(r)];
      for (int i = 0; i < total; ++i) {
        const auto at = static_cast<size_t>(2 * i);
        SWITCHYARD_CUDA_CHECK(cudaMemsetAsync(scratch_[static_cast<size_t>(r)], i, kFlushBytes, stream));
        cluster_.enqueue_barrier(r, meets[at]);
        SWITCHYARD_CUDA_CHECK(cudaEventRecord(events[at], stream));
        enqueue(kind, r, calls[static_cast<size_t>(i)]);
        if (floor) cluster_.enqueue_barrier(r, meets[at + 1]);  // dispatch itself ends when all rows have come
        SWITCHYARD_CUDA_CHECK(cudaEventRecord(events[at + 1], stream));
      }
      SWITCHYARD_CUDA_CHECK(cudaStreamSynchronize(stream));
      for (int i = 0; i < total; ++i) {
        const auto at = static_cast<size_t>(2 * i);
        SWITCHYARD_CUDA_CHECK(
            cudaEventElapsedTime(&ms[static_cast<size_t>(r)][static_cast<size_t>(i)], events[at], events[at + 1]));
      }
    });
    for (auto& events : all_events)
      for (auto& event : events) cudaEventDestroy(event);
    std::vector<float> slowest;
    for (int i = warmups; i < total; ++i) {
      float most = 0;
      for (const auto& rank : ms) most = std::max(most, rank[static_cast<size_t>(i)]);
      slowest.push_back(most);
    }
    std::sort(slowest.begin(), slowest.end());
    return slowest;
  }

  /// Dispatch as a percentage of the faster push floor at the same T and SM count.
  void relate() {
    for (Result& d : results_) {
      if (d.kind != Kind::dispatch && d.kind != Kind::cached) continue;
      double floor = 0;
      for (const Result& p : results_) {
        if (p.kind != Kind::push || p.tokens != d.tokens || p.shape.blocks != d.shape.blocks || p.median_us <= 0) continue;
        floor = floor == 0 ? p.median_us : std::min(floor, p.median_us);
      }
      if (d.median_us > 0) d.percent = 100 * floor / d.median_us;
    }
  }

  static void print(const Result& r) {
    std::printf("T=%6lld SMs=%3d %2d warps x %d stage  %-21s %9.1f us  p99 %9.1f  remote %6.1f GB/s  %s\n",
                static_cast<long long>(r.tokens), r.shape.blocks, r.shape.warps, r.shape.stages, name_of(r.kind), r.median_us,
                r.p99_us, r.gbps(), r.verdict.empty() ? "rows exact" : r.verdict.c_str());
    std::fflush(stdout);
  }

  const Options& options_;
  Cluster& cluster_;
  std::vector<void*> scratch_;
  std::vector<Result> results_;
};

const Result* best(const std::vector<Result>& all, Kind kind, int64_t tokens, int sms) {
  const Result* found = nullptr;
  for (const Result& r : all) {
    if (r.kind != kind || r.tokens != tokens || r.shape.blocks != sms || r.median_us <= 0) continue;
    if (found == nullptr || r.median_us < found->median_us) found = &r;
  }
  return found;
}

void summarise(const Options& o, const std::vector<Result>& all, int world) {
  std::printf("\nbest shape per kind, us (%d ranks)\n%8s %5s | %10s %10s | %10s %12s | %9s %9s\n", world, "tokens", "SMs",
              "dispatch", "no records", "push", "all * m/W", "% of push", "% of all");
  for (const int tokens : o.tokens) {
    for (const int sms : o.sms) {
      const Result *d = best(all, Kind::dispatch, tokens, sms), *c = best(all, Kind::cached, tokens, sms),
                   *p = best(all, Kind::push, tokens, sms), *a = best(all, Kind::push_all, tokens, sms);
      if (!d || !c || !p || !a) continue;
      const double scaled = a->median_us * d->mean_ranks / world;
      std::printf("%8d %5d | %10.1f %10.1f | %10.1f %12.1f | %8.1f%% %8.1f%%\n", tokens, sms, d->median_us, c->median_us,
                  p->median_us, scaled, 100 * p->median_us / d->median_us, 100 * scaled / d->median_us);
    }
  }
}

void write_json(const Options& o, const Cluster& cluster, const std::vector<Result>& all) {
  std::FILE* f = std::fopen(o.json.c_str(), "w");
  if (f == nullptr) {
    std::fprintf(stderr, "cannot write '%s': %s\n", o.json.c_str(), std::strerror(errno));
    std::exit(2);
  }
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  std::fprintf(f,
               "{\"bench\": \"cuda_dispatch\", \"commit\": \"%s\", \"date\": \"%s\", \"cuda_driver\": %d, \"cuda_runtime\": "
               "%d,\n \"gpus\": [",
               o.commit.c_str(), date, driver, runtime);
  for (int g = 0; g < cluster.gpus(); ++g) {
    cudaDeviceProp properties;
    SWITCHYARD_CUDA_CHECK(cudaGetDeviceProperties(&properties, g));
    std::fprintf(f, "%s\"%s\"", g == 0 ? "" : ", ", properties.name);
  }
  std::fprintf(
      f,
      "],\n \"config\": {\"ranks\": %d, \"ranks_per_gpu\": %d, \"hidden\": %lld, \"row_type\": \"bf16\", \"experts\": %d, "
      "\"topk\": %d, "
      "\"routing\": \"uniform\", \"seed\": %llu, \"cold_l2\": true, \"statistic\": \"slowest rank\"},\n \"results\": [",
      cluster.world(), o.ranks_per_gpu, static_cast<long long>(o.hidden), o.experts, o.topk,
      static_cast<unsigned long long>(o.seed));
  for (size_t i = 0; i < all.size(); ++i) {
    const Result& r = all[i];
    std::fprintf(f,
                 "%s\n  {\"kind\": \"%s\", \"tokens\": %lld, \"sms\": %d, \"warps\": %d, \"stages\": %d, \"reps\": %d, "
                 "\"median_us\": %.2f, "
                 "\"p99_us\": %.2f, \"remote_bytes\": %.0f, \"remote_gbps\": %.2f, \"mean_ranks\": %.4f, \"percent_of_push\": "
                 "%.2f, \"exact\": %s}",
                 i == 0 ? "" : ",", name_of(r.kind), static_cast<long long>(r.tokens), r.shape.blocks, r.shape.warps,
                 r.shape.stages, r.reps, r.median_us, r.p99_us, r.remote_bytes, r.gbps(), r.mean_ranks, r.percent,
                 r.verdict.empty() ? "true" : "false");
  }
  std::fprintf(f, "\n ]}\n");
  if (std::fclose(f) != 0) std::fprintf(stderr, "'%s' is incomplete: %s\n", o.json.c_str(), std::strerror(errno));
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const int gpus = find_gpus();
  if (gpus == 0) {
    std::fprintf(stderr, "no usable GPU or driver\n");
    return 2;
  }
  const int64_t most = *std::max_element(options.tokens.begin(), options.tokens.end());
  const auto rows = static_cast<size_t>(most * gpus * options.ranks_per_gpu);
  Cluster cluster(options.ranks_per_gpu,
                  rows * static_cast<size_t>(options.hidden * 2 + 4 + 8 * options.topk) + (size_t{16} << 20));
  std::printf("%d ranks on %d GPUs, %d SMs each, hidden %lld bf16, uniform top-%d of %d, seed %llu\n", cluster.world(),
              cluster.gpus(), cluster.multiprocessors(), static_cast<long long>(options.hidden), options.topk, options.experts,
              static_cast<unsigned long long>(options.seed));
  if (options.ranks_per_gpu > 1) std::printf("several ranks share a GPU: figures show correctness only\n");
  const std::vector<Result> results = Bench(options, cluster).run();
  summarise(options, results, cluster.world());
  if (!options.json.empty()) write_json(options, cluster, results);
  const auto wrong = std::count_if(results.begin(), results.end(), [](const Result& r) { return !r.verdict.empty(); });
  std::printf("%s: %zu configurations, %zd with wrong rows\n", wrong == 0 ? "PASS" : "FAIL", results.size(),
              static_cast<ssize_t>(wrong));
  return wrong == 0 ? 0 : 1;
}
