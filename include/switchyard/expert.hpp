// SPDX-License-Identifier: Apache-2.0
/// \file
/// Expert compute: the SwiGLU MLPs of one rank's experts, between dispatch and combine. No communication. Library
/// switchyard_layer (CMake: switchyard::layer). The CPU, and GPUs of compute capability 9.0 (H100, H200), have one interface.
///
/// Notation: H hidden, I intermediate, L local experts. Rows and weights are bf16 (on GPUs also f16, or fp8 e4m3 with scales),
/// dense, row-major.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "switchyard/gemm.hpp"
#include "switchyard/held.hpp"
#include "switchyard/moe_weights.hpp"
#include "switchyard/names.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Size of one rank's experts; all experts are alike.
struct ExpertShape {
  int64_t hidden = 0;         ///< H >= 1
  int64_t intermediate = 0;   ///< I >= 1
  int num_local_experts = 0;  ///< L >= 0
};

/// Where an ExpertMlp keeps its weights.
enum class WeightStorage : uint8_t {
  packed = 0,  ///< own copy in this CPU's fastest layout, made once; the caller's weights may go afterwards
  view = 1,    ///< the caller's weights, read in place by every call: no second copy; on the CPU slower for few rows per expert
};
template <>
struct NamesOf<WeightStorage> {
  static constexpr Named<WeightStorage> kAll[] = {{WeightStorage::packed, "packed"}, {WeightStorage::view, "view"}};
};

/// Settings of an ExpertMlp.
struct ExpertOptions {
  Backend backend = Backend::cpu;  ///< cuda: weights, rows and ranges are in memory of the GPU that is current at construction
  DType type = DType::bf16;        ///< of rows and weights: bf16; cuda: or f16, or fp8_e4m3, with outputs of bf16
  WeightStorage storage = WeightStorage::packed;  ///< cuda: view, given so, because the weights stay the caller's
  /// CPU, forward_rank_major: memory for the float32 outputs of single routes, H * 4 bytes each (at least 256 routes are kept).
  /// Rows whose routes do not fit are done in blocks, and each block reads the weights once: larger is faster. Pages are
  /// touched only when used.
  size_t route_scratch_bytes = size_t{64} << 20;
  /// CUDA: most rows of a call's `x`, for each of which the object has an intermediate row. Of normal mode most_rows(), or the
  /// capacity that dispatches are given; of low latency LowLatencyOutput::x.rows. 0: calls have none.
  int64_t max_rows = 0;
  /// fp8_e4m3: scales of w13 `[L, 2 * ceil(I / 128), ceil(H / 128)]` (of the gate rows, then of the up rows) and of w2
  /// `[L, ceil(H / 128), ceil(I / 128)]`, one for 128 x 128 weights; in memory of the GPU; they stay the caller's.
  const void* w13_scales = nullptr;
  const void* w2_scales = nullptr;
  ScaleKind weight_scales = ScaleKind::f32;  ///< f32 or ue8m0
};

/// Settings of one call.
struct ExpertCall {
  void* stream = nullptr;  ///< CUDA: cudaStream_t; null: the legacy default stream
  int num_sms = 0;         ///< CUDA: most multiprocessors, in [1, those of the GPU]; 0: all
};

/// Memory of one ExpertMlp, in bytes, beside the caller's arrays.
struct ExpertMemory {
  size_t weight_bytes = 0;   ///< WeightStorage::packed: own weights; view: 0
  size_t scratch_bytes = 0;  ///< fixed at construction; CUDA: intermediate rows, in memory of the GPU
  size_t total() const { return weight_bytes + scratch_bytes; }
};

/// The MLPs of one rank's experts: `y = (silu(x W1^T) * (x W3^T)) W2^T`, silu(v) = v / (1 + exp(-v)).
///
/// Arithmetic, on both backends: x and the weights are bf16 (or f16). Both products accumulate in float32; silu and the product
/// with the up half are float32; the intermediate row is rounded to bf16 once; the output is float32 until its one rounding to
/// bf16 (nearest even). The order of a product's sum is the backend's: results of GPUs and CPUs are within a tolerance of each
/// other (docs/expert.md), not bit-equal. Infinite or NaN inputs give what IEEE arithmetic gives; the silu of -inf is NaN.
///
/// CPU: that order may differ by the number of rows of a call, so that results are not bit-equal between machines or batchings.
/// CPUs with bf16 instructions take subnormal bf16 operands as zero. Every call runs on the calling thread alone, also where
/// oneDNN was built with OpenMP, so that as many ranks as cores may run side by side.
///
/// CUDA: a call is two GroupedGemm, with what that class says of bits. H and I are multiples of 8; fp8: of 16. The intermediate
/// row of fp8 is rounded to bf16 and then quantised, one float32 scale for 128 columns. Calls are enqueued, allocate
/// nothing and wait for nothing; they can be captured. Calls of one object, graphs included, must be ordered one after the
/// other: they share the intermediate rows.
///
/// Threads: one thread at a time per object; objects are independent.
class ExpertMlp {
 public:
  /// Writes the weights of local expert `expert`: w13 `[2 * I, H]` (gate rows, then up rows) and w2 `[H, I]`.
  using Source = std::function<void(int expert, std::span<uint16_t> w13, std::span<uint16_t> w2)>;

