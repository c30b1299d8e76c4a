// SPDX-License-Identifier: Apache-2.0
/// \file
/// Expert compute: the SwiGLU MLPs of one rank's experts, between dispatch and combine. No communication. Library
/// switchyard_layer (CMake: switchyard::layer). One interface for the CPU and for GPUs of compute capability 9.0 (H100, H200).
///
/// Notation: H hidden, I intermediate, L local experts. Rows and weights are bf16 (on GPUs also f16, or fp8 e4m3 with scales),
/// dense and row-major.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "switchyard/gemm.hpp"
#include "switchyard/detail/held.hpp"
#include "switchyard/names.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

class ExpertMlp;
namespace detail {
class ExpertSteps;
void observe_steps(ExpertMlp& mlp, ExpertSteps* steps);
}  // namespace detail

/// Size of one rank's experts; all experts have the same size.
struct ExpertShape {
  int64_t hidden = 0;         ///< H >= 1
  int64_t intermediate = 0;   ///< I >= 1
  int num_local_experts = 0;  ///< L >= 0
};

/// Storage of the weights of an ExpertMlp.
enum class WeightStorage : uint8_t {
  packed = 0,  ///< separate copy in this CPU's fastest layout, created once; the caller's weights may be freed afterwards
  view = 1,    ///< the caller's weights, read in place by every call: no second copy; on the CPU slower for few rows per expert
};
template <>
struct NamesOf<WeightStorage> {
  static constexpr Named<WeightStorage> kAll[] = {{WeightStorage::packed, "packed"}, {WeightStorage::view, "view"}};
};

/// Settings of an ExpertMlp.
struct ExpertOptions {
  Backend backend = Backend::cpu;  ///< cuda: weights, rows and ranges are in memory of the GPU that is current at construction
  DType dtype = DType::bf16;       ///< of rows and weights: bf16; cuda: also f16 or fp8_e4m3, with bf16 outputs
  WeightStorage storage = WeightStorage::packed;  ///< cuda: must be view, because the weights stay in the caller's memory
  /// CPU, forward_rank_major: memory for the float32 outputs of single routes, H * 4 bytes each (never fewer than 256 routes).
  /// Rows whose routes do not fit are processed in blocks, and each block reads the weights once, so a larger value is faster.
  /// Unused pages are never touched.
  size_t route_scratch_bytes = size_t{64} << 20;
  /// CUDA: maximum number of rows in a call's `x`; the object allocates an intermediate row for each. Use max_rows() or the
  /// capacity of the dispatches in normal mode, and LowLatencyOutput::x.rows in low-latency mode. 0: calls have no rows.
  int64_t max_rows = 0;
  /// fp8_e4m3: scales of w13 `[L, 2 * ceil(I / 128), ceil(H / 128)]` (gate rows, then up rows) and of w2 `[L, ceil(H / 128),
  /// ceil(I / 128)]`, one per 128 x 128 weights. If `scaling` is not block: float32 `[L, 2 * I]` and `[L, H]`. They are in
  /// GPU memory and owned by the caller.
  const void* w13_scales = nullptr;
  const void* w2_scales = nullptr;
  ScaleKind weight_scales = ScaleKind::f32;   ///< f32 or ue8m0
  Accumulate accumulate = Accumulate::exact;  ///< of both products; fast: only fp8_e4m3 with scaling block
  /// Scales of `x` and of the weights; values other than block: only fp8_e4m3. With per_channel, `x` has one scale per row (see
  /// ExpertRows::scale_stride).
  ScaleGranularity scaling = ScaleGranularity::block;
  /// Scales of the intermediate rows; fixed and per_row require that `scaling` is not block. In that case, the second product
  /// has ScaleGranularity::group_channel with per_group, and per_channel with fixed and per_row.
  OutputScaling intermediate_scaling = OutputScaling::per_group;
  /// OutputScaling::fixed: the scale, in GPU memory, aligned to 4 bytes; read by every call. Otherwise null.
  const float* intermediate_scale = nullptr;
};

