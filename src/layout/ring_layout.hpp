// SPDX-License-Identifier: Apache-2.0
// Rings for ring staging, defined once for host and device.
#pragma once

#include <cstdint>

#include "layout/heap_view.hpp"
#include "layout/addressing.hpp"

namespace switchyard::detail {

/// Header of a row, identifying its record. int32 route[K] and float weight[K] follow.
struct RingRecord {
  int32_t record;
  int32_t token;
  int32_t unused[2];
};

/// Every consumer's segment contains one ring per (channel, producer rank), at `base`. Each flag has its own cache line; `tail`
/// is in the consumer's segment, `head` in the producer's.
struct RingLayout {
  uint64_t base = 0;  ///< heap offset
  int world = 1;
  int num_channels = 0;
  int64_t slots = 0;
  int64_t max_row_bytes = 0;
  int64_t max_scale_bytes = 0;
  int topk = 0;

  static constexpr int64_t kLine = 64;
  SWITCHYARD_FN int64_t scale_at() const { return round_up(max_row_bytes, 128); }
  SWITCHYARD_FN int64_t record_at() const { return scale_at() + round_up(max_scale_bytes, 128); }
  SWITCHYARD_FN int64_t slot_bytes() const {
    return record_at() + round_up(static_cast<int64_t>(sizeof(RingRecord)) + 8 * topk, 128);
  }
  SWITCHYARD_FN int64_t num_rings() const { return static_cast<int64_t>(num_channels) * world; }
  /// Number of states that a rank keeps: one per stream in each role, and one per channel.
  SWITCHYARD_FN int64_t num_streams() const { return 2 * num_rings() + num_channels; }
  SWITCHYARD_FN int64_t flags_bytes() const { return 2 * num_rings() * kLine; }
  SWITCHYARD_FN int64_t bytes() const { return num_channels == 0 ? 0 : flags_bytes() + num_rings() * slots * slot_bytes(); }

  /// In the consumer's segment, written by rank `producer`.
  SWITCHYARD_FN SymPtr<uint64_t> tail(int channel, int producer) const {
    return {base + static_cast<uint64_t>((static_cast<int64_t>(channel) * world + producer) * kLine)};
  }
  /// In the producer's segment, written by rank `consumer`.
  SWITCHYARD_FN SymPtr<uint64_t> head(int channel, int consumer) const {
    return {base + static_cast<uint64_t>((num_rings() + static_cast<int64_t>(channel) * world + consumer) * kLine)};
  }
  /// Slot of the `n`-th row of a stream, in the consumer's segment.
  SWITCHYARD_FN SymPtr<std::byte> slot(int channel, int producer, int64_t n) const {
    const int64_t ring = static_cast<int64_t>(channel) * world + producer;
    return {base + static_cast<uint64_t>(flags_bytes() + (ring * slots + n % slots) * slot_bytes())};
  }
};

/// A tail word's value is the number of rows appended in this call, plus this bit if the stream has ended.
inline constexpr uint64_t kRingEnd = uint64_t{1} << 23;

}  // namespace switchyard::detail
