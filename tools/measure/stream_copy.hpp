// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace switchyard::measure {

/// memcpy using non-temporal stores of this CPU's widest vectors (plain memcpy on architectures other than x86-64). `to` must
/// be aligned to 64 bytes. Copying the last 1024 bytes may prefetch beyond `from + bytes`, which never causes a fault. When the
/// call returns, the stores are complete for all threads that synchronize with the calling thread.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace switchyard::measure
