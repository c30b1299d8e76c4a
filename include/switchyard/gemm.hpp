// SPDX-License-Identifier: Apache-2.0
/// \file
/// Grouped GEMM on GPUs: each expert's rows times its own weights, in one launch, between dispatch and combine. Library
/// switchyard_layer (CMake: switchyard::layer). Needs a GPU of compute capability 9.0 (H100, H200).
///
///     out[r, :] = epilogue(W[e] x[r, :])     for every row r of expert e
///
/// Sums are float32 over the whole inner dimension, epilogues are float32, an output is rounded once, to the type of the rows
/// (nearest even). Rows and weights of fp8 e4m3 have scales, of 128 elements of a row and of 128 x 128 weights, as
/// DeepSeek-V3's:
///
///     W[e] x[r, :] = sum over blocks b of 128 of K: (codes of W[e] in b) . (codes of x[r] in b) * scale of W * scale of x
///
/// each block's product as the tensor cores add it up, then float32; outputs are bf16, or fp8 again. The bits of an output row
/// depend on that row and the weights of its expert alone: not on the number of rows, the row's place, its neighbours, or the
/// number of multiprocessors.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "switchyard/held.hpp"
#include "switchyard/names.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

struct Dispatched;
struct LowLatencyOutput;

/// How an expert's weights lie in memory, dense.
enum class WeightOrder : uint8_t {
  nk = 0,  ///< [N, K]: as checkpoints store linear layers, outputs outside
  kn = 1,  ///< [K, N]: the transposed product of nk weights, as a gradient needs it
};
template <>
struct NamesOf<WeightOrder> {
  static constexpr Named<WeightOrder> kAll[] = {{WeightOrder::nk, "nk"}, {WeightOrder::kn, "kn"}};
};

/// What becomes of the N sums of a row.
enum class Epilogue : uint8_t {
  none = 0,    ///< N outputs
  relu = 1,    ///< N outputs: max(v, 0); NaN stays
  silu = 2,    ///< N outputs: v / (1 + exp(-v))
  swiglu = 3,  ///< N / 2 outputs of the first N / 2 sums (gate) and the others (up): see Swiglu
};
template <>
struct NamesOf<Epilogue> {
  static constexpr Named<Epilogue> kAll[] = {
      {Epilogue::none, "none"}, {Epilogue::relu, "relu"}, {Epilogue::silu, "silu"}, {Epilogue::swiglu, "swiglu"}};
};

/// g / (1 + exp(-alpha * g)) * (u + up_shift), where g = min(gate, limit) and u = up, brought into [-limit, limit]. As it is:
/// silu(gate) * up.
struct Swiglu {
  float limit = std::numeric_limits<float>::infinity();  ///< > 0
  float alpha = 1;
  float up_shift = 0;
};

/// Fixed properties of a GroupedGemm.
struct GroupedGemmConfig {
  int num_experts = 0;                  ///< in [1, kMostGemmExperts]: of this rank
  int64_t n = 0;                        ///< N: a multiple of 8, gate and up of swiglu counted both: a multiple of 16
  int64_t k = 0;                        ///< K: a multiple of 8; fp8: of 16
  DType type = DType::bf16;             ///< of rows, weights and outputs: bf16 or f16; fp8_e4m3: of rows and weights
  WeightOrder order = WeightOrder::nk;  ///< fp8: nk
  Epilogue epilogue = Epilogue::none;
  Swiglu swiglu;
  /// fp8: of the scales of the weights, [E, S, ceil(K / 128)], f32 or ue8m0 (one byte), dense. S is ceil(N / 128); swiglu:
  /// ceil(N / 256) of the gate, then as many of the up half.
  ScaleKind weight_scales = ScaleKind::f32;
  /// fp8 with swiglu. Not none: outputs are fp8 e4m3 with such scales, one for 128 columns: bit for bit what a dispatch makes
  /// of bf16 outputs with DispatchOptions::quantize (docs/concepts/layouts.md has the formulas). N is then a multiple of 32.
  ScaleKind quantize = ScaleKind::none;

