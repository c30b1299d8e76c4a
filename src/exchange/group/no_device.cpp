// SPDX-License-Identifier: Apache-2.0
// Builds without a GPU toolkit: creating a GPU group throws a typed error.
#include "exchange/group/device_rank.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

[[noreturn]] void refuse() {
  throw Error(
      ErrorCode::unsupported,
      "GroupOptions::backend = cuda: this build has no CUDA code; build with nvcc and -DSWITCHYARD_BACKENDS=cuda, or use "
      "Backend::cpu");
}

}  // namespace

void end_device(DeviceParts) noexcept {}
DeviceParts join_device(Bootstrap&, const GroupOptions&) { refuse(); }
std::vector<DeviceParts> devices_in_process(const HostMap&, const GroupOptions&) { refuse(); }

}  // namespace switchyard::detail
