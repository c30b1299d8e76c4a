// SPDX-License-Identifier: Apache-2.0
// Compares the row ops of arch/cuda with the host: copies of every alignment and size through every path, and sums and
// quantization bit by bit. One GPU. Prints "N passed, N failed"; fails if there is no GPU.
//
// Build:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -cudart static -I . -I src -I include
//     tests/gpu/arch/cuda_arch_test.cu -o cuda_arch_test
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "arch/cuda/cuda_arch.cuh"
#include "layout/sites.hpp"

namespace {

using namespace switchyard;
using namespace switchyard::detail;

#define CHECK_CUDA(call)                                                                               \
  do {                                                                                                 \
    const cudaError_t status_ = (call);                                                                \
    if (status_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(2);                                                                                    \
    }                                                                                                  \
  } while (0)

int passed = 0, failed = 0;
void check(bool good, const std::string& what) {
  good ? ++passed : ++failed;
  if (!good) std::printf("FAILED %s\n", what.c_str());
}

template <class T>
struct Device {
  T* data = nullptr;
  size_t count;
  explicit Device(const std::vector<T>& from) : count(from.size()) {
    CHECK_CUDA(cudaMalloc(&data, (count + 1) * sizeof(T)));
    CHECK_CUDA(cudaMemcpy(data, from.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(data); }
  std::vector<T> host() const {
    std::vector<T> out(count);
    CHECK_CUDA(cudaMemcpy(out.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }
};

extern __shared__ __align__(128) std::byte shared_memory[];

struct CopyJob {
  int64_t src, bytes;
  int64_t dst[40];
  int n;
};

/// Warp w performs jobs w, w + total, ... without settling in between. `via_scratch`: lanes first write the rows to scratch.
__global__ void copy_kernel(const CopyJob* jobs, int num_jobs, const std::byte* src, std::byte* dst, CudaShape shape,
                            bool via_scratch) {
  CudaWarp w(shared_memory, shape);
  for (int j = w.index(); j < num_jobs; j += w.total()) {
    const CopyJob& job = jobs[j];
    void* to[40];
    for (int i = 0; i < job.n; ++i) to[i] = dst + job.dst[i];
    const std::byte* from = src + job.src;
    const auto bytes = static_cast<size_t>(job.bytes);
    if (via_scratch) {
      Cuda::drain_sources(w);
      Cuda::for_lanes(w, job.bytes, [&](int i) { w.scratch()[i] = from[i]; });
      Cuda::settle(w);
      from = w.scratch();
    }
    if (job.n == 1) {
      Cuda::copy(w, to[0], from, bytes);
    } else {
      Cuda::multicast_to(
          w, job.n, [&](int i) { return to[i]; }, from, bytes);
    }
  }
  Cuda::settle(w);
}

void copies(const CudaShape& shape, bool via_scratch, const std::string& what) {
  const std::vector<int64_t> sizes = {0,    1,    3,    15,   16,   17,    64,    100,   1008,
                                      1023, 1024, 1040, 2048, 2064, 14336, 14338, 40000, 40004};
  std::vector<std::byte> src(1 << 16);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<std::byte>((i * 2654435761u >> 13) & 0xff);
  std::vector<CopyJob> jobs;
  int64_t end = 64;
  for (const int64_t bytes : sizes) {
    if (via_scratch && bytes > static_cast<int64_t>(shape.scratch_bytes)) continue;
    for (const int64_t src_at : {0, 1, 2, 4, 8, 16, 1024})
      for (const int64_t shift : {0, 1, 4, 8})
        for (const int n : {1, 2, 7, 32, 40}) {
          if (n > 7 && bytes > 2064) continue;
          CopyJob job{src_at, bytes, {}, n};
          for (int i = 0; i < n; ++i) {
            job.dst[i] = end + shift;
            end += (bytes + shift + 63) / 16 * 16;
          }
          jobs.push_back(job);
        }
  }
  std::vector<std::byte> want(static_cast<size_t>(end + 64), std::byte{0xEE});
  const Device<std::byte> in(src), out(want);
  const Device<CopyJob> list(jobs);
  for (const CopyJob& job : jobs)
    for (int i = 0; i < job.n; ++i) std::memcpy(want.data() + job.dst[i], src.data() + job.src, static_cast<size_t>(job.bytes));
  CHECK_CUDA(
      cudaFuncSetAttribute(copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes())));
  copy_kernel<<<8, shape.warps * 32, shape.shared_bytes()>>>(list.data, static_cast<int>(jobs.size()), in.data, out.data, shape,
                                                             via_scratch);
  CHECK_CUDA(cudaDeviceSynchronize());
  check(out.host() == want, "copies: " + what);
}

__global__ void zero_kernel(std::byte* dst, CudaShape shape) {
  CudaWarp w(shared_memory, shape);
  int64_t at = 64;
  for (int bytes = 0; bytes < 200; bytes += 7) {
    for (int shift = 0; shift < 16; ++shift, at += 256) Cuda::fill_zero(w, dst + at + shift, static_cast<size_t>(bytes));
  }
  Cuda::settle(w);
}

void zeros() {
  std::vector<std::byte> want(64 + 29 * 16 * 256 + 256, std::byte{0xEE});
  const Device<std::byte> out(want);
  size_t at = 64;
  for (size_t bytes = 0; bytes < 200; bytes += 7)
    for (size_t shift = 0; shift < 16; ++shift, at += 256) std::memset(want.data() + at + shift, 0, bytes);
  const CudaShape shape{1, 0, 0, 0};
  zero_kernel<<<1, 32, shape.shared_bytes()>>>(out.data, shape);
  CHECK_CUDA(cudaDeviceSynchronize());
  check(out.host() == want, "fill_zero");
}

/// Random values, including every special case of rounding and comparison.
float sample(uint64_t& state) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  const auto bits = static_cast<uint32_t>(state >> 32);
  constexpr float kOdd[] = {0.0f,  -0.0f,   1.0f,   1.00390625f, 1.01171875f, -2.5f,    448.0f,   464.0f,    65504.0f, 65520.0f,
                            6e-8f, 2.9e-8f, 1e-40f, -1e-40f,     3.3e38f,     -3.3e38f, INFINITY, -INFINITY, NAN};
  if (bits % 16 == 0) return kOdd[bits / 16 % (sizeof kOdd / sizeof kOdd[0])];
  const float unit = static_cast<float>(bits & 0xffffff) / 16777216.0f - 0.5f;
  return std::ldexp(unit, static_cast<int>(bits >> 24) % 24 - 12);
}

// The vendor's host emulations serve as the oracle for conversions.
float to_float(const std::byte* at, DType type) {
  if (type == DType::f32) {
    float f;
    std::memcpy(&f, at, 4);
    return f;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return type == DType::bf16 ? __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}))
                             : __half2float(__half(__half_raw{bits}));
}
void from_float(std::byte* at, DType type, float f) {
  if (type == DType::f32) {
    std::memcpy(at, &f, 4);
  } else if (type == DType::bf16) {
    const __nv_bfloat16_raw raw = __float2bfloat16_rn(f);
    std::memcpy(at, &raw.x, 2);
  } else {
    const __half_raw raw = __float2half_rn(f);
    std::memcpy(at, &raw.x, 2);
  }
}

std::vector<std::byte> random_rows(DType type, int64_t elements, uint64_t seed) {
  std::vector<std::byte> out(dtype_bytes(type, elements));
  for (int64_t i = 0; i < elements; ++i) from_float(out.data() + dtype_bytes(type, i), type, sample(seed));
  return out;
}

bool same_values(const std::vector<std::byte>& a, const std::vector<std::byte>& b, DType type) {
  for (size_t i = 0; i < a.size(); i += dtype_bytes(type, 1)) {
    if (std::memcmp(&a[i], &b[i], dtype_bytes(type, 1)) == 0) continue;
    if (!std::isnan(to_float(&a[i], type)) || !std::isnan(to_float(&b[i], type))) return false;
  }
  return true;
}

__global__ void reduce_kernel(std::byte* out, const std::byte* rows, const float* weights, const std::byte* bias, int n,
                              int num_bias, DType type, int64_t hidden, int64_t pitch, CudaShape shape) {
  CudaWarp w(shared_memory, shape);
  const void* list[40];
  for (int i = 0; i < n; ++i) list[i] = rows + i * pitch;
  Cuda::reduce_rows(
      w,
      ReduceSpec{out, list, weights, n, {num_bias > 0 ? bias : nullptr, num_bias > 1 ? bias + pitch : nullptr}, type, hidden});
  Cuda::settle(w);
}

void reduce(DType type, int64_t hidden, int n, bool weighted, int num_bias, int64_t offset) {
  const auto size = static_cast<int64_t>(dtype_bytes(type, 1));
  const int64_t pitch = (hidden * size + 15) / 16 * 16 + offset;
  const auto rows = random_rows(type, pitch * (n + 1) / size, 99), bias = random_rows(type, pitch * 3 / size, 7);
  std::vector<float> weights;
  uint64_t state = 5;
  for (int i = 0; i < n; ++i) weights.push_back(sample(state));
  std::vector<std::byte> want(static_cast<size_t>(hidden * size));
  for (int64_t c = 0; c < hidden; ++c) {
    volatile float sum = 0;  // volatile: one rounding per operation
    if (num_bias > 0) sum = to_float(&bias[static_cast<size_t>(c * size)], type);
    if (num_bias > 1) sum = sum + to_float(&bias[static_cast<size_t>(pitch + c * size)], type);
    for (int i = 0; i < n; ++i) {
      volatile float term = to_float(&rows[static_cast<size_t>(i * pitch + c * size)], type);
      if (weighted) term = weights[static_cast<size_t>(i)] * term;
      sum = sum + term;
    }
    from_float(&want[static_cast<size_t>(c * size)], type, sum);
  }
  const Device<std::byte> in(rows), added(bias), out(std::vector<std::byte>(want.size(), std::byte{0xEE}));
  const Device<float> factors(weights);
  const CudaShape shape{1, 0, 0, 0};
  reduce_kernel<<<1, 32, shape.shared_bytes()>>>(out.data, in.data, weighted ? factors.data : nullptr, added.data, n, num_bias,
                                                 type, hidden, pitch, shape);
  CHECK_CUDA(cudaDeviceSynchronize());
  check(same_values(out.host(), want, type), "reduce_rows: type " + std::to_string(static_cast<int>(type)) + " hidden " +
                                                 std::to_string(hidden) + " n " + std::to_string(n) + " bias " +
                                                 std::to_string(num_bias) + " offset " + std::to_string(offset));
}

__global__ void map_kernel(std::byte* out, const std::byte* src, DType type, int64_t hidden, CudaShape shape) {
  CudaWarp w(shared_memory, shape);
  Cuda::map_row(w, out, src, type, hidden, [](float* x, int64_t column, auto n) {
    for (int i = 0; i < n; ++i) x[i] = __fadd_rn(__fmul_rn(x[i], 3.0f), static_cast<float>((column + i) % 64));
  });
  Cuda::settle(w);
}

void map(DType type, int64_t hidden, int64_t offset) {
  const auto size = static_cast<int64_t>(dtype_bytes(type, 1));
  const auto src = random_rows(type, hidden + offset / size, 13);
  std::vector<std::byte> want(src.size(), std::byte{0xEE});
  for (int64_t c = 0; c < hidden; ++c) {
    const auto at = static_cast<size_t>(offset + c * size);
    const volatile float product = to_float(&src[at], type) * 3;  // volatile: one rounding per operation
    from_float(&want[at], type, product + static_cast<float>(c % 64));
  }
  const Device<std::byte> in(src), out(std::vector<std::byte>(src.size(), std::byte{0xEE}));
  const CudaShape shape{1, 0, 0, 0};
  map_kernel<<<1, 32, shape.shared_bytes()>>>(out.data + offset, in.data + offset, type, hidden, shape);
  CHECK_CUDA(cudaDeviceSynchronize());
  check(same_values(out.host(), want, type), "map_row: type " + std::to_string(static_cast<int>(type)) + " hidden " +
                                                 std::to_string(hidden) + " offset " + std::to_string(offset));
}

template <class A>
__global__ void locate_kernel(const int* lengths, int n, int total, bool many, Located* out, CudaShape shape) {
  CudaWarp w(shared_memory, shape);
  for (int index = w.index(); index < total; index += w.total()) {
    const auto length = [&](int i) { return int64_t{lengths[i]}; };
    const Located found = many ? A::locate_many(w, index, n, length) : A::locate(w, index, n, length);
    if (threadIdx.x % 32 == 0) out[index] = found;
  }
}

/// Tests every index of n segments, some of them empty, and three indices past the end.
template <class A>
void locate(const char* name, int n, bool many) {
  std::vector<int> lengths(static_cast<size_t>(n));
  std::vector<std::pair<int, int64_t>> want;
  for (int i = 0; i < n; ++i) {
    lengths[static_cast<size_t>(i)] = i % 3 == 1 ? 0 : (i * 7 + n) % 6;
    for (int k = 0; k < lengths[static_cast<size_t>(i)]; ++k) want.emplace_back(i, k);
  }
  for (int k = 0; k < 3; ++k) want.emplace_back(n, k);
  const auto total = static_cast<int>(want.size());
  const Device<int> in(lengths);
  const Device<Located> out(std::vector<Located>(want.size()));
  const CudaShape shape{4, 0, 0, 0};
  locate_kernel<A><<<2, 128, shape.shared_bytes()>>>(in.data, n, total, many, out.data, shape);
  CHECK_CUDA(cudaDeviceSynchronize());
  const auto got = out.host();
  bool same = true;
  for (size_t i = 0; i < want.size(); ++i)
    same = same && got[i].segment == want[i].first && (got[i].segment == n || got[i].offset == want[i].second);
  check(same, std::string("locate: ") + name + ", " + std::to_string(n) + " segments");
}

/// Quantizes rows to three destinations: directly (`direct`), as in low-latency dispatch, or through scratch.
template <class A>
__global__ void quantize_kernel(std::byte* out, int64_t out_pitch, const std::byte* src, int64_t src_pitch, int rows,
                                DType type, int64_t hidden, ScaleKind kind, int group, bool direct, CudaShape shape) {
  CudaWarp w(shared_memory, shape);
  const size_t scale_bytes = scale_row_bytes(hidden, kind, group);
  const int64_t q_bytes = (hidden + 15) / 16 * 16;
  for (int r = w.index(); r < rows; r += w.total()) {
    std::byte* const places = out + r * 3 * out_pitch;
    if (direct) {
      A::quantize_to(
          w, 4,
          [&](int i) {
            std::byte* const to = i == 1 ? nullptr : places + (i - (i > 1)) * out_pitch;
            return QuantizedRow{reinterpret_cast<uint8_t*>(to), to == nullptr ? nullptr : to + q_bytes};
          },
          src + r * src_pitch, type, hidden, kind, group);
      continue;
    }
    Cuda::drain_sources(w);
    std::byte* const scales = w.scratch() + q_bytes;
    Cuda::quantize_row(w, reinterpret_cast<uint8_t*>(w.scratch()), scales, src + r * src_pitch, type, hidden, kind, group);
    Cuda::multicast_to(
        w, 3, [&](int i) { return places + i * out_pitch; }, w.scratch(), static_cast<size_t>(hidden));
    Cuda::multicast_to(
        w, 3, [&](int i) { return places + i * out_pitch + q_bytes; }, scales, scale_bytes);
  }
  Cuda::settle(w);
}

/// Quantizes one row as the contract specifies, using the vendor's host conversion to e4m3.
void quantize_reference(std::byte* q, std::byte* scales, const std::byte* src, DType type, int64_t hidden, ScaleKind kind,
                        int group) {
  for (int64_t begin = 0; begin < hidden; begin += group) {
    float amax = 0;
    bool infinite = false;
    for (int64_t c = begin; c < std::min(hidden, begin + group); ++c) {
      const float m = std::fabs(to_float(src + dtype_bytes(type, c), type));
      if (std::isfinite(m)) amax = std::max(amax, m);
      infinite = infinite || std::isinf(m);
    }
    float scale = amax / 448.0f;
    if (scale == 0 && infinite) scale = 1;
    const bool zero = scale == 0;
    if (kind == ScaleKind::f32) {
      std::memcpy(scales + begin / group * 4, &scale, 4);
    } else {
      const int exponent = zero ? -127 : std::max(-127, static_cast<int>(std::ceil(std::log2(static_cast<double>(scale)))));
      scale = static_cast<float>(std::ldexp(1.0, exponent));
      scales[begin / group] = static_cast<std::byte>(exponent + 127);
    }
    for (int64_t c = begin; c < std::min(hidden, begin + group); ++c) {
      const float x = to_float(src + dtype_bytes(type, c), type);
      const volatile float ratio = x / scale;
      q[c] = std::isnan(x) ? std::byte{0x7F}
             : zero        ? std::byte{0}
                           : static_cast<std::byte>(__nv_cvt_float_to_fp8(ratio, __NV_SATFINITE, __NV_E4M3));
    }
  }
}

template <class A>
void quantize(DType type, int64_t hidden, ScaleKind kind, int group, bool direct) {
  constexpr int kRows = 37;
  const auto src_pitch = static_cast<int64_t>(dtype_bytes(type, hidden));
  auto src = random_rows(type, hidden * kRows, 31);
  // Row 1 contains zeros, row 2 one infinity among zeros, and row 3 tiny values.
  for (int64_t c = 0; c < hidden; ++c) {
    const auto set = [&](int64_t row, float f) {
      from_float(&src[static_cast<size_t>(row * src_pitch + static_cast<int64_t>(dtype_bytes(type, c)))], type, f);
    };
    set(1, c % 2 == 0 ? 0.0f : -0.0f);
    set(2, c == hidden / 2 ? INFINITY : 0.0f);
    set(3, std::ldexp(static_cast<float>(c % 7 - 3), type == DType::f16 ? -24 : -140));
  }
  const auto scale_bytes = static_cast<int64_t>(scale_row_bytes(hidden, kind, group));
  const int64_t q_bytes = (hidden + 15) / 16 * 16, pitch = q_bytes + scale_bytes;
  std::vector<std::byte> want(static_cast<size_t>(kRows * 3 * pitch), std::byte{0xEE});
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < 3; ++i) {
      std::byte* at = &want[static_cast<size_t>((r * 3 + i) * pitch)];
      if (!direct) std::memset(at + q_bytes, 0, static_cast<size_t>(scale_bytes));  // the padding
      quantize_reference(at, at + q_bytes, &src[static_cast<size_t>(r * src_pitch)], type, hidden, kind, group);
    }
  }
  const Device<std::byte> in(src), out(std::vector<std::byte>(want.size(), std::byte{0xEE}));
  const CudaShape shape{2, 1, 2048, static_cast<uint32_t>(pitch)};
  quantize_kernel<A>
      <<<2, 64, shape.shared_bytes()>>>(out.data, pitch, in.data, src_pitch, kRows, type, hidden, kind, group, direct, shape);
  CHECK_CUDA(cudaDeviceSynchronize());
  check(out.host() == want, "quantize_row: type " + std::to_string(static_cast<int>(type)) + " hidden " +
                                std::to_string(hidden) + " kind " + std::to_string(static_cast<int>(kind)) +
                                (direct ? " direct" : ""));
}

