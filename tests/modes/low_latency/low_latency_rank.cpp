// SPDX-License-Identifier: Apache-2.0
#include "modes/low_latency/low_latency_rank.hpp"

#include <cstring>

namespace harness {

using switchyard::LowLatencyOutput;

void LowLatencyRank::check_shape(const oracle::LowLatencyView& view, const LowLatencyOutput& o) {
  f_.equal(view.rows_per_expert, o.rows_per_expert, "rows_per_expert");
  f_.equal(static_cast<int64_t>(view.arrivals.size()) * view.rows_per_expert, o.x.rows, "x.rows");
  f_.equal(settings_.config.hidden, o.x.cols, "x.cols");
  f_.check(o.x.dtype == settings_.sent_type() && o.x.scale_kind == settings_.config.scales, "x.dtype or x.scale_kind");
  f_.equal(settings_.scale_shape().column(), o.scale_rows, "scale_rows");
  check_alignment(o);
}

/// Requirements of masked grouped GEMMs and tensor maps: in every expert, scale rows, scale columns, and rows whose size is a
/// multiple of 16 bytes begin at multiples of 16 bytes.
void LowLatencyRank::check_alignment(const LowLatencyOutput& o) {
  const auto at = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  f_.check(at(o.x.data) % 256 == 0 && at(o.rows_of_expert) % 16 == 0, "x or rows_of_expert is not aligned");
  const LowLatencyConfig& config = settings_.config;
  if (config.scales == ScaleKind::none) return;
  const oracle::ScaleShape shape = settings_.scale_shape();
  const bool columns = config.scale_order == ScaleOrder::column_major;
  const int64_t step = config.scales == ScaleKind::f32 ? 1 : 4;
  bool aligned = at(o.x.scales) % 256 == 0;
  for (int64_t expert = 0; expert < 3; ++expert)
    for (int64_t i = 0; i < (columns ? shape.places() : o.rows_per_expert); i += columns ? step : 1)
      aligned &= shape.offset(expert, columns ? 0 : i, columns ? i : 0) % 16 == 0;
  f_.check(aligned, "scales are not aligned");
}

void LowLatencyRank::check_delivered(const oracle::LowLatencyView& view, const ByRank& sent, const ByRank& sent_scales,
                                     const LowLatencyOutput& o) {
  check_shape(view, o);
  const auto experts = static_cast<int64_t>(view.arrivals.size()), bytes = settings_.row_bytes(o.x.dtype);
  const bool scaled = settings_.config.scales != ScaleKind::none;
  const auto scales =
      fetch(static_cast<const std::byte*>(o.x.scales), scaled ? settings_.scale_shape().offset(experts, 0, 0) : 0);
  if (!f_.equal_range(view.rows_of_expert, fetch(o.rows_of_expert, experts), "rows_of_expert")) return;
  f_.equal_range(view.source_range, fetch(o.source_range, experts * settings_.world), "source_range");
  for (int64_t expert = 0; expert < experts; ++expert) {
    const auto& arrivals = view.arrivals[idx(expert)];
    const int64_t first = expert * view.rows_per_expert, count = static_cast<int64_t>(arrivals.size());
    const auto sources = fetch(o.row_source + first, count);
    const auto rows = fetch(static_cast<const std::byte*>(o.x.data) + first * bytes, count * bytes);
    for (int64_t r = 0; r < count; ++r) {
      const oracle::Arrival& from = arrivals[idx(r)];
      const std::string name = "expert " + std::to_string(expert) + " row " + std::to_string(r);
      if (!f_.equal(from.packed(), sources[idx(r)], name + " row_source")) return;
      const std::byte* expected = sent[idx(from.source)].data() + from.token * bytes;
      if (std::memcmp(expected, rows.data() + r * bytes, idx(bytes)) != 0) return f_.add(name + ": rows differ");
      if (scaled && !scales_equal(scales, sent_scales[idx(from.source)], from.token, expert, r))
        return f_.add(name + ": scales differ");
    }
  }
}

/// Also checks that elements beyond the last group are zero.
bool LowLatencyRank::scales_equal(const std::vector<std::byte>& delivered, const std::vector<std::byte>& sent, int64_t token,
                                  int64_t expert, int64_t row) const {
  const size_t size = settings_.config.scales == ScaleKind::f32 ? 4 : 1;
  const oracle::ScaleShape shape = settings_.scale_shape();
  const std::byte* const given = sent.data() + token * settings_.given_scale_bytes();
  const std::byte zero[4] = {};
  for (int64_t g = 0; g < shape.places(); ++g) {
    const std::byte* expected = g < shape.groups() ? given + idx(g) * size : zero;
    if (std::memcmp(expected, delivered.data() + shape.offset(expert, row, g), size) != 0) return false;
  }
  return true;
}

void LowLatencyRank::check_combined(DType type, std::span<const std::byte> expected, std::span<const std::byte> got) {
  const auto elements = 8 * static_cast<int64_t>(expected.size()) / switchyard::dtype_bits(type);
  const std::string text =
      first_difference("combined token", 0, type, settings_.config.hidden, expected.data(), got.data(), elements);
  if (!text.empty()) f_.add(text);
}

}  // namespace harness
