// SPDX-License-Identifier: Apache-2.0
// Times the fp8 layer for Hopper of the package sgl-deep-gemm 0.2.5, a whole MoE layer in one kernel, without Python and torch:
// one process, a GPU per rank, the peer's kernel from the headers in its wheel, configured as its own host code does. Build:
//
//     bench/peers/build_mega_moe_fp8.sh WHEEL_DIR OUT      # fetches the wheel if WHEEL_DIR is missing, then calls nvcc once
//     OUT --tokens 4096 --experts 128 --ranks 2 --json FILE
//
// The peer keeps one set of float32 sums per tile and rescales it in place before each 128 elements of K. Sampled tokens are
// compared with float32 loops over the same quantized operands. The loops also quantize the activation, but from more precise
// sums, so that elements near a rounding boundary round the other way. If all elements rounded independently, the relative
// error of a token would be 0.037 (twice the variance of e4m3's rounding); a missing or wrong route causes about 0.35.
//
// Preparation (the peer's kernel that quantizes tokens into the symmetric buffer), layer kernel, and both together are timed in
// turn. Before each, the L2 cache is overwritten, and a small kernel on every GPU waits until the host has queued the work on
// all of them. The result of a round is that of its slowest rank. Then the kernel, and both together, run back to back.
#include "mega_moe_fp8.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

