// SPDX-License-Identifier: Apache-2.0
// Other representations of the plan: the tables of DeepEP, the route ledger, and portable bytes. All are pure functions of one
// rank's HandleData, without communication or symmetric memory. See docs/concepts/plan.md and ledger.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "plan/plan.hpp"
#include "switchyard/plan_tables.hpp"

namespace switchyard::detail {

/// True if any rank dropped routes in this dispatch at its capacity. Identical on all ranks, because it is computed from the
/// gathered counts.
bool dropped_at_capacity(const HandleData& handle);

/// DeepEP / TileScale matrices for `num_channels` channels. They describe (token, rank) pairs and are therefore independent of
/// the layout. Rank-major rows dropped at capacity count as not sent. O(T * W + rows + W * (W + C)). \throws
/// Error(invalid_argument) if num_channels < 1; Error(unsupported) if a count does not fit int32 or an expert-major dispatch
/// dropped routes at capacity. (This rank does not know which tokens of a third rank kept a route there.)
DispatchMatrices make_matrices(const HandleData& handle, int num_channels);

/// Route ledger. Rows of the expert buffer are those of an expert-major handle, including padding; for a rank-major handle,
/// they are those of an unpadded expert-major dispatch. O(T * K + W * E). \throws Error(unsupported) if any rank dropped routes
/// at capacity, or if a row does not fit int32.
LedgerTables make_ledger(const HandleData& handle);

/// Portable bytes: little endian, versioned, checksummed. Derivable data is omitted.
std::vector<std::byte> serialize(const HandleData& handle);
/// Inverse of serialize(). The bytes are untrusted: every count, index and order is checked against the others, so that the
/// resulting handle is one that a dispatch could have created. \throws Error(invalid_argument) naming the first invalid field.
std::shared_ptr<HandleData> deserialize(std::span<const std::byte> bytes);

}  // namespace switchyard::detail
