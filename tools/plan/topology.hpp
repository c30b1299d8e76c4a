// SPDX-License-Identifier: Apache-2.0
// A topology file: hosts, their links and the network between them as numbers, from which `switchyard plan` predicts. `doctor
// --measure` writes one for this machine. docs/topology.md gives the format.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Rates are 1e9 bytes a second, times microseconds, unless their names say otherwise.

/// A time that comes once, and rates of bytes read and written: the time of rows is the sum of the three.
struct MoveRate {
  double start_us = 0;
  double read_gbs = 0, write_gbs = 0;            ///< of one worker by itself
  double host_read_gbs = 0, host_write_gbs = 0;  ///< of all workers of a host together; 0: they do not disturb each other
};

struct HostTopology {
  int ranks = 1;    ///< most of a host
  int workers = 0;  ///< threads that run at once and do all the work of the host's ranks; 0: each rank has a GPU
  MoveRate copy;    ///< rows read once and written once or several times
  MoveRate sum;     ///< rows read and added up, and written once
  double quantize_gbs = 0, host_quantize_gbs = 0;  ///< bytes of source rows; host_ as above
  double link_gbs = 0;                             ///< a rank to the others of its host, each direction, written by the sender
  double link_read_gbs = 0;                        ///< the same, read by the receiver
  double link_us = 0;                              ///< a flag, one way
  double wake_us = 0;                              ///< until a worker begins to work; of ranks with several
  std::vector<int> call_ranks;                     ///< numbers of ranks, ascending, for which there are
  std::vector<double> dispatch_us, combine_us;     ///< times of calls that move nothing
  double route_ns = 0;                             ///< planning, of the rank's own thread: a route
  double record_write_ns = 0;                      ///< a worker writes one of the K entries of a record
  double record_read_ns = 0;                       ///< the receiver's own thread takes one

  bool on_gpus() const { return workers == 0; }
};

struct NetworkTopology {
  int rails = 1;         ///< network interfaces of a host
  double gbs = 0;        ///< one of them, each direction
  double us = 0;         ///< a small message, one way
  double post_us = 0;    ///< what a round of messages costs besides its bytes
  double host_gbs = 0;   ///< all rails of a host together, each direction; 0: rails * gbs
  double bisection = 1;  ///< share of all hosts' rates that crosses the middle of the network at once
};

struct Topology {
  std::string name;
  std::string source;      ///< where the figures come from
  std::vector<int> hosts;  ///< ranks of each
  HostTopology host;
  bool has_network = false;
  NetworkTopology network;
  /// A test bed: all hosts are on one machine, and what is said of a host's workers and network is true of all hosts together.
  bool one_machine = false;

  int max_ranks() const;
};

/// \throws UsageError naming the file, and the line or the field that is wrong
Topology read_topology(const std::string& path);
/// \throws std::runtime_error naming the field
Topology topology_from(const nlohmann::json& document);
nlohmann::json to_json(const Topology& topology);

}  // namespace switchyard::tool
