// SPDX-License-Identifier: Apache-2.0
// Groups on GPUs whose ranks are threads on several named hosts.
#pragma once

#include <chrono>
#include <string>

#include "harness/outcome.hpp"
#include "harness/rank_memory.hpp"
#include "switchyard/group.hpp"

namespace harness {

inline switchyard::GroupOptions options_on_gpus(const std::string& host) {
  switchyard::GroupOptions options = options_with(std::chrono::seconds(20), size_t{64} << 20);
  options.backend = switchyard::Backend::cuda;
  options.host = host;
  return options;
}

inline constexpr const char* kTwoGpus = "NCCL takes one rank on a GPU: two are needed";

}  // namespace harness