  /// `w13` is `[L, 2 * I, H]`: of each expert first the I gate rows (W1), then the I up rows (W3). `w2` is `[L, H, I]`.
  /// With WeightStorage::view both must stay valid and unchanged while calls run; with packed they are read here only. CUDA:
  /// both at multiples of 16 bytes.
  /// \throws Error(invalid_argument) naming the argument; Error(system) without memory; Error(unsupported) for f16 on the CPU,
  /// and for GPUs as the constructor of GroupedGemm.
  ExpertMlp(const ExpertShape& shape, const void* w13, const void* w2, const ExpertOptions& options = {});
  /// Packs one expert after the other as `source` writes them (called for 0 .. L - 1, in order), so that the unpacked weights
  /// of only one expert exist at a time. WeightStorage::packed only, and so the CPU.
  ExpertMlp(const ExpertShape& shape, const Source& source, const ExpertOptions& options = {});
  ExpertMlp(ExpertMlp&&) noexcept;
  ExpertMlp& operator=(ExpertMlp&&) noexcept;
  /// CUDA: at any time; memory that enqueued calls and captured graphs use is freed after them.
  ~ExpertMlp();

  /// Experts of another layer of the model: of this shape and these options, the scales of the weights aside. CUDA: they share
  /// this object's intermediate rows, so that calls of all of them, graphs included, must be ordered one after the other. CPU:
  /// they have scratch of their own, and WeightStorage as here. \throws as the constructor.
  ExpertMlp with_weights(const MoeWeights& weights) const;

  /// Memory that an object of this shape takes on this machine. Allocates nothing that stays.
  static ExpertMemory memory_required(const ExpertShape& shape, const ExpertOptions& options = {});

  /// The rows of each expert of `x` go through it into the same rows of `y`. Both are [rows, H] of the object's type (fp8: `x`
  /// with its scales of 128 columns, `y` is bf16): what an
  /// expert-major dispatch or a low-latency one delivered, as it is, with ExpertRows::of, and where combine reads
  /// (NormalExchange::allocate_rows, LowLatencyExchange::make_rows). Rows of no expert, and rows that lie behind those of `x`
  /// or `y`, are not touched. `x` and `y` must not overlap; they may be null if they have no rows. CUDA: both at multiples of
  /// 16 bytes. \throws Error(invalid_argument) naming the argument, before anything is written: CUDA also if `x` has more than
  /// ExpertOptions::max_rows; Error(system).
  void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall& call = {});

  /// The same with arrays of the host: rows `first_row[e] .. first_row[e] + num_rows[e] - 1` of `x` go through local expert e
  /// into the same rows of `y`. Both spans have L entries; a count may be 0; ranges may have gaps (padding) and must not
  /// overlap. Rows of `y` outside the ranges are not touched, those of `x` not read. `x` and `y` must not overlap; they may be
  /// null if all counts are 0. CPU only. \throws Error(invalid_argument) before anything is written; Error(unsupported) on a
  /// GPU.
  void forward(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows, uint16_t* y);

  /// Rank-major rows: `y[r] = sum over k of weights[r, k] * mlp_(ids[r, k])(x[r])`, for `x` and `y` of `[ids.tokens, H]`. The
  /// sum is float32 from +0, k ascending, multiply then add, rounded to bf16 once; the summands are not rounded to bf16. `ids`
  /// are local; one outside `[0, L)` is skipped, one that occurs twice in a row counts twice; a row without experts gives +0.
  /// `weights` is float32 `[ids.tokens, ids.topk]`, or null: all 1. `x` and `y` must not overlap. CPU only.
  /// \throws Error(invalid_argument) before anything is written; Error(unsupported) on a GPU.
  void forward_rank_major(const uint16_t* x, const ExpertIds& ids, const float* weights, uint16_t* y);

  const ExpertShape& shape() const;
  ExpertMemory memory() const;
  /// The data type of the products and the kernel, for example "bf16 brg:avx512_core_bf16" or "f32 gemm:jit" (oneDNN's), or
  /// "bf16 wgmma:sm_90a".
  std::string implementation() const;

  struct Impl;  ///< library internal

 private:
  explicit ExpertMlp(std::unique_ptr<Impl> impl);
  detail::Held<std::unique_ptr<Impl>, detail::kExpertObject> impl_;
};

/// Weights for demonstrations and tests: a closed form of (seed, global expert, matrix, row, column), so that any rank, or a
/// single-rank reference, makes the same weights of an expert. Scaled so that rows of independent unit-variance elements give
/// outputs of about unit variance. Immutable; cheap to copy; the same bits on every machine.
class ExpertWeights {
 public:
  /// \throws Error(invalid_argument) if hidden or intermediate is below 1.
  ExpertWeights(uint64_t seed, int64_t hidden, int64_t intermediate);

  /// One element of `[2 * I, H]` and of `[H, I]`. `expert` is the global expert.
  uint16_t w13(int64_t expert, int64_t row, int64_t col) const noexcept;
  uint16_t w2(int64_t expert, int64_t row, int64_t col) const noexcept;

  /// All of one expert. \throws Error(invalid_argument) if a span does not have 2 * I * H, or H * I, elements.
  void fill(int64_t expert, std::span<uint16_t> w13, std::span<uint16_t> w2) const;

  /// For ExpertMlp: local expert i is global expert `first_expert + i`.
  ExpertMlp::Source source(int64_t first_expert) const;

 private:
  static constexpr int kLevels = 256;
  uint64_t seed_;
  int64_t hidden_, intermediate_;
  uint16_t levels13_[kLevels], levels2_[kLevels];
};

}  // namespace switchyard
