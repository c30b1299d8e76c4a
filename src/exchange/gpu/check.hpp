// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "arch/gpu_runtime.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Throws Error(system), naming `what`, unless the runtime reports success.
inline void check_cuda(gpu::Status status, const char* what) {
  if (status == gpu::kOk) return;
  gpu::forget_error();
  throw Error(ErrorCode::system, std::string(what) + ": " + gpu::text_of(status) + " (" + gpu::name_of(status) + ")");
}

}  // namespace switchyard::detail
