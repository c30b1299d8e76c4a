// SPDX-License-Identifier: Apache-2.0
/// \file
/// Vocabulary shared by all modes: element types, layouts, policies and non-owning array views.
#pragma once

#include <cstddef>
#include <cstdint>

namespace switchyard {

/// Largest group. Largest number of experts that one token may choose.
inline constexpr int kMaxRanks = 64;
inline constexpr int kMaxTopk = 32;
/// Number of channels (columns) that share one quantisation scale, unless a mode lets its user choose.
inline constexpr int kScaleGroup = 128;

/// Where a group's ranks compute and hold their rows.
enum class Backend : uint8_t {
  cpu = 0,   ///< threads or processes of one host; pointers are host pointers
  cuda = 1,  ///< NVIDIA GPUs with peer access; pointers are device pointers of the rank's GPU
};

/// Element type of a row.
enum class DType : uint8_t { bf16 = 0, f16 = 1, f32 = 2, fp8_e4m3 = 3 };

/// How the scales of fp8 rows are stored, one per kScaleGroup channels. A scale row is padded to 16 bytes.
enum class ScaleKind : uint8_t {
  none = 0,
  f32 = 1,    ///< float32: `amax / 448`
  ue8m0 = 2,  ///< one byte, a power of two: `2^(byte - 127)`, `2^ceil(log2(amax / 448))`
};

/// Order of the rows that a dispatch delivers.
enum class Layout : uint8_t {
  rank_major = 0,  ///< one row per (token, destination rank), ordered by (source rank, token)
  expert_major =
      1,  ///< one row per route, ordered by (local expert, source rank, token, k), each expert padded to the alignment
};

/// How rows travel.
enum class Staging : uint8_t {
  direct = 0,  ///< senders write rows at their final place in the receiver's pool; combine pulls from there,
               ///< or pushes rows to their owners (expert-major, per_route)
  ring = 1,    ///< bounded symmetric memory: rows pass through rings of fixed size
};

/// How the number of output rows is chosen.
enum class SizePolicy : uint8_t {
  exact = 0,       ///< from the exchanged counts; CUDA: the call waits for them
  capacity = 1,    ///< the caller's bound, see Overflow
  worst_case = 2,  ///< the largest number that any routing can produce; shapes never vary
  automatic = 3,   ///< CPU: exact; CUDA: worst_case, because exact waits for the GPU
};

/// What happens if a rank would receive more rows than the caller's capacity. All ranks take the same decision.
enum class Overflow : uint8_t { fail = 0, drop_and_report = 1 };

/// Content of the padding rows of the expert-major layout.
enum class Padding : uint8_t { zero = 0, unspecified = 1 };

/// Order of the float32 sum in combine. Part of the contract: within one order equal input gives equal bits.
enum class CombineOrder : uint8_t {
  per_rank = 0,   ///< k ascending inside a rank, rounded to the row type, then ranks ascending, one final rounding
  per_route = 1,  ///< k ascending over all routes, one rounding at the end (expert-major rows only)
};

/// Bytes of one element.
constexpr size_t dtype_bytes(DType type) {
  switch (type) {
    case DType::bf16:
    case DType::f16: return 2;
    case DType::f32: return 4;
    case DType::fp8_e4m3: return 1;
  }
  return 0;
}

/// Number of scales of a row of `hidden` channels; the last group may be short. No scales for a group below 1.
constexpr int64_t num_scales(int64_t hidden, int group = kScaleGroup) { return group < 1 ? 0 : (hidden + group - 1) / group; }

/// Bytes of one scale row: the scales, padded to a multiple of 16. Zero for ScaleKind::none.
constexpr size_t scale_row_bytes(int64_t hidden, ScaleKind kind, int group = kScaleGroup) {
  if (kind == ScaleKind::none) return 0;
  const size_t raw = static_cast<size_t>(num_scales(hidden, group)) * (kind == ScaleKind::f32 ? 4 : 1);
  return (raw + 15) / 16 * 16;
}

/// Non-owning view of `rows` dense rows of `cols` elements; `scales` (fp8 only) is dense with scale_row_bytes a row.
struct ConstRows {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::bf16;
  const void* scales = nullptr;
  ScaleKind scale_kind = ScaleKind::none;
};

/// The mutable twin of ConstRows.
struct Rows {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::bf16;
  void* scales = nullptr;
  ScaleKind scale_kind = ScaleKind::none;
  operator ConstRows() const { return {data, rows, cols, dtype, scales, scale_kind}; }
};

/// Expert ids `[tokens, topk]`, dense, int32 or int64. An id outside `[0, num_experts)` means "no expert" (drop).
struct ExpertIds {
  const void* data = nullptr;
  int64_t tokens = 0;
  int topk = 0;
  bool is_int64 = false;
  static ExpertIds of(const int32_t* ids, int64_t tokens, int topk) { return {ids, tokens, topk, false}; }
  static ExpertIds of(const int64_t* ids, int64_t tokens, int topk) { return {ids, tokens, topk, true}; }
};

}  // namespace switchyard
