// SPDX-License-Identifier: Apache-2.0
/// \file
/// The backward pass of an expert MLP on GPUs, as calls that complement the grouped GEMM. Library switchyard_layer (CMake:
/// switchyard::layer). Requires a GPU of compute capability 9.0 (H100, H200).
///
/// For every row r of expert e, with its combine weight w[r]:
///
///     h = W13[e] x[r, :]      a = swiglu(h)      y = W2[e] a      z = w[r] * y
///
/// and from the gradient dz, with dy[r, :] = w[r] * dz[r, :]:
///
///     dw[r]    = dot(dz[r, :], y[r, :])              RoutingGradient
///     dW2[e]   = sum over r of dy[r, :]^T a[r, :]    WeightGradient
///     da[r, :] = W2[e]^T dy[r, :]                    GroupedGemm, WeightOrder::kn, with the same W2
///     dh[r, :] = swiglu'(h[r, :]) da[r, :]           SwigluGradient
///     dW13[e]  = sum over r of dh[r, :]^T x[r, :]    WeightGradient
///     dx[r, :] = W13[e]^T dh[r, :]                   GroupedGemm, WeightOrder::kn, with the same W13
///
/// All calls are enqueued and do not wait; they read the ExpertRows arrays when they run, and can be captured. Sums are float32
/// and each result is rounded once; a WeightGradient with `add` rounds the added sum and then the result. Objects are created
/// on the current GPU and must be used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/gemm.hpp"
#include "switchyard/detail/held.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

/// Fixed properties of a WeightGradient.
struct WeightGradientConfig {
  int num_experts = 0;           ///< number of local experts, in [1, kMaxGemmExperts]
  int64_t n = 0;                 ///< N, columns of dy: a multiple of 8
  int64_t k = 0;                 ///< K, columns of x: a multiple of 8
  DType dtype = DType::bf16;     ///< of dy and x: bf16 or f16
  DType out_dtype = DType::f32;  ///< of the gradients: f32, or equal to `dtype`
  bool add = false;              ///< adds to the existing gradients, in their type; else overwrites them
};

/// dw[e, n, k] (+)= sum over rows r of expert e: dy[r, n] * x[r, k]
///
/// Rows are added in ascending order, in float32 (as the tensor cores add), over all rows of the expert; the sum is rounded
/// once to the gradients' type. With `add`, it is then added once to the previous contents of memory and rounded to nearest, so
/// bf16 and f16 are rounded twice. float32 behaves like a single addition of two numbers, except that subnormals (below
/// 1.2e-38) may be treated as 0. The bits of an expert's gradients depend only on its rows (and the previous contents), not on
/// other experts, the rows' position, or the number of multiprocessors. The gradient of an expert without rows is set to zero
/// or, with `add`, left unchanged. Memory outside an expert's rows has no effect.
///
/// Calls on one object, including graph launches, must be ordered one after another (they share a counter); objects are
/// independent.
class WeightGradient {
 public:
  /// Allocates. \throws Error(invalid_argument) naming the member; Error(unsupported) if the library was built without CUDA, or
  /// for an unsupported GPU (named in the message).
  explicit WeightGradient(const WeightGradientConfig& config);
  WeightGradient(WeightGradient&&) noexcept;
  WeightGradient& operator=(WeightGradient&&) noexcept;
  /// May be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done. Does not
  /// wait.
  ~WeightGradient();

  /// `dy` is [rows, N], `x` is [rows, K], both dense and aligned to 16 bytes; row i of each belongs to the same token. `dw` is
  /// [E, N, K] in GPU memory, aligned to 16 bytes, and must not overlap `dy` or `x`. \throws Error(invalid_argument) naming the
  /// argument; Error(system).
  void run(const ConstRows& dy, const ConstRows& x, const ExpertRows& rows, void* dw, const GroupedGemmOptions& options = {});

  const WeightGradientConfig& config() const;

  struct Impl;  ///< library internal

