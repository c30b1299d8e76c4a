// SPDX-License-Identifier: Apache-2.0
#include "run/rows.hpp"

#include <algorithm>
#include <cstring>

namespace switchyard::tool {
namespace {

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// Sequence of 64-bit words derived from a key.
class Words {
 public:
  explicit Words(uint64_t key) : state_(key) {}
  uint64_t next() { return mixed(state_ += 0x9E3779B97F4A7C15ULL); }

 private:
  uint64_t state_;
};

/// Converts 16 random bits into a 16-bit float with `mantissa` bits, consisting of a sign, one of five exponents and a
/// mantissa; one value in 64 is zero.
uint16_t half_word(uint64_t bits, int mantissa, uint32_t exponent_of_one) {
  const auto r = static_cast<uint32_t>(bits & 0xFFFF);
  const uint32_t sign = r & 0x8000u;
  if ((r & 0x3Fu) == 0x15u) return static_cast<uint16_t>(sign);
  const uint32_t drop = (r >> (mantissa > 7 ? 11 : 12)) % 5;
  return static_cast<uint16_t>(sign | ((exponent_of_one - drop) << mantissa) | (r & ((1u << mantissa) - 1)));
}

uint32_t float_word(uint32_t r) {
  const uint32_t sign = r & 0x80000000u;
  if ((r & 0x3Fu) == 0x15u) return sign;
  return sign | ((127u - (r >> 28) % 5) << 23) | (r & 0x7FFFFFu);
}

}  // namespace

uint64_t row_key(uint64_t seed, uint64_t set, RowKind kind, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t key = mixed(seed + 0x9E3779B97F4A7C15ULL);
  for (const uint64_t part : {set, static_cast<uint64_t>(kind), a, b, c})
    key = mixed(key ^ (part + 0x9E3779B97F4A7C15ULL + (key << 6)));
  return key;
}

void fill_row(void* row, DType type, int64_t hidden, uint64_t key) {
  Words words(key);
  auto* out = static_cast<unsigned char*>(row);
  const auto element_bytes = static_cast<int64_t>(dtype_bytes(type, 1));
  const int64_t per_word = 8 / element_bytes;
  for (int64_t c = 0; c < hidden; c += per_word) {
    const uint64_t bits = words.next();
    unsigned char packed[8];
    for (int64_t i = 0; i < per_word; ++i) {
      const uint64_t part = bits >> (i * element_bytes * 8);
      uint32_t word = 0;
      switch (type) {
        case DType::bf16: word = half_word(part, 7, 127); break;
        case DType::f16: word = half_word(part, 10, 15); break;
        case DType::f32: word = float_word(static_cast<uint32_t>(part)); break;
        case DType::fp8_e4m3: word = (part & 0x7F) == 0x7F ? 0x38u : static_cast<uint32_t>(part & 0xFF); break;
      }
      std::memcpy(packed + i * element_bytes, &word, static_cast<size_t>(element_bytes));
    }
    const int64_t left = std::min(per_word, hidden - c);
    std::memcpy(out + c * element_bytes, packed, static_cast<size_t>(left * element_bytes));
  }
}

void fill_scales(void* row, int64_t hidden, ScaleKind kind, uint64_t key) {
  Words words(key);
  const size_t bytes = scale_row_bytes(hidden, kind);
  auto* out = static_cast<unsigned char*>(row);
  for (size_t at = 0; at < bytes; at += 8) {  // scale rows are multiples of 16 bytes
    uint64_t bits = words.next();
    if (kind == ScaleKind::f32)
      bits = uint64_t{float_word(static_cast<uint32_t>(bits))} | uint64_t{float_word(static_cast<uint32_t>(bits >> 32))} << 32;
    std::memcpy(out + at, &bits, 8);
  }
}

RowArray::RowArray(int64_t rows, int64_t hidden, DType type, ScaleKind kind)
    : rows_(rows),
      hidden_(hidden),
      type_(type),
      kind_(kind),
      row_bytes_(dtype_bytes(type, hidden)),
      scale_bytes_(scale_row_bytes(hidden, kind)) {
  data_.resize(static_cast<size_t>(rows) * row_bytes_ + 64);
  offset_ = 64 - reinterpret_cast<uintptr_t>(data_.data()) % 64;
  scales_.resize(static_cast<size_t>(rows) * scale_bytes_);
}

ConstRows RowArray::view() const {
  return {row(0), rows_, hidden_, type_, kind_ == ScaleKind::none ? nullptr : scales_.data(), kind_};
}

RowArray token_rows(uint64_t seed, uint64_t set, int rank, int64_t tokens, int64_t hidden, DType type, ScaleKind kind) {
  RowArray rows(tokens, hidden, type, kind);
  for (int64_t t = 0; t < tokens; ++t) {
    const auto r = static_cast<uint64_t>(rank);
    const auto token = static_cast<uint64_t>(t);
    fill_row(rows.row(t), type, hidden, row_key(seed, set, RowKind::token, r, token));
    if (kind != ScaleKind::none)
      fill_scales(rows.scale_row(t), hidden, kind, row_key(seed, set, RowKind::token_scales, r, token));
  }
  return rows;
}

}  // namespace switchyard::tool
