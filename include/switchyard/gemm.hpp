// SPDX-License-Identifier: Apache-2.0
/// \file
/// Grouped GEMM on GPUs: multiplies each expert's rows by its weights, in one launch, between dispatch and combine. Library
/// switchyard_layer (CMake: switchyard::layer). Requires a GPU of compute capability 9.0 (H100, H200).
///
///     out[r, :] = epilogue(W[e] x[r, :])     for every row r of expert e
///
/// Sums over the whole inner dimension and epilogues are computed in float32, and each output is rounded once to the row type
/// (nearest even). Rows and weights in fp8 e4m3 have one scale per 128 elements of a row and per 128 x 128 weights, as in
/// DeepSeek-V3:
///
///     W[e] x[r, :] = sum over blocks b of 128 of K: (codes of W[e] in b) . (codes of x[r] in b) * scale of W * scale of x
///
/// The tensor cores accumulate each block's product, which is then added in float32; outputs are bf16, or fp8 again. The bits
/// of an output row depend only on that row and its expert's weights, not on the number of rows, the row's position, its
/// neighbors, or the number of multiprocessors.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "switchyard/detail/held.hpp"
#include "switchyard/names.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

struct Dispatched;
struct LowLatencyOutput;

/// Memory order of an expert's dense weights.
enum class WeightOrder : uint8_t {
  nk = 0,  ///< [N, K]: the order of linear layers in checkpoints, outputs outermost
  kn = 1,  ///< [K, N]: the transposed product of nk weights, for gradients
};
template <>
struct NamesOf<WeightOrder> {
  static constexpr Named<WeightOrder> kAll[] = {{WeightOrder::nk, "nk"}, {WeightOrder::kn, "kn"}};
};

/// Function applied to the N sums of each row.
enum class Epilogue : uint8_t {
  none = 0,    ///< N outputs
  relu = 1,    ///< N outputs: max(v, 0); NaN is kept
  silu = 2,    ///< N outputs: v / (1 + exp(-v))
  swiglu = 3,  ///< N / 2 outputs from the first N / 2 sums (gate) and the others (up): see Swiglu
};
template <>
struct NamesOf<Epilogue> {
  static constexpr Named<Epilogue> kAll[] = {
      {Epilogue::none, "none"}, {Epilogue::relu, "relu"}, {Epilogue::silu, "silu"}, {Epilogue::swiglu, "swiglu"}};
};

/// g / (1 + exp(-alpha * g)) * (u + up_shift), where g = min(gate, limit) and u is up clamped to [-limit, limit]. With the
/// defaults: silu(gate) * up.
struct Swiglu {
  float limit = std::numeric_limits<float>::infinity();  ///< > 0
  float alpha = 1;
  float up_shift = 0;
};

/// Elements that share a scale in matrix products of fp8 rows and weights on GPUs.
enum class ScaleGranularity : uint8_t {
  block = 0,  ///< rows: 128 columns; weights: 128 x 128
  /// Rows: a whole row; weights: an output. Both scales are float32 and applied once, to the whole sum. The tensor cores
  /// compute this sum; they keep about 14 bits and truncate.
  per_channel = 1,
  group_channel = 2,  ///< rows: 128 columns, summed as with block; weights: an output, applied to the whole sum. float32 scales
};
template <>
struct NamesOf<ScaleGranularity> {
  static constexpr Named<ScaleGranularity> kAll[] = {{ScaleGranularity::block, "block"},
                                                     {ScaleGranularity::per_channel, "per_channel"},
                                                     {ScaleGranularity::group_channel, "group_channel"}};
};

/// Columns of a quantized output row that share a scale.
enum class OutputScaling : uint8_t {
  per_group = 0,  ///< 128 columns: amax / 448
  fixed = 1,      ///< all, with a scale given by the caller; larger values saturate
  per_row = 2,    ///< all: amax / 448
};
template <>
struct NamesOf<OutputScaling> {
  static constexpr Named<OutputScaling> kAll[] = {
      {OutputScaling::per_group, "per_group"}, {OutputScaling::fixed, "fixed"}, {OutputScaling::per_row, "per_row"}};
};

/// Fixed properties of a GroupedGemm.
struct GroupedGemmConfig {
  int num_experts = 0;                  ///< number of local experts, in [1, kMaxGemmExperts]
  int64_t n = 0;                        ///< N: a multiple of 8; swiglu: gate and up together, a multiple of 16
  int64_t k = 0;                        ///< K: a multiple of 8; fp8: of 16
  DType dtype = DType::bf16;            ///< of rows, weights and outputs: bf16 or f16; fp8_e4m3: of rows and weights
  WeightOrder order = WeightOrder::nk;  ///< fp8: nk
  Epilogue epilogue = Epilogue::none;
  Swiglu swiglu;
  /// fp8: kind of the weight scales, dense [E, S, ceil(K / 128)]: f32 or ue8m0 (one byte). S is ceil(N / 128); for swiglu,
  /// ceil(N / 256) for the gate half, then as many for the up half. If `scaling` is not block: f32, dense [E, N].
  ScaleKind weight_scales = ScaleKind::f32;
  /// fp8 with swiglu. If not none, outputs are fp8 e4m3 with these scales, shared according to `output_scaling`, and N
  /// must be a multiple of 32. They are quantized from bf16 outputs. With per_group, they are bit-identical to those of a
  /// dispatch of bf16 outputs with DispatchOptions::quantize (docs/concepts/layouts.md gives the formulas).
  ScaleKind quantize = ScaleKind::none;
  Accumulate accumulate = Accumulate::exact;  ///< fast: only fp8 with ScaleGranularity::block; docs/gemm.md states its error
  ScaleGranularity scaling = ScaleGranularity::block;  ///< other values: only fp8
  /// Values other than per_group require `quantize` f32 and a `scaling` other than block; output scales are then dense float32
  /// [rows].
  OutputScaling output_scaling = OutputScaling::per_group;