/// Blocks pass a token around a ring of flags and a counter: the payload is written by bulk copy and, after the acquire, read
/// by bulk copy.
__global__ void relay_kernel(std::byte* slots, uint64_t* flags, uint64_t* counter, int64_t bytes, int rounds,
                             uint64_t* failures, CudaShape shape) {
  CudaWarp w(shared_memory, shape);
  const int me = w.index(), next = (me + 1) % w.total();
  const uint64_t deadline = Cuda::now_ns() + 2'000'000'000ull;
  for (int round = 1; round <= rounds; ++round) {
    if (me != 0 || round > 1) {
      const uint64_t expected = static_cast<uint64_t>(me == 0 ? round - 1 : round);
      const auto mine = [&](int) { return flags + me * 8; };
      for (int polls = 0; Cuda::poll_from<Scope::device>(w, 1, mine, expected, Site::rows) >= 0; ++polls) {
        if (Cuda::now_ns() > deadline) {
          Cuda::fetch_add<Scope::device>(w, failures, 1, Site::none);
          return;
        }
        Cuda::pause(w, polls);
      }
    }
    // At each hop, the lanes increment every word, and a bulk copy then passes the row on.
    auto* words = reinterpret_cast<uint32_t*>(slots + me * bytes);
    Cuda::for_lanes(w, bytes / 4, [&](int i) { words[i] += 1; });
    Cuda::settle(w);
    Cuda::copy(w, slots + next * bytes, words, static_cast<size_t>(bytes));
    Cuda::settle(w);
    Cuda::publish_to<Scope::device>(
        w, 1,
        [&](int) {
          return FlagStore{flags + next * 8, static_cast<uint64_t>(round)};
        },
        Site::rows);
    Cuda::fetch_add<Scope::device>(w, counter, 1, Site::local_sends);
  }
}

