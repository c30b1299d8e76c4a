// SPDX-License-Identifier: Apache-2.0
// Device-initiated networking (NCCL's GIN) as a carrier: legs of a round are puts that a kernel on the caller's stream makes,
// and the kernel ends when what it waits for has come (docs/design/0056-device-initiated-networking.md).
//
// Networks reach memory in windows alone, which all ranks of a communicator register together. So the carrier has a window of
// its own for each communicator, with a slot to send from and one to receive in for each other rank, and bytes are copied from
// a leg to its slot, and back, on the stream. Legs that are longer than a slot travel in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "carrier/carrier.hpp"
#include "carrier/nccl/comms.hpp"

namespace switchyard::detail {

/// What goes to and comes from one rank in a piece of a round, through the slots of both ends.
struct GinPart {
  int peer = -1;   ///< a rank
  int place = -1;  ///< its number in the communicator
  uint64_t send_bytes = 0, receive_bytes = 0;
  uint64_t sent = 0, received = 0;  ///< pieces before this one, each way
  uint64_t from = 0;                ///< in this rank's window: what is put
  uint64_t to = 0;                  ///< in the peer's window
};

/// Signals of a communicator, two for each of its ranks: by its number in the communicator, what counts at this rank the pieces
/// of the peer that have come, and those that it is ready for.
inline constexpr int gin_signals(int ranks) { return 2 * ranks; }
inline constexpr uint32_t gin_arrived(int place) { return 2 * static_cast<uint32_t>(place); }
inline constexpr uint32_t gin_ready(int place) { return 2 * static_cast<uint32_t>(place) + 1; }
/// Counters of a communicator, one for each rank: pieces to it whose bytes have left this rank's slot.
inline constexpr int gin_counters(int ranks) { return ranks; }

/// What the kernel needs of a communicator.
struct GinRail {
  const std::byte* device_comm = nullptr;  ///< ncclDevComm
  void* window = nullptr;                  ///< ncclWindow_t
  int ranks = 0;
};

/// What the carrier asks of the GPU. In the order of `stream`; each throws if nothing was enqueued.
class GinDevice {
 public:
  virtual ~GinDevice() = default;
  /// Of the header that the kernels were compiled with, as NCCL counts; an NCCL of this version or a later one takes them.
  virtual int header_version() const = 0;
  /// Bytes of its ncclDevComm.
  virtual size_t device_comm_bytes() const = 0;
  /// Sets signals and counters to 0, and waits for that. No rank sends anything meanwhile.
  virtual void reset(const GinRail& rail) = 0;
  virtual void copy(std::byte* to, const std::byte* from, size_t bytes, void* stream) = 0;
  /// Tells peers that their slots here are free, puts what goes once theirs are, and waits until all has come and gone.
  /// Bounded: an abort of the group, a deadline and end() end the wait, and then nothing has to have come.
  virtual void exchange(const GinRail& rail, uint64_t round, std::span<const GinPart> parts, void* stream) = 0;
  /// Exchanges under way end soon, those that begin later at once. Any thread, with the GPU current; at most once.
  virtual void end() noexcept = 0;
};

/// SWITCHYARD_NCCL_GIN: whether device-initiated networking is used.
enum class GinChoice : int32_t {
  automatic,  ///< "auto", or not set: where it can be
  off,        ///< "0"
  on,         ///< "1": an error where it cannot be
};
/// \throws Error(invalid_argument) for other values.
GinChoice gin_choice();

/// Why kernels cannot use the network here, before there is a communicator; "" if nothing is against it. `device`: null in a
/// build without kernels for it. `ranks_here`: ranks of the group on this GPU.
std::string why_no_gin(const NcclApi& api, const GinDevice* device, int ranks_here);
/// The same of communicators, as NCCL tells their properties: alike on all ranks of each.
std::string why_no_gin(const NcclComms& comms);

/// What a rank tells the others.
struct GinClaim {
  GinChoice choice = GinChoice::automatic;
  char why_not[300] = {};  ///< as why_no_gin
};
GinClaim make_gin_claim(GinChoice choice, const std::string& why_not);
/// Whether all ranks have device-initiated networking, by the claims of all. \throws on all alike Error(mismatch) if they
/// choose differently, Error(unsupported) if they choose `on` and one cannot, which it names.
bool agree_on_gin(std::span<const GinClaim> claims);

/// Registers the windows, with the rank's GPU current: collective over the ranks of each rail, for which nothing is against it.
/// `slot_bytes`, rounded up to 4 KiB: the same on all ranks. All ranks have returned before one posts a round. \throws
/// Error(rendezvous) at the deadline or when it was interrupted, Error(system) with NCCL's own words.
///
/// post() enqueues and returns. A round comes after the one before it also if that is on another stream.
/// advance() as with NCCL's rounds (carrier.hpp). abort() ends what kernels wait for; whoever aborts has told the kernels
/// behind them before. Communicators end in a thread of its own, when all that was enqueued here has, or are left behind if it
/// has not after a second. The carrier's end waits that long for rounds under way.
std::unique_ptr<Carrier> make_gin_carrier(std::unique_ptr<NcclComms> comms, std::shared_ptr<GinDevice> device,
                                          size_t slot_bytes);

}  // namespace switchyard::detail