/// Weights of the L SwiGLU experts of one rank, for objects that compute with several weight sets (ExpertMlp, MoeLayer). The
/// object determines their type and sizes; the caller owns the memory. All pointers may be null on a rank without experts.
struct MoeWeights {
  const void* w13 = nullptr;         ///< [L, 2 * I, H]: for each expert, the I gate rows followed by the I up rows
  const void* w2 = nullptr;          ///< [L, H, I]
  const void* w13_scales = nullptr;  ///< fp8: as ExpertOptions::w13_scales; else null
  const void* w2_scales = nullptr;   ///< fp8: as ExpertOptions::w2_scales; else null
  /// GPUs: cudaStream_t for reads outside calls, for example of scales at construction; null: the legacy default stream.
  void* stream = nullptr;
  const float* intermediate_scale = nullptr;  ///< as ExpertOptions::intermediate_scale
};

/// Settings of one call.
struct ExpertCall {
  void* stream = nullptr;  ///< CUDA: cudaStream_t, which must outlive the object; null: the legacy default stream
  int num_sms = 0;         ///< CUDA: maximum number of multiprocessors, in [1, those of the GPU]; 0: all
};

/// Memory used by one ExpertMlp, in bytes, excluding the caller's arrays.
struct ExpertMemory {
  size_t weight_bytes = 0;   ///< WeightStorage::packed: own weights; view: 0
  size_t scratch_bytes = 0;  ///< fixed at construction; CUDA: intermediate rows, in GPU memory
  size_t total() const { return weight_bytes + scratch_bytes; }
};

/// The MLPs of one rank's experts: `y = (silu(x W1^T) * (x W3^T)) W2^T`, silu(v) = v / (1 + exp(-v)).
///
/// Arithmetic, on both backends: x and the weights are bf16 (or f16). Both matrix products accumulate in float32, and silu and
/// the multiplication by the up half are computed in float32. The intermediate row and the output are each rounded once to bf16
/// (nearest even). The summation order of a matrix product depends on the backend, so GPU and CPU results agree within a
/// tolerance (docs/expert.md), not bitwise. Infinite and NaN inputs follow IEEE arithmetic; the silu of -inf is NaN.
///
/// CPU: the summation order may depend on the number of rows in a call, so results are not bit-identical between machines or
/// batch sizes. CPUs with bf16 instructions treat subnormal bf16 operands as zero. Every call runs only on the calling thread,
/// even if oneDNN was built with OpenMP, so up to one rank per core can run concurrently.
///
/// CUDA: a call consists of two GroupedGemm calls, with the bitwise guarantees that GroupedGemm documents. H and I are
/// multiples of 8; fp8: of 16. The fp8 intermediate row is rounded to bf16 and then quantized, with float32 scales
/// according to ExpertOptions::intermediate_scaling. Calls are enqueued, allocate nothing and do not wait; they can be
/// captured. Calls on one object, including graph launches, must be ordered one after another because they share the
/// intermediate rows.
///
/// Threads: one thread at a time per object; objects are independent.
class ExpertMlp {
 public:
  /// Writes the weights of local expert `expert`: w13 `[2 * I, H]` (gate rows, then up rows) and w2 `[H, I]`.
  using Source = std::function<void(int expert, std::span<uint16_t> w13, std::span<uint16_t> w2)>;

  /// `w13` is `[L, 2 * I, H]`: for each expert, the I gate rows (W1) followed by the I up rows (W3). `w2` is `[L, H, I]`. With
  /// WeightStorage::view, both must stay valid and unchanged while calls run; with packed, they are read only during
  /// construction. CUDA: both must be aligned to 16 bytes.
  /// \throws Error(invalid_argument) naming the argument; Error(system) if memory is insufficient; Error(unsupported) for f16
  /// on the CPU, and on GPUs as for the constructor of GroupedGemm.
  ExpertMlp(const ExpertShape& shape, const void* w13, const void* w2, const ExpertOptions& options = {});
  /// Packs the experts one at a time, calling `source` for experts 0 to L - 1 in order, so the unpacked weights of only one
  /// expert exist at a time. WeightStorage::packed only, hence CPU only.
  ExpertMlp(const ExpertShape& shape, const Source& source, const ExpertOptions& options = {});
  ExpertMlp(ExpertMlp&&) noexcept;
  ExpertMlp& operator=(ExpertMlp&&) noexcept;
  /// CUDA: may be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done.
  ~ExpertMlp();

  /// Creates the experts of another layer of the model, with this shape and these options except the weight scales. CUDA: they
  /// share this object's intermediate rows, so calls on all of them, including graph launches, must be ordered one after
  /// another. CPU: they have their own scratch memory and the same WeightStorage. \throws as the constructor.
  ExpertMlp with_weights(const MoeWeights& weights) const;

