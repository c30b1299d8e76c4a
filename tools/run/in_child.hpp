// SPDX-License-Identifier: Apache-2.0
// Runs one function in a child process.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>

namespace switchyard::tool {

/// Runs `body` in a forked process, which then ends, and returns its result. Use it for code that touches the CUDA driver
/// before ranks are forked, because a process that has initialized the driver cannot fork ranks that use it. Call it while this
/// process has only one thread. \throws std::runtime_error with the text of an exception thrown by `body`, or if the process
/// ended without a result.
nlohmann::json run_in_child(const std::function<nlohmann::json()>& body);

}  // namespace switchyard::tool
