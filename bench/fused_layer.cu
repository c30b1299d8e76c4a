// SPDX-License-Identifier: Apache-2.0
// The kernel of a whole MoE layer beside both products alone, ranks as GPUs of this process (or several on one): tables are made
// by the host, rows lie in memory that peers reach.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "arch/gpu_tensor_map.hpp"
#include "fused/layer_kernel.cuh"
#include "gpu/gemm/gemm_reference.hpp"
#include "switchyard/expert.hpp"

namespace {

using namespace switchyard;
using namespace switchyard::detail;
using fused::LayerParams;
using gemm::Finish;

void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct Options {
  int ranks = 2, experts = 128, topk = 8, iterations = 20, sms = 0, lag = -1, skew = 0;
  int64_t tokens = 4096, hidden = 7168, intermediate = 2048;
  bool check = false, sorted = true;
  uint64_t seed = 1;
  int flags = 0;
};

using Up = gemm::Kind<__nv_bfloat16, ptx::OperandOrder::inner, Finish::gated>;
using Down = gemm::Kind<__nv_bfloat16, ptx::OperandOrder::inner, Finish::plain>;

__global__ void reference_sum(HeapView heap, const uint64_t* y_of, int rank, ExpertMap map, int topk, int64_t tokens, int64_t hidden,
                              const int32_t* ids, const int32_t* rows, const float* weights, const __nv_bfloat16* out,
                              unsigned long long* unequal) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < tokens * hidden; i += gridDim.x * 256ll) {
    const int64_t t = i / hidden, c = i % hidden;
    float sum = 0;
    for (int k = 0; k < topk; ++k) {
      const int id = ids[t * topk + k], row = rows[t * topk + k];
      if (id < 0 || row < 0) continue;
      const auto* y = reinterpret_cast<const __nv_bfloat16*>(y_of[map.owner(id)]);
      sum = __fadd_rn(sum, __fmul_rn(weights[t * topk + k], __bfloat162float(y[row * hidden + c])));
    }
    const __nv_bfloat16 want = __float2bfloat16_rn(sum);
    if (__bfloat16_as_ushort(want) != __bfloat16_as_ushort(out[i])) atomicAdd(unequal, 1ull);
  }
}
__global__ void compare_words(const uint4* a, const uint4* b, int64_t count, unsigned long long* unequal) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const uint4 x = a[i], y = b[i];
    if (x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w) atomicAdd(unequal, 1ull);
  }
}
__global__ void compare_rows(HeapView heap, uint64_t x_at, const int64_t* source, const uint4* rows, int64_t count, int64_t vectors,
                             unsigned long long* unequal) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count * vectors; i += gridDim.x * 256ll) {
    const int64_t r = i / vectors, v = i % vectors;
    const int64_t s = source[r];
    const uint4 a = reinterpret_cast<const uint4*>(heap.base[s >> 48] + x_at)[(s & 0xffffffff) * vectors + v], b = rows[i];
    if (a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w) atomicAdd(unequal, 1ull);
  }
}

struct Rank {
  int device = 0, local = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::byte* segment = nullptr;
  LayerParams p{};
  std::vector<int64_t> counts, first;
  std::unique_ptr<ExpertMlp> mlp;
  int64_t *num_rows = nullptr, *first_row = nullptr;
  std::byte *x_rows = nullptr, *h = nullptr, *y = nullptr, *y2 = nullptr, *out = nullptr, *w13 = nullptr, *w2 = nullptr, *flush = nullptr;
};