  /// Memory required by an object of this shape on this machine. Leaves no memory allocated.
  static ExpertMemory memory_required(const ExpertShape& shape, const ExpertOptions& options = {});

  /// Applies each expert to its rows of `x` and writes the results to the same rows of `y`. Both are [rows, H] of the object's
  /// type (fp8: `x` has scales as in ExpertOptions::scaling, and `y` is bf16). `x` may be the result of an expert-major or
  /// low-latency dispatch, with ExpertRows::of; `y` may be memory that combine reads (NormalExchange::allocate_rows,
  /// LowLatencyExchange::make_rows). Rows that belong to no expert, and rows past the end of `x` or `y`, are not accessed. `x`
  /// and `y` must not overlap; they may be null if they have no rows. CUDA: both must be aligned to 16 bytes. \throws
  /// Error(invalid_argument) naming the argument, before anything is written; on CUDA, also if `x` has more than
  /// ExpertOptions::max_rows; Error(system).
  void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall& call = {});

  /// forward() with host arrays: applies local expert e to rows `first_row[e] .. first_row[e] + num_rows[e] - 1` of `x` and
  /// writes the same rows of `y`. Both spans have L entries. A count may be 0; ranges may have gaps (padding) but must not
  /// overlap. Rows outside the ranges are neither read nor written. `x` and `y` must not overlap; they may be null if all
  /// counts are 0. CPU only. \throws Error(invalid_argument) before anything is written; Error(unsupported) on a GPU.
  void forward(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows, uint16_t* y);

  /// Rank-major rows: `y[r] = sum over k of topk_weights[r, k] * mlp_(topk_ids[r, k])(x[r])`. `x` and `y` are
  /// `[topk_ids.num_tokens, H]`. The sum is float32 from +0, k ascending, multiply then add, and is rounded once to bf16; the
  /// summands are not rounded to bf16. `topk_ids` are local: an id outside `[0, L)` is skipped, an id that occurs twice in a
  /// row counts twice, and a row without experts gives +0. `topk_weights` is float32 `[topk_ids.num_tokens, topk_ids.topk]`, or
  /// null (all 1). `x` and `y` must not overlap. CPU only. \throws Error(invalid_argument) before anything is written;
  /// Error(unsupported) on a GPU.
  void forward_rank_major(const uint16_t* x, const ExpertIds& topk_ids, const float* topk_weights, uint16_t* y);

  const ExpertShape& shape() const;
  ExpertMemory memory() const;
  /// Data type and kernel of the matrix products, for example "bf16 brg:avx512_core_bf16" or "f32 gemm:jit" (oneDNN), or "bf16
  /// wgmma:sm_90a".
  std::string implementation() const;

  struct Impl;  ///< library internal

 private:
  explicit ExpertMlp(std::unique_ptr<Impl> impl);
  friend void detail::observe_steps(ExpertMlp& mlp, detail::ExpertSteps* steps);
  detail::Held<std::unique_ptr<Impl>, detail::kExpertObject> impl_;
};

/// Weights for demonstrations and tests, computed in closed form from (seed, global expert, matrix, row, column): any rank, or
/// a single-rank reference, generates the same weights for an expert. They are scaled so that rows of independent unit-variance
/// elements give outputs of about unit variance. Immutable, cheap to copy, and bit-identical on every machine.
class ExpertWeights {
 public:
  /// \throws Error(invalid_argument) if hidden or intermediate is less than 1.
  ExpertWeights(uint64_t seed, int64_t hidden, int64_t intermediate);

  /// Returns one element of `[2 * I, H]` and of `[H, I]`, respectively. `expert` is the global expert.
  uint16_t w13(int64_t expert, int64_t row, int64_t col) const noexcept;
  uint16_t w2(int64_t expert, int64_t row, int64_t col) const noexcept;

  /// Writes all weights of one expert. \throws Error(invalid_argument) if a span does not have 2 * I * H, or H * I, elements.
  void fill(int64_t expert, std::span<uint16_t> w13, std::span<uint16_t> w2) const;

  /// Source for ExpertMlp: local expert i is global expert `first_expert + i`.
  ExpertMlp::Source source(int64_t first_expert) const;

 private:
  static constexpr int kLevels = 256;
  uint64_t seed_;
  int64_t hidden_, intermediate_;
  uint16_t levels13_[kLevels], levels2_[kLevels];
};

}  // namespace switchyard
