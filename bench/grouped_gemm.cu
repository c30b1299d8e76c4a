// SPDX-License-Identifier: Apache-2.0
// Compares the grouped GEMM, or with --gradients its backward pass, with cuBLAS and a plain read of the weights in one process.
// First, the versions alternate so that all run at the same clock; the L2 cache is flushed before each call. Then each version
// runs alone for a while at the clock permitted by the power limit.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/gemm/gemm_reference.hpp"
#include "switchyard/gemm.hpp"
#include "switchyard/gemm_gradients.hpp"

namespace {

using nlohmann::json;
using namespace switchyard;

void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}
void must(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(std::string(what) + ": cuBLAS error " + std::to_string(status));
}

struct Options {
  int experts = 64, rounds = 20, sustain_ms = 0;
  int64_t rows = 32768, n = 4096, k = 7168;
  uint64_t seed = 1;
  bool equal = false, fp8 = false, gradients = false;
  std::string out, only = ".";
};

template <class T>
class Memory {
 public:
  explicit Memory(int64_t count) { must(cudaMalloc(&p_, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc"); }
  explicit Memory(const std::vector<T>& values) : Memory(static_cast<int64_t>(values.size())) {
    must(cudaMemcpy(p_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Memory() { cudaFree(p_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  T* get() const { return p_; }

 private:
  T* p_ = nullptr;
};

__global__ void read_kernel(const uint4* p, int64_t count, uint32_t* sink) {
  constexpr int kAtOnce = 8;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint32_t x = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count; i += kAtOnce * threads) {
    uint4 v[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) v[j] = i + j * threads < count ? __ldcs(p + i + j * threads) : make_uint4(0, 0, 0, 0);
    for (int j = 0; j < kAtOnce; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 0x12345) *sink = x;
}

/// Scale of all fp8 operands in this benchmark: `normal` data with this deviation reaches 448 at five standard deviations.
constexpr float fp8_scale(float deviation) { return deviation * 5.F / 448.F; }
__global__ void to_fp8(const __nv_bfloat16* from, __nv_fp8_e4m3* to, int64_t count, float scale) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll)
    to[i] = __nv_fp8_e4m3(__bfloat162float(from[i]) / scale);
}
__global__ void fill_floats(float* p, int64_t count, float value) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) p[i] = value;
}
/// sums[0] += (a - b)^2, sums[1] += b^2.
__global__ void add_difference(const __nv_bfloat16* a, const __nv_bfloat16* b, int64_t count, double* sums) {
  double difference = 0, square = 0;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const double x = __bfloat162float(a[i]), y = __bfloat162float(b[i]);
    difference += (x - y) * (x - y);
    square += y * y;
  }
  atomicAdd(sums, difference);
  atomicAdd(sums + 1, square);
}

/// A timed version.
struct Version {
  std::string name;
  std::function<void()> call;
  double error = 0;  ///< error of its outputs against float64; only for our versions
  std::vector<float> ms{};
  float sustained_ms = 0;
};

float median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

class Bench {
 public:
  explicit Bench(const Options& o)
      : o_(o),
        counts_(draw(o)),
        x_(o.rows * o.k),
        w_(o.experts * o.n * o.k),
        out_(o.rows * o.n),
        dense_(o.gradients ? o.rows * o.n : 1),  // `out_` is then an input
        dx_(o.gradients ? o.rows * o.k : 1),
        dw_(o.gradients ? o.experts * o.n * o.k * 4 : 1),
        flush_(kFlush),
        sink_(1),
        num_rows_(counts_),
        first_row_(firsts()) {
    gemm_test::fill(x_.get(), o.rows * o.k, false, gemm_test::Fill::normal, 1, 1.F);
    gemm_test::fill(w_.get(), o.experts * o.n * o.k, false, gemm_test::Fill::normal, 2, kWeights);
    must(cudaEventCreate(&begin_), "cudaEventCreate");
    must(cudaEventCreate(&end_), "cudaEventCreate");
    must(cublasCreate(&blas_), "cublasCreate");
    add_peers();
    if (o.gradients) {
      add_gradients();
    } else {
      for (const WeightOrder order : {WeightOrder::nk, WeightOrder::kn})
        for (const Epilogue epilogue : {Epilogue::none, Epilogue::swiglu}) add_ours(order, epilogue);
      if (o.fp8) add_fp8();
    }
    std::erase_if(versions_, [&](const Version& v) { return !std::regex_search(v.name, std::regex(o.only)); });
    if (versions_.empty()) throw std::runtime_error("--only " + o.only + ": no version has such a name");
  }

  json run() {
    for (int round = -3; round < o_.rounds; ++round) {
      for (Version& v : versions_) {
        must(cudaMemsetAsync(flush_.get(), round, kFlush), "cudaMemsetAsync");
        const float ms = timed(v, 1);
        if (round >= 0) v.ms.push_back(ms);
      }
    }
    for (Version& v : versions_) {
      if (o_.sustain_ms == 0) break;
      const int calls = static_cast<int>(static_cast<float>(o_.sustain_ms) / median(v.ms)) + 1;
      (void)timed(v, calls * 2 / 5 + 1);
      v.sustained_ms = timed(v, calls * 3 / 5 + 1);
    }
    return report();
  }

 private:
  static constexpr int64_t kFlush = int64_t{256} << 20;
  static constexpr float kWeights = 0.03F;  // deviation
  static constexpr const char* kDense = "cuBLAS dense";

  static std::vector<int64_t> draw(const Options& o) {
    std::vector<int64_t> counts(static_cast<size_t>(o.experts), o.equal ? o.rows / o.experts : 0);
    std::mt19937_64 random(o.seed);
    for (int64_t i = o.equal ? o.rows / o.experts * o.experts : 0; i < o.rows; ++i) ++counts[random() % counts.size()];
    return counts;
  }
  std::vector<int64_t> firsts() const {
    std::vector<int64_t> first;
    for (int64_t at = 0; const int64_t c : counts_) {
      first.push_back(at);
      at += c;
    }
    return first;
  }

  /// Adds a dense product with the same operation count, using the first expert's weights, and a read of all weights.
  void add_peers() {
    versions_.push_back({kDense, [this] {
                           const float one = 1, zero = 0;
                           const auto n = static_cast<int>(o_.n), k = static_cast<int>(o_.k), rows = static_cast<int>(o_.rows);
                           must(cublasGemmEx(blas_, CUBLAS_OP_T, CUBLAS_OP_N, n, rows, k, &one, w_.get(), CUDA_R_16BF, k,
                                             x_.get(), CUDA_R_16BF, k, &zero, o_.gradients ? dense_.get() : out_.get(),
                                             CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                                "cublasGemmEx");
                         }});
    versions_.push_back({"read weights", [this] {
                           read_kernel<<<132 * 4, 512>>>(reinterpret_cast<const uint4*>(w_.get()), o_.experts * o_.n * o_.k / 8,
                                                         sink_.get());
                         }});
  }

  void add_ours(WeightOrder order, Epilogue epilogue) {
    GroupedGemmConfig c;
    c.num_experts = o_.experts;
    c.n = o_.n;
    c.k = o_.k;
    c.order = order;
    c.epilogue = epilogue;
    gemms_.push_back(std::make_unique<GroupedGemm>(c, w_.get()));
    const auto call = [this, gemm = gemms_.back().get()] {
      gemm->run({x_.get(), o_.rows, o_.k}, ranges(), {out_.get(), o_.rows, gemm->config().columns()});
    };
    versions_.push_back({std::string(to_string(order)) + " " + to_string(epilogue), call, check(c, call)});
  }

  ExpertRows ranges() const {
    ExpertRows rows;
    rows.num_rows = num_rows_.get();
    rows.first_row = first_row_.get();
    return rows;
  }

  /// Adds products of the same operands in e4m3: plain, SwiGLU, and SwiGLU with quantized output.
  void add_fp8() {
    const int64_t groups = num_scales(o_.k), rows_of_scales = std::max(num_scales(o_.n) + 1, (o_.n + groups - 1) / groups);
    const auto scale_row = static_cast<int64_t>(scale_row_bytes(o_.k, ScaleKind::f32) / 4);
    x8_ = std::make_unique<Memory<__nv_fp8_e4m3>>(o_.rows * o_.k);
    w8_ = std::make_unique<Memory<__nv_fp8_e4m3>>(o_.experts * o_.n * o_.k);
    x_scales_ = std::make_unique<Memory<float>>(o_.rows * scale_row);
    w_scales_ = std::make_unique<Memory<float>>(o_.experts * rows_of_scales * groups);
    const auto convert = [](const Memory<uint16_t>& from, const Memory<__nv_fp8_e4m3>& to, int64_t count, float deviation) {
      to_fp8<<<1024, 256>>>(reinterpret_cast<const __nv_bfloat16*>(from.get()), to.get(), count, fp8_scale(deviation));
    };
    convert(x_, *x8_, o_.rows * o_.k, 1.F);
    convert(w_, *w8_, o_.experts * o_.n * o_.k, kWeights);
    fill_floats<<<1024, 256>>>(x_scales_->get(), o_.rows * scale_row, fp8_scale(1.F));
    fill_floats<<<1024, 256>>>(w_scales_->get(), o_.experts * rows_of_scales * groups, fp8_scale(kWeights));
    out8_scales_ = std::make_unique<Memory<float>>(o_.rows * (num_scales(o_.n) + 3));
    for (const Accumulate accumulate : {Accumulate::exact, Accumulate::fast})
      add_fp8_products(accumulate, ScaleGranularity::block);
    for (const ScaleGranularity scaling : {ScaleGranularity::per_channel, ScaleGranularity::group_channel})
      add_fp8_products(Accumulate::exact, scaling);
  }
  /// All scales of rows are equal, as are all scales of weights, so the operands are the same for every granularity.
  void add_fp8_products(Accumulate accumulate, ScaleGranularity scaling) {
    for (const auto& [epilogue, quantize] : {std::pair{Epilogue::none, ScaleKind::none},
                                             {Epilogue::swiglu, ScaleKind::none},
                                             {Epilogue::swiglu, ScaleKind::f32}}) {
      GroupedGemmConfig c;
      c.num_experts = o_.experts;
      c.n = o_.n;
      c.k = o_.k;
      c.dtype = DType::fp8_e4m3;
      c.epilogue = epilogue;
      c.quantize = quantize;
      c.accumulate = accumulate;
      c.scaling = scaling;
      gemms_.push_back(std::make_unique<GroupedGemm>(c, w8_->get(), w_scales_->get()));
      const auto call = [this, gemm = gemms_.back().get(), quantize] {
        gemm->run({x8_->get(), o_.rows, o_.k, DType::fp8_e4m3, x_scales_->get(), ScaleKind::f32}, ranges(),
                  {out_.get(), o_.rows, gemm->config().columns(), gemm->config().out_dtype(),
                   quantize == ScaleKind::none ? nullptr : out8_scales_->get(), quantize});
      };
      std::string name = std::string("fp8 ") + to_string(epilogue);
      if (quantize != ScaleKind::none) name += " to fp8";
      if (accumulate == Accumulate::fast) name += ", fast";
      if (scaling != ScaleGranularity::block) name += std::string(", ") + to_string(scaling);
      versions_.push_back({name, call, quantize == ScaleKind::none ? compare_with_bf16(call, epilogue) : 0});
    }
  }
  /// Relative difference of all outputs from those of the same product in bf16: the effect of quantizing the operands.
  double compare_with_bf16(const std::function<void()>& call, Epilogue epilogue) {
    const int64_t count = o_.rows * (epilogue == Epilogue::swiglu ? o_.n / 2 : o_.n);
    const Memory<uint16_t> exact(count);
    Memory<double> sums(std::vector<double>{0, 0});
    const size_t at = epilogue == Epilogue::none ? 0 : 1;
    gemms_[at]->run({x_.get(), o_.rows, o_.k}, ranges(), {exact.get(), o_.rows, gemms_[at]->config().columns()});
    call();
    add_difference<<<256, 256>>>(reinterpret_cast<const __nv_bfloat16*>(out_.get()),
                                 reinterpret_cast<const __nv_bfloat16*>(exact.get()), count, sums.get());
    double host[2];
    must(cudaMemcpy(host, sums.get(), sizeof host, cudaMemcpyDeviceToHost), "cudaMemcpy");
    const double error = std::sqrt(host[0] / host[1]);
    if (!(error <= 0.1)) throw std::runtime_error("wrong outputs of fp8: they differ from bf16 by " + std::to_string(error));
    return error;
  }

  /// Adds the backward pass of the product with weights [E, N, K]; `out_` is the gradient of its outputs. Row gradients take as
  /// many operations as the dense product. Weight gradients are computed in float32 and in bf16, overwritten and accumulated.
  void add_gradients() {
    gemm_test::fill(out_.get(), o_.rows * o_.n, false, gemm_test::Fill::normal, 3, 1.F);
    GroupedGemmConfig c;
    c.num_experts = o_.experts;
    c.n = o_.k;
    c.k = o_.n;
    c.order = WeightOrder::kn;
    gemms_.push_back(std::make_unique<GroupedGemm>(c, w_.get()));
    const auto rows = [this, gemm = gemms_.back().get()] {
      gemm->run({out_.get(), o_.rows, o_.n}, ranges(), {dx_.get(), o_.rows, o_.k});
    };
    versions_.push_back({"dx", rows, check_rows_gradient(rows)});
    for (const DType output : {DType::f32, DType::bf16})
      for (const bool add : {false, true}) add_weight_gradient(output, add);
  }
  void add_weight_gradient(DType output, bool add) {
    WeightGradientConfig c;
    c.num_experts = o_.experts;
    c.n = o_.n;
    c.k = o_.k;
    c.out_dtype = output;
    c.add = add;
    weight_gradients_.push_back(std::make_unique<WeightGradient>(c));
    const auto call = [this, gradient = weight_gradients_.back().get()] {
      gradient->run({out_.get(), o_.rows, o_.n}, {x_.get(), o_.rows, o_.k}, ranges(), dw_.get());
    };
    const std::string name = std::string("dw ") + to_string(output) + (add ? " add" : "");
    versions_.push_back({name, call, check_weight_gradient(output, call)});
  }

  double check_rows_gradient(const std::function<void()>& call) {
    gemm_test::Problem p;
    p.num_experts = o_.experts;
    p.n = o_.k;
    p.k = o_.n;
    p.outputs_outside = false;
    call();
    return compare_rows(p, out_.get(), dx_.get());
  }
  /// Checks the first and last experts that have rows. For an accumulating version, the result starts at 0.
  double check_weight_gradient(DType output, const std::function<void()>& call) {
    const bool wide = output == DType::f32;
    must(cudaMemset(dw_.get(), 0, static_cast<size_t>(o_.experts * o_.n * o_.k * (wide ? 4 : 2))), "cudaMemset");
    call();
    const std::vector<int64_t> first = firsts();
    double worst = 0;
    const auto look = [&](size_t e) {
      const uint8_t* dw = dw_.get() + static_cast<int64_t>(e) * o_.n * o_.k * (wide ? 4 : 2);
      worst = larger(
          worst,
          gemm_test::compare_gradient({o_.n, o_.k, false, wide}, out_.get(), x_.get(), dw, nullptr, first[e], counts_[e]).norm);
    };
    const auto has = [](int64_t count) { return count > 0; };
    look(static_cast<size_t>(std::find_if(counts_.begin(), counts_.end(), has) - counts_.begin()));
    look(counts_.size() - 1 - static_cast<size_t>(std::find_if(counts_.rbegin(), counts_.rend(), has) - counts_.rbegin()));
    return believed(worst);
  }
  /// The larger number; NaN counts as larger than any number.
  static double larger(double a, double b) { return std::isnan(a) || b <= a ? a : b; }
  static double believed(double error) {
    if (!(error <= 5e-3)) throw std::runtime_error("wrong outputs: |out - reference| / |reference| = " + std::to_string(error));
    return error;
  }

  /// Compares the first and last rows of every expert.
  double compare_rows(const gemm_test::Problem& p, const uint16_t* in, const uint16_t* out) const {
    double worst = 0;
    const std::vector<int64_t> first = firsts();
    for (size_t e = 0; e < counts_.size(); ++e) {
      if (counts_[e] == 0) continue;
      for (const int64_t row : {first[e], first[e] + counts_[e] - 1})
        worst = larger(worst, gemm_test::compare(p, in, w_.get(), out, static_cast<int>(e), row, 1).norm);
    }
    return believed(worst);
  }
  double check(const GroupedGemmConfig& c, const std::function<void()>& call) {
    gemm_test::Problem p;
    p.num_experts = c.num_experts;
    p.n = c.n;
    p.k = c.k;
    p.outputs_outside = c.order == WeightOrder::nk;
    p.epilogue = static_cast<int>(c.epilogue);
    p.limit = c.swiglu.limit;
    must(cudaMemset(out_.get(), 0xff, static_cast<size_t>(o_.rows * o_.n) * 2), "cudaMemset");
    call();
    return compare_rows(p, x_.get(), out_.get());
  }

  float timed(const Version& v, int calls) {
    float ms = 0;
    must(cudaEventRecord(begin_), "cudaEventRecord");
    for (int i = 0; i < calls; ++i) v.call();
    must(cudaEventRecord(end_), "cudaEventRecord");
    must(cudaEventSynchronize(end_), "a call");
    must(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return ms / static_cast<float>(calls);
  }

  json report() const {
    cudaDeviceProp device{};
    must(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    int driver = 0, runtime = 0;
    must(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    must(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    const auto [min, max] = std::minmax_element(counts_.begin(), counts_.end());
    const double flops = 2. * static_cast<double>(o_.rows) * static_cast<double>(o_.n) * static_cast<double>(o_.k);
    const double weight_bytes = 2. * o_.experts * static_cast<double>(o_.n) * static_cast<double>(o_.k);
    const bool has_dense = versions_[0].name == kDense;
    json runs = json::array();
    std::printf("%s: %d experts, %lld rows (%lld to %lld each), N %lld, K %lld\n", device.name, o_.experts,
                static_cast<long long>(o_.rows), static_cast<long long>(*min), static_cast<long long>(*max),
                static_cast<long long>(o_.n), static_cast<long long>(o_.k));
    for (const Version& v : versions_) {
      const double ms = median(v.ms);
      json run{{"version", v.name},
               {"experts", o_.experts},
               {"rows", o_.rows},
               {"fewest_rows", *min},
               {"most_rows", *max},
               {"n", o_.n},
               {"k", o_.k},
               {"p50_ms", ms},
               {"min_ms", *std::min_element(v.ms.begin(), v.ms.end())},
               {"weights_tb_s", weight_bytes / (v.name.starts_with("fp8") ? 2 : 1) / ms / 1e9}};
      if (v.name != "read weights") {
        run["tflops"] = flops / ms / 1e9;
        if (has_dense) run["of_dense"] = median(versions_[0].ms) / ms;
        if (v.sustained_ms > 0) run["sustained_tflops"] = flops / v.sustained_ms / 1e9;
        if (v.sustained_ms > 0 && has_dense) run["sustained_of_dense"] = versions_[0].sustained_ms / v.sustained_ms;
      }
      if (v.error > 0) run["error"] = v.error;
      std::printf("  %-14s %8.4f ms  %s\n", v.name.c_str(), ms, run.dump().c_str());
      runs.push_back(run);
    }
    return {{"gpu", device.name}, {"driver_cuda", driver}, {"runtime_cuda", runtime}, {"rounds", o_.rounds}, {"runs", runs}};
  }

  Options o_;
  std::vector<int64_t> counts_;
  Memory<uint16_t> x_, w_, out_, dense_, dx_;
  Memory<uint8_t> dw_, flush_;
  Memory<uint32_t> sink_;
  Memory<int64_t> num_rows_, first_row_;
  std::unique_ptr<Memory<__nv_fp8_e4m3>> x8_, w8_;  // if fp8 is timed
  std::unique_ptr<Memory<float>> x_scales_, w_scales_, out8_scales_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  cublasHandle_t blas_ = nullptr;
  std::vector<std::unique_ptr<GroupedGemm>> gemms_;
  std::vector<std::unique_ptr<WeightGradient>> weight_gradients_;
  std::vector<Version> versions_;
};

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"Times the grouped GEMM beside cuBLAS's dense product of as many operations, and beside reading the weights"};
  app.add_option("--experts", o.experts, "Experts")->check(CLI::Range(1, kMaxGemmExperts))->capture_default_str();
  app.add_option("--rows", o.rows, "Rows of all experts")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22))
      ->capture_default_str();
  app.add_option("--n", o.n, "Outputs, gate and up counted both: a multiple of 16")->capture_default_str();
  app.add_option("--k", o.k, "Elements of a row: a multiple of 8")->capture_default_str();
  app.add_option("--rounds", o.rounds, "Timed calls of each version, in turn")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--sustain-ms", o.sustain_ms, "Then each version alone for so long; 0: not")
      ->check(CLI::Range(0, 60000))
      ->capture_default_str();
  app.add_option("--seed", o.seed, "Of the numbers of rows")->capture_default_str();
  app.add_flag("--equal", o.equal, "Every expert has the same number of rows; else each row draws its expert");
  app.add_flag("--fp8", o.fp8, "Time fp8 operands too, with scales of 128 elements and of 128 x 128 weights");
  app.add_flag("--gradients", o.gradients,
               "Time gradients in place of products: of rows, and of weights in float32 and bf16, written and added");
  app.add_option("--only", o.only, "Time only the versions whose name this regular expression matches")->capture_default_str();
  app.add_option("--json", o.out, "Write results to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    const json result = Bench(o).run();
    if (!o.out.empty()) std::ofstream(o.out) << result.dump() << '\n';
  } catch (const std::exception& e) {
    std::fprintf(stderr, "grouped_gemm_bench: %s\n", e.what());
    return 1;
  }
  return 0;
}