  /// Columns of an output row.
  int64_t columns() const { return epilogue == Epilogue::swiglu ? n / 2 : n; }
  /// Type of an output row.
  DType out_type() const { return type != DType::fp8_e4m3 ? type : quantize != ScaleKind::none ? type : DType::bf16; }
};

inline constexpr int kMostGemmExperts = 2048;
/// Largest N and K.
inline constexpr int64_t kMostGemmColumns = int64_t{1} << 20;

/// Where the rows of each expert lie, in memory of the GPU that is read when the kernel runs: no host needs to know a count.
/// (ExpertMlp on the CPU: in memory of the host.)
/// A count is taken as 0 if it or the first row is negative, and rows that would lie behind those of `x` or of `out` are left
/// out. The rows of different experts must not overlap.
struct ExpertRows {
  const int64_t* num_rows = nullptr;     ///< [experts], or
  const int32_t* num_rows_32 = nullptr;  ///< [experts]
  const int64_t* first_row = nullptr;  ///< [experts], or null: expert e begins at e * rows_per_expert and ends before the next
  int64_t rows_per_expert = 0;
  /// fp8, ScaleOrder::column_major of low latency: words from a column of an expert's scales to the next. 0: a row of scales
  /// for each row, as ConstRows says.
  int64_t scale_rows = 0;

  /// Of an expert-major dispatch. \throws Error(invalid_argument) if it is rank-major.
  static ExpertRows of(const Dispatched& dispatched);
  /// Of a low-latency dispatch. \throws Error(invalid_argument) if its rows have scales of other groups than 128 columns.
  static ExpertRows of(const LowLatencyOutput& output);
};

struct GroupedGemmOptions {
  void* stream = nullptr;  ///< cudaStream_t; null: the legacy default stream
  /// Most multiprocessors, in [1, those of the GPU]; 0: all. A call ends when each of its blocks, one a multiprocessor, has
  /// run: if a kernel that waits for other ranks occupies some, and those wait for this call, leave it its multiprocessors.
  int num_sms = 0;
};

/// One matrix product per expert, on the GPU that is current when it is made. Calls are enqueued and wait for nothing; they can
/// be captured. Calls of one object, graphs included, must be ordered one after the other (they share a counter); objects are
/// independent. One thread at a time.
class GroupedGemm {
 public:
  /// `weights` is [E, N, K] or [E, K, N] in memory of the GPU, a multiple of 16 bytes; it stays the caller's, and is read by
  /// every call and graph; so do `weight_scales` (fp8 only, 4-byte aligned). Allocates. \throws Error(invalid_argument) naming
  /// the member; Error(unsupported) where the library was built without CUDA, or for a GPU of another kind, which it names.
  GroupedGemm(const GroupedGemmConfig& config, const void* weights, const void* weight_scales = nullptr);
  GroupedGemm(GroupedGemm&&) noexcept;
  GroupedGemm& operator=(GroupedGemm&&) noexcept;
  /// At any time: memory that enqueued calls and captured graphs use is freed after them. Waits for nothing.
  ~GroupedGemm();

  /// `x` is [rows, K], `out` [rows, columns()], both dense and at multiples of 16 bytes: Dispatched::x or LowLatencyOutput::x
  /// as it is, and RowBuffer::rows() or LowLatencyRows. Row i of `out` is of row i of `x`; rows of no expert are not touched.
  /// They must not overlap. fp8: `x` has its scales, f32 or ue8m0; so has an `out` that is quantised, whose scales are written
  /// (what pads a row of them to 16 bytes is not). \throws Error(invalid_argument) naming the argument; Error(system).
  void run(const ConstRows& x, const ExpertRows& rows, const Rows& out, const GroupedGemmOptions& options = {});

  const GroupedGemmConfig& config() const;

  struct Impl;  ///< library internal

 private:
  detail::Held<std::unique_ptr<Impl>, detail::kGemmObject> impl_;
};

}  // namespace switchyard
