// SPDX-License-Identifier: Apache-2.0
// Rendezvous of ranks that are threads in one process: a table of rounds protected by one lock.
#include <sys/socket.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/deadline.hpp"
#include "bootstrap/rank_list.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {
namespace {

/// One rank's contribution to one round.
struct Contribution {
  bool present = false;
  std::vector<std::byte> bytes;
  std::shared_ptr<void> object;
};

/// One collective call. Immutable once all ranks have arrived; the waiting ranks then hold the last references.
struct Round {
  int arrived = 0;
  std::vector<Contribution> of_rank;
};

class Meeting {
 public:
  explicit Meeting(int world) : left_(static_cast<size_t>(world)) {}

  /// Adds `mine` to round `number` and waits for the other ranks, or until `interrupt`, if set, returns true.
  std::shared_ptr<const Round> meet(int rank, uint64_t number, Contribution mine, Milliseconds budget,
                                    const std::function<bool()>& interrupt) {
    const Deadline deadline(budget);
    std::unique_lock lock(mutex_);
    std::shared_ptr<Round>& entry = rounds_[number];
    if (!entry) {
      const auto made = std::make_shared<Round>();
      made->of_rank.resize(left_.size());
      entry = made;  // a rank without memory leaves no partial round for the others
    }
    const std::shared_ptr<Round> round = entry;
    mine.present = true;
    round->of_rank[static_cast<size_t>(rank)] = std::move(mine);
    if (++round->arrived == static_cast<int>(left_.size())) {
      rounds_.erase(number);
      changed_.notify_all();
      return round;
    }
    while (round->arrived < static_cast<int>(left_.size())) {
      if (const int lost = find_lost_rank(*round); lost >= 0) {
        throw PeerFailed(lost, ErrorCode::system, "set-up step " + std::to_string(number) + " on rank " + std::to_string(rank),
                         true);
      }
      if (deadline.passed() || (interrupt && interrupt())) throw_missing(*round, rank, number, deadline.budget());
      changed_.wait_until(lock, interrupt ? deadline.next_look() : deadline.time());
    }
    return round;
  }

  void leave(int rank) noexcept {
    const std::lock_guard lock(mutex_);
    left_[static_cast<size_t>(rank)] = true;
    changed_.notify_all();
  }

 private:
  int find_lost_rank(const Round& round) const {
    for (size_t r = 0; r < left_.size(); ++r) {
      if (left_[r] && !round.of_rank[r].present) return static_cast<int>(r);
    }
    return -1;
  }

  [[noreturn]] void throw_missing(const Round& round, int rank, uint64_t number, Milliseconds budget) const {
    std::vector<int> missing;
    for (size_t r = 0; r < left_.size(); ++r) {
      if (!round.of_rank[r].present) missing.push_back(static_cast<int>(r));
    }
    throw RendezvousError("forming the group, step " + std::to_string(number) + " on rank " + std::to_string(rank) + ": " +
                              describe_ranks(missing) + " of " + std::to_string(left_.size()) + " did not come within " +
                              std::to_string(budget.count()) + " ms",
                          missing);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> left_;
  std::map<uint64_t, std::shared_ptr<Round>> rounds_;  // rounds that some ranks have not reached
};

/// Remote ends of one rank's sockets, for the higher ranks to take; `error` explains why any are absent.
struct RemoteEnds {
  explicit RemoteEnds(int world) : of_rank(static_cast<size_t>(world)) {}
  std::vector<UniqueFd> of_rank;
  int error = 0;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(int rank, HostMap hosts, std::shared_ptr<Meeting> meeting)
      : Bootstrap(rank, std::move(hosts)), meeting_(std::move(meeting)) {}
  ~ThreadBootstrap() override { ThreadBootstrap::leave(); }

  bool same_process() const noexcept override { return true; }

  void all_gather(const void* mine, size_t bytes, void* all, Milliseconds deadline) override {
    Contribution part;
    part.bytes.resize(bytes);
    if (bytes > 0) std::memcpy(part.bytes.data(), mine, bytes);
    const auto round = meeting_->meet(rank(), ++rounds_, std::move(part), deadline, interrupt());
    auto* out = static_cast<std::byte*>(all);
    for (int r = 0; r < world(); ++r) {
      const auto& theirs = round->of_rank[static_cast<size_t>(r)].bytes;
      if (theirs.size() != bytes) {
        throw Error(ErrorCode::mismatch, "all_gather: rank " + std::to_string(r) + " brought " + std::to_string(theirs.size()) +
                                             " bytes and rank " + std::to_string(rank()) + " " + std::to_string(bytes) +
                                             "; all ranks must bring the same number");
      }
      if (bytes > 0) std::memcpy(out + static_cast<size_t>(r) * bytes, theirs.data(), bytes);
    }
  }

  std::vector<UniqueFd> exchange_fds(int, Milliseconds) override {
    throw Error(ErrorCode::unsupported, "exchange_fds: the ranks are threads of one process and share descriptors already");
  }

  std::vector<std::shared_ptr<void>> exchange_objects(std::shared_ptr<void> mine, Milliseconds deadline) override {
    Contribution part;
    part.object = std::move(mine);
    const auto round = meeting_->meet(rank(), ++rounds_, std::move(part), deadline, interrupt());
    std::vector<std::shared_ptr<void>> all;
    for (const Contribution& theirs : round->of_rank) all.push_back(theirs.object);
    return all;
  }

  std::vector<UniqueFd> connect_rails(Milliseconds deadline) override {
    std::vector<UniqueFd> near(static_cast<size_t>(world()));
    const auto remote = std::make_shared<RemoteEnds>(world());
    for (const int peer : host_map().rail_peers(rank())) {
      int ends[2];
      if (peer < rank()) continue;
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
        remote->error = errno;
        break;
      }
      near[static_cast<size_t>(peer)].reset(ends[0]);
      remote->of_rank[static_cast<size_t>(peer)].reset(ends[1]);
    }
    const auto all = exchange_objects(remote, deadline);
    for (size_t r = 0; r < all.size(); ++r) {
      auto& theirs = *static_cast<RemoteEnds*>(all[r].get());
      if (theirs.error != 0)
        throw Error(ErrorCode::system, "rank " + std::to_string(r) + " cannot make sockets to ranks of other hosts: " +
                                           std::generic_category().message(theirs.error));
      if (auto& end = theirs.of_rank[static_cast<size_t>(rank())]) near[r] = std::move(end);
    }
    return near;
  }

  void watch(std::function<void(int)>) override {}  // a thread does not die separately from its process
  void leave() noexcept override { meeting_->leave(rank()); }

 private:
  std::shared_ptr<Meeting> meeting_;
  uint64_t rounds_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(int world, const std::string& host) {
  if (world < 1 || world > kMaxRanks) {
    throw Error(ErrorCode::invalid_argument,
                "world = " + std::to_string(world) + ": must be from 1 to " + std::to_string(kMaxRanks));
  }
  const auto meeting = std::make_shared<Meeting>(world);
  std::vector<std::string> places;
  for (int r = 0; r < world; ++r) places.push_back(place_of_rank(host, r));
  const HostMap hosts{places};
  std::vector<std::unique_ptr<Bootstrap>> ranks;
  for (int r = 0; r < world; ++r) ranks.push_back(std::make_unique<ThreadBootstrap>(r, hosts, meeting));
  return ranks;
}

}  // namespace switchyard::detail
