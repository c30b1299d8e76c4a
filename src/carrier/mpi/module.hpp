// SPDX-License-Identifier: Apache-2.0
// Interface between the library and the MPI module. Both come from the same build, so class types may cross it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "carrier/mpi.hpp"

namespace switchyard::detail {

/// Result of a module function; unless it is `ok`, an error text is written.
enum class MpiEnd : uint8_t { ok, unsupported, timeout, failed };

struct MpiText {
  char text[512];
};

/// Function pointers allow the module to be located by a single symbol name.
struct MpiModule {
  /// MPI_Get_library_version of the MPI with which the module is linked.
  const char* (*library)();
  /// See mpi_process().
  MpiEnd (*begin)(int64_t deadline_ms, int* process, MpiText* why);
  /// See make_mpi_carrier(); the caller deletes it.
  MpiEnd (*make)(const MpiCarrierSpec* spec, Carrier** carrier, MpiText* why);
};

/// The module's only symbol; its number changes with this interface.
using MpiModuleEntry = const MpiModule* (*)();
inline constexpr char kMpiModuleEntry[] = "switchyard_internal_mpi_module_1";

}  // namespace switchyard::detail
