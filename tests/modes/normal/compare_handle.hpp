// SPDX-License-Identifier: Apache-2.0
// Compares every field of a handle, and every view of it, with the oracle.
#pragma once

#include "harness/failures.hpp"
#include "oracle/routing.hpp"
#include "plan/plan.hpp"
#include "switchyard/normal.hpp"

namespace harness {

void compare_handle(const oracle::Problem& problem, const oracle::Expected& expected, int rank,
                    const switchyard::detail::HandleData& handle, Failures& failures);
void compare_matrices(const oracle::Problem& problem, const oracle::Expected& expected, int rank, int num_channels,
                      const switchyard::DispatchMatrices& matrices, Failures& failures);
void compare_ledger(const oracle::Problem& problem, int rank, const switchyard::LedgerTables& ledger, Failures& failures);
/// Compares all fields of two handles.
void compare_handles(const switchyard::detail::HandleData& expected, const switchyard::detail::HandleData& actual,
                     Failures& failures);

}  // namespace harness
