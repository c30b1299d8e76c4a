// SPDX-License-Identifier: Apache-2.0
// Operands of the benchmark, and results computed from them with plain float32 loops.
#include "mega_moe_fp8.hpp"

#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace mega_moe {
namespace {

constexpr int kSampled = 16;  // tokens of a rank that are compared with the reference
constexpr float kLargest = 448.F, kSmallest = 1e-10F;

__host__ __device__ uint64_t mix(uint64_t v) {
  v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ (v >> 27)) * 0x94d049bb133111ebull;
  return v ^ (v >> 31);
}
/// Two numbers with a normal distribution, a function of seed and position.
__device__ float2 normals(uint64_t seed, uint64_t position) {
  const uint64_t bits = mix(seed * 0x9e3779b97f4a7c15ull + position);
  const float u = (static_cast<float>(bits >> 40) + 0.5F) / 16777216.F;
  float sine, cosine;
  __sincosf(6.2831853F * static_cast<float>(bits & 0xffffff) / 16777216.F, &sine, &cosine);
  const float radius = sqrtf(-2.F * __logf(u));
  return {radius * cosine, radius * sine};
}

/// A number with a uniform exponent from -6 to 3, from 32 bits.
__device__ float any_exponent(uint32_t bits) {
  const float mantissa = 1.F + static_cast<float>(bits & 0xffff) / 65536.F;
  return ldexpf(bits >> 31 != 0 ? -mantissa : mantissa, static_cast<int>((bits >> 16 & 0x7fff) % 10) - 6);
}

__global__ void fill_tokens(__nv_bfloat162* x, int64_t pairs, uint64_t seed, Values values) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < pairs; i += gridDim.x * int64_t{256}) {
    const uint64_t bits = mix(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(i));
    x[i] = __float22bfloat162_rn(values == Values::normal ? normals(seed, static_cast<uint64_t>(i))
                                                          : make_float2(any_exponent(static_cast<uint32_t>(bits)),
                                                                        any_exponent(static_cast<uint32_t>(bits >> 32))));
  }
}

__device__ float block_max(float v) {
  __shared__ float warps[8];
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) v = fmaxf(v, warps[i]);
  return v;
}

/// A pair of weights with variance 1 / columns.
__device__ float2 weight_pair(uint64_t seed, int pair, float deviation, Values values) {
  if (values == Values::normal) {
    const float2 v = normals(seed, static_cast<uint64_t>(pair));
    return make_float2(v.x * deviation, v.y * deviation);
  }
  const uint64_t bits = mix(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(pair));
  const float amplitude = 1.7320508F * deviation / 255.F;
  return make_float2(static_cast<float>(static_cast<int>(bits & 255) * 2 - 255) * amplitude,
                     static_cast<float>(static_cast<int>(bits >> 32 & 255) * 2 - 255) * amplitude);
}
/// Quantizes one block of 128 x 128 weights: blockIdx is (column block, row block, local expert). `reorder`: stores the rows
/// in the order of `up_row`; scales keep their order.
__global__ void fill_weights(uint8_t* weights, float* scales, int rows, int columns, int first_expert, uint64_t seed,
                             bool reorder, Values values) {
  const uint64_t block_seed = mix(seed + static_cast<uint64_t>(first_expert + static_cast<int>(blockIdx.z))) +
                              blockIdx.y * static_cast<uint64_t>(gridDim.x) + blockIdx.x;
  const float deviation = rsqrtf(static_cast<float>(columns));
  float largest = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kBlock * kBlock / 2; i += 256) {
    const float2 v = weight_pair(block_seed, i, deviation, values);
    largest = fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y)));
  }
  const float times = values == Values::normal ? 1.F : 1.F + static_cast<float>(mix(block_seed) % 4) / 4.F;
  const float scale = block_max(largest) / kLargest * times;
  if (threadIdx.x == 0) scales[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = scale;
  for (int i = static_cast<int>(threadIdx.x); i < kBlock * kBlock / 2; i += 256) {
    const float2 v = weight_pair(block_seed, i, deviation, values);
    const int n = static_cast<int>(blockIdx.y) * kBlock + i / (kBlock / 2);
    const int64_t row = static_cast<int64_t>(blockIdx.z) * rows + (reorder ? up_row(n) : n);
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kBlock + i % (kBlock / 2) * 2;
    const float2 scaled = make_float2(v.x / scale, v.y / scale);
    *reinterpret_cast<__nv_fp8x2_storage_t*>(weights + row * columns + column) =
        __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
  }
}

