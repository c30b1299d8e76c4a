// SPDX-License-Identifier: Apache-2.0
#include "harness/fleet.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string_view>

#include "harness/rank_memory.hpp"
#include "harness/rank_team.hpp"
#include "harness/suite_hosts.hpp"
#include "launch/forked_ranks.hpp"
#include "launch/on_threads.hpp"
#include "switchyard/status.hpp"
#include "testing/test_access.hpp"

namespace harness {

using switchyard::Group;
using switchyard::launch::ChildRank;
using switchyard::launch::RankEnd;

namespace {

void run_body(Group& group, const Fleet& fleet, const RankBody& body, Failures& failures) {
  if (fleet.deferred) switchyard::detail::defer_copies(group);
  try {
    body(group, failures);
  } catch (const switchyard::Error& error) {
    failures.add(std::string("threw ") + switchyard::to_string(error.code()) + ": " + error.what());
    group.abort(static_cast<int32_t>(switchyard::ErrorCode::system));
  } catch (const std::exception& error) {
    failures.add(std::string("threw ") + error.what());
    group.abort(static_cast<int32_t>(switchyard::ErrorCode::system));
  }
}

/// A directory for the store's socket, removed together with this object.
class StoreDirectory {
 public:
  StoreDirectory() {
    path_ = store_prefix() + "XXXXXX";
    if (!::mkdtemp(path_.data())) path_.clear();
  }
  ~StoreDirectory() {
    ::unlink((path_ + "/store").c_str());
    ::rmdir(path_.c_str());
  }
  std::string store() const { return "unix:" + path_ + "/store"; }

 private:
  std::string path_;
};

/// On GPUs, ranks with the same host name share a GPU, and other hosts use other GPUs, as on separate machines. NCCL treats
/// each such host as a separate machine and uses its network transport between them.
void place_on_gpu(int rank, int world, switchyard::GroupOptions& options) {
  if constexpr (kBackend == switchyard::Backend::cuda) {
    if (!spans_hosts(world)) return;
    const int host = hosts_of_suite(world)[static_cast<size_t>(rank)];
    options.device = host % std::max(1, count_gpus());
    ::setenv("NCCL_HOSTID", ("host-" + std::to_string(host)).c_str(), 1);
  }
}

/// Runs one rank of a group of processes, from joining to leaving. Returns its failures.
std::vector<std::string> be_rank(int rank, const Fleet& fleet, const std::string& store, const std::string& token,
                                 const RankBody& body) {
  Failures failures("rank " + std::to_string(rank));
  try {
    auto options = fleet.per_rank.empty() ? fleet.options : fleet.per_rank[static_cast<size_t>(rank)];
    place_on_gpu(rank, fleet.world, options);
    Group group = Group::connect(rank, fleet.world, store, token, options);
    run_body(group, fleet, body, failures);
  } catch (const std::exception& error) {
    failures.add(std::string("could not join: ") + error.what());
  }
  return failures.take();
}

/// Runs in a process that already is a rank. If the group is smaller than the team's world, the other processes do not join it.
std::vector<std::string> run_in_team(RankTeam& team, const Fleet& fleet, const RankBody& body) {
  if (fleet.world > team.world()) return {"more ranks than the team of " + std::to_string(team.world()) + " has"};
  const bool here = team.rank() < fleet.world;
  return team.gather(here ? be_rank(team.rank(), fleet, team.store(), team.token(), body) : std::vector<std::string>{});
}

}  // namespace

std::string to_string(const Workers& w) {
  return std::to_string(w.blocks) + "x" + std::to_string(w.warps) + (w.deferred ? "_deferred" : "");
}

Fleet fleet_of(int world, const Workers& workers, size_t heap_bytes) {
  Fleet fleet;
  fleet.world = world;
  fleet.options.heap_bytes = heap_bytes;
  fleet.options.num_blocks = workers.blocks;
  fleet.options.num_warps = workers.warps;
  fleet.options.backend = kBackend;
  fleet.deferred = workers.deferred;
  if (kBackend == switchyard::Backend::cuda) {
    fleet.options.timeout = patience(std::chrono::seconds(10));
    fleet.options.rendezvous_timeout = patience(std::chrono::seconds(60));
  }
  return fleet;
}

std::vector<std::string> run_threads(const Fleet& fleet, const RankBody& body) {
  std::vector<Group> groups = Group::in_process(fleet.world, fleet.options);
  std::vector<Failures> failures;
  for (int r = 0; r < fleet.world; ++r) failures.emplace_back("rank " + std::to_string(r));
  switchyard::launch::on_threads(groups.size(), [&](size_t r) { run_body(groups[r], fleet, body, failures[r]); });
  std::vector<std::string> all;
  for (const auto& f : failures) {
    for (auto& text : f.take()) all.push_back(std::move(text));
  }
  return all;
}

Ranks ranks_of_suite() {
  const char* const text = std::getenv("SWITCHYARD_TEST_RANKS");
  const std::string_view given = text ? text : "threads";
  if (given == "threads") return Ranks::threads;
  if (given == "processes") return Ranks::processes;
  std::fprintf(stderr, "SWITCHYARD_TEST_RANKS is '%s'; allowed: threads, processes\n", text);
  std::exit(2);
}

std::chrono::seconds patience(std::chrono::seconds default_value) {
  const char* const text = std::getenv("SWITCHYARD_TEST_DEADLINE_S");
  const long given = text ? std::strtol(text, nullptr, 10) : 0;
  return given > 0 ? std::chrono::seconds(given) : default_value;
}

std::vector<std::string> run_processes(const Fleet& fleet, const RankBody& body, uint64_t may_die, int limit_ms) {
  if (RankTeam* const team = RankTeam::mine()) {
    return may_die != 0 ? std::vector<std::string>{"a rank of a team may not die"} : run_in_team(*team, fleet, body);
  }
  limit_ms = std::max(limit_ms, static_cast<int>(10000 * patience(std::chrono::seconds(0)).count()));
  static std::atomic<int> serial{0};
  const StoreDirectory directory;
  const std::string token = "test-" + std::to_string(::getpid()) + "-" + std::to_string(++serial);
  const auto rank_of_fleet = [&](ChildRank& me) {
    for (const std::string& failure : be_rank(me.rank(), fleet, directory.store(), token, body)) me.say(failure);
  };
  std::vector<std::string> all;
  for (const RankEnd& end : switchyard::launch::run_ranks(fleet.world, rank_of_fleet, std::chrono::milliseconds(limit_ms))) {
    all.insert(all.end(), end.said.begin(), end.said.end());
    if (end.ok() || may_die >> end.rank & 1) continue;
    std::ostringstream text;
    text << end;
    all.push_back(text.str());
  }
  return all;
}

std::vector<std::string> run_ranks(Ranks ranks, const Fleet& fleet, const RankBody& body) {
  return ranks == Ranks::threads ? run_threads(fleet, body) : run_processes(fleet, body);
}

std::string store_prefix() { return "/tmp/switchyard-test-" + std::to_string(::getpid()) + "-"; }

std::string joined(const std::vector<std::string>& failures) {
  std::string text;
  for (const auto& f : failures) text += f + "\n";
  return text;
}

}  // namespace harness
