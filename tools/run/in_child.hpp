// SPDX-License-Identifier: Apache-2.0
// Runs one function in a process of its own.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>

namespace switchyard::tool {

/// What `body` returns, computed in a forked process that ends with it. For whatever touches the CUDA driver before ranks are
/// forked: a process that has initialised it cannot fork ranks that use it. Call it while this process has one thread.
/// \throws std::runtime_error with the text of what `body` threw, or if the process ended without an answer.
nlohmann::json run_in_child(const std::function<nlohmann::json()>& body);

}  // namespace switchyard::tool
