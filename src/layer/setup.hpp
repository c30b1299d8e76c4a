// SPDX-License-Identifier: Apache-2.0
// Values derived from a layer's settings: exchange and form, the configuration of each part, and the memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/agreed_fields.hpp"
#include "exchange/fused/fused_moe.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/low_latency.hpp"

namespace switchyard::detail {

/// Validated settings, with the exchange and the form selected.
struct LayerSetup {
  MoeLayerConfig config;
  int world = 1;
  Backend backend = Backend::cpu;
  int gpu = -1;  ///< GPU of this rank; CPU: none

  /// Number of experts on a rank; rank 0 has the maximum.
  int experts_of(int rank) const;
  ExpertShape shape_of(int rank) const { return {config.hidden, config.intermediate, experts_of(rank)}; }
  /// Options for the rows on a rank with the maximum number of experts.
  ExpertOptions expert_options() const;
  NormalConfig normal() const;
  LowLatencyConfig low_latency() const;
  FusedMoeConfig fused() const;
  /// Number of rows for which a rank with the maximum number of experts has memory; for low latency, the number of rows in each
  /// of its calls.
  int64_t rows() const;
  size_t row_bytes() const { return dtype_bytes(config.token_dtype(), config.hidden); }
  /// Size of the low-latency sums, [max_tokens, H], for calls that add.
  size_t sum_bytes() const { return static_cast<size_t>(config.max_tokens) * row_bytes(); }
  /// ScaleGranularity::per_channel: size of the quantized tokens, [max_tokens, H], and of their rows of scales, which precede
  /// them.
  size_t token_bytes() const {
    return config.scaling == ScaleGranularity::per_channel
               ? static_cast<size_t>(config.max_tokens) * (token_scale_bytes() + static_cast<size_t>(config.hidden))
               : 0;
  }
  /// Bytes of a row of scales, as in an exchange.
  size_t token_scale_bytes() const { return scale_row_bytes(config.hidden, ScaleKind::f32); }
  MoeLayerMemory memory() const;
  size_t heap_bytes() const;
  /// Fields that must be identical on all ranks.
  AgreedFields agreed_fields() const;
};

/// Throws Error(invalid_argument) naming the field, or Error(unsupported).
LayerSetup set_up(const MoeLayerConfig& config, int world, Backend backend);

}  // namespace switchyard::detail