  /// Number of columns in an output row.
  int64_t columns() const { return epilogue == Epilogue::swiglu ? n / 2 : n; }
  /// Data type of an output row.
  DType out_dtype() const { return dtype != DType::fp8_e4m3 ? dtype : quantize != ScaleKind::none ? dtype : DType::bf16; }
};

inline constexpr int kMaxGemmExperts = 2048;
/// Maximum N and K.
inline constexpr int64_t kMaxGemmColumns = int64_t{1} << 20;

/// Location of each expert's rows. The arrays are in GPU memory and are read when the kernel runs, so the host does not need
/// the counts. (ExpertMlp on the CPU: in host memory.) An expert has no rows if its count or its first row is negative; rows
/// past the end of `x` or `out` are skipped. The rows of different experts must not overlap.
struct ExpertRows {
  const int64_t* num_rows = nullptr;     ///< [experts], or
  const int32_t* num_rows_32 = nullptr;  ///< [experts]
  const int64_t* first_row = nullptr;  ///< [experts], or null: expert e starts at e * rows_per_expert and ends before the next
  int64_t rows_per_expert = 0;
  /// fp8 with ScaleOrder::column_major (low latency): distance in words between columns of an expert's scales. 0: one row of
  /// scales per row, as in ConstRows.
  int64_t scale_rows = 0;
  /// ScaleGranularity::per_channel without scale_rows: distance in words between the scales of consecutive rows: 0 or 1
  /// (dense), or that of a dispatch's scale rows, which of() sets; of these, only the first scale counts. For a product of
  /// another product's quantized outputs, set scale_rows and scale_stride to 0.
  int64_t scale_stride = 0;

  /// Rows of an expert-major dispatch. \throws Error(invalid_argument) if it is rank-major.
  static ExpertRows of(const Dispatched& dispatched);
  /// Rows of a low-latency dispatch. \throws Error(invalid_argument) if its scale group is not 128 columns.
  static ExpertRows of(const LowLatencyOutput& output);
};

struct GroupedGemmOptions {
  void* stream = nullptr;  ///< cudaStream_t, which must outlive the object; null: the legacy default stream
  /// Maximum number of multiprocessors, in [1, those of the GPU]; 0: all. A call ends only after each of its blocks, one per
  /// multiprocessor, has run. If a kernel that occupies multiprocessors waits for other ranks, and those ranks wait for this
  /// call, limit the call to the remaining multiprocessors.
  int num_sms = 0;
  /// OutputScaling::fixed: the scale, > 0, in GPU memory, aligned to 4 bytes; read when the kernel runs.
  const float* output_scale = nullptr;
  void* scratch = nullptr;  ///< OutputScaling::per_row: memory for bf16 [out.rows, columns()], aligned to 16 bytes
};

/// One matrix product per expert, on the GPU that is current at construction. Calls are enqueued and do not wait; they can be
/// captured. Calls on one object, including graph launches, must be ordered one after another (they share a counter); objects
/// are independent. Use each object from one thread at a time.
class GroupedGemm {
 public:
  /// `weights` is [E, N, K] or [E, K, N] in GPU memory, aligned to 16 bytes; the caller keeps ownership, and every call and
  /// graph launch reads it. The same applies to `weight_scales` (fp8 only, 4-byte aligned). Allocates. \throws
  /// Error(invalid_argument) naming the member; Error(unsupported) if the library was built without CUDA, or for an unsupported
  /// GPU (named in the message).
  GroupedGemm(const GroupedGemmConfig& config, const void* weights, const void* weight_scales = nullptr);
  GroupedGemm(GroupedGemm&&) noexcept;
  GroupedGemm& operator=(GroupedGemm&&) noexcept;
  /// May be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done. Does not
  /// wait.
  ~GroupedGemm();

  /// `x` is [rows, K] and `out` is [rows, columns()], both dense and aligned to 16 bytes. For example, `x` is Dispatched::x or
  /// LowLatencyOutput::x, and `out` is RowBuffer::rows() or LowLatencyRows. Row i of `out` is computed from row i of `x`; rows
  /// that belong to no expert are not accessed. `x` and `out` must not overlap. fp8: `x` must have scales, f32 or ue8m0; a
  /// quantized `out` must have scales too, which are written except for the padding of each scale row to 16 bytes. \throws
  /// Error(invalid_argument) naming the argument; Error(system).
  void run(const ConstRows& x, const ExpertRows& rows, const Rows& out, const GroupedGemmOptions& options = {});

  const GroupedGemmConfig& config() const;

  struct Impl;  ///< library internal

 private:
  detail::Held<std::unique_ptr<Impl>, detail::kGemmObject> impl_;
};

}  // namespace switchyard
