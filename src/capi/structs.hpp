// SPDX-License-Identifier: Apache-2.0
// Conversion of the exchange's structs between C and C++.
#pragma once

#include "capi/errors.hpp"
#include "capi/views.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::detail {

/// Conversions to C++. NULL means defaults if the header says so. Checks everything that the C++ type cannot express.
GroupOptions to_options(const sy_group_options* options);
NormalConfig to_config(const sy_normal_config* config);
/// `out`: storage for the converted options->out, which the result points to.
DispatchOptions to_options(const sy_dispatch_options* options, Rows& out);
CombineOptions to_options(const sy_combine_options* options);

/// Fill the caller's struct.
void write_requirement(sy_memory_requirement* to, const MemoryRequirement& from);
void write_statistics(sy_call_statistics* to, const CallStatistics& from);
void write_rows(sy_row_view* to, const Rows& from);

}  // namespace switchyard::detail
