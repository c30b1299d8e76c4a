// SPDX-License-Identifier: Apache-2.0
#include "carrier/nccl/comms.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "switchyard/status.hpp"

namespace switchyard::detail {

NcclComms::NcclComms(const NcclApi& api, NcclCarrierSpec spec) : api_(api), spec_(std::move(spec)) {
  try {
    for (size_t rail = 0; rail < spec_.rails.size(); ++rail) connect(static_cast<int>(rail));
  } catch (...) {
    end_elsewhere(api_, take());
    throw;
  }
}

NcclComms::~NcclComms() { end_elsewhere(api_, take()); }

std::vector<NcclComm> NcclComms::take() { return std::exchange(comms_, {}); }

int NcclComms::rail_to(int peer) const {
  const int rail = spec_.rail_to(peer);
  return rail < 0 || static_cast<size_t>(rail) >= spec_.rails.size() ? -1 : rail;
}

int NcclComms::place_on(int rail, int rank) const {
  const std::vector<int>& ranks = spec_.rails[static_cast<size_t>(rail)].ranks;
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

void NcclComms::require(int rail, int result, const char* what, const char* failed) const {
  const NcclComm comm = static_cast<size_t>(rail) < comms_.size() ? comms_[static_cast<size_t>(rail)] : nullptr;
  if (comm != nullptr) result = settle(comm, result, Clock::now() + spec_.deadline, spec_.interrupted);
  if (result == kNcclSuccess && comm != nullptr) return;
  std::string text = std::string("NCCL: ") + what + " ranks ";
  for (const int r : spec_.rails[static_cast<size_t>(rail)].ranks) text += (text.back() == ' ' ? "" : ", ") + std::to_string(r);
  if (result == kNcclInProgress)
    throw Error(ErrorCode::rendezvous, text + " was not made within " + std::to_string(spec_.deadline.count()) +
                                           " ms, or the group was ended meanwhile");
  const char *const words = api_.error_text(result), *const last = comm ? api_.last_error(comm) : nullptr;
  throw Error(ErrorCode::system, text + failed + (words ? words : "result " + std::to_string(result)) +
                                     (last && *last ? std::string("; ") + last : "") + " (NCCL_DEBUG=WARN says more)");
}

bool NcclComms::finish(NcclComm comm, Clock::time_point until) const {
  return settle(comm, api_.finalize(comm), until, [] { return false; }) == kNcclSuccess && api_.destroy(comm) == kNcclSuccess;
}

void NcclComms::connect(int rail) {
  const NcclRail& of = spec_.rails[static_cast<size_t>(rail)];
  NcclComm comm = nullptr;
  NcclConfig config;
  const int result = api_.init_rank(&comm, static_cast<int>(of.ranks.size()), of.id, own_place(rail), &config);
  if (comm != nullptr) comms_.push_back(comm);
  require(rail, result, "the communicator of", " cannot be made: ");
}

void end_elsewhere(const NcclApi& api, std::vector<NcclComm> comms) noexcept try {
  if (comms.empty()) return;
  std::thread([abort = api.abort, held = std::move(comms)] {
    for (const NcclComm comm : held) (void)abort(comm);
  }).detach();
} catch (const std::exception&) {
  // The communicators stay, and rounds under way too.
}

}  // namespace switchyard::detail
