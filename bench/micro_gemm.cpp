// SPDX-License-Identifier: Apache-2.0
// Speed of expert computation on one core: single tiles of both products, and complete expert calls. Measures CPU time, so
// other load on the machine has little effect. Several experts alternate, so weights are read from memory, as in a layer,
// rather than from the caches.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "gemm/cpu/tile_gemm.hpp"
#include "switchyard/expert.hpp"

namespace switchyard {
namespace {

constexpr int kExperts = 4;

/// Values of ordinary magnitude. Their bits do not matter, but no product may be subnormal.
std::vector<uint16_t> some_bf16(int64_t n) {
  std::vector<uint16_t> out(static_cast<size_t>(n));
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint16_t>(0x3C00 + i % 251);
  return out;
}

void set_rate(benchmark::State& state, double operations) {
  state.counters["FLOP/s"] = benchmark::Counter(operations, benchmark::Counter::kIsIterationInvariantRate);
}

/// Multiplies `rows` rows by the [n, k] weights of kExperts groups in turn.
void run_tiles(benchmark::State& state, int64_t rows, int64_t n, int64_t k, WeightStorage storage) {
  detail::TileGemm gemm(kExperts, n, k, storage);
  const std::vector<uint16_t> b = some_bf16(kExperts * n * k), a = some_bf16(rows * k);
  gemm.bind(b.data());
  for (int g = 0; g < kExperts && storage == WeightStorage::packed; ++g) gemm.pack(g, b.data() + g * n * k);
  std::vector<float> c(static_cast<size_t>(rows * n));
  gemm.tile(0, a.data(), rows, c.data());  // compiles the kernel
  int group = 0;
  for (auto _ : state) {
    gemm.tile(group, a.data(), rows, c.data());
    benchmark::DoNotOptimize(c.data());
    group = (group + 1) % kExperts;
  }
  set_rate(state, 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k));
  state.SetLabel(gemm.implementation());
}

// Arguments: rows, H, I, storage.
void tile_gate_up(benchmark::State& state) {
  run_tiles(state, state.range(0), 2 * state.range(2), state.range(1), static_cast<WeightStorage>(state.range(3)));
}
void tile_down(benchmark::State& state) {
  run_tiles(state, state.range(0), state.range(1), state.range(2), static_cast<WeightStorage>(state.range(3)));
}

/// ExpertMlp::forward with `rows` rows for each of kExperts experts: both products, SwiGLU and rounding.
void expert_forward(benchmark::State& state) {
  const int64_t rows = state.range(0), h = state.range(1), i = state.range(2);
  ExpertMlp mlp({h, i, kExperts}, ExpertWeights(1, h, i).source(0), {});
  const std::vector<uint16_t> x = some_bf16(kExperts * rows * h);
  std::vector<uint16_t> y(x.size());
  std::vector<int64_t> first, count(kExperts, rows);
  for (int e = 0; e < kExperts; ++e) first.push_back(e * rows);
  mlp.forward(x.data(), first, count, y.data());
  for (auto _ : state) {
    mlp.forward(x.data(), first, count, y.data());
    benchmark::DoNotOptimize(y.data());
  }
  set_rate(state, 6.0 * kExperts * static_cast<double>(rows) * static_cast<double>(h) * static_cast<double>(i));
  state.SetLabel(mlp.implementation());
}

/// ExpertWeights::fill for one expert, in weights per second.
void generate_weights(benchmark::State& state) {
  const int64_t h = 7168, i = 512;
  const ExpertWeights weights(1, h, i);
  std::vector<uint16_t> w13(static_cast<size_t>(2 * h * i)), w2(static_cast<size_t>(h * i));
  for (auto _ : state) {
    weights.fill(3, w13, w2);
    benchmark::DoNotOptimize(w13.data());
  }
  state.SetItemsProcessed(state.iterations() * 3 * h * i);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "H", "I"});
  for (const int64_t h : {1024, 7168}) {
    for (const int64_t i : {512, 2048}) {
      for (const int64_t rows : {1, 16, 64, 256}) bench->Args({rows, h, i});
    }
  }
}
void sizes_and_storages(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "H", "I", "view"});
  for (const int64_t view : {0, 1}) {
    for (const int64_t h : {1024, 7168}) {
      for (const int64_t i : {512, 2048}) {
        for (const int64_t rows : {1, 16, 64, 256}) bench->Args({rows, h, i, view});
      }
    }
  }
}

BENCHMARK(tile_gate_up)->Apply(sizes_and_storages)->Unit(benchmark::kMicrosecond)->MinTime(0.1);
BENCHMARK(tile_down)->Apply(sizes_and_storages)->Unit(benchmark::kMicrosecond)->MinTime(0.1);
BENCHMARK(expert_forward)->Apply(sizes)->Unit(benchmark::kMicrosecond)->MinTime(0.1);
BENCHMARK(generate_weights)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace switchyard

BENCHMARK_MAIN();
