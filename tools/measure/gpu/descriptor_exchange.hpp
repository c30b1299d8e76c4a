// SPDX-License-Identifier: Apache-2.0
// Passes GPU memory as a file descriptor, as ranks in separate processes do.
#pragma once

namespace switchyard::measure {

/// Exports a small driver allocation of GPU `owner`, passes the descriptor through a Unix socket, imports and maps it for GPU
/// `user`, and checks that each mapping reads the data written through the other. \throws switchyard::Error, or
/// std::runtime_error, naming the failed step
void exchange_descriptor(int owner, int user);

}  // namespace switchyard::measure
