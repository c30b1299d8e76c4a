// SPDX-License-Identifier: Apache-2.0
// MPI as a carrier, for ranks on CPUs. The library does not link MPI; instead, a separate module that does (src/carrier/mpi) is
// loaded when a group requests it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "carrier/carrier.hpp"

namespace switchyard::detail {

/// Parameters for a rank's carrier.
struct MpiCarrierSpec {
  int rank = 0;
  std::vector<int> processes;          ///< [world] the MPI_COMM_WORLD rank of each rank's process
  uint64_t nonce = 0;                  ///< of the group, equal on all its ranks: identifies messages of other groups
  size_t max_bytes = size_t{1} << 30;  ///< maximum message size; longer data is split
};

/// Returns this process's rank in MPI_COMM_WORLD. Loads the module, initializes MPI unless the process already has (MPI is then
/// finalized at process exit), and creates a private communicator. The first call is collective over all processes in
/// MPI_COMM_WORLD; later calls are local. Any thread. \throws Error(unsupported) if there is no module or no MPI, or if the
/// process uses a different MPI than the module does or one without MPI_THREAD_SERIALIZED; Error(rendezvous) at the deadline;
/// Error(system).
int mpi_process(std::chrono::milliseconds deadline);

/// Call after mpi_process(). Local. Ranks in one process may use their carriers from different threads: the module serializes
/// MPI calls. The carrier's destructor cancels receives for which no peer has started to send. MPI may access the other buffers
/// until their requests complete or, for data that is never received, until the process ends. Memory passed to share() is kept
/// until then, and a line on stderr reports it. \throws Error(unsupported) if MPI has too few tags; Error(system).
std::unique_ptr<Carrier> make_mpi_carrier(const MpiCarrierSpec& spec);

}  // namespace switchyard::detail