 private:
  detail::Held<std::unique_ptr<Impl>, detail::kWeightGradientObject> impl_;
};

/// Fixed properties of a SwigluGradient.
struct SwigluGradientConfig {
  int num_experts = 0;        ///< number of local experts, in [1, kMaxGemmExperts]
  int64_t columns = 0;        ///< I, columns of a: a multiple of 8
  DType dtype = DType::bf16;  ///< of all rows: bf16 or f16
  Swiglu swiglu;              ///< as in the GroupedGemm of the forward pass
};

/// The gradient of Epilogue::swiglu. For column c of a row, with gate = h[c] and up = h[I + c], the sums before the epilogue
/// (Epilogue::none with the same weights):
///
///     g = min(gate, limit)      u = up clamped to [-limit, limit]         s = 1 / (1 + exp(-alpha * g))
///     a[c]      = g * s * (u + up_shift)
///     dh[c]     = da[c] * (u + up_shift) * s * (1 + alpha * g * (1 - s))     0 if gate > limit
///     dh[I + c] = da[c] * g * s                                              0 if up > limit or up < -limit
///
/// in float32 (`ex2.approx`, `rcp.approx`). A NaN in gate propagates to both gradients, and a NaN in up propagates to the
/// gradient of gate.
class SwigluGradient {
 public:
  /// \throws as WeightGradient.
  explicit SwigluGradient(const SwigluGradientConfig& config);
  SwigluGradient(SwigluGradient&&) noexcept;
  SwigluGradient& operator=(SwigluGradient&&) noexcept;
  ~SwigluGradient();

  /// `h` and `dh` are [rows, 2 I], and `da` and `a` are [rows, I], all dense and aligned to 16 bytes. `a` is written only if it
  /// has memory; pass it if the forward pass did not keep `a`. Rows that belong to no expert are not accessed. `dh` may occupy
  /// the memory of `h`, and `a` that of `da`; the arrays must not overlap otherwise. \throws Error(invalid_argument) naming the
  /// argument; Error(system).
  void run(const ConstRows& h, const ConstRows& da, const ExpertRows& rows, const Rows& dh, const Rows& a = {},
           const GroupedGemmOptions& options = {});

  const SwigluGradientConfig& config() const;

  struct Impl;  ///< library internal

 private:
  detail::Held<std::unique_ptr<Impl>, detail::kSwigluGradientObject> impl_;
};

/// Fixed properties of a RoutingGradient.
struct RoutingGradientConfig {
  int num_experts = 0;        ///< number of local experts, in [1, kMaxGemmExperts]
  int64_t columns = 0;        ///< columns of a row: a multiple of 8
  DType dtype = DType::bf16;  ///< of the rows: bf16 or f16
};

/// dweight[r] = sum over columns c: dy[r, c] * y[r, c], float32, where `dy` is the gradient of the weighted row (dz above). The
/// summation order is fixed: each of 32 partial sums covers 8 adjacent columns in every 256, in ascending order, and the
/// partial sums are then added pairwise by halves. The bits depend only on the row.
class RoutingGradient {
 public:
  /// \throws as WeightGradient.
  explicit RoutingGradient(const RoutingGradientConfig& config);
  RoutingGradient(RoutingGradient&&) noexcept;
  RoutingGradient& operator=(RoutingGradient&&) noexcept;
  ~RoutingGradient();

  /// `dy` and `y` are [rows, columns], dense and aligned to 16 bytes; `dweight` is [rows], aligned to 4 bytes. Rows that belong
  /// to no expert are not accessed. \throws Error(invalid_argument) naming the argument; Error(system).
  void run(const ConstRows& dy, const ConstRows& y, const ExpertRows& rows, float* dweight,
           const GroupedGemmOptions& options = {});

  const RoutingGradientConfig& config() const;

  struct Impl;  ///< library internal

 private:
  detail::Held<std::unique_ptr<Impl>, detail::kRoutingGradientObject> impl_;
};

}  // namespace switchyard
