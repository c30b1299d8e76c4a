// SPDX-License-Identifier: Apache-2.0
// The built-in carrier: one stream socket per peer, driven by the thread that polls the rounds. For tests, and for small groups
// on CPUs; not intended as a fast network (docs/design/0055-several-hosts.md).
#pragma once

#include <memory>
#include <vector>

#include "base/unique_fd.hpp"
#include "carrier/carrier.hpp"

namespace switchyard::detail {

/// A connection used only for data.
struct CarrierSocket {
  int peer = -1;
  UniqueFd fd;  ///< a connected stream socket; becomes non-blocking
};

/// Throws Error(system) if a descriptor is invalid.
std::unique_ptr<Carrier> make_socket_carrier(std::vector<CarrierSocket> sockets);

}  // namespace switchyard::detail
