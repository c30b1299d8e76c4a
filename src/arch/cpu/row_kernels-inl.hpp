// SPDX-License-Identifier: Apache-2.0
// Vectorized row ops: moving and reducing. See kernels-inl.hpp.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "arch/ops.hpp"
#include "base/number_formats.hpp"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::detail {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using D8 = hn::Repartition<uint8_t, DF>;    // a whole vector of bytes
using D16 = hn::Repartition<uint16_t, DF>;  // a whole vector of 16-bit elements
using D16Half = hn::Rebind<uint16_t, DF>;   // as many 16-bit elements as DF has lanes
using D8Quarter = hn::Rebind<uint8_t, DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VI = hn::Vec<DI>;

constexpr size_t kLine = 64;         // streams write complete cache lines
constexpr size_t kUnroll = 4;        // float vectors per step of a reduction
constexpr size_t kMaxStep = 4 * 64;  // elements per step, for vectors of up to 256 bytes
constexpr size_t kBufferAlignment = 256;

inline size_t step_elements() { return kUnroll * hn::Lanes(DF()); }

// ---- Moving -----------------------------------------------------------------------------------------------

/// Starts the address translations for all pages of a row at once. A row of 14 KiB spans four pages, usually far from the
/// previous row; in measurements with 4 KiB pages under a hypervisor, this gained 12 % for copies and 15 % for sums of two
/// rows.
HWY_INLINE void touch_pages(const void* row, size_t bytes) {
  constexpr size_t kPage = 4096;
  for (size_t at = 0; at < bytes; at += kPage) hwy::Prefetch(static_cast<const uint8_t*>(row) + at);
}

/// Number of bytes from `p` to the next line boundary.
inline size_t bytes_to_line(const void* p) { return (kLine - reinterpret_cast<uintptr_t>(p) % kLine) % kLine; }

