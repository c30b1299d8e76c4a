// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "carrier/carrier.hpp"
#include "exchange/group/impl.hpp"

namespace switchyard::detail {

/// Collective, in Group::Impl::collectively(): returns this rank's carrier to the ranks of other hosts with which it exchanges
/// rows, as selected by GroupOptions::network. \throws on all ranks: Error(mismatch) if ranks select different networks, and
/// the error of a rank that cannot connect.
std::unique_ptr<Carrier> connect_hosts(Group::Impl& group);

}  // namespace switchyard::detail