void relay(int64_t bytes, const std::string& what) {
  constexpr int kBlocks = 4, kRounds = 300;
  const CudaShape shape{3, 1, 1536, 0};
  const int warps = kBlocks * shape.warps;
  const Device<uint32_t> slots(std::vector<uint32_t>(static_cast<size_t>(bytes / 4 * warps), 0));
  const Device<uint64_t> flags(std::vector<uint64_t>(static_cast<size_t>(warps * 8), 0)), counter({0}), failures({0});
  relay_kernel<<<kBlocks, shape.warps * 32, shape.shared_bytes()>>>(reinterpret_cast<std::byte*>(slots.data), flags.data,
                                                                    counter.data, bytes, kRounds, failures.data, shape);
  CHECK_CUDA(cudaDeviceSynchronize());
  const auto total = static_cast<uint64_t>(warps) * kRounds;
  bool good = failures.host()[0] == 0 && counter.host()[0] == total;
  const auto rows = slots.host();
  for (int64_t i = 0; i < bytes / 4; ++i)
    good = good && rows[static_cast<size_t>(i)] == total;  // warp 0's slot: after the last hop
  check(good, "relay: " + what);
}

}  // namespace

int main() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::printf("no GPU: 0 passed, 1 failed\n");
    return 1;
  }
  copies({4, 0, 0, 0}, false, "lanes only");
  copies({14, 1, 14336, 0}, false, "14 warps, 1 stage");
  copies({7, 2, 14336, 0}, false, "7 warps, 2 stages");
  copies({3, 1, 2048, 0}, false, "1 stage, rows in pieces");
  copies({3, 2, 2048, 0}, false, "2 stages, rows in pieces");
  copies({3, 1, 2048, 14352}, true, "from scratch, 1 stage");
  copies({3, 2, 2048, 14352}, true, "from scratch, 2 stages");
  zeros();
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    for (const int64_t hidden : {1, 7, 8, 64, 1001, 7168})
      for (const int n : {0, 1, 2, 3, 8, 33})
        for (const bool weighted : {false, true})
          for (const int num_bias : {0, 1, 2})
            for (const int64_t offset : {0, 4}) reduce(type, hidden, n, weighted, num_bias, offset);
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    for (const int64_t hidden : {1, 7, 8, 64, 1001, 7168})
      for (const int64_t offset : {0, 4}) map(type, hidden, offset);
  for (const int n : {0, 1, 2, 3, 4, 8, 31, 32, 33, 63, 64, 65, 128, 300}) {
    for (const bool many : {false, true}) {
      locate<Cuda>("any", n, many);
      locate<CudaInline>("inline", n, many);
    }
  }
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    for (const int64_t hidden : {8, 100, 128, 144, 1040, 7168})
      for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0})
        for (const int group : {32, 64, 128})
          for (const bool direct : {false, true}) quantize<Cuda>(type, hidden, kind, group, direct);
  for (const int64_t hidden : {16, 128, 144, 1040, 7168})
    for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0})
      for (const int group : {32, 64, 128}) quantize<CudaInline>(DType::bf16, hidden, kind, group, true);
  relay(256, "by lanes");
  relay(8192, "in bulk");
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