void stream_copy(uint8_t* HWY_RESTRICT dst, const uint8_t* HWY_RESTRICT src, size_t bytes) {
  touch_pages(src, bytes);
  touch_pages(dst, bytes);
  const D8 d;
  const size_t lanes = hn::Lanes(d);
  const size_t head = std::min(bytes, bytes_to_line(dst));
  std::memcpy(dst, src, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    for (size_t i = 0; i < kLine; i += lanes) hn::Stream(hn::LoadU(d, src + at + i), d, dst + at + i);
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

void stream_zero(uint8_t* dst, size_t bytes) {
  const D8 d;
  const size_t lanes = hn::Lanes(d);
  const auto zero = hn::Zero(d);
  const size_t head = std::min(bytes, bytes_to_line(dst));
  std::memset(dst, 0, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    for (size_t i = 0; i < kLine; i += lanes) hn::Stream(zero, d, dst + at + i);
  }
  std::memset(dst + at, 0, bytes - at);
}

// ---- Sentinel rows -----------------------------------------------------------------------------------------

using D64 = hn::Repartition<uint64_t, DF>;

/// Copies the source's first `words` words of 8 bytes to the row, replacing `blank` words with `substitute`, in complete lines
/// of the row. Returns the number of words written.
size_t write_sentinel_lines(uint8_t* HWY_RESTRICT row, const uint8_t* HWY_RESTRICT src, size_t words, uint64_t blank,
                            uint64_t substitute) {
  const D64 d;
  const size_t lanes = hn::Lanes(d), end = words * 8;
  const auto nothing = hn::Set(d, blank), something = hn::Set(d, substitute);
  touch_pages(src, end);
  touch_pages(row, end);
  const auto word = [&](size_t at) {
    uint64_t w;
    std::memcpy(&w, src + at, 8);
    if (w == blank) w = substitute;
    std::memcpy(row + at, &w, 8);
  };
  size_t at = 0;
  for (const size_t head = std::min(end, bytes_to_line(row)); at < head; at += 8) word(at);
  for (; at + kLine <= end; at += kLine) {
    for (size_t i = 0; i < kLine / 8; i += lanes) {
      const auto given = hn::LoadU(d, reinterpret_cast<const uint64_t*>(src + at) + i);
      hn::Store(hn::IfThenElse(hn::Eq(given, nothing), something, given), d, reinterpret_cast<uint64_t*>(row + at) + i);
    }
  }
  return at / 8;
}

/// True if none of the row's first `words` words is `blank`; `words` is a multiple of 8.
bool lines_have_arrived(const uint8_t* row, size_t words, uint64_t blank) {
  const D64 d;
  const size_t lanes = hn::Lanes(d);
  const auto nothing = hn::Set(d, blank);
  touch_pages(row, words * 8);
  const auto* const from = reinterpret_cast<const uint64_t*>(row);
  for (size_t line = 0; line < words; line += 8) {
    auto missing = hn::Eq(hn::LoadU(d, from + line), nothing);
    for (size_t i = lanes; i < 8; i += lanes) missing = hn::Or(missing, hn::Eq(hn::LoadU(d, from + line + i), nothing));
    if (!hn::AllFalse(d, missing)) return false;
  }
  return true;
}

// ---- Reading ahead ----------------------------------------------------------------------------------------

/// Prefetches the rows of a reduction before they are summed. The rows of one sum are short and scattered, so the hardware
/// prefetchers start over at each row and page. In measurements, prefetching raised the throughput of sums of 1 to 8 rows of 14
/// KiB by a factor of 1.2 to 1.7. Copies do not benefit, because their loads already run ahead of any dependent instruction.
class ReadAhead {
 public:
  ReadAhead(const void* const* rows, size_t n, size_t row_bytes) : rows_(rows), n_(n), row_bytes_(row_bytes) {
    if (n == 0) return;
    distance_ = std::clamp(kTotalBytes / n, kMinDistance, kMaxDistance);
    for (size_t i = 0; i < n; ++i) touch_pages(rows[i], row_bytes);
    fetch(0, distance_);
  }
  /// States that bytes [at, at + bytes) of every row are used next.
  HWY_INLINE void advance(size_t at, size_t bytes) const { fetch(at + distance_, at + distance_ + bytes); }

 private:
  static constexpr size_t kTotalBytes = 6144;  // in flight, over all rows
  static constexpr size_t kMinDistance = 512;
  static constexpr size_t kMaxDistance = 4096;

  HWY_INLINE void fetch(size_t begin, size_t end) const {
    if (end > row_bytes_) return;  // the last few bytes do not justify a page walk beyond the row
    for (size_t at = begin; at < end; at += kLine) {
      for (size_t i = 0; i < n_; ++i) hwy::Prefetch(static_cast<const uint8_t*>(rows_[i]) + at);
    }
  }

  const void* const* rows_;
  size_t n_;
  size_t row_bytes_;
  size_t distance_ = 0;
};

// ---- Conversion -------------------------------------------------------------------------------------------

/// A row type that combine accepts: `load` widens Lanes(DF) elements at any address; `round` narrows as many, rounding to
/// nearest even (a NaN stays a NaN).
template <DType T>
struct VectorRow;

template <>
struct VectorRow<DType::bf16> {
  static constexpr size_t kBytes = 2;

  static HWY_INLINE VF load(const uint8_t* p) {
    const hn::Repartition<uint8_t, D16Half> d;
    const auto narrow = hn::BitCast(D16Half(), hn::LoadU(d, p));
    return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), narrow)));
  }

  static HWY_INLINE hn::Vec<D16Half> round(VF value) {
    const DU du;
    const VU bits = hn::BitCast(du, value);
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const VU nearest = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd));
    const VU quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x0040));
    return hn::TruncateTo(D16Half(), hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), quiet, nearest));
  }
};

template <>
struct VectorRow<DType::f16> {
  static constexpr size_t kBytes = 2;

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  // F16C: the hardware conversions ignore flush-to-zero for subnormal halves, and the instruction encodes the rounding mode.
  using DHalf = hn::Rebind<hwy::float16_t, DF>;

  static HWY_INLINE VF load(const uint8_t* p) {
    const hn::Repartition<uint8_t, D16Half> d;
    return hn::PromoteTo(DF(), hn::BitCast(DHalf(), hn::LoadU(d, p)));
  }

