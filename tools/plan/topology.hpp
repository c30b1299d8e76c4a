// SPDX-License-Identifier: Apache-2.0
// A topology file: figures for hosts, their links and the network between them, on which the predictions of `switchyard plan`
// are based. `doctor --measure` writes one for this machine. docs/topology.md describes the format.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Rates are in 1e9 bytes per second and times in microseconds unless their names say otherwise.

/// A fixed time, and rates for bytes read and written. The time to move rows is the sum of the three parts.
struct MoveRate {
  double start_us = 0;
  double read_gbs = 0, write_gbs = 0;            ///< one worker by itself
  double host_read_gbs = 0, host_write_gbs = 0;  ///< all workers of a host together; 0: they do not disturb each other
};

struct HostTopology {
  int ranks = 1;    ///< maximum per host
  int workers = 0;  ///< threads that run simultaneously and do all the work of the host's ranks; 0: each rank has a GPU
  MoveRate copy;    ///< rows read once and written once or several times
  MoveRate sum;     ///< rows read and summed, and written once
  double quantize_gbs = 0, host_quantize_gbs = 0;  ///< bytes of source rows; host_: as above
  double link_gbs = 0;                             ///< to the other ranks of a host, each direction, written by the sender
  double link_read_gbs = 0;                        ///< like link_gbs, but read by the receiver
  double link_us = 0;                              ///< a flag, one way
  double wake_us = 0;                              ///< until a worker begins its work; for ranks with several workers
  std::vector<int> call_ranks;                     ///< numbers of ranks for which empty calls were measured, ascending
  std::vector<double> dispatch_us, combine_us;     ///< times of calls that move nothing
  double route_ns = 0;                             ///< planning a route, on the rank's own thread
  double record_write_ns = 0;                      ///< a worker writes one of the K entries of a record
  double record_read_ns = 0;                       ///< the receiver's own thread reads one entry

  bool on_gpus() const { return workers == 0; }
};

struct NetworkTopology {
  int rails = 1;         ///< network interfaces per host
  double gbs = 0;        ///< one interface, each direction
  double us = 0;         ///< a small message, one way
  double post_us = 0;    ///< cost of a round of messages apart from its bytes
  double host_gbs = 0;   ///< all rails of a host together, each direction; 0: rails * gbs
  double bisection = 1;  ///< fraction of all hosts' combined rates that can cross the middle of the network at once
};

struct Topology {
  std::string name;
  std::string source;      ///< source of the figures
  std::vector<int> hosts;  ///< number of ranks of each host
  HostTopology host;
  bool has_network = false;
  NetworkTopology network;
  /// A test bed: all hosts are on one machine, and the figures for workers and network apply to all hosts together.
  bool one_machine = false;

  int max_ranks() const;
};

/// \throws UsageError naming the file and the invalid line or field
Topology read_topology(const std::string& path);
/// \throws std::runtime_error naming the field
Topology topology_from(const nlohmann::json& document);
nlohmann::json to_json(const Topology& topology);

}  // namespace switchyard::tool
