// SPDX-License-Identifier: Apache-2.0
#include "run/ranks.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <system_error>

#include "cli/words.hpp"
#include "launch/forked_ranks.hpp"
#include "launch/on_threads.hpp"
#include "measure/machine.hpp"

namespace switchyard::tool {
namespace {

using launch::ChildRank;
using measure::pin_thread;
using nlohmann::json;

/// Outcome of a rank. `result` is valid if the error is empty.
struct Outcome {  // NOLINT(bugprone-exception-escape): moving a json does not throw, but its header does not declare so
  json result;
  std::string error;
  ErrorCode code = ErrorCode::peer_failed;
  int distance = 0;        ///< from the cause: 0 own error, 1 timed out waiting for a peer, 2 notified of a failure
  bool joined = true;      ///< the group was formed
  std::string field = {};  ///< Error::field()
};

/// The outcome of a rank, derived from the exception that is being handled.
Outcome failed(bool joined) {
  try {
    throw;
  } catch (const PeerFailed& e) {
    return {json(), e.what(), e.code(), 2, joined};
  } catch (const Error& e) {
    const bool peer_missing = e.code() == ErrorCode::peer_timeout || e.code() == ErrorCode::rendezvous;
    return {json(), e.what(), e.code(), peer_missing ? 1 : 0, joined, std::string(e.field())};
  } catch (const std::bad_alloc&) {
    return {json(), "no memory is left", ErrorCode::system, 0, joined};
  } catch (const std::exception& e) {
    return {json(), e.what(), ErrorCode::peer_failed, 0, joined};
  }
}

Outcome run_body(Group& group, const RankBody& body, RankLink& link) {
  try {
    Outcome out;
    out.result = body(group, link);
    return out;
  } catch (...) {
    group.abort(static_cast<int32_t>(ErrorCode::system));
    return failed(true);
  }
}

/// The results. Throws the error that is closest to the cause.
std::vector<json> collect(std::vector<Outcome>&& outcomes) {
  for (const int distance : {0, 1, 2}) {
    for (size_t r = 0; r < outcomes.size(); ++r) {
      const Outcome& o = outcomes[r];
      if (o.error.empty() || o.distance != distance) continue;
      if (!o.joined) throw Error(o.code, o.error, o.field);
      throw RankError(static_cast<int>(r), o.code, fmt::format("rank {}: {}", r, o.error), o.field);
    }
  }
  std::vector<json> results;
  for (Outcome& o : outcomes) results.push_back(std::move(o.result));
  return results;
}

class ThreadLink : public RankLink {
 public:
  ThreadLink(int rank, const OnProgress& on_progress) : rank_(rank), on_progress_(on_progress) {}
  void progress(int64_t done, const std::string& note) override {
    if (on_progress_) on_progress_(rank_, done, note);
  }

 private:
  int rank_;
  const OnProgress& on_progress_;
};

std::vector<json> run_threads(const RankJob& job, const RankBody& body, const OnProgress& on_progress) {
  std::vector<Group> groups = Group::in_process(job.world, job.group);
  std::vector<Outcome> outcomes(groups.size());
  launch::on_threads(groups.size(), [&](size_t r) {
    if (!job.cpus.empty()) pin_thread(job.cpus[r]);
    ThreadLink link(static_cast<int>(r), on_progress);
    outcomes[r] = run_body(groups[r], body, link);
    // A failed rank leaves the group now so that peers waiting for it at a barrier are notified at once.
    if (!outcomes[r].error.empty()) const Group left = std::move(groups[r]);
  });
  return collect(std::move(outcomes));
}

// ------------------------------------------------------------------------------------------------------------------ processes

// A message from a rank's process is a JSON array in CBOR: {done, note} is progress, otherwise the last one is {Outcome's
// members}.
std::string encoded(const json& message) {
  const std::vector<uint8_t> bytes = json::to_cbor(message);
  return {bytes.begin(), bytes.end()};
}

class ProcessLink : public RankLink {
 public:
  explicit ProcessLink(ChildRank& me) : me_(me) {}
  void progress(int64_t done, const std::string& note) override { me_.say(encoded(json::array({done, note}))); }

