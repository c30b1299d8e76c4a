// SPDX-License-Identifier: Apache-2.0
// Interface of the MPI module to the library: both are of one build, so classes may cross it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "carrier/mpi.hpp"

namespace switchyard::detail {

/// Result of a function of the module; unless it is `ok`, a text is written.
enum class MpiEnd : uint8_t { ok, unsupported, timeout, failed };

struct MpiText {
  char text[512];
};

/// Function pointers, because the module is located by one symbol name.
struct MpiModule {
  /// MPI_Get_library_version of the MPI that the module is linked with.
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
