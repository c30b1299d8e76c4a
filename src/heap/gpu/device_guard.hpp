// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace switchyard::detail {

/// Makes a device current for this thread during its lifetime and restores the caller's device afterwards. Pushes and pops the
/// device's primary context unless it is already current. Unlike a pair of cudaSetDevice calls, this creates no context on a
/// device that is merely the caller's default; such a context would use a few hundred MB there. Primary contexts stay retained
/// until the process ends.
class DeviceGuard {
 public:
  /// Throws Error(invalid_argument) if no device has this index, Error(system) if its context is unavailable.
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
