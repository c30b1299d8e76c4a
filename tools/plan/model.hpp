// SPDX-License-Identifier: Apache-2.0
// Times, bytes and memory of an exchange that nobody has run: from a topology's numbers and the counted rows. The constants are
// the topology's alone. docs/concepts/prediction.md gives the formulas.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/topology.hpp"
#include "plan/traffic.hpp"
#include "run/names.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {

/// How rows cross. On one host the last three are the same.
enum class Variant {
  flat_per_route,  ///< a row for each route, from its source to the expert's rank: an all-to-all that saves nothing
  flat_per_rank,   ///< a row for each (token, rank)
  hierarchical,    ///< a row for each (token, host), forwarded there; back come exact rows, one for each (token, rank)
  per_host,        ///< the same, and back comes one sum for each (token, host)
};
inline constexpr Variant kVariants[] = {Variant::flat_per_route, Variant::flat_per_rank, Variant::hierarchical,
                                        Variant::per_host};
const char* to_string(Variant variant);
bool is_flat(Variant variant);

/// What is exchanged: rank-major rows of normal mode, direct staging.
struct PlanShape {
  int64_t tokens = 4096;  ///< of each rank
  int64_t hidden = 7168;
  int experts = 256;
  int topk = 8;
  SourceRows rows;
  ScaleKind quantize = ScaleKind::none;

  double source_row() const;    ///< bytes of a row as it is given, scales included
  double sent_row() const;      ///< on its way to the experts
  double returned_row() const;  ///< on its way back
  /// Of a row that crosses to another host once: header, row and scales, each padded. `max_host_size`: ranks of the largest
  /// host.
  double slot(int max_host_size) const;
};

/// A part of a call. Parts that overlap take as long as the longest of them.
struct PlanPhase {
  const char* name;
  double us = 0;
  bool overlaps = false;
};

/// Bytes of one call; of ranks, the one with most.
struct PlanBytes {
  double network_out = 0, network_in = 0;  ///< of a rank
  double link_out = 0, link_in = 0;        ///< of a rank, to and from the others of its host
  double memory = 0;                       ///< of a rank, read and written
  double network_host = 0;                 ///< out of the host with most
  double network_all = 0;                  ///< of all ranks together
};

struct CallPrediction {
  double us = 0;
  std::vector<PlanPhase> phases;
  std::string bottleneck;  ///< name of the phase that takes longest
  PlanBytes bytes;
};

/// Bytes of a rank, most of any.
struct PlanMemory {
  MemoryRequirement heap;  ///< NormalExchange::memory_required
  double network = 0;      ///< rings of crossing rows, and the inbox of combine
  bool continued = false;  ///< more ranks than a group can have: heap continues the library's numbers
  double total() const { return static_cast<double>(heap.total() + heap.private_bytes) + network; }
};

struct Prediction {
  Variant variant;
  CallPrediction dispatch, combine;
  PlanMemory memory;
  double us() const { return dispatch.us + combine.us; }
};

/// \pre traffic was counted for hosts of the topology. \throws Error(invalid_argument) if the library does not take the shape
Prediction predict(const Topology& topology, const PlanShape& shape, const Traffic& traffic, Variant variant);

/// NormalExchange::memory_required for groups of any size. Beyond kMaxRanks ranks there are no groups: then the parabola
/// through its values at a quarter, half and all of kMaxRanks, which is what its formulas are but for rounding.
MemoryRequirement memory_for(const NormalConfig& config, int world, Backend backend);

/// Time of a call that moves nothing with so many ranks on a host: between the numbers that were measured, a line over the
/// logarithm; beyond them, the nearest.
double call_us(const HostTopology& host, const std::vector<double>& times, int ranks);

}  // namespace switchyard::tool
