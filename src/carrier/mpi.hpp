// SPDX-License-Identifier: Apache-2.0
// MPI as a carrier, for ranks on CPUs. The library links no MPI: a module of its own does (src/carrier/mpi), which is loaded
// when a group asks for it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "carrier/carrier.hpp"

namespace switchyard::detail {

/// What a rank's carrier is made from.
struct MpiCarrierSpec {
  int rank = 0;
  std::vector<int> processes;           ///< [world] of each rank, the number of its process in MPI_COMM_WORLD
  uint64_t nonce = 0;                   ///< of the group, equal on all its ranks: messages of other groups are found to be such
  size_t most_bytes = size_t{1} << 30;  ///< of a message; what is longer goes in several
};

/// Number of this process in MPI_COMM_WORLD. Loads the module, starts MPI if the process has not (MPI then ends with the
/// process), and makes a communicator of the library's own: collective over all processes of MPI_COMM_WORLD the first time,
/// local later. Any thread. \throws Error(unsupported): there is no module or no MPI, the process has another MPI than the
/// module, or one without MPI_THREAD_SERIALIZED; Error(rendezvous) at the deadline; Error(system).
int mpi_process(std::chrono::milliseconds deadline);

/// After mpi_process(). Local. Ranks of one process may use theirs from different threads: the module lets one of them into MPI
/// at a time. When the carrier ends, it cancels what it awaits and no peer has begun to send. MPI may read and write the rest
/// until it completes, for what nobody receives until the process ends: its memory is kept so long if it was given to share(),
/// and a line on stderr says so. \throws Error(unsupported) if MPI has too few tags; Error(system).
std::unique_ptr<Carrier> make_mpi_carrier(const MpiCarrierSpec& spec);

}  // namespace switchyard::detail
