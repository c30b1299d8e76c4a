// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace switchyard::detail {

/// Makes a device current for this thread during its lifetime and restores the caller's device afterwards. It pushes and pops
/// the device's primary context, unless that is already current. Unlike a pair of cudaSetDevice calls, this creates no context
/// on a device that is only the caller's default, which would cost some hundred MB there. Primary contexts stay retained until
/// the process ends.
class DeviceGuard {
 public:
  /// Throws Error(invalid_argument) for an index without a device, Error(system) if its context is unavailable.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

/// Number of visible devices. Throws Error(unsupported) if the driver or a device is missing; the text states which.
int count_devices();
/// Throws Error(invalid_argument) unless 0 <= device < count_devices().
void check_device_index(int device);

}  // namespace switchyard::detail
