// SPDX-License-Identifier: Apache-2.0
// Connections of move_weights() to the ranks of other hosts, and their memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "exchange/group/impl.hpp"

namespace switchyard::detail {

/// Bytes that this rank sends to and receives from a rank with which it exchanges rows.
struct RailTransfer {
  int peer = -1;
  size_t send = 0, receive = 0;
};

/// Call from one thread. exchange() is collective among the ranks of a transfer.
class WeightRails {
 public:
  WeightRails() = default;
  virtual ~WeightRails() = default;
  WeightRails(const WeightRails&) = delete;
  WeightRails& operator=(const WeightRails&) = delete;

  /// Allocates memory for transfers of at most these sizes, replacing that of the last call.
  virtual void reserve(std::span<const RailTransfer> transfers) = 0;
  /// Frees that memory. \pre no round is in flight
  virtual void release() noexcept = 0;
  /// The memory from which bytes are sent to `peer`.
  virtual std::byte* outgoing(int peer) = 0;
  /// The memory that contains the bytes of `peer` after exchange().
  virtual const std::byte* incoming(int peer) const = 0;
  /// Sends and receives the bytes of all transfers. CPU: throws the error of a rank that does not participate. GPU: in stream
  /// order; a failure ends the group, and the bytes are then undefined.
  virtual void exchange(std::span<const RailTransfer> transfers) = 0;
};

/// Collective. The group's first call makes the connections; the group keeps them.
std::shared_ptr<WeightRails> weight_rails_on_cpu(Group::Impl& group);
/// Collective. `stream`: of exchange().
std::shared_ptr<WeightRails> weight_rails_on_gpu(Group& group, void* stream);

}  // namespace switchyard::detail
