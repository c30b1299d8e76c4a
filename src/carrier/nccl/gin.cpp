// SPDX-License-Identifier: Apache-2.0
#include "carrier/nccl/gin.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "carrier/nccl/rounds.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

using Clock = NcclComms::Clock;
/// Slots are whole pages.
constexpr size_t kSlotUnit = 4096;
constexpr char kGinVariable[] = "SWITCHYARD_NCCL_GIN";
constexpr std::chrono::milliseconds kEndTime{1000}, kPollInterval{1};

/// Windows and device communicators belonging to one communicator. NCCL writes here when it has created them, so the address
/// must not change.
struct Rail {
  int ranks = 0, own_place = 0;
  void* memory = nullptr;
  void* window = nullptr;
  std::vector<std::byte> device_comm;
  std::vector<uint64_t> sent, received;  ///< [ranks] pieces so far

  GinRail view() const { return {device_comm.data(), window, ranks}; }
};

/// Slots at one end of a communicator: for each other rank, one to send from and one to receive into.
struct Slots {
  size_t bytes;

  /// Index of rank number `other` among the peers of rank number `place`.
  static size_t index(int place, int other) { return static_cast<size_t>(other < place ? other : other - 1); }
  size_t out(int place, int other) const { return 2 * index(place, other) * bytes; }
  size_t in(int place, int other) const { return out(place, other) + bytes; }
  size_t all(int ranks) const { return 2 * bytes * static_cast<size_t>(ranks - 1); }
};

/// Resources of a destroyed carrier; none may be freed while its kernels are running.
struct Remains {
  std::vector<NcclComm> comms;
  std::vector<std::unique_ptr<Rail>> rails;
  std::vector<std::shared_ptr<const void>> marks;
  std::shared_ptr<StreamMarks> of;
  bool unmarked = false;  ///< something was enqueued without a mark

  /// Waits until `until` at most. \returns true if all enqueued work is done
  bool wait(Clock::time_point until) const {
    const auto ended = [this](const auto& mark) { return of->reached(mark.get()); };
    while (!unmarked && !std::all_of(marks.begin(), marks.end(), ended)) {
      if (Clock::now() > until) return false;
      std::this_thread::sleep_for(kPollInterval);
    }
    return !unmarked;
  }
};

/// Leaks resources that kernels may still use.
void leave_behind(std::unique_ptr<Remains> remains) {
  static std::mutex mutex;
  static auto* const all = new std::vector<std::unique_ptr<Remains>>;
  const std::lock_guard lock(mutex);
  all->push_back(std::move(remains));
}

/// Ends communicators once this rank has no work in flight; otherwise leaks them.
void end_remains(const NcclApi& api, Remains remains) noexcept try {
  if (remains.comms.empty()) return;
  Remains* const held = std::make_unique<Remains>(std::move(remains)).release();  // without a thread everything is leaked
  end_in_thread([held, abort = api.abort, release = api.gin.release] {
    std::unique_ptr<Remains> mine(held);
    if (!mine->wait(Clock::now() + kEndTime)) return leave_behind(std::move(mine));
    for (const NcclComm comm : mine->comms) (void)abort(comm);
    for (const auto& rail : mine->rails)
      if (rail->memory != nullptr) (void)release(rail->memory);
  });
} catch (const std::exception&) {
  // Leaked.
}

/// Bytes [at, at + max) of `whole`, limited to its size.
template <class Byte>
std::span<Byte> piece_of(std::span<Byte> whole, size_t at, size_t max) {
  const std::span<Byte> rest = whole.subspan(std::min(at, whole.size()));
  return rest.first(std::min(max, rest.size()));
}

class GinCarrier final : public NcclRounds {
 public:
  GinCarrier(std::unique_ptr<NcclComms> comms, std::shared_ptr<GinDevice> device, size_t slot_bytes)
      : NcclRounds(std::move(comms)), device_(std::move(device)), slots_{(slot_bytes + kSlotUnit - 1) / kSlotUnit * kSlotUnit} {
    try {
      for (size_t rail = 0; rail < this->comms().all().size(); ++rail) set_up(static_cast<int>(rail));
    } catch (...) {
      end_elsewhere();
      throw;
    }
  }

  ~GinCarrier() override {
    const NcclApi& api = comms().api();
    const Clock::time_point until = Clock::now() + kEndTime;
    Remains all = take(), left;
    const bool quiet = !has_failed() && all.wait(until);
    if (!quiet && !ended_) device_->end();
    for (size_t i = 0; i < all.comms.size(); ++i) {
      if (quiet && tear_down(all.comms[i], *all.rails[i], until)) continue;
      left.comms.push_back(all.comms[i]);
      left.rails.push_back(std::move(all.rails[i]));
    }
    left.marks = std::move(all.marks);
    left.of = all.of;
    left.unmarked = all.unmarked;
    end_remains(api, std::move(left));
  }

