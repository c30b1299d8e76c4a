// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "carrier/carrier.hpp"
#include "exchange/group/impl.hpp"

namespace switchyard::detail {

/// Collective, in Group::Impl::collectively(): this rank's way to the ranks of other hosts with which it exchanges rows, by
/// GroupOptions::network. \throws on all ranks alike Error(mismatch) if ranks name different networks, and what a rank throws
/// that cannot have its own.
std::unique_ptr<Carrier> connect_hosts(Group::Impl& group);

}  // namespace switchyard::detail
