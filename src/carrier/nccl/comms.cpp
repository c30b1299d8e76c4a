// SPDX-License-Identifier: Apache-2.0
#include "carrier/nccl/comms.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "base/forked.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

/// The threads of this process that are ending communicators.
struct Endings {
  std::mutex mutex;
  std::condition_variable ended;
  int in_progress = 0;
  bool at_exit = false;  ///< exit() will wait for them
};
Endings& endings() {
  static auto* const all = new Endings;  // detached threads use it to their end
  return *all;
}

/// Maximum wait of a new carrier, and of the end of the process.
constexpr std::chrono::seconds kMaxEndingTime{5};

/// Waits for these threads, for at most `max` or until `stop` returns true.
void await_endings(std::chrono::milliseconds max, const std::function<bool()>& stop) {
  const auto until = std::chrono::steady_clock::now() + max;
  std::unique_lock lock(endings().mutex);
  while (endings().in_progress > 0 && !stop() && std::chrono::steady_clock::now() < until)
    endings().ended.wait_for(lock, std::chrono::milliseconds(5));
}

/// Makes exit() wait for these threads: NCCL's destructors must not run while a thread aborts a communicator. The handler runs
/// before these destructors, because it is registered after NCCL is loaded, and again for communicators that end during exit().
/// A forked child has no such threads.
void await_endings_at_exit() {
  static const HomeProcess home;
  const std::lock_guard lock(endings().mutex);
  if (endings().at_exit) return;
  endings().at_exit = true;
  (void)std::atexit([] {  // if memory for the handler is exhausted, exit() does not wait
    if (!home.here()) return;
    {
      const std::lock_guard again(endings().mutex);
      endings().at_exit = false;
    }
    await_endings(kMaxEndingTime, [] { return false; });
  });
}

}  // namespace

NcclComms::NcclComms(const NcclApi& api, NcclCarrierSpec spec) : api_(api), spec_(std::move(spec)) {
  await_endings(std::min<std::chrono::milliseconds>(spec_.deadline / 4, kMaxEndingTime), spec_.interrupted);
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

void end_in_thread(std::function<void()> end) {
  const auto count = [](int by) {
    const std::lock_guard lock(endings().mutex);
    endings().in_progress += by;
    endings().ended.notify_all();
  };
  await_endings_at_exit();
  count(1);
  try {
    std::thread([end = std::move(end), count] {
      end();
      count(-1);
    }).detach();
  } catch (...) {
    count(-1);
    throw;
  }
}

void end_elsewhere(const NcclApi& api, std::vector<NcclComm> comms) noexcept try {
  if (comms.empty()) return;
  end_in_thread([abort = api.abort, held = std::move(comms)] {
    for (const NcclComm comm : held) (void)abort(comm);
  });
} catch (const std::exception&) {
  // The communicators and the rounds in flight are then leaked.
}

}  // namespace switchyard::detail