  static HWY_INLINE hn::Vec<D16Half> round(VF value) { return hn::BitCast(D16Half(), hn::DemoteTo(DHalf(), value)); }
#else
  static HWY_INLINE VF load(const uint8_t* p) {
    const DU du;
    const DF df;
    const hn::Repartition<uint8_t, D16Half> d;
    const VU wide = hn::PromoteTo(du, hn::BitCast(D16Half(), hn::LoadU(d, p)));
    const VU magnitude = hn::And(wide, hn::Set(du, 0x7FFF));
    const VU sign = hn::ShiftLeft<16>(hn::Xor(wide, magnitude));
    // Exact for normal and subnormal numbers: multiplying by 2^112 rebiases the exponent.
    const VF scaled = hn::Mul(hn::BitCast(df, hn::ShiftLeft<13>(magnitude)), hn::Set(df, 0x1p112f));
    const VU special = hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(du, 0x7F800000));
    const auto is_special = hn::Gt(hn::BitCast(DI(), magnitude), hn::Set(DI(), 0x7BFF));
    const VU unsigned_value = hn::IfThenElse(hn::RebindMask(du, is_special), special, hn::BitCast(du, scaled));
    return hn::BitCast(df, hn::Or(sign, unsigned_value));
  }

  static HWY_INLINE hn::Vec<D16Half> round(VF value) {
    const DU du;
    const DI di;
    const DF df;
    const VU bits = hn::BitCast(du, value);
    const VU magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
    const VI ordered = hn::BitCast(di, magnitude);
    const VU sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
    const VU odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const VU normal = hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000 - 0xFFF)), odd));
    // Below 2^-14: after adding 0.5, the low bits contain the value in multiples of 2^-24, rounded to nearest.
    const VF shifted = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
    const VU subnormal = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3F000000));
    VU result = hn::IfThenElse(hn::RebindMask(du, hn::Lt(ordered, hn::Set(di, 0x38800000))), subnormal, normal);
    result = hn::IfThenElse(hn::RebindMask(du, hn::Gt(ordered, hn::Set(di, 0x477FEFFF))), hn::Set(du, 0x7C00), result);
    result = hn::IfThenElse(hn::RebindMask(du, hn::Gt(ordered, hn::Set(di, 0x7F800000))), hn::Set(du, 0x7E00), result);
    return hn::TruncateTo(D16Half(), hn::Or(sign, result));
  }
#endif
};

template <>
struct VectorRow<DType::f32> {
  static constexpr size_t kBytes = 4;
  static HWY_INLINE VF load(const uint8_t* p) { return hn::BitCast(DF(), hn::LoadU(D8(), p)); }
};

template <bool kStream>
HWY_INLINE void store_vector(hn::Vec<D8> value, uint8_t* p) {
  if constexpr (kStream) {
    hn::Stream(value, D8(), p);
  } else {
    hn::StoreU(value, D8(), p);
  }
}

template <class Row>
HWY_INLINE hn::Vec<D8> narrow_pair(VF low, VF high) {
  return hn::BitCast(D8(), hn::Combine(D16(), Row::round(high), Row::round(low)));
}

template <class Row, bool kStream>
HWY_INLINE void store_step(VF s0, VF s1, VF s2, VF s3, uint8_t* p) {
  const size_t vector_bytes = hn::Lanes(D8());
  if constexpr (Row::kBytes == 4) {
    store_vector<kStream>(hn::BitCast(D8(), s0), p);
    store_vector<kStream>(hn::BitCast(D8(), s1), p + vector_bytes);
    store_vector<kStream>(hn::BitCast(D8(), s2), p + 2 * vector_bytes);
    store_vector<kStream>(hn::BitCast(D8(), s3), p + 3 * vector_bytes);
  } else {
    store_vector<kStream>(narrow_pair<Row>(s0, s1), p);
    store_vector<kStream>(narrow_pair<Row>(s2, s3), p + vector_bytes);
  }
}

// ---- Reduction --------------------------------------------------------------------------------------------

/// `count` elements of `row` starting at byte `at`: read in place for a full step, else copied to `buffer`, whose remaining
/// elements stay zero.
template <class Row, bool kWhole>
HWY_INLINE const uint8_t* step_source(const void* row, size_t at, size_t count, uint8_t* buffer) {
  const uint8_t* source = static_cast<const uint8_t*>(row) + at;
  if constexpr (kWhole) return source;
  std::memcpy(buffer, source, count * Row::kBytes);
  return buffer;
}

