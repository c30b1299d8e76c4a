// SPDX-License-Identifier: Apache-2.0
// Device-initiated networking (NCCL's GIN) as a carrier: the legs of a round are puts issued by a kernel on the caller's
// stream. The kernel ends when the data it waits for has arrived (docs/design/0056-device-initiated-networking.md).
//
// Networks can access only memory in windows, which all ranks of a communicator register together. The carrier therefore has
// one window per communicator, with a slot to send from and a slot to receive into for each other rank. Bytes are copied
// between legs and slots on the stream. Legs longer than a slot are sent in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "carrier/carrier.hpp"
#include "carrier/nccl/comms.hpp"

namespace switchyard::detail {

/// Data sent to and received from one rank in a piece of a round, through the slots at both ends.
struct GinPart {
  int peer = -1;   ///< a rank
  int place = -1;  ///< its rank number in the communicator
  uint64_t send_bytes = 0, receive_bytes = 0;
  uint64_t sent = 0, received = 0;  ///< pieces before this one, in each direction
  uint64_t from = 0;                ///< in this rank's window: source of the put
  uint64_t to = 0;                  ///< in the peer's window
};

/// Signals of a communicator, two per rank, indexed by rank number in the communicator. On this rank, they hold the number of
/// the peer's pieces that have arrived and the number for which the peer is ready.
inline constexpr int gin_signals(int ranks) { return 2 * ranks; }
inline constexpr uint32_t gin_arrived(int place) { return 2 * static_cast<uint32_t>(place); }
inline constexpr uint32_t gin_ready(int place) { return 2 * static_cast<uint32_t>(place) + 1; }
/// Counters of a communicator, one per rank: the number of pieces to that rank that have left this rank's slot.
inline constexpr int gin_counters(int ranks) { return ranks; }

/// Kernel parameters for a communicator.
struct GinRail {
  const std::byte* device_comm = nullptr;  ///< ncclDevComm
  void* window = nullptr;                  ///< ncclWindow_t
  int ranks = 0;
};

/// The carrier's interface to the GPU. Calls are in stream order on `stream`; each throws if it enqueued nothing.
class GinDevice {
 public:
  virtual ~GinDevice() = default;
  /// NCCL version of the header with which the kernels were compiled; this and later NCCL versions accept them.
  virtual int header_version() const = 0;
  /// Bytes of its ncclDevComm.
  virtual size_t device_comm_bytes() const = 0;
  /// Sets signals and counters to 0 and waits for completion. No rank may send during the call.
  virtual void reset(const GinRail& rail) = 0;
  virtual void copy(std::byte* to, const std::byte* from, size_t bytes, void* stream) = 0;
  /// Announces to peers that their slots here are free, sends once the peers' slots are free, and waits until all data has been
  /// sent and received. The wait is bounded: it ends on a group abort, at a deadline or on end(); data may then be missing.
  virtual void exchange(const GinRail& rail, uint64_t round, std::span<const GinPart> parts, void* stream) = 0;
  /// Ends exchanges in flight shortly, and later ones immediately. Any thread, with the GPU current; at most once.
  virtual void end() noexcept = 0;
};

/// SWITCHYARD_NCCL_GIN: use of device-initiated networking.
enum class GinChoice : int32_t {
  automatic,  ///< "auto", or not set: if possible
  off,        ///< "0"
  on,         ///< "1": an error if impossible
};
/// Reads SWITCHYARD_NCCL_GIN. \throws Error(invalid_argument) for other values.
GinChoice gin_choice();

/// Returns why kernels cannot use the network, as far as this is known before a communicator exists; "" if nothing prevents it.
/// `device` is null in a build without kernels for it. `ranks_on_gpu` is the number of ranks in the group on this GPU.
std::string why_no_gin(const NcclApi& api, const GinDevice* device, int ranks_on_gpu);
/// Like why_no_gin() above, but based on the properties of the communicators; identical on all ranks of each communicator.
std::string why_no_gin(const NcclComms& comms);

/// A rank's report to the others.
struct GinProposal {
  GinChoice choice = GinChoice::automatic;
  char why_not[300] = {};  ///< result of why_no_gin
};
GinProposal make_gin_proposal(GinChoice choice, const std::string& why_not);
/// True if all ranks use device-initiated networking, given the proposals of all ranks. \throws, on all ranks, Error(mismatch)
/// if their choices differ, Error(unsupported) naming a rank if they choose `on` and that rank cannot use it.
bool agree_on_gin(std::span<const GinProposal> proposals);

/// Registers the windows, with the rank's GPU current: collective over the ranks on each rail; requires that why_no_gin() is
/// empty. `slot_bytes`, rounded up to 4 KiB, is identical on all ranks. The call must have returned on all ranks before any
/// rank posts a round. \throws Error(rendezvous) at the deadline or when interrupted, Error(system) with NCCL's error text.
///
/// post() enqueues and returns. A round is ordered after the previous one, even on a different stream. advance() behaves as in
/// the NCCL carrier (carrier.hpp). abort() ends the kernels' waits; the caller must first notify the kernels queued after them.
/// Communicators are ended in a separate thread once all work enqueued here is done, or leaked if it is not done within a
/// second. The carrier's destructor waits up to a second for rounds in flight.
std::unique_ptr<Carrier> make_gin_carrier(std::unique_ptr<NcclComms> comms, std::shared_ptr<GinDevice> device,
                                          size_t slot_bytes);

}  // namespace switchyard::detail
