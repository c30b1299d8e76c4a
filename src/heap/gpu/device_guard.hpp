// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace switchyard::detail {

/// Makes a device current for this thread while it lives; the caller's device is current again afterwards. It pushes and pops
/// the device's primary context, unless that is the current one already. Unlike a pair of cudaSetDevice, this creates no
/// context on a device that the caller has merely as its default (that would cost some hundred MB there). Primary contexts stay
/// retained until the process ends.
class DeviceGuard {
 public:
  /// Throws Error(invalid_argument) for an index without a device, Error(system) if its context cannot be had.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

/// Number of visible devices. Throws Error(unsupported) without a driver or a device, saying which.
int count_devices();
/// Throws Error(invalid_argument) unless 0 <= device < count_devices().
void check_device_index(int device);

}  // namespace switchyard::detail
