// SPDX-License-Identifier: Apache-2.0
// NCCL as a carrier, for ranks on GPUs: the legs of a round are sends and receives in one NCCL group on the caller's stream.
#pragma once

#include <memory>

#include "carrier/carrier.hpp"
#include "carrier/nccl/comms.hpp"

namespace switchyard::detail {

/// post() returns when NCCL has enqueued the round on the stream, so that later work on the stream is ordered after it; post()
/// does not wait for the round itself. If NCCL fails or does not finish within the deadline, advance() returns `broken` from
/// then on. advance() can name the peer that a round waits for only if the round has a single leg. It never returns `unlike`:
/// mismatched sizes are detected by the ranks' reports of their calls, or at the deadline.
///
/// abort() lets NCCL abort the communicators in a separate thread, however long that takes. Kernels of rounds in flight then
/// end without completing their work, so the caller must first notify the kernels queued after them. A communicator that does
/// not end is leaked, as is one that has not flushed within a second of the carrier's destruction.
std::unique_ptr<Carrier> make_nccl_carrier(std::unique_ptr<NcclComms> comms);

}  // namespace switchyard::detail
