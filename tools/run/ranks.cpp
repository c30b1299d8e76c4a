// SPDX-License-Identifier: Apache-2.0
#include "run/ranks.hpp"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <thread>

#include "cli/words.hpp"
#include "measure/machine.hpp"

namespace switchyard::tool {
namespace {

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
  std::vector<std::thread> threads;
  for (size_t r = 0; r < groups.size(); ++r) {
    threads.emplace_back([&, r] {
      if (!job.cpus.empty()) pin_thread(job.cpus[r]);
      ThreadLink link(static_cast<int>(r), on_progress);
      outcomes[r] = run_body(groups[r], body, link);
      // A failed rank leaves the group now so that peers waiting for it at a barrier are notified at once.
      if (!outcomes[r].error.empty()) const Group left = std::move(groups[r]);
    });
  }
  for (std::thread& t : threads) t.join();
  return collect(std::move(outcomes));
}

// ------------------------------------------------------------------------------------------------------------------ processes

// A message from a rank's process: a 5-byte header {type, length} and the payload.
constexpr char kProgress = 'P';
constexpr char kResult = 'R';
constexpr char kFailure = 'F';

void write_all(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = write(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // the parent has ended, so this process ends too
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

void send_message(int fd, char type, const void* data, size_t bytes) {
  char header[5] = {type};
  const auto length = static_cast<uint32_t>(bytes);
  std::memcpy(header + 1, &length, sizeof length);
  write_all(fd, header, sizeof header);
  write_all(fd, data, bytes);
}

class PipeLink : public RankLink {
 public:
  explicit PipeLink(int fd) : fd_(fd) {}
  void progress(int64_t done, const std::string& note) override {
    const std::string text = fmt::format("{} {}", done, note);
    send_message(fd_, kProgress, text.data(), text.size());
  }

 private:
  int fd_;
};

struct Child {
  pid_t pid = -1;
  int pipe = -1;
  std::string buffer;
  Outcome outcome{json(), "its process ended without a result"};
};

[[noreturn]] void be_rank(int rank, const RankJob& job, const RankBody& body, const std::string& store,
                          const std::string& token, int pipe) {
  if (!job.cpus.empty()) pin_thread(job.cpus[static_cast<size_t>(rank)]);
  Outcome outcome;
  bool joined = false;
  try {
    Group group = Group::connect(rank, job.world, store, token, job.group);
    joined = true;
    PipeLink link(pipe);
    outcome = run_body(group, body, link);
    if (outcome.error.empty()) group.barrier();  // no rank leaves while a peer may still read its memory
  } catch (...) {
    outcome = failed(joined);
  }
  const bool ok = outcome.error.empty();
  const std::vector<uint8_t> bytes = json::to_cbor(
      ok ? outcome.result
         : json{outcome.error, static_cast<int32_t>(outcome.code), outcome.distance, outcome.joined, outcome.field});
  send_message(pipe, ok ? kResult : kFailure, bytes.data(), bytes.size());
  _exit(0);
}

/// Removes complete messages from the front of the child's buffer.
void take_messages(Child& child, int rank, const OnProgress& on_progress) {
  size_t at = 0;
  while (child.buffer.size() - at >= 5) {
    uint32_t length = 0;
    std::memcpy(&length, child.buffer.data() + at + 1, sizeof length);
    if (child.buffer.size() - at - 5 < length) break;
    const char type = child.buffer[at];
    const std::string payload = child.buffer.substr(at + 5, length);
    at += 5 + length;
    if (type == kProgress) {
      const size_t space = payload.find(' ');
      if (on_progress) on_progress(rank, std::stoll(payload), payload.substr(space + 1));
      continue;
    }
    json message = json::from_cbor(payload.begin(), payload.end());
    if (type == kResult)
      child.outcome = {std::move(message), ""};
    else
      child.outcome = {json(),
                       message[0].get<std::string>(),
                       static_cast<ErrorCode>(message[1].get<int32_t>()),
                       message[2].get<int>(),
                       message[3].get<bool>(),
                       message[4].get<std::string>()};
  }
  child.buffer.erase(0, at);
}

/// Reads until all children have closed their pipes.
void drain(std::vector<Child>& children, const OnProgress& on_progress) {
  std::vector<char> chunk(1 << 16);
  while (true) {
    std::vector<pollfd> fds;
    std::vector<size_t> polled;
    for (size_t r = 0; r < children.size(); ++r) {
      if (children[r].pipe < 0) continue;
      fds.push_back({children[r].pipe, POLLIN, 0});
      polled.push_back(r);
    }
    if (fds.empty()) return;
    if (poll(fds.data(), fds.size(), -1) < 0) continue;  // every wait of a rank has a deadline: all pipes close eventually
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      Child& child = children[polled[i]];
      const ssize_t n = read(child.pipe, chunk.data(), chunk.size());
      if (n < 0 && errno == EINTR) continue;
      if (n > 0) {
        child.buffer.append(chunk.data(), static_cast<size_t>(n));
        take_messages(child, static_cast<int>(polled[i]), on_progress);
        continue;
      }
      close(child.pipe);
      child.pipe = -1;
    }
  }
}

void reap(Child& child) {
  int status = 0;
  while (waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFSIGNALED(status)) return;
  const int signal = WTERMSIG(status);
  child.outcome = {json(), fmt::format("its process was ended by signal {} ({})", signal, strsignal(signal)),
                   signal == SIGKILL ? ErrorCode::system : ErrorCode::peer_failed};  // typical of the out-of-memory killer
}

/// Ends the ranks already started. errno contains the reason why the next rank cannot be started.
[[noreturn]] void cannot_start(const char* call, int rank, std::vector<Child>& children) {
  const int error = errno;
  for (Child& child : children) {
    if (child.pipe >= 0) close(child.pipe);
    if (child.pid <= 0) continue;
    kill(child.pid, SIGKILL);
    reap(child);
  }
  throw Error(ErrorCode::system, fmt::format("cannot start a process for rank {}: {}: {}", rank, call, std::strerror(error)));
}

std::string random_text() {
  std::random_device device;
  std::string text;
  for (int i = 0; i < 4; ++i) text += fmt::format("{:08x}", device());
  return text;
}

std::vector<json> run_processes(const RankJob& job, const RankBody& body, const OnProgress& on_progress) {
  const std::string store = "unix:@switchyard-" + random_text();  // abstract: nothing remains, however this process ends
  const std::string token = random_text();
  std::vector<Child> children(static_cast<size_t>(job.world));
  std::fflush(nullptr);
  for (int r = 0; r < job.world; ++r) {
    Child& child = children[static_cast<size_t>(r)];
    int ends[2];
    if (pipe(ends) != 0) cannot_start("pipe", r, children);
    const pid_t parent = getpid();
    child.pid = fork();
    if (child.pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(3);
      signal(SIGPIPE, SIG_IGN);
      close(ends[0]);
      for (const Child& other : children) {
        if (other.pipe >= 0) close(other.pipe);
      }
      be_rank(r, job, body, store, token, ends[1]);
    }
    close(ends[1]);
    child.pipe = ends[0];
    if (child.pid < 0) cannot_start("fork", r, children);
  }
  drain(children, on_progress);
  std::vector<Outcome> outcomes;
  for (Child& child : children) {
    reap(child);
    outcomes.push_back(std::move(child.outcome));
  }
  return collect(std::move(outcomes));
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