 private:
  void set_up(int rail) {
    const NcclComms& of = comms();
    const NcclApi& api = of.api();
    const NcclComm comm = of.all()[static_cast<size_t>(rail)];
    Rail& made = *rails_.emplace_back(std::make_unique<Rail>());
    made.ranks = static_cast<int>(of.spec().rails[static_cast<size_t>(rail)].ranks.size());
    made.own_place = of.own_place(rail);
    made.sent.resize(static_cast<size_t>(made.ranks));
    made.received.resize(static_cast<size_t>(made.ranks));
    made.device_comm.resize(device_->device_comm_bytes());
    const size_t bytes = slots_.all(made.ranks);
    of.require(rail, api.gin.allocate(&made.memory, bytes), "the memory of the window of", " cannot be had: ");
    of.require(rail, api.gin.make_window(comm, made.memory, bytes, &made.window, 0), "the window of", " cannot be made: ");
    if (made.window == nullptr) throw Error(ErrorCode::system, "NCCL: a communicator with the device API registers no memory");
    NcclProperties properties;
    of.require(rail, api.gin.properties(comm, &properties), "the properties of", " cannot be had: ");
    NcclRequirements wanted;
    wanted.version = static_cast<unsigned>(device_->header_version());
    wanted.gin_signals = gin_signals(made.ranks);
    wanted.gin_counters = gin_counters(made.ranks);
    wanted.gin_connection = properties.gin_type != 0 ? kNcclGinFull : kNcclGinRail;
    of.require(rail, api.gin.make_device_comm(comm, &wanted, made.device_comm.data()), "the device communicator of",
               " cannot be made: ");
    device_->reset(made.view());
  }

  /// All ranks process rails and pieces in the same order, because two ranks could otherwise wait for each other.
  bool enqueue(std::span<const PeerTransfer> transfers, void* stream, int peer) override {
    unmarked_ = true;
    ++rounds_;
    try {
      if (last_ != nullptr) comms().spec().marks->order(stream, last_.get());  // the slots are those of the last round
      for (size_t rail = 0; rail < rails_.size(); ++rail) {
        size_t max = 0;
        for (const PeerTransfer& transfer : transfers)
          if (comms().rail_to(transfer.peer) == static_cast<int>(rail))
            max = std::max({max, transfer.send.size(), transfer.receive.size()});
        for (size_t at = 0; at < max; at += slots_.bytes) enqueue_piece(static_cast<int>(rail), transfers, at, stream);
      }
    } catch (...) {
      fail(peer);  // the peers have another number of pieces
      throw;
    }
    return true;
  }
  void marked(const std::shared_ptr<const void>& mark) override {
    unmarked_ = false;
    last_ = mark;
  }

  /// Enqueues bytes [at, at + slot) of all legs on a rail.
  void enqueue_piece(int number, std::span<const PeerTransfer> transfers, size_t at, void* stream) {
    Rail& rail = *rails_[static_cast<size_t>(number)];
    auto* const window = static_cast<std::byte*>(rail.memory);
    std::vector<GinPart> parts;
    std::vector<PeerTransfer> pieces;
    for (const PeerTransfer& transfer : transfers) {
      if (comms().rail_to(transfer.peer) != number) continue;
      const PeerTransfer piece{transfer.peer, piece_of(transfer.send, at, slots_.bytes),
                               piece_of(transfer.receive, at, slots_.bytes)};
      if (piece.send.empty() && piece.receive.empty()) continue;
      const int place = comms().place_on(number, transfer.peer);
      const auto i = static_cast<size_t>(place);
      parts.push_back({transfer.peer, place, piece.send.size(), piece.receive.size(), rail.sent[i], rail.received[i],
                       slots_.out(rail.own_place, place), slots_.in(place, rail.own_place)});
      rail.sent[i] += piece.send.empty() ? 0 : 1;
      rail.received[i] += piece.receive.empty() ? 0 : 1;
      if (!piece.send.empty()) device_->copy(window + parts.back().from, piece.send.data(), piece.send.size(), stream);
      pieces.push_back(piece);
    }
    device_->exchange(rail.view(), rounds_, parts, stream);
    for (size_t i = 0; i < parts.size(); ++i)
      if (!pieces[i].receive.empty())
        device_->copy(pieces[i].receive.data(), window + slots_.in(rail.own_place, parts[i].place), pieces[i].receive.size(),
                      stream);
  }

