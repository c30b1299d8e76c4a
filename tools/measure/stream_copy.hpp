// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace switchyard::measure {

/// memcpy with non-temporal stores of this CPU's widest vectors (on other architectures than x86-64: memcpy). `to` must be
/// aligned to 64 bytes. The last 1024 bytes before `from + bytes` may prefetch beyond it, which never faults. Complete on
/// return, for all threads that synchronize with the calling one.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace switchyard::measure
