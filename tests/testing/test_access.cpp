// SPDX-License-Identifier: Apache-2.0
#include "testing/test_access.hpp"

#include "exchange/group_impl.hpp"

namespace switchyard::detail {

void number_calls_from(Group& group, uint64_t first_epoch) { group.impl().first_epoch = first_epoch; }

void defer_copies(Group& group) { group.impl().cpu_modes = kCpuModes<CpuDeferred>; }

}  // namespace switchyard::detail
