// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "carrier/carrier.hpp"
#include "exchange/group/impl.hpp"

namespace switchyard::detail {

/// Collective, inside Group::Impl::collectively(). Returns this rank's carrier, as selected by GroupOptions::network, to the
/// ranks of other hosts with which it exchanges rows. \throws on all ranks: Error(mismatch) if ranks select different networks,
/// or the error of a rank that cannot connect.
std::unique_ptr<Carrier> connect_hosts(Group::Impl& group);

}  // namespace switchyard::detail