__host__ __device__ float value(uint8_t e4m3) {
  __nv_fp8_e4m3 v;
  v.__x = e4m3;
  return static_cast<float>(v);
}

/// A warp's share of the product of a quantized row and a row of weights, summed over the warp.
__device__ float dot(const uint8_t* row, const float* row_scales, const uint8_t* weights, const float* scales, int blocks) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float sum = 0;
  for (int b = 0; b < blocks; ++b) {
    float part = 0;
    for (int i = 0; i < kBlock / 32; ++i) {
      const int at = b * kBlock + i * 32 + lane;
      part += value(row[at]) * value(weights[at]);
    }
    sum += part * row_scales[b] * scales[b];
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}
/// Gate and up of one token and expert: a warp per output.
__global__ void reference_up(const uint8_t* x, const float* x_scales, const uint8_t* weights, const float* scales, float* out) {
  const int n = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const float sum =
      dot(x, x_scales, weights + static_cast<int64_t>(up_row(n)) * kHidden, scales + n / kBlock * kHiddenBlocks, kHiddenBlocks);
  if (threadIdx.x % 32 == 0) out[n] = sum;
}
/// silu(gate) * up * weight of the route, quantized by blocks of 128: one thread block each.
__global__ void reference_activation(const float* gate_up, const float* route_weight, uint8_t* out, float* scales) {
  const int i = static_cast<int>(blockIdx.x * kBlock + threadIdx.x);
  const float gate = gate_up[i], up = gate_up[kIntermediate + i];
  const float h = gate / (1.F + expf(-gate)) * up * *route_weight;
  const float scale = fmaxf(block_max(fabsf(h)), kSmallest) / kLargest;
  out[i] = __nv_cvt_float_to_fp8(h / scale, __NV_SATFINITE, __NV_E4M3);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}
/// Adds an expert's outputs to those of the token.
__global__ void reference_down(const uint8_t* h, const float* h_scales, const uint8_t* weights, const float* scales,
                               float* out) {
  const int n = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const float sum = dot(h, h_scales, weights + static_cast<int64_t>(n) * kIntermediate,
                        scales + n / kBlock * kIntermediateBlocks, kIntermediateBlocks);
  if (threadIdx.x % 32 == 0) out[n] += sum;
}
__global__ void count_bad(const __nv_bfloat16* y, int64_t count, unsigned long long* bad) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += gridDim.x * int64_t{256})
    if (!isfinite(__bfloat162float(y[i]))) atomicAdd(bad, 1ull);
}

template <class T>
T* allocate(int64_t count) {
  T* p = nullptr;
  must(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  return p;
}
template <class T>
std::vector<T> fetch(const T* from, int64_t count) {
  std::vector<T> to(static_cast<size_t>(count));
  must(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDefault), "cudaMemcpy to the host");
  return to;
}
template <class T>
void store(T* to, const std::vector<T>& from) {
  must(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyDefault), "cudaMemcpy from the host");
}