template <class T>
T* get(int64_t count) {
  void* m = nullptr;
  must(cudaMalloc(&m, static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)), "cudaMalloc");
  must(cudaMemset(m, 0, static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(m);
}
template <class T>
T* put(const std::vector<T>& v) {
  T* m = get<T>(static_cast<int64_t>(v.size()));
  must(cudaMemcpy(m, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return m;
}

class Probe {
 public:
  explicit Probe(const Options& o) : o_(o), ranks_(static_cast<size_t>(o.ranks)) {
    must(cudaGetDeviceCount(&devices_), "devices");
    route();
    for (int r = 0; r < o.ranks; ++r) make(r);
    for (int r = 0; r < o.ranks; ++r) connect(r);
  }

  void launch(Rank& k) {
    must(cudaSetDevice(k.device), "device");
    k.p.epoch = epoch_;
    auto* const kernel = &fused::layer_kernel<Up, Down>;
    const int blocks = o_.sms > 0 ? o_.sms : 132 / std::max(1, (o_.ranks + devices_ - 1) / devices_);
    kernel<<<static_cast<unsigned>(blocks), gemm::kThreads, k.p.up.shared_bytes, k.stream>>>(k.p);
    must(cudaGetLastError(), "launch");
  }
  void sync() {
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      must(cudaStreamSynchronize(k.stream), "sync");
    }
  }
  void layer() {
    ++epoch_;
    for (Rank& k : ranks_) launch(k);
  }
  void products() {
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      ExpertRows rows;
      rows.num_rows = k.num_rows;
      rows.first_row = k.first_row;
      const ConstRows x{k.x_rows, k.p.rows, o_.hidden, DType::bf16};
      const Rows y{k.y2, k.p.rows, o_.hidden, DType::bf16};
      k.mlp->forward(x, rows, y, ExpertCall{k.stream, 0});
    }
  }
  float timed(const std::function<void()>& what) {
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      must(cudaMemsetAsync(k.flush, 1, kFlush, k.stream), "flush");
    }
    sync();
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      must(cudaEventRecord(k.begin, k.stream), "event");
    }
    what();
    float worst = 0;
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      must(cudaEventRecord(k.end, k.stream), "event");
    }
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      must(cudaEventSynchronize(k.end), "event");
      float ms = 0;
      must(cudaEventElapsedTime(&ms, k.begin, k.end), "event");
      worst = std::max(worst, ms);
    }
    return worst;
  }
  bool check() {
    bool good = true;
    products();
    sync();
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      auto* n = get<unsigned long long>(3);
      unsigned long long host[3], fault = 0;
      const int64_t vectors = o_.hidden / 8;
      compare_rows<<<256, 256>>>(k.p.heap, k.p.places.x, reinterpret_cast<int64_t*>(k.segment + k.p.places.row_source),
                                 reinterpret_cast<uint4*>(k.x_rows), k.p.rows, vectors, n);
      compare_words<<<256, 256>>>(reinterpret_cast<uint4*>(k.y), reinterpret_cast<uint4*>(k.y2), k.p.rows * vectors, n + 1);
      std::vector<uint64_t> ys;
      for (const Rank& other : ranks_) ys.push_back(reinterpret_cast<uint64_t>(other.y));
      reference_sum<<<256, 256>>>(k.p.heap, put(ys), k.p.heap.rank, k.p.map, o_.topk, o_.tokens, o_.hidden, k.p.ids, k.p.route_row,
                                  k.p.weights, reinterpret_cast<const __nv_bfloat16*>(k.out), n + 2);
      must(cudaMemcpy(host, n, sizeof host, cudaMemcpyDeviceToHost), "check");
      must(cudaMemcpy(&fault, k.p.fault, sizeof fault, cudaMemcpyDeviceToHost), "fault");
      std::printf("rank %d: rows %lld, unequal: rows %llu, outputs %llu, sums %llu; fault %llu\n", k.p.heap.rank,
                  static_cast<long long>(k.p.rows), host[0], host[1], host[2], fault);
      good = good && host[0] + host[1] + host[2] + fault == 0;
    }
    return good;
  }
  void poison() {
    for (Rank& k : ranks_) {
      must(cudaSetDevice(k.device), "device");
      for (std::byte* m : {k.x_rows, k.y, k.out}) must(cudaMemset(m, 0xff, static_cast<size_t>((m == k.out ? o_.tokens : k.p.rows) * o_.hidden * 2)), "poison");
      must(cudaMemset(k.h, 0xff, static_cast<size_t>(k.p.rows * o_.intermediate * 2)), "poison");
      must(cudaDeviceSynchronize(), "poison");
    }
  }
  uint64_t fault() {
    uint64_t worst = 0;
    for (Rank& k : ranks_) {
      uint64_t f = 0;
      must(cudaMemcpy(&f, k.p.fault, sizeof f, cudaMemcpyDeviceToHost), "fault");
      worst = std::max(worst, f);
    }
    return worst;
  }

 private:
  static constexpr size_t kFlush = 64 << 20;

  void route() {
    std::mt19937_64 g(o_.seed);
    const ExpertMap map{o_.experts, o_.ranks};
    ids_.resize(ranks_.size());
    rows_.resize(ranks_.size());
    std::vector<int64_t> count(static_cast<size_t>(o_.experts));
    for (auto& ids : ids_) {
      std::vector<int> all(static_cast<size_t>(o_.experts));
      for (int e = 0; e < o_.experts; ++e) all[static_cast<size_t>(e)] = e;
      for (int64_t t = 0; t < o_.tokens; ++t) {
        for (int k = 0; k < o_.topk; ++k) {
          const int spread = o_.skew > 0 && g() % 4 == 0 ? o_.skew : o_.experts;
          int at = 0;
          for (int tries = 0; tries < 100; ++tries) {
            at = static_cast<int>(g() % static_cast<uint64_t>(spread));
            if (std::find(ids.end() - k, ids.end(), at) == ids.end()) break;
          }
          ids.push_back(at);
        }
      }
      for (const int32_t id : ids) ++count[static_cast<size_t>(id)];
    }
    std::vector<int64_t> next(count.size());
    for (int r = 0; r < o_.ranks; ++r) {
      int64_t at = 0;
      for (int e = map.first(r); e < map.first(r) + map.count(r); ++e) {
        ranks_[static_cast<size_t>(r)].first.push_back(at);
        ranks_[static_cast<size_t>(r)].counts.push_back(count[static_cast<size_t>(e)]);
        next[static_cast<size_t>(e)] = at;
        at += count[static_cast<size_t>(e)];
      }
      ranks_[static_cast<size_t>(r)].p.rows = at;
    }
    for (size_t r = 0; r < ranks_.size(); ++r)
      for (const int32_t id : ids_[r]) rows_[r].push_back(static_cast<int32_t>(next[static_cast<size_t>(id)]++));
  }

  void make(int r) {
    Rank& k = ranks_[static_cast<size_t>(r)];
    const ExpertMap map{o_.experts, o_.ranks};
    k.device = r % devices_;
    must(cudaSetDevice(k.device), "device");
    for (int d = 0; d < devices_; ++d)
      if (d != k.device) (void)cudaDeviceEnablePeerAccess(d, 0);
    (void)cudaGetLastError();
    must(cudaStreamCreateWithFlags(&k.stream, cudaStreamNonBlocking), "stream");
    must(cudaEventCreate(&k.begin), "event");
    must(cudaEventCreate(&k.end), "event");
    const int experts = map.count(r);
    LayerParams& p = k.p;
    int64_t most_rows = 0;
    for (const Rank& other : ranks_) most_rows = std::max(most_rows, other.p.rows);
    p.row_bytes = o_.hidden * 2;
    uint64_t at = 0;
    const auto place = [&](int64_t bytes) { return std::exchange(at, (at + static_cast<uint64_t>(bytes) + 1023) / 1024 * 1024); };
    p.places.x = place(o_.tokens * p.row_bytes);
    p.places.row_source = place(most_rows * 8);
    p.places.pull_rows = place(most_rows * 4 * o_.topk);
    p.places.told = place(o_.ranks * 8);
    p.places.inbox = place(o_.tokens * o_.topk * p.row_bytes);
    p.places.returned = place(o_.tokens * o_.topk * 8);
    k.segment = get<std::byte>(static_cast<int64_t>(at));
    gemm_test::fill(k.segment + p.places.x, o_.tokens * o_.hidden, false, gemm_test::Fill::normal, o_.seed + static_cast<uint64_t>(r), 1.F);
    k.x_rows = get<std::byte>(p.rows * p.row_bytes);
    k.h = get<std::byte>(p.rows * o_.intermediate * 2);
    k.y = get<std::byte>(p.rows * p.row_bytes);
    k.y2 = get<std::byte>(p.rows * p.row_bytes);
    k.out = get<std::byte>(o_.tokens * p.row_bytes);
    k.flush = get<std::byte>(kFlush);
    const int64_t per13 = 2 * o_.intermediate * o_.hidden, per2 = o_.hidden * o_.intermediate;
    k.w13 = get<std::byte>(experts * per13 * 2);
    k.w2 = get<std::byte>(experts * per2 * 2);
    gemm_test::fill(k.w13, experts * per13, false, gemm_test::Fill::normal, 100 + static_cast<uint64_t>(r), 0.02F);
    gemm_test::fill(k.w2, experts * per2, false, gemm_test::Fill::normal, 200 + static_cast<uint64_t>(r), 0.02F);
    k.num_rows = put(k.counts);
    k.first_row = put(k.first);
    ExpertOptions options;
    options.backend = Backend::cuda;
    options.storage = WeightStorage::view;
    options.max_rows = p.rows;
    k.mlp = std::make_unique<ExpertMlp>(ExpertShape{o_.hidden, o_.intermediate, experts}, k.w13, k.w2, options);
    p.map = map;
    p.topk = o_.topk;
    p.lag = o_.lag < 0 ? experts : std::min(o_.lag, experts);
    p.tokens = o_.tokens;
    p.timeout_ns = 2'000'000'000;
    p.ids = put(ids_[static_cast<size_t>(r)]);
    p.route_row = put(rows_[static_cast<size_t>(r)]);
    std::mt19937 g(7);
    std::vector<float> weights(ids_[static_cast<size_t>(r)].size());
    for (float& w : weights) w = std::uniform_real_distribution<float>(0.05F, 0.3F)(g);
    p.weights = put(weights);
    if (o_.sorted) p.order = put(order_of(r));
    p.x_rows = k.x_rows;
    p.y = k.y;
    p.out = k.out;
    int64_t tiles = 0;
    for (const int64_t c : k.counts) tiles += count_row_tiles(c, fused::kWidest);
    p.up = product(experts, 2 * o_.intermediate, o_.hidden, true, k, k.w13, k.x_rows, k.h);
    p.down = product(experts, o_.hidden, o_.intermediate, false, k, k.w2, k.h, k.y);
    p.arrived = get<uint64_t>(p.rows);
    p.h_done = get<uint64_t>(tiles * p.up.column_tiles);
    p.y_done = get<uint64_t>(tiles * p.down.column_tiles);
    p.counters = get<fused::LayerCounters>(1);
    p.fault = get<uint64_t>(1);
    must(cudaFuncSetAttribute(fused::layer_kernel<Up, Down>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(p.up.shared_bytes)),
         "shared memory");
    must(cudaDeviceSynchronize(), "make");
  }
  /// Tokens by the highest local number of their experts.
  std::vector<int32_t> order_of(int r) const {
    const ExpertMap map{o_.experts, o_.ranks};
    const auto& ids = ids_[static_cast<size_t>(r)];
    std::vector<int32_t> order(static_cast<size_t>(o_.tokens)), key(order.size());
    for (size_t t = 0; t < order.size(); ++t) {
      order[t] = static_cast<int32_t>(t);
      for (size_t f = t * static_cast<size_t>(o_.topk); f < (t + 1) * static_cast<size_t>(o_.topk); ++f)
        key[t] = std::max(key[t], ids[f] - map.first(map.owner(ids[f])));
    }
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key[static_cast<size_t>(a)] < key[static_cast<size_t>(b)]; });
    return order;
  }

  gemm::GroupedParams product(int experts, int64_t n, int64_t k_size, bool gated, const Rank& k, void* weights, void* in, void* out) const {
    using gpu::Dimension;
    using gpu::ElementType;
    using gpu::Swizzle;
    gemm::GroupedParams g;
    g.num_experts = experts;
    g.columns = static_cast<int>(gated ? n / 2 : n);
    const int in_tile = gated ? gemm::kTileColumns / 2 : gemm::kTileColumns;
    g.column_tiles = (g.columns + in_tile - 1) / in_tile;
    g.inner_blocks = std::max(3, static_cast<int>((k_size + gemm::kInner - 1) / gemm::kInner));
    g.gate_rows = static_cast<int>(n / 2);
    int shared = 0;
    must(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, k.device), "attribute");
    g.shared_bytes = static_cast<uint32_t>(shared);
    g.gating = {std::numeric_limits<float>::infinity(), 1.F, 0.F};
    g.ranges.num_rows = k.num_rows;
    g.ranges.wide = true;
    g.ranges.first_row = k.first_row;
    g.ranges.end = k.p.rows;
    const auto nn = static_cast<uint64_t>(n), kk = static_cast<uint64_t>(k_size), e = static_cast<uint64_t>(experts), row = kk * 2;
    bool good = true;
    if (gated)
      good = gpu::make_tensor_map(&g.weights, weights, ElementType::bf16,
                                  {{kk, 0, gemm::kInner}, {8, row, 8}, {2, nn / 2 * row, 2}, {nn / 16, 8 * row, 16}, {e, nn * row, 1}},
                                  Swizzle::bytes_128);
    else
      good = gpu::make_tensor_map(&g.weights, weights, ElementType::bf16, {{kk, 0, gemm::kInner}, {nn, row, gemm::kTileColumns}, {e, nn * row, 1}},
                                  Swizzle::bytes_128);
    const auto rows = static_cast<uint64_t>(k.p.rows);
    for (uint32_t s = 1; s <= fused::kWidest / kRowStep; ++s)
      good = good && gpu::make_tensor_map(&g.rows[s - 1], in, ElementType::bf16, {{kk, 0, gemm::kInner}, {rows, row, s * kRowStep}}, Swizzle::bytes_128);
    const uint32_t columns = gated ? 32 : 64;
    const Swizzle swizzle = gated ? Swizzle::bytes_64 : Swizzle::bytes_128;
    const auto width = static_cast<uint64_t>(g.columns);
    good = good && gpu::make_tensor_map(&g.out_64, out, ElementType::bf16, {{width, 0, columns}, {rows, width * 2, 64}}, swizzle) &&
           gpu::make_tensor_map(&g.out_16, out, ElementType::bf16, {{width, 0, columns}, {rows, width * 2, 16}}, swizzle);
    g.out = static_cast<uint16_t*>(out);
    if (!good) throw std::runtime_error("tensor map");
    return g;
  }

  void connect(int r) {
    HeapView& heap = ranks_[static_cast<size_t>(r)].p.heap;
    heap.rank = r;
    heap.world = o_.ranks;
    for (int other = 0; other < o_.ranks; ++other) heap.base[other] = ranks_[static_cast<size_t>(other)].segment;
  }

  Options o_;
  int devices_ = 1;
  uint64_t epoch_ = 0;
  std::vector<Rank> ranks_;
  std::vector<std::vector<int32_t>> ids_, rows_;
};