namespace mega_moe {

void fail(const std::string& what) {
  std::fprintf(stderr, "mega_moe_fp8: %s\n", what.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kTolerance = 0.05;  // of |y - reference| / |reference| of a token
constexpr double kPreparationTolerance = 0.04;
constexpr std::chrono::seconds kDeadline{20};  // of a call on the GPU, and of every wait on the host
constexpr size_t kFlush = size_t{256} << 20;
constexpr int kWarmUp = 3, kMaxRanks = 8;

struct Options {
  int ranks = 2, tokens = 4096, experts = 128, rounds = 30, sustain_ms = 300;
  uint64_t seed = 1;
  Values values = Values::normal;
  std::string json;
  bool layout = false;
};

/// In host memory that all GPUs map. Each word has one writer.
struct Gate {
  unsigned arrived[kMaxRanks];  ///< the last round in which this rank's kernel waits
  unsigned late[kMaxRanks];     ///< not 0: its kernel has timed out
  unsigned open;                ///< the last round in which kernels may continue, written by the host
};
__device__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__global__ void wait_at_gate(volatile Gate* gate, int rank, unsigned round) {
  const uint64_t begin = nanoseconds();
  gate->arrived[rank] = round;
  __threadfence_system();
  while (gate->open < round) {
    if (nanoseconds() - begin > 10'000'000'000ull) {
      gate->late[rank] = 1;
      return;
    }
  }
}

/// A barrier of the ranks' threads, with a deadline.
class Meeting {
 public:
  explicit Meeting(int count) : count_(count) {}
  void wait() {
    std::unique_lock lock(mutex_);
    const int generation = generation_;
    if (++here_ == count_) {
      here_ = 0;
      ++generation_;
      all_.notify_all();
    } else if (!all_.wait_for(lock, 3 * kDeadline, [&] { return generation_ != generation; })) {
      fail("a rank's thread did not arrive");
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  const int count_;
  int here_ = 0, generation_ = 0;
};

float median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// A timed piece of work, and its milliseconds by rank and round.
struct Measure {
  const char* name;
  std::vector<std::vector<float>> ms{};
  std::vector<float> sustained_ms{};

  /// Milliseconds of the slowest rank by round.
  std::vector<float> slowest() const {
    std::vector<float> worst = ms[0];
    for (const auto& rank : ms)
      for (size_t i = 0; i < worst.size(); ++i) worst[i] = std::max(worst[i], rank[i]);
    return worst;
  }
  float slowest_sustained() const { return *std::max_element(sustained_ms.begin(), sustained_ms.end()); }
};

class Bench {
 public:
  Bench(const Options& o, const Config& c) : options_(o), config_(c), meeting_(o.ranks), ranks_(static_cast<size_t>(o.ranks)) {
    require_gpus();
    must(cudaHostAlloc(&gate_, sizeof(Gate), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(gate_, 0, sizeof(Gate));
    errors_.resize(2 * ranks_.size());
    for (const char* name : {"preparation", "kernel", "both"}) {
      measures_.push_back({name});
      measures_.back().ms.resize(ranks_.size());
      measures_.back().sustained_ms.resize(ranks_.size());
    }
  }
  void run() {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < options_.ranks; ++rank) threads.emplace_back([this, rank] { run_rank(rank); });
    for (std::thread& t : threads) t.join();
  }
  int report() const;

 private:
  void require_gpus() const {
    int count = 0;
    must(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (count < options_.ranks)
      fail("--ranks " + std::to_string(options_.ranks) + ": there are " + std::to_string(count) + " GPUs");
    for (int i = 0; i < options_.ranks; ++i) {
      cudaDeviceProp gpu{};
      must(cudaGetDeviceProperties(&gpu, i), "cudaGetDeviceProperties");
      if (gpu.major != 9 || gpu.multiProcessorCount != 132)
        fail(std::string(gpu.name) + ": the configurations are those of a Hopper GPU with 132 multiprocessors");
    }
  }
  void enable_peers(int rank) const {
    for (int other = 0; other < options_.ranks; ++other) {
      if (other == rank) continue;
      int can = 0;
      must(cudaDeviceCanAccessPeer(&can, rank, other), "cudaDeviceCanAccessPeer");
      if (can == 0) fail("GPU " + std::to_string(rank) + " cannot access GPU " + std::to_string(other));
      must(cudaDeviceEnablePeerAccess(other, 0), "cudaDeviceEnablePeerAccess");
    }
  }
  void run_rank(int rank);

  /// State of a rank's thread.
  struct Worker {
    int rank;
    cudaStream_t stream = nullptr;
    cudaEvent_t begin = nullptr, end = nullptr;
    uint8_t* flush = nullptr;
    unsigned round = 0;
  };
  /// Waits for the event with a deadline, which the runtime's own calls do not support.
  static void await(cudaEvent_t event, const char* what) {
    const auto end = Clock::now() + kDeadline;
    for (cudaError_t status; (status = cudaEventQuery(event)) != cudaSuccess;) {
      if (status != cudaErrorNotReady) must(status, what);
      if (Clock::now() > end) fail(std::string(what) + " did not finish in 20 s");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  /// Releases the waiting kernels of this round after all ranks have queued their work behind them and all kernels wait.
  void open_gate(Worker& w) {
    meeting_.wait();
    if (w.rank == 0) {
      const auto end = Clock::now() + kDeadline;
      for (int r = 0; r < options_.ranks; ++r) {
        while (__atomic_load_n(&gate_->arrived[r], __ATOMIC_ACQUIRE) < w.round)
          if (Clock::now() > end) fail("GPU " + std::to_string(r) + " did not reach the gate");
      }
      __atomic_store_n(&gate_->open, w.round, __ATOMIC_RELEASE);
    }
  }
  /// Milliseconds of `calls` calls after `before` untimed ones. All ranks make the same call.
  float timed(Worker& w, const std::function<void()>& work, int before, int calls, const char* what) {
    ++w.round;
    must(cudaMemsetAsync(w.flush, static_cast<int>(w.round), kFlush, w.stream), "cudaMemsetAsync");
    wait_at_gate<<<1, 1, 0, w.stream>>>(gate_, w.rank, w.round);
    must(cudaGetLastError(), "the gate");
    for (int i = 0; i < before + calls; ++i) {
      if (i == before) must(cudaEventRecord(w.begin, w.stream), "cudaEventRecord");
      work();
      if (i == before + calls - 1) must(cudaEventRecord(w.end, w.stream), "cudaEventRecord");
      if (i == 0) open_gate(w);  // a queue has room for a limited number of calls
    }
    await(w.end, what);
    if (__atomic_load_n(&gate_->late[w.rank], __ATOMIC_ACQUIRE) != 0) fail("the gate opened too late");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, w.begin, w.end), "cudaEventElapsedTime");
    return ms / static_cast<float>(calls);
  }
  void checked(Worker& w, const Peer& peer, size_t which);
  void measure(Worker& w, const Peer& peer);

  const Options options_;
  const Config config_;
  Meeting meeting_;
  std::vector<Rank> ranks_;
  std::vector<Errors> errors_;  // of all ranks before, then of all ranks after the measurements
  std::vector<Measure> measures_;
  Gate* gate_ = nullptr;
};

/// One call without the gate, so that all kernels are loaded before one of them waits, and a check of its results.
void Bench::checked(Worker& w, const Peer& peer, size_t which) {
  const Rank& rank = ranks_[static_cast<size_t>(w.rank)];
  must(cudaMemsetAsync(rank.y, 0xff, static_cast<size_t>(config_.tokens) * kHidden * 2, w.stream), "cudaMemsetAsync");
  peer.prepare(w.stream);
  must(cudaEventRecord(w.end, w.stream), "cudaEventRecord");
  await(w.end, "the peer's preparation");
  meeting_.wait();
  peer.run(w.stream);
  must(cudaEventRecord(w.end, w.stream), "cudaEventRecord");
  await(w.end, "the peer's kernel");
  meeting_.wait();
  errors_[which * ranks_.size() + static_cast<size_t>(w.rank)] = check(config_, ranks_, w.rank, w.stream);
  meeting_.wait();
}

void Bench::measure(Worker& w, const Peer& peer) {
  const std::function<void()> works[] = {[&] { peer.prepare(w.stream); }, [&] { peer.run(w.stream); },
                                         [&] {
                                           peer.prepare(w.stream);
                                           peer.run(w.stream);
                                         }};
  const auto rank = static_cast<size_t>(w.rank);
  for (int round = -kWarmUp; round < options_.rounds; ++round) {
    for (size_t i = 0; i < measures_.size(); ++i) {
      const float ms = timed(w, works[i], 0, 1, measures_[i].name);
      if (round >= 0) measures_[i].ms[rank].push_back(ms);
    }
  }
  meeting_.wait();
  for (size_t i = 1; i < measures_.size() && options_.sustain_ms > 0; ++i) {
    // All ranks must make the same number of calls.
    const int calls = static_cast<int>(static_cast<float>(options_.sustain_ms) / median(measures_[i].slowest())) + 1;
    measures_[i].sustained_ms[rank] = timed(w, works[i], calls / 2 + 1, calls, measures_[i].name);
    meeting_.wait();
  }
}

void Bench::run_rank(int rank) {
  must(cudaSetDevice(rank), "cudaSetDevice");
  enable_peers(rank);
  Worker w{rank};
  must(cudaStreamCreateWithFlags(&w.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  must(cudaEventCreate(&w.begin), "cudaEventCreate");
  must(cudaEventCreate(&w.end), "cudaEventCreate");
  must(cudaMalloc(&w.flush, kFlush), "cudaMalloc");
  ranks_[static_cast<size_t>(rank)] = make_rank(config_, rank, options_.seed, options_.values);
  meeting_.wait();
  const Peer peer(config_, ranks_, rank);
  cudaFuncAttributes attributes{};
  must(cudaFuncGetAttributes(&attributes, wait_at_gate), "the gate");
  checked(w, peer, 0);
  measure(w, peer);
  checked(w, peer, 1);
}

int Bench::report() const {
  cudaDeviceProp gpu{};
  must(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
  int driver = 0;
  must(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  Errors worst{0, 0, 0};
  bool good = true;
  for (const Errors& e : errors_) {
    good = good && e.worst <= kTolerance && e.preparation <= kPreparationTolerance && e.bad == 0;
    worst.worst = e.worst > worst.worst || e.worst != e.worst ? e.worst : worst.worst;
    worst.preparation = e.preparation > worst.preparation || e.preparation != e.preparation ? e.preparation : worst.preparation;
    worst.bad += e.bad;
  }
  const double flops = 6. * config_.tokens * kTopK * kHidden * static_cast<double>(kIntermediate);
  char text[512];
  std::string json = "{\"peer\": \"sgl-deep-gemm 0.2.5\", \"arithmetic\": \"float32 sums rescaled in place\"";
  std::snprintf(text, sizeof text,
                ", \"values\": \"%s\", \"gpu\": \"%s\", \"driver_cuda\": %d, \"ranks\": %d, \"tokens\": %d, \"experts\": %d, "
                "\"rounds\": %d, "
                "\"ring\": %d, \"stages\": %d, \"lag\": %d, \"error\": %.3g, \"preparation_error\": %.3g, \"bad\": %lld",
                options_.values == Values::normal ? "normal" : "bench", gpu.name, driver, config_.ranks, config_.tokens,
                config_.experts, options_.rounds, config_.ring, config_.stages, config_.lag, worst.worst, worst.preparation,
                static_cast<long long>(worst.bad));
  json += text;
  std::printf("%s x %d: %d tokens per rank, %d experts; largest error %.3g (at most %.3g), of the preparation %.3g, %lld bad\n",
              gpu.name, config_.ranks, config_.tokens, config_.experts, worst.worst, kTolerance, worst.preparation,
              static_cast<long long>(worst.bad));
  for (const Measure& m : measures_) {
    const std::vector<float> ms = m.slowest();
    const double p50 = median(ms), sustained = m.slowest_sustained();
    const bool computes = m.name != std::string("preparation");
    std::snprintf(text, sizeof text, ", \"%s\": {\"p50_ms\": %.4f, \"min_ms\": %.4f, \"max_ms\": %.4f", m.name, p50,
                  *std::min_element(ms.begin(), ms.end()), *std::max_element(ms.begin(), ms.end()));
    json += text;
    std::printf("  %-11s %8.4f ms", m.name, p50);
    if (computes) {
      std::snprintf(text, sizeof text, ", \"tflops\": %.1f, \"sustained_ms\": %.4f", flops / p50 / 1e9, sustained);
      json += text;
      std::printf("  %6.1f TFLOP/s  sustained %8.4f ms", flops / p50 / 1e9, sustained);
    }
    json += "}";
    std::printf("\n");
  }
  json += good ? ", \"correct\": true}\n" : ", \"correct\": false}\n";
  if (!options_.json.empty()) {
    std::FILE* file = std::fopen(options_.json.c_str(), "w");
    if (file == nullptr || std::fputs(json.c_str(), file) < 0 || std::fclose(file) != 0) fail("cannot write " + options_.json);
  }
  if (!good) std::printf("  WRONG RESULTS\n");
  return good ? 0 : 1;
}

/// Prints the layout for a comparison with the peer's host code. Needs no GPU.
void print_layout(const Config& c) {
  const Layout l = layout_of(c);
  const auto print = [](const char* name, uint64_t offset) {
    std::printf("%s %llu\n", name, static_cast<unsigned long long>(offset));
  };
  print("bytes", l.bytes);
  print("x", l.x);
  print("x_scales", l.x_scales);
  print("topk_idx", l.topk_idx);
  print("topk_weights", l.topk_weights);
  print("rows", l.rows);
  print("row_scales", l.row_scales);
  print("intermediate_rows", l.intermediate_rows);
  print("intermediate_scales", l.intermediate_scales);
  for (const Map& m : maps_of(c, Rank{})) {
    std::printf("map \"%s\" type %d at %llu: %llu x %llu, stride %llu, box %u x %u, swizzle %d\n", m.name,
                static_cast<int>(m.type), static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(m.base)),
                static_cast<unsigned long long>(m.inner), static_cast<unsigned long long>(m.outer),
                static_cast<unsigned long long>(m.stride_bytes), m.box_inner, m.box_outer, static_cast<int>(m.swizzle));
  }
}

[[noreturn]] void usage(const std::string& problem) {
  std::fprintf(stderr,
               "usage: mega_moe_fp8 [--ranks N] [--tokens N] [--experts N] [--rounds N] [--sustain-ms N] [--seed N] "
               "[--values normal|bench] [--json FILE] [--layout]\nshapes (ranks, tokens per rank, experts):");
  for (const Config& c : configs()) std::fprintf(stderr, " %d,%d,%d", c.ranks, c.tokens, c.experts);
  std::fprintf(stderr, "\nmega_moe_fp8: %s\n", problem.c_str());
  std::exit(2);
}
Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--layout") {
      o.layout = true;
      continue;
    }
    if (i + 1 == argc) usage("option " + name + " is unknown or lacks a value");
    const char* text = argv[++i];
    const auto number = [&](int low, int high) {
      char* end = nullptr;
      const long value = std::strtol(text, &end, 10);
      if (*text == 0 || *end != 0 || value < low || value > high)
        usage(name + " " + text + ": allowed are " + std::to_string(low) + " to " + std::to_string(high));
      return static_cast<int>(value);
    };
    if (name == "--ranks")
      o.ranks = number(2, kMaxRanks);
    else if (name == "--tokens")
      o.tokens = number(1, 1 << 20);
    else if (name == "--experts")
      o.experts = number(1, 1 << 16);
    else if (name == "--rounds")
      o.rounds = number(1, 1000);
    else if (name == "--sustain-ms")
      o.sustain_ms = number(0, 5000);
    else if (name == "--seed")
      o.seed = static_cast<uint64_t>(number(0, 1 << 30));
    else if (name == "--values" && std::strcmp(text, "bench") == 0)
      o.values = Values::bench;
    else if (name == "--values" && std::strcmp(text, "normal") != 0)
      usage("--values " + std::string(text) + ": normal or bench");
    else if (name == "--values")
      o.values = Values::normal;
    else if (name == "--json")
      o.json = text;
    else
      usage("unknown option " + name);
  }
  return o;
}

int run(const Options& o) {
  for (const Config& c : configs()) {
    if (c.ranks != o.ranks || c.tokens != o.tokens || c.experts != o.experts) continue;
    if (o.layout) {
      print_layout(c);
      return 0;
    }
    Bench bench(o, c);
    bench.run();
    return bench.report();
  }
  usage("no kernel was compiled for this shape");
}

}  // namespace
}  // namespace mega_moe

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // loading a kernel could wait for one that waits at the gate
  return mega_moe::run(mega_moe::parse(argc, argv));
}
