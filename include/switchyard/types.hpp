// SPDX-License-Identifier: Apache-2.0
/// \file
/// Types shared by all modes: element types, layouts, policies and non-owning array views.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/names.hpp"

namespace switchyard {

/// Maximum number of ranks in a group, and of experts per token.
inline constexpr int kMaxRanks = 64;
inline constexpr int kMaxTopk = 32;
/// Number of columns that share one quantization scale, unless a mode makes it configurable.
inline constexpr int kScaleGroup = 128;

/// Where a group's ranks compute and store their rows.
enum class Backend : uint8_t {
  cpu = 0,   ///< threads or processes, of one host or several; pointers are host pointers
  cuda = 1,  ///< NVIDIA GPUs with peer access; pointers are device pointers of the rank's GPU
};
template <>
struct NamesOf<Backend> {
  static constexpr Named<Backend> kAll[] = {{Backend::cpu, "cpu"}, {Backend::cuda, "cuda"}};
};

/// Element type of a row: bf16, f16, f32, fp8_e4m3. dtypes.def lists the capabilities of each type.
enum class DType : uint8_t {
#define SY_ROW_TYPE(name, NAME, value, ...) name = value,
#include "switchyard/dtypes.def"
};
template <>
struct NamesOf<DType> {
  static constexpr Named<DType> kAll[] = {
#define SY_ROW_TYPE(name, ...) {DType::name, #name},
#include "switchyard/dtypes.def"
  };
};

/// Storage of the scales of fp8 rows, one scale per kScaleGroup columns. A scale row is padded to 16 bytes.
enum class ScaleKind : uint8_t {
  none = 0,
  f32 = 1,    ///< float32: `amax / 448`
  ue8m0 = 2,  ///< one byte, a power of two: `2^(byte - 127)`, `2^ceil(log2(amax / 448))`
};
template <>
struct NamesOf<ScaleKind> {
  static constexpr Named<ScaleKind> kAll[] = {{ScaleKind::none, "none"}, {ScaleKind::f32, "f32"}, {ScaleKind::ue8m0, "ue8m0"}};
};

/// Addition of fp8 products in matrix products on GPUs.
enum class Accumulate : uint8_t {
  exact = 0,  ///< in float32: the products of each 128 elements of a row are multiplied by their scales, then added
  /// By the tensor cores, for experts with more than 64 rows (unless num_sms is 1). They keep about 14 bits and truncate. When
  /// a scale changes, the sums are multiplied by the quotient of the old and the new scale. 128 elements of a row contribute
  /// nothing if their scale is at most 2^-32 times the last scale that contributed. Sums may overflow if scales of a row, or of
  /// weights, differ by a factor above 2^64. Weights with scale 0 must be 0.
  fast = 1,
};
template <>
struct NamesOf<Accumulate> {
  static constexpr Named<Accumulate> kAll[] = {{Accumulate::exact, "exact"}, {Accumulate::fast, "fast"}};
};

/// Order of the rows delivered by a dispatch.
enum class Layout : uint8_t {
  rank_major = 0,  ///< one row per (token, destination rank), ordered by (source rank, token)
  expert_major =
      1,  ///< one row per route, ordered by (local expert, source rank, token, k), each expert padded to the alignment
};
template <>
struct NamesOf<Layout> {
  static constexpr Named<Layout> kAll[] = {{Layout::rank_major, "rank_major"}, {Layout::expert_major, "expert_major"}};
};

/// Transport of rows within a host.
enum class Staging : uint8_t {
  direct = 0,  ///< senders write rows at their final place in the receiver's pool; combine pulls rows from there,
               ///< or pushes them to their owners (expert-major, per_route)
  ring = 1,    ///< bounded symmetric memory: rows pass through rings of fixed size
};
template <>
struct NamesOf<Staging> {
  static constexpr Named<Staging> kAll[] = {{Staging::direct, "direct"}, {Staging::ring, "ring"}};
};

/// Determines the number of output rows.
enum class SizePolicy : uint8_t {
  exact = 0,       ///< from the exchanged counts; CUDA: the call waits for them
  capacity = 1,    ///< the caller's bound, see Overflow
  worst_case = 2,  ///< maximum over all routings; shapes never vary
  automatic = 3,   ///< CPU: exact; CUDA: worst_case, because exact waits for the GPU
};
template <>
struct NamesOf<SizePolicy> {
  static constexpr Named<SizePolicy> kAll[] = {{SizePolicy::exact, "exact"},
                                               {SizePolicy::capacity, "capacity"},
                                               {SizePolicy::worst_case, "worst_case"},
                                               {SizePolicy::automatic, "automatic"}};
};

/// Action taken when a rank would receive more rows than the caller's capacity. All ranks make the same decision.
enum class Overflow : uint8_t {
  fail = 0,
  drop_and_report = 1,
  split = 2,  ///< only MoeLayer in the fused form: split the call into passes over ranges of tokens
};
template <>
struct NamesOf<Overflow> {
  static constexpr Named<Overflow> kAll[] = {
      {Overflow::fail, "fail"}, {Overflow::drop_and_report, "drop_and_report"}, {Overflow::split, "split"}};
};

/// Treatment of ids that are neither -1 (no expert) nor in [0, E). Their routes are dropped.
enum class InvalidIds : uint8_t {
  /// Ids in host memory: before any row is transferred, the call fails with invalid_argument, whose message gives the first
  /// invalid id. Ids on a GPU: the object counts them, and Group::check() fails with invalid_argument, whose message gives the
  /// object and the count.
  raise = 0,
  count = 1,  ///< the object only counts them
};
template <>
struct NamesOf<InvalidIds> {
  static constexpr Named<InvalidIds> kAll[] = {{InvalidIds::raise, "raise"}, {InvalidIds::count, "count"}};
};

/// Content of the padding rows of the expert-major layout.
enum class Padding : uint8_t { zero = 0, unspecified = 1 };
template <>
struct NamesOf<Padding> {
  static constexpr Named<Padding> kAll[] = {{Padding::zero, "zero"}, {Padding::unspecified, "unspecified"}};
};

/// Order of the float32 sum in combine. Part of the contract: with the same order, identical inputs give bit-identical results.
enum class CombineOrder : uint8_t {
  per_rank = 0,   ///< k ascending inside a rank, rounded to the row type, then ranks ascending, one final rounding
  per_route = 1,  ///< k ascending over all routes, one rounding at the end (expert-major rows only)
  /// Normal mode. Each host sums in ascending order of k (rank-major: of ranks) from +0 and rounds to the row type; the hosts'
  /// sums are then added in ascending order of lowest rank, with one final rounding. Every other host returns one row per
  /// token. In a single-host group, equal to per_route for expert-major rows and to per_rank for rank-major rows.
  per_host = 2,
};
template <>
struct NamesOf<CombineOrder> {
  static constexpr Named<CombineOrder> kAll[] = {
      {CombineOrder::per_rank, "per_rank"}, {CombineOrder::per_route, "per_route"}, {CombineOrder::per_host, "per_host"}};
};

namespace detail {
/// Bytes of `elements` dense elements of `bits` bits, without overflow unless the result overflows.
constexpr int64_t packed_bytes(int64_t elements, int bits) {
  return bits % 8 == 0 ? elements * (bits / 8) : elements / 8 * bits + (elements % 8 * bits + 7) / 8;
}
/// True if the elements of every type are whole bytes, so that no call needs the general form.
inline constexpr bool kWholeBytes = true
#define SY_ROW_TYPE(name, NAME, value, bits, ...) &&(bits) % 8 == 0
#include "switchyard/dtypes.def"
    ;
}  // namespace detail

/// Bits of one element.
constexpr int dtype_bits(DType type) {
  // clang-format off
  switch (type) {
#define SY_ROW_TYPE(name, NAME, value, bits, ...) case DType::name: return bits;
#include "switchyard/dtypes.def"
  }
  // clang-format on
  return 0;
}

/// Bytes of `elements` consecutive elements; the last byte may be partly used. Also the offset of element `elements` of a row,
/// if that element starts at a byte. The size of one element is its alignment.
constexpr size_t dtype_bytes(DType type, int64_t elements) {
  if constexpr (detail::kWholeBytes) return static_cast<size_t>(elements * (dtype_bits(type) / 8));
  return static_cast<size_t>(detail::packed_bytes(elements, dtype_bits(type)));
}

/// True if combine accepts rows of this type.
constexpr bool dtype_combines(DType type) {
  // clang-format off
  switch (type) {
#define SY_ROW_TYPE(name, NAME, value, bits, combines, ...) case DType::name: return combines;
#include "switchyard/dtypes.def"
  }
  // clang-format on
  return false;
}

/// True if a dispatch can quantize rows of this type.
constexpr bool dtype_quantises(DType type) {
  // clang-format off
  switch (type) {
#define SY_ROW_TYPE(name, NAME, value, bits, combines, quantises, ...) case DType::name: return quantises;
#include "switchyard/dtypes.def"
  }
  // clang-format on
  return false;
}

/// True if rows of this type have scales.
constexpr bool dtype_has_scales(DType type) {
  // clang-format off
  switch (type) {
#define SY_ROW_TYPE(name, NAME, value, bits, combines, quantises, has_scales) case DType::name: return has_scales;
#include "switchyard/dtypes.def"
  }
  // clang-format on
  return false;
}

/// Number of scales in a row of `hidden` columns; the last group may be partial. 0 if the group size is less than 1.
constexpr int64_t num_scales(int64_t hidden, int group = kScaleGroup) { return group < 1 ? 0 : (hidden + group - 1) / group; }

/// Bytes of one scale row: the scales, padded to a multiple of 16. 0 for ScaleKind::none.
constexpr size_t scale_row_bytes(int64_t hidden, ScaleKind kind, int group = kScaleGroup) {
  if (kind == ScaleKind::none) return 0;
  const size_t raw = static_cast<size_t>(num_scales(hidden, group)) * (kind == ScaleKind::f32 ? 4 : 1);
  return (raw + 15) / 16 * 16;
}

/// Non-owning view of `rows` dense rows of `cols` elements; `scales` (fp8 only) is dense with scale_row_bytes() per row.
struct ConstRows {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::bf16;
  const void* scales = nullptr;
  ScaleKind scale_kind = ScaleKind::none;
};

/// Mutable counterpart of ConstRows.
struct Rows {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::bf16;
  void* scales = nullptr;
  ScaleKind scale_kind = ScaleKind::none;
  operator ConstRows() const { return {data, rows, cols, dtype, scales, scale_kind}; }
};

/// Expert ids `[num_tokens, topk]`, dense, int32 or int64. An id of -1 means no expert, and nothing is sent for it. Any other
/// id outside `[0, num_experts)` is invalid (InvalidIds).
struct ExpertIds {
  const void* data = nullptr;
  int64_t num_tokens = 0;
  int topk = 0;
  bool is_int64 = false;
  static ExpertIds of(const int32_t* topk_ids, int64_t num_tokens, int topk) { return {topk_ids, num_tokens, topk, false}; }
  static ExpertIds of(const int64_t* topk_ids, int64_t num_tokens, int topk) { return {topk_ids, num_tokens, topk, true}; }
};

/// Traffic and time of this rank's last call. Payload bytes are rows and scales, not metadata.
/// The members are listed in statistics.def (remote_bytes, local_bytes, copied_bytes, payload_rows, metadata_bytes, plan_us,
/// total_us, network_bytes).
struct CallStatistics {
#define SY_STATISTIC_MOVED(name) uint64_t name = 0;
#define SY_STATISTIC_TIME(name) double name = 0;
#include "switchyard/statistics.def"
};

}  // namespace switchyard