float median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("The kernel of a whole MoE layer beside its products alone.");
  app.add_option("--ranks", o.ranks);
  app.add_option("--tokens", o.tokens);
  app.add_option("--hidden", o.hidden);
  app.add_option("--intermediate", o.intermediate);
  app.add_option("--experts", o.experts);
  app.add_option("--topk", o.topk);
  app.add_option("--iterations", o.iterations);
  app.add_option("--sms", o.sms);
  app.add_option("--lag", o.lag);
  app.add_option("--skew", o.skew);
  app.add_option("--seed", o.seed);
  app.add_flag("--check", o.check);
  app.add_flag("!--unsorted", o.sorted);
  CLI11_PARSE(app, argc, argv);
  try {
    Probe probe(o);
    bool good = true;
    if (o.check) {
      for (int i = 0; i < 3; ++i) {
        probe.poison();
        probe.layer();
        probe.sync();
        good = probe.check() && good;
      }
    }
    std::vector<float> layer, products;
    for (int i = 0; i < o.iterations && good; ++i) {
      products.push_back(probe.timed([&] { probe.products(); }));
      layer.push_back(probe.timed([&] { probe.layer(); }));
    }
    if (!products.empty())
      std::printf("tokens %lld experts %d lag %d: products %.3f ms, layer %.3f ms, ratio %.3f, fault %llu\n", static_cast<long long>(o.tokens),
                  o.experts, o.lag, median(products), median(layer), median(layer) / median(products), static_cast<unsigned long long>(probe.fault()));
    return good && probe.fault() == 0 ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "fused_layer: %s\n", e.what());
    return 2;
  }
}
