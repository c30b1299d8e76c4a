// SPDX-License-Identifier: Apache-2.0
/// \file
/// Expert compute on the CPU: the SwiGLU MLPs of one rank's experts, between dispatch and combine. No communication. Library
/// switchyard_layer (CMake: switchyard::layer).
///
/// Notation: H hidden, I intermediate, L local experts. Rows and weights are bf16, dense, row-major, as uint16_t bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "switchyard/held.hpp"
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
  view = 1,    ///< the caller's weights, read in place by every call: no second copy, slower for few rows per expert
};

/// Settings of an ExpertMlp.
struct ExpertOptions {
  WeightStorage storage = WeightStorage::packed;
  /// forward_rank_major: memory for the float32 outputs of single routes, H * 4 bytes each (at least 256 routes are kept). Rows
  /// whose routes do not fit are done in blocks, and each block reads the weights once: larger is faster. Pages are touched
  /// only when used.
  size_t route_scratch_bytes = size_t{64} << 20;
};

/// Memory of one ExpertMlp, in bytes, beside the caller's arrays.
struct ExpertMemory {
  size_t weight_bytes = 0;   ///< WeightStorage::packed: own weights; view: 0
  size_t scratch_bytes = 0;  ///< fixed at construction
  size_t total() const { return weight_bytes + scratch_bytes; }
};

/// The MLPs of one rank's experts: `y = (silu(x W1^T) * (x W3^T)) W2^T`, silu(v) = v / (1 + exp(-v)).
///
/// Arithmetic: x and the weights are bf16. Both products accumulate in float32; silu and the product with the up half are
/// float32; the intermediate row is rounded to bf16 once; the output is float32 until its one rounding to bf16 (nearest even).
/// CPUs with bf16 instructions take subnormal bf16 operands as zero. The order of a product's sum is the CPU library's, and may
/// differ by the number of rows of a call: results are within a tolerance (docs/expert.md), not bit-equal between machines or
/// batchings. Infinite or NaN inputs give what IEEE arithmetic gives; the silu of -inf is NaN.
///
/// Threads: one thread at a time per object; objects are independent. Every call runs on the calling thread alone, also where
/// oneDNN was built with OpenMP, so that as many ranks as cores may run side by side.
class ExpertMlp {
 public:
  /// Writes the weights of local expert `expert`: w13 `[2 * I, H]` (gate rows, then up rows) and w2 `[H, I]`.
  using Source = std::function<void(int expert, std::span<uint16_t> w13, std::span<uint16_t> w2)>;

  /// `w13` is `[L, 2 * I, H]`: of each expert first the I gate rows (W1), then the I up rows (W3). `w2` is `[L, H, I]`.
  /// With WeightStorage::view both must stay valid and unchanged while calls run; with packed they are read here only.
  /// \throws Error(invalid_argument) naming the argument; Error(system) without memory.
  ExpertMlp(const ExpertShape& shape, const uint16_t* w13, const uint16_t* w2, const ExpertOptions& options = {});
  /// Packs one expert after the other as `source` writes them (called for 0 .. L - 1, in order), so that the unpacked weights
  /// of only one expert exist at a time. WeightStorage::packed only.
  ExpertMlp(const ExpertShape& shape, const Source& source, const ExpertOptions& options = {});
  ExpertMlp(ExpertMlp&&) noexcept;
  ExpertMlp& operator=(ExpertMlp&&) noexcept;
  ~ExpertMlp();

  /// Memory that an object of this shape takes on this machine. Allocates nothing that stays.
  static ExpertMemory memory_required(const ExpertShape& shape, const ExpertOptions& options = {});

  /// Expert-major rows: rows `first_row[e] .. first_row[e] + num_rows[e] - 1` of `x` go through local expert e into the same
  /// rows of `y`. Both spans have L entries; a count may be 0; ranges may have gaps (padding) and must not overlap. Rows of `y`
  /// outside the ranges are not touched, those of `x` not read. `x` and `y` must not overlap; they may be null if all counts
  /// are 0.
  /// \throws Error(invalid_argument) before anything is written.
  void forward(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows, uint16_t* y);

  /// Rank-major rows: `y[r] = sum over k of weights[r, k] * mlp_(ids[r, k])(x[r])`, for `x` and `y` of `[ids.tokens, H]`. The
  /// sum is float32 from +0, k ascending, multiply then add, rounded to bf16 once; the summands are not rounded to bf16. `ids`
  /// are local; one outside `[0, L)` is skipped, one that occurs twice in a row counts twice; a row without experts gives +0.
  /// `weights` is float32 `[ids.tokens, ids.topk]`, or null: all 1. `x` and `y` must not overlap.
  /// \throws Error(invalid_argument) before anything is written.
  void forward_rank_major(const uint16_t* x, const ExpertIds& ids, const float* weights, uint16_t* y);

  const ExpertShape& shape() const;
  ExpertMemory memory() const;
  /// The data type of the products and oneDNN's kernel, for example "bf16 brg:avx512_core_bf16" or "f32 gemm:jit".
  std::string implementation() const;

 private:
  struct Impl;
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
