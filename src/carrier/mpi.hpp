// SPDX-License-Identifier: Apache-2.0
// MPI as a carrier, for ranks on CPUs. The library does not link MPI: a separate module does (src/carrier/mpi), which is loaded
// when a group requests it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "carrier/carrier.hpp"

namespace switchyard::detail {

/// Parameters of a rank's carrier.
struct MpiCarrierSpec {
  int rank = 0;
  std::vector<int> processes;          ///< [world] the MPI_COMM_WORLD rank of each rank's process
  uint64_t nonce = 0;                  ///< of the group, equal on all its ranks: identifies messages of other groups
  size_t max_bytes = size_t{1} << 30;  ///< maximum message size; longer data is split
};

/// Rank of this process in MPI_COMM_WORLD. Loads the module, initializes MPI if the process has not (MPI is then finalized with
/// the process), and makes a private communicator: collective over all processes of MPI_COMM_WORLD the first time, local later.
/// Any thread. \throws Error(unsupported): there is no module or no MPI, the process uses another MPI than the module, or one
/// without MPI_THREAD_SERIALIZED; Error(rendezvous) at the deadline; Error(system).
int mpi_process(std::chrono::milliseconds deadline);

/// Call after mpi_process(). Local. Ranks of one process may use their carriers from different threads: the module serializes
/// calls of MPI. The carrier's destructor cancels receives that no peer has begun to send to. MPI may access the other buffers
/// until the requests complete, for unreceived data until the process ends: memory given to share() is kept until then, and a
/// line on stderr reports it. \throws Error(unsupported) if MPI has too few tags; Error(system).
std::unique_ptr<Carrier> make_mpi_carrier(const MpiCarrierSpec& spec);

}  // namespace switchyard::detail
