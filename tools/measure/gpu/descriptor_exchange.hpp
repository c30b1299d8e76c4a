// SPDX-License-Identifier: Apache-2.0
// Passing memory of a GPU as a file descriptor, as ranks that are processes do it.
#pragma once

namespace switchyard::measure {

/// Exports a small driver allocation of GPU `owner`, passes the descriptor through a Unix socket, imports and maps it for GPU
/// `user`, and sees that each of the two mappings reads what was written by the other. \throws switchyard::Error, or
/// std::runtime_error, naming the step that fails
void exchange_descriptor(int owner, int user);

}  // namespace switchyard::measure