/// Elements [first, first + count) of the sum; `count` is step_elements() if kWhole, else less.
template <class Row, bool kWhole, bool kWeighted, bool kStream>
HWY_INLINE void reduce_step(const ReduceSpec& spec, size_t first, size_t count) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const size_t at = first * Row::kBytes;
  const size_t stride = lanes * Row::kBytes;
  alignas(kBufferAlignment) uint8_t buffer[kWhole ? 1 : kMaxStep * Row::kBytes] = {};
  VF s0 = hn::Zero(df);
  VF s1 = s0;
  VF s2 = s0;
  VF s3 = s0;
  if (spec.bias[0] != nullptr) {
    const uint8_t* p = step_source<Row, kWhole>(spec.bias[0], at, count, buffer);
    s0 = Row::load(p);
    s1 = Row::load(p + stride);
    s2 = Row::load(p + 2 * stride);
    s3 = Row::load(p + 3 * stride);
    if (spec.bias[1] != nullptr) {
      p = step_source<Row, kWhole>(spec.bias[1], at, count, buffer);
      s0 = hn::Add(s0, Row::load(p));
      s1 = hn::Add(s1, Row::load(p + stride));
      s2 = hn::Add(s2, Row::load(p + 2 * stride));
      s3 = hn::Add(s3, Row::load(p + 3 * stride));
    }
  }
  for (int i = 0; i < spec.n; ++i) {
    const uint8_t* p = step_source<Row, kWhole>(spec.rows[i], at, count, buffer);
    VF r0 = Row::load(p);
    VF r1 = Row::load(p + stride);
    VF r2 = Row::load(p + 2 * stride);
    VF r3 = Row::load(p + 3 * stride);
    if constexpr (kWeighted) {
      const VF weight = hn::Set(df, spec.weights[i]);
      r0 = hn::Mul(weight, r0);
      r1 = hn::Mul(weight, r1);
      r2 = hn::Mul(weight, r2);
      r3 = hn::Mul(weight, r3);
    }
    s0 = hn::Add(s0, r0);
    s1 = hn::Add(s1, r1);
    s2 = hn::Add(s2, r2);
    s3 = hn::Add(s3, r3);
  }
  uint8_t* out = static_cast<uint8_t*>(spec.out) + at;
  if constexpr (kWhole) {
    store_step<Row, kStream>(s0, s1, s2, s3, out);
  } else {
    store_step<Row, false>(s0, s1, s2, s3, buffer);
    std::memcpy(out, buffer, count * Row::kBytes);
  }
}

/// The sum of one row without weights or bias: the row itself, except that -0 becomes +0.
template <class Row, bool kStream>
HWY_INLINE void add_to_zero(const uint8_t* HWY_RESTRICT row, uint8_t* HWY_RESTRICT out, size_t bytes) {
  using DE = hn::Repartition<std::conditional_t<Row::kBytes == 4, uint32_t, uint16_t>, DF>;
  using Element = hn::TFromD<DE>;
  const DE d;
  const auto minus_zero = hn::Set(d, static_cast<Element>(Element{1} << (8 * sizeof(Element) - 1)));
  const size_t lanes = hn::Lanes(D8());
  for (size_t at = 0; at < bytes; at += lanes) {
    const auto value = hn::BitCast(d, hn::LoadU(D8(), row + at));
    store_vector<kStream>(hn::BitCast(D8(), hn::IfThenZeroElse(hn::Eq(value, minus_zero), value)), out + at);
  }
}

template <class Row, bool kWeighted, bool kStream>
void reduce_typed(const ReduceSpec& spec) {
  const auto hidden = static_cast<size_t>(spec.hidden);
  const size_t step = step_elements();
  const bool is_row = !kWeighted && spec.n == 1 && spec.bias[0] == nullptr;
  const ReadAhead read_ahead(spec.rows, is_row ? 0 : static_cast<size_t>(spec.n), hidden * Row::kBytes);
  size_t at = 0;
  if constexpr (kStream) {
    const size_t head = std::min(hidden, bytes_to_line(spec.out) / Row::kBytes);
    while (at < head) {
      const size_t count = std::min(head - at, step - 1);
      reduce_step<Row, false, kWeighted, false>(spec, at, count);
      at += count;
    }
  }
  touch_pages(spec.out, hidden * Row::kBytes);
  if (is_row) {
    touch_pages(spec.rows[0], hidden * Row::kBytes);
    const size_t bytes = (hidden - at) / step * step * Row::kBytes;
    const auto* row = static_cast<const uint8_t*>(spec.rows[0]) + at * Row::kBytes;
    add_to_zero<Row, kStream>(row, static_cast<uint8_t*>(spec.out) + at * Row::kBytes, bytes);
    at += bytes / Row::kBytes;
  }
  for (; at + step <= hidden; at += step) {
    read_ahead.advance(at * Row::kBytes, step * Row::kBytes);
    reduce_step<Row, true, kWeighted, kStream>(spec, at, step);
  }
  if (at < hidden) reduce_step<Row, false, kWeighted, false>(spec, at, hidden - at);
}

template <class Row>
void reduce_row_type(const ReduceSpec& spec, bool stream) {
  if (spec.weights != nullptr) {
    stream ? reduce_typed<Row, true, true>(spec) : reduce_typed<Row, true, false>(spec);
  } else {
    stream ? reduce_typed<Row, false, true>(spec) : reduce_typed<Row, false, false>(spec);
  }
}

void reduce_any(const ReduceSpec& spec, bool stream) {
  with_combined_type(spec.type, [&]<DType T>() { reduce_row_type<VectorRow<T>>(spec, stream); });
}

}  // namespace HWY_NAMESPACE
}  // namespace switchyard::detail
HWY_AFTER_NAMESPACE();
