// SPDX-License-Identifier: Apache-2.0
#include "exchange/exchange_base.hpp"

#include <cstring>
#include <vector>

namespace switchyard::detail {

void invalid(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    invalid(std::string(name) + " = " + std::to_string(value) + ": must be in [" + std::to_string(low) + ", " +
            std::to_string(high) + "]");
}

const char* name_of(DType type) {
  switch (type) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::f32: return "f32";
    case DType::fp8_e4m3: return "fp8_e4m3";
  }
  return "unknown";
}

int64_t checked_row_bytes(const char* what, int64_t hidden, DType type) {
  const int64_t bytes = hidden * static_cast<int64_t>(dtype_bytes(type));
  if (bytes % 16 != 0)
    invalid(std::string(what) + ": a row of hidden = " + std::to_string(hidden) + " " + name_of(type) + " elements has " +
            std::to_string(bytes) + " bytes: must be a multiple of 16");
  return bytes;
}

void ExchangeBase::agree_on_construction(uint64_t heap_offset, uint64_t config_hash, const char* object, const char* config) {
  const uint64_t claim[2] = {heap_offset, config_hash};
  std::vector<uint64_t> all(2 * static_cast<size_t>(world()));
  group_.all_gather(claim, sizeof claim, all.data(), object, Operation::construction, object_);
  for (size_t r = 0; r < static_cast<size_t>(world()); ++r) {
    if (all[2 * r] == claim[0] && all[2 * r + 1] == claim[1]) continue;
    const std::string who = std::string(object) + ": rank " + std::to_string(r) + " and rank " + std::to_string(rank());
    throw Error(ErrorCode::mismatch, all[2 * r + 1] == claim[1]
                                         ? who + " hold other objects in their heaps"
                                         : who + " were given different " + config + " values, or make different objects");
  }
}

CallStatistics sum_moved(std::span<const MoveCounter> moved) {
  CallStatistics sum;
  for (const MoveCounter& m : moved) {
    sum.remote_bytes += m.remote_bytes;
    sum.local_bytes += m.local_bytes;
    sum.copied_bytes += m.copied_bytes;
    sum.payload_rows += m.rows;
    sum.metadata_bytes += m.metadata_bytes;
  }
  return sum;
}

void set_flags(std::byte* base, int64_t bytes, int64_t stride, uint64_t word) {
  for (int64_t at = 0; at < bytes; at += stride) std::memcpy(base + at, &word, sizeof word);
}

}  // namespace switchyard::detail