/// Draws for every token distinct experts, uniformly, and weights that sum to 1.
void route(const Config& c, const Rank& rank, uint64_t seed) {
  std::mt19937_64 random(mix(seed * 1000 + static_cast<uint64_t>(rank.idx)));
  std::vector<int32_t> experts;
  std::vector<float> weights;
  for (int t = 0; t < c.tokens; ++t) {
    const size_t first = experts.size();
    while (experts.size() < first + kTopK) {
      const auto e = static_cast<int32_t>(random() % static_cast<uint64_t>(c.experts));
      if (std::find(experts.begin() + static_cast<std::ptrdiff_t>(first), experts.end(), e) == experts.end())
        experts.push_back(e);
    }
    float sum = 0, drawn[kTopK];
    for (float& w : drawn) sum += w = 0.5F + static_cast<float>(random() >> 40) / 16777216.F;
    for (const float w : drawn) weights.push_back(w / sum);
  }
  store(rank.topk_idx, experts);
  store(rank.topk_weights, weights);
}

double relative(const std::vector<float>& a, const std::vector<float>& reference) {
  double difference = 0, square = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(reference[i]);
    difference += d * d;
    square += static_cast<double>(reference[i]) * static_cast<double>(reference[i]);
  }
  return std::sqrt(difference / square);
}
/// The larger number; NaN counts as larger than any number.
double larger(double a, double b) { return std::isnan(a) || b <= a ? a : b; }

std::vector<float> widened(const __nv_bfloat16* from) {
  const auto narrow = fetch(from, kHidden);
  std::vector<float> wide;
  for (const __nv_bfloat16 v : narrow) wide.push_back(__bfloat162float(v));
  return wide;
}

class Reference {
 public:
  Reference(const Config& c, const std::vector<Rank>& ranks, cudaStream_t stream)
      : config_(c), layout_(layout_of(c)), ranks_(ranks), stream_(stream) {}
  ~Reference() {
    for (void* p :
         {static_cast<void*>(gate_up_), static_cast<void*>(h_), static_cast<void*>(h_scales_), static_cast<void*>(out_)})
      cudaFree(p);
  }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

  /// Outputs of a token, from the rows and weights of routes that the preparation wrote.
  std::vector<float> outputs(const Rank& rank, int64_t token) {
    const auto experts = fetch(reinterpret_cast<const int64_t*>(rank.shared + layout_.topk_idx) + token * kTopK, kTopK);
    must(cudaMemsetAsync(out_, 0, kHidden * sizeof(float), stream_), "cudaMemsetAsync");
    for (int k = 0; k < kTopK; ++k) add_route(rank, token, k, static_cast<int>(experts[static_cast<size_t>(k)]));
    must(cudaStreamSynchronize(stream_), "the reference");
    return fetch(out_, kHidden);
  }
  /// A token's inputs as quantized by the preparation.
  std::vector<float> inputs(const Rank& rank, int64_t token) const {
    const auto row = fetch(rank.shared + layout_.x + token * kHidden, kHidden);
    const auto scales =
        fetch(reinterpret_cast<const float*>(rank.shared + layout_.x_scales) + token * kHiddenBlocks, kHiddenBlocks);
    std::vector<float> x;
    for (size_t i = 0; i < row.size(); ++i) x.push_back(value(row[i]) * scales[i / kBlock]);
    return x;
  }

 private:
  void add_route(const Rank& rank, int64_t token, int k, int expert) {
    if (expert < 0 || expert >= config_.experts) fail("the preparation wrote expert " + std::to_string(expert));
    const Rank& owner = ranks_[static_cast<size_t>(expert / config_.local_experts())];
    const int64_t local = expert % config_.local_experts();
    const auto* weights = reinterpret_cast<const float*>(rank.shared + layout_.topk_weights) + token * kTopK + k;
    reference_up<<<2 * kIntermediate / 8, 256, 0, stream_>>>(
        rank.shared + layout_.x + token * kHidden,
        reinterpret_cast<const float*>(rank.shared + layout_.x_scales) + token * kHiddenBlocks,
        owner.up + local * 2 * kIntermediate * kHidden, owner.up_scales + local * 2 * kIntermediateBlocks * kHiddenBlocks,
        gate_up_);
    reference_activation<<<kIntermediateBlocks, kBlock, 0, stream_>>>(gate_up_, weights, h_, h_scales_);
    reference_down<<<kHidden / 8, 256, 0, stream_>>>(h_, h_scales_, owner.down + local * kHidden * kIntermediate,
                                                     owner.down_scales + local * kHiddenBlocks * kIntermediateBlocks, out_);
    must(cudaGetLastError(), "the reference");
  }