  Remains take() {
    Remains all{comms().take(), std::move(rails_), {}, comms().spec().marks, unmarked_};
    for (const Posted& round : posted()) all.marks.push_back(round.mark);
    posted().clear();
    return all;
  }
  void end_elsewhere() noexcept override try {
    if (!std::exchange(ended_, true)) device_->end();
    end_remains(comms().api(), take());
  } catch (const std::exception&) {
    // Leaked if memory is insufficient.
  }

  /// Destroys a communicator without work in flight. \returns true if it is destroyed
  bool tear_down(NcclComm comm, const Rail& rail, Clock::time_point until) const {
    const NcclApi& api = comms().api();
    const bool gone = api.gin.destroy_device_comm(comm, rail.device_comm.data()) == kNcclSuccess &&
                      api.gin.destroy_window(comm, rail.window) == kNcclSuccess && comms().finish(comm, until);
    if (gone) (void)api.gin.release(rail.memory);
    return gone;
  }

  const std::shared_ptr<GinDevice> device_;
  const Slots slots_;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::shared_ptr<const void> last_;  ///< after the last round
  uint64_t rounds_ = 0;
  bool unmarked_ = false;
  bool ended_ = false;
};

}  // namespace

GinChoice gin_choice() {
  const char* const text = std::getenv(kGinVariable);
  const std::string given = text != nullptr ? text : "";
  if (given.empty() || given == "auto") return GinChoice::automatic;
  if (given == "0") return GinChoice::off;
  if (given == "1") return GinChoice::on;
  throw Error(ErrorCode::invalid_argument, std::string(kGinVariable) + " is '" + given + "'; allowed: auto, 0, 1");
}

std::string why_no_gin(const NcclApi& api, const GinDevice* device, int ranks_on_gpu) {
  if (device == nullptr) return "this build has no kernels for it (CMake found no nccl_device.h of version 2.30.7 or later)";
  if (!api.no_gin.empty()) return api.no_gin;
  if (api.version < device->header_version())
    return "NCCL " + nccl_version_text(api.version) + " is older than " + nccl_version_text(device->header_version()) +
           ", with whose headers this build was compiled";
  // A waiting kernel prevents another rank's kernel, for which it may be waiting, from starting.
  if (ranks_on_gpu > 1) return std::to_string(ranks_on_gpu) + " ranks of the group share its GPU";
  return "";
}

std::string why_no_gin(const NcclComms& comms) {
  for (size_t i = 0; i < comms.all().size(); ++i) {
    const auto rail = static_cast<int>(i);
    NcclProperties has;
    comms.require(rail, comms.api().gin.properties(comms.all()[i], &has), "the properties of", " cannot be had: ");
    std::string ranks;
    for (const int r : comms.spec().rails[i].ranks) ranks += (ranks.empty() ? " ranks " : ", ") + std::to_string(r);
    if (!has.device_api) return "NCCL offers no device API for" + ranks;
    // With one rank per host, all ranks are reached through one network card, unless hosts share memory over NVLink.
    if (has.gin_type == 0 && (has.railed_gin_type == 0 || has.lsa_teams != has.ranks))
      return "NCCL finds no network that kernels can drive between" + ranks;
  }
  return "";
}

GinProposal make_gin_proposal(GinChoice choice, const std::string& why_not) {
  GinProposal proposal;
  proposal.choice = choice;
  std::snprintf(proposal.why_not, sizeof proposal.why_not, "%s", why_not.c_str());
  return proposal;
}

bool agree_on_gin(std::span<const GinProposal> proposals) {
  const GinChoice choice = proposals.front().choice;
  for (size_t r = 0; r < proposals.size(); ++r)
    if (proposals[r].choice != choice)
      throw Error(ErrorCode::mismatch, std::string(kGinVariable) + " is not the same on ranks 0 and " + std::to_string(r));
  if (choice == GinChoice::off) return false;
  for (size_t r = 0; r < proposals.size(); ++r) {
    if (proposals[r].why_not[0] == '\0') continue;
    if (choice == GinChoice::automatic) return false;
    throw Error(ErrorCode::unsupported, std::string(kGinVariable) + "=1, but rank " + std::to_string(r) +
                                            " cannot have device-initiated networking: " + proposals[r].why_not);
  }
  return true;
}

std::unique_ptr<Carrier> make_gin_carrier(std::unique_ptr<NcclComms> comms, std::shared_ptr<GinDevice> device,
                                          size_t slot_bytes) {
  return std::make_unique<GinCarrier>(std::move(comms), std::move(device), slot_bytes);
}

}  // namespace switchyard::detail
