// SPDX-License-Identifier: Apache-2.0
// What the module over MPI gives to the library: both are of one build, so a class may cross.
#pragma once

#include <cstddef>
#include <cstdint>

#include "carrier/mpi.hpp"

namespace switchyard::detail {

/// How a function of the module ended; a text is written where it was not `ok`.
enum class MpiEnd : uint8_t { ok, unsupported, timeout, failed };

struct MpiText {
  char text[512];
};

/// Functions, because the module is found by the name of one symbol.
struct MpiModule {
  /// MPI_Get_library_version of the MPI that the module is linked to.
  const char* (*library)();
  /// As mpi_process().
  MpiEnd (*begin)(int64_t deadline_ms, int* process, MpiText* why);
  /// As make_mpi_carrier(); the caller deletes it.
  MpiEnd (*make)(const MpiCarrierSpec* spec, Carrier** carrier, MpiText* why);
};

/// The module's one symbol; its number changes with what this header says.
using MpiModuleEntry = const MpiModule* (*)();
inline constexpr char kMpiModuleEntry[] = "switchyard_internal_mpi_module_1";

}  // namespace switchyard::detail