  const Config& config_;
  Layout layout_;
  const std::vector<Rank>& ranks_;
  cudaStream_t stream_;
  float *gate_up_ = allocate<float>(2 * kIntermediate), *h_scales_ = allocate<float>(kIntermediateBlocks);
  float* out_ = allocate<float>(kHidden);
  uint8_t* h_ = allocate<uint8_t>(kIntermediate);
};

}  // namespace

Rank make_rank(const Config& c, int idx, uint64_t seed, Values values) {
  Rank r;
  const int64_t experts = c.local_experts(), tokens = c.tokens;
  r.idx = idx;
  r.x = allocate<__nv_bfloat16>(tokens * kHidden);
  r.y = allocate<__nv_bfloat16>(tokens * kHidden);
  r.topk_idx = allocate<int32_t>(tokens * kTopK);
  r.topk_weights = allocate<float>(tokens * kTopK);
  r.up = allocate<uint8_t>(experts * 2 * kIntermediate * kHidden);
  r.up_scales = allocate<float>(experts * 2 * kIntermediateBlocks * kHiddenBlocks);
  r.down = allocate<uint8_t>(experts * kHidden * kIntermediate);
  r.down_scales = allocate<float>(experts * kHiddenBlocks * kIntermediateBlocks);
  r.shared = allocate<uint8_t>(static_cast<int64_t>(layout_of(c).bytes));
  must(cudaMemset(r.shared, 0, layout_of(c).bytes), "cudaMemset");
  must(cudaMemset(r.y, 0xff, static_cast<size_t>(tokens * kHidden) * 2), "cudaMemset");
  fill_tokens<<<1024, 256>>>(reinterpret_cast<__nv_bfloat162*>(r.x), tokens * kHidden / 2,
                             mix(seed + 1) + static_cast<uint64_t>(idx), values);
  const auto blocks = static_cast<unsigned>(experts);
  fill_weights<<<dim3(kHiddenBlocks, 2 * kIntermediateBlocks, blocks), 256>>>(
      r.up, r.up_scales, 2 * kIntermediate, kHidden, idx * c.local_experts(), mix(seed + 2), true, values);
  fill_weights<<<dim3(kIntermediateBlocks, kHiddenBlocks, blocks), 256>>>(
      r.down, r.down_scales, kHidden, kIntermediate, idx * c.local_experts(), mix(seed + 3), false, values);
  must(cudaGetLastError(), "operands");
  route(c, r, seed);
  must(cudaDeviceSynchronize(), "operands");
  return r;
}

Errors check(const Config& c, const std::vector<Rank>& ranks, int idx, cudaStream_t stream) {
  const Rank& rank = ranks[static_cast<size_t>(idx)];
  Reference reference(c, ranks, stream);
  Errors errors{0, 0, 0};
  for (int i = 0; i < kSampled; ++i) {
    const int64_t token = static_cast<int64_t>(c.tokens - 1) * i / (kSampled - 1);  // the first, the last, and some between
    errors.worst = larger(errors.worst, relative(widened(rank.y + token * kHidden), reference.outputs(rank, token)));
    errors.preparation = larger(errors.preparation, relative(reference.inputs(rank, token), widened(rank.x + token * kHidden)));
  }
  auto* bad = allocate<unsigned long long>(1);
  must(cudaMemsetAsync(bad, 0, sizeof *bad, stream), "cudaMemsetAsync");
  count_bad<<<1024, 256, 0, stream>>>(rank.y, static_cast<int64_t>(c.tokens) * kHidden, bad);
  must(cudaStreamSynchronize(stream), "the check of all outputs");
  errors.bad = static_cast<int64_t>(fetch(bad, 1)[0]);
  must(cudaFree(bad), "cudaFree");
  return errors;
}

}  // namespace mega_moe