 private:
  ChildRank& me_;
};

void be_rank(ChildRank& me, const RankJob& job, const RankBody& body, const std::string& store, const std::string& token) {
  if (!job.cpus.empty()) pin_thread(job.cpus[static_cast<size_t>(me.rank())]);
  Outcome o;
  bool joined = false;
  try {
    Group group = Group::connect(me.rank(), job.world, store, token, job.group);
    joined = true;
    ProcessLink link(me);
    o = run_body(group, body, link);
    if (o.error.empty()) group.barrier();  // no rank leaves while a peer may still read its memory
  } catch (...) {
    o = failed(joined);
  }
  me.say(encoded(json::array({o.result, o.error, static_cast<int32_t>(o.code), o.distance, o.joined, o.field})));
}

std::string random_text() {
  std::random_device device;
  std::string text;
  for (int i = 0; i < 4; ++i) text += fmt::format("{:08x}", device());
  return text;
}

std::vector<json> run_processes(const RankJob& job, const RankBody& body, const OnProgress& on_progress) try {
  const std::string store = "unix:@switchyard-" + random_text();  // abstract: nothing remains, however this process ends
  const std::string token = random_text();
  std::vector<Outcome> outcomes(static_cast<size_t>(job.world), Outcome{json(), "its process ended without a result"});
  const auto on_message = [&](int rank, const std::string& bytes) {
    json message = json::from_cbor(bytes);
    if (message.size() == 2) {
      if (on_progress) on_progress(rank, message[0].get<int64_t>(), message[1].get<std::string>());
      return;
    }
    outcomes[static_cast<size_t>(rank)] = {
        std::move(message[0]), message[1].get<std::string>(), ErrorCode{message[2].get<int32_t>()},
        message[3].get<int>(), message[4].get<bool>(),        message[5].get<std::string>()};
  };
  const auto start = [&](ChildRank& me) { be_rank(me, job, body, store, token); };
  for (const launch::RankEnd& end : launch::run_ranks(job.world, start, launch::kNoDeadline, on_message)) {
    if (end.signal == 0) continue;
    outcomes[static_cast<size_t>(end.rank)] = {
        json(), fmt::format("its process was ended by signal {} ({})", end.signal, strsignal(end.signal)),
        end.signal == SIGKILL ? ErrorCode::system : ErrorCode::peer_failed};  // typical of the out-of-memory killer
  }
  return collect(std::move(outcomes));
} catch (const std::system_error& e) {
  throw Error(ErrorCode::system, e.what());
}

// ------------------------------------------------------------------------------------------------------------------- launched

/// This process's rank, set by join_launched_ranks.
std::optional<Membership>& launched() {
  static std::optional<Membership> me;
  return me;
}

/// Collective: gathers all ranks' values.
std::vector<json> gathered(Group& group, const json& mine) {
  const std::vector<uint8_t> bytes = json::to_cbor(mine);
  const auto world = static_cast<size_t>(group.size());
  std::vector<uint64_t> sizes(world);
  const uint64_t size = bytes.size();
  group.all_gather(&size, sizeof size, sizes.data());
  const size_t longest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<uint8_t> padded(longest), all(longest * world);
  std::copy(bytes.begin(), bytes.end(), padded.begin());
  group.all_gather(padded.data(), longest, all.data());
  std::vector<json> results;
  for (size_t r = 0; r < world; ++r) {
    const uint8_t* const begin = all.data() + r * longest;
    results.push_back(json::from_cbor(begin, begin + sizes[r]));
  }
  return results;
}

std::vector<json> run_launched(const RankJob& job, const RankBody& body, const OnProgress& on_progress) {
  const int rank = launched()->rank;
  Outcome outcome;
  bool joined = false;
  try {
    Group group = Group::from_environment(job.group);
    joined = true;
    ThreadLink link(rank, on_progress);
    outcome = run_body(group, body, link);
    if (outcome.error.empty()) return gathered(group, outcome.result);  // no rank leaves while a peer may still read its memory
  } catch (...) {
    outcome = failed(joined);
  }
  if (!joined) throw Error(outcome.code, outcome.error, outcome.field);
  throw RankError(rank, outcome.code, fmt::format("rank {}: {}", rank, outcome.error), outcome.field);
}

}  // namespace

bool RankError::blames_exchange() const {
  switch (code()) {
    case ErrorCode::invalid_argument:
    case ErrorCode::unsupported:
    case ErrorCode::rendezvous:
    case ErrorCode::io:
    case ErrorCode::system: return false;
    case ErrorCode::ok:
    case ErrorCode::heap_exhausted:
    case ErrorCode::pool_exhausted:
    case ErrorCode::capacity_exceeded:
    case ErrorCode::peer_timeout:
    case ErrorCode::peer_failed:
    case ErrorCode::mismatch: break;
  }
  return true;
}

std::vector<json> run_ranks(const RankJob& job, const RankBody& body, const OnProgress& on_progress) {
  try {
    if (launched()) return run_launched(job, body, on_progress);
    return job.processes ? run_processes(job, body, on_progress) : run_threads(job, body, on_progress);
  } catch (const RankError&) {
    throw;
  } catch (const Error& e) {
    std::string text = e.what();
    constexpr std::string_view kHint = "lower heap_bytes";
    if (const size_t at = text.find(kHint); at != std::string::npos)
      text.replace(at, kHint.size(), "make " + job.size_flags + " smaller");
    throw Error(e.code(), text, e.field());
  }
}

int64_t default_ranks(const measure::Machine& machine) { return machine.usable_cores() >= 16 ? 8 : 2; }
int64_t default_warps(const measure::Machine& machine, int64_t blocks_of_all_ranks) {
  return std::max<int64_t>(1, machine.usable_cores() / blocks_of_all_ranks);
}

bool ranks_are_launched() { return launched().has_value(); }

std::optional<Membership> join_launched_ranks() {
  try {
    const Membership me = Group::find_in_environment();
    if (me.world > 1) launched() = me;
  } catch (const Error&) {  // no launcher, or variables left by an earlier one: this process is not a member of a group
  }
  return launched();
}

}  // namespace switchyard::tool
