// SPDX-License-Identifier: Apache-2.0
// Predicted times, bytes and memory of an exchange, computed from a topology's figures and the counted rows. All constants come
// from the topology. docs/concepts/prediction.md gives the formulas.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/topology.hpp"
#include "plan/traffic.hpp"
#include "run/names.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {

/// How rows are sent between hosts. On a single host, the last three are equal.
enum class Variant {
  flat_per_route,  ///< a row for each route, from its source to the expert's rank: an all-to-all without deduplication
  flat_per_rank,   ///< a row for each (token, rank)
  hierarchical,    ///< a row for each (token, host), forwarded there; unsummed rows return, one for each (token, rank)
  per_host,        ///< like hierarchical, but one sum returns for each (token, host)
};
inline constexpr Variant kVariants[] = {Variant::flat_per_route, Variant::flat_per_rank, Variant::hierarchical,
                                        Variant::per_host};
const char* to_string(Variant variant);
bool is_flat(Variant variant);

/// The predicted exchange, with rank-major rows in normal mode and direct staging.
struct PlanShape {
  int64_t tokens = 4096;  ///< per rank
  int64_t hidden = 7168;
  int experts = 256;
  int topk = 8;
  SourceRows rows;
  ScaleKind quantize = ScaleKind::none;

  double source_row() const;    ///< bytes of an input row, scales included
  double sent_row() const;      ///< bytes on the way to the experts
  double returned_row() const;  ///< bytes on the way back
  /// Bytes of a row that crosses once to another host: header, row and scales, each padded. `max_host_size`: number of ranks on
  /// the largest host.
  double slot(int max_host_size) const;
};

/// A part of a call. Overlapping parts together take as long as the longest of them.
struct PlanPhase {
  const char* name;
  double us = 0;
  bool overlaps = false;
};

/// Bytes of one call. Per-rank figures are maxima over ranks.
struct PlanBytes {
  double network_out = 0, network_in = 0;  ///< per rank
  double link_out = 0, link_in = 0;        ///< per rank, to and from the other ranks of its host
  double memory = 0;                       ///< per rank, read and written
  double network_host = 0;                 ///< maximum sent by a host
  double network_all = 0;                  ///< of all ranks together
};

struct CallPrediction {
  double us = 0;
  std::vector<PlanPhase> phases;
  std::string bottleneck;  ///< name of the longest phase
  PlanBytes bytes;
};

/// Memory per rank, in bytes, as the maximum over ranks.
struct PlanMemory {
  MemoryRequirement heap;  ///< NormalExchange::memory_required
  double network = 0;      ///< rings of crossing rows, and the inbox of combine
  bool continued = false;  ///< more ranks than a group can have: `heap` is extrapolated
  double total() const { return static_cast<double>(heap.total() + heap.private_bytes) + network; }
};

struct Prediction {
  Variant variant;
  CallPrediction dispatch, combine;
  PlanMemory memory;
  double us() const { return dispatch.us + combine.us; }
};

/// \pre `traffic` was counted for hosts of the topology. \throws Error(invalid_argument) if the library rejects the shape
Prediction predict(const Topology& topology, const PlanShape& shape, const Traffic& traffic, Variant variant);

/// NormalExchange::memory_required for groups of any size. Groups have at most kMaxRanks ranks. Larger sizes are extrapolated
/// using the parabola through the values at a quarter, half and all of kMaxRanks, which matches the formulas up to rounding.
MemoryRequirement memory_for(const NormalConfig& config, int world, Backend backend);

/// Time of a call that moves nothing, with `ranks` ranks on a host. Between measured rank counts, it is interpolated linearly
/// in the logarithm; outside their range, the nearest measured value is used.
double call_us(const HostTopology& host, const std::vector<double>& times, int ranks);

}  // namespace switchyard::tool
