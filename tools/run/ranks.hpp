// SPDX-License-Identifier: Apache-2.0
// Runs one function on every rank of a group. Ranks are threads of this process, processes started by it, or processes started
// by a launcher.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "measure/machine.hpp"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"

namespace switchyard::tool {

/// Progress reports from a rank. Calls are cheap and local, and any rank may make them.
class RankLink {
 public:
  virtual ~RankLink() = default;
  virtual void progress(int64_t done, const std::string& note) = 0;
};

using RankBody = std::function<nlohmann::json(Group& group, RankLink& link)>;
/// Called from the rank's thread or, for processes, from the caller's thread.
using OnProgress = std::function<void(int rank, int64_t done, const std::string& note)>;

struct RankJob {
  int world = 1;
  bool processes = false;
  GroupOptions group;
  std::vector<std::vector<int>> cpus;  ///< per rank, or empty: CPUs to which rank r's thread or whole process is pinned
  std::string size_flags = "--tokens, --hidden or --ranks";  ///< flags to reduce if memory cannot hold the heaps
};

/// A rank threw an exception while it was working, or its process ended. The text begins with the rank that caused the failure.
/// The code is that of the rank's Error, or `system` if the rank ran out of memory or was killed, or otherwise `peer_failed`.
class RankError : public Error {
 public:
  RankError(int rank, ErrorCode code, const std::string& what, const std::string& field = {})
      : Error(code, what, field), rank_(rank) {}
  int rank() const { return rank_; }
  /// True if valid calls failed; false if calls were rejected or ran out of memory.
  bool blames_exchange() const;

 private:
  int rank_;
};

/// Element r is the result of `body` on rank r. If a rank throws, the others are aborted with PeerFailed. Ranks that are
/// processes are forked here and meet at an abstract Unix socket, so `body` must not rely on the caller's threads. \throws
/// RankError; Error, the same for threads and processes, if the group cannot be formed.
std::vector<nlohmann::json> run_ranks(const RankJob& job, const RankBody& body, const OnProgress& on_progress = {});

/// Defaults on the CPU: 2 ranks (8 on 16 cores or more), and the number of warps that keeps all cores busy.
int64_t default_ranks(const measure::Machine& machine);
int64_t default_warps(const measure::Machine& machine, int64_t blocks_of_all_ranks);

/// If torchrun, mpirun, srun or SWITCHYARD_ variables made this process one of several ranks: from now on run_ranks runs only
/// that rank, every rank returns the results of all ranks, and a failing rank throws only its own error. \returns the
/// membership, or nothing
std::optional<Membership> join_launched_ranks();
/// True if join_launched_ranks() found a launcher. In that case, no rank may make decisions on its own, for example to stop
/// early, because the others would wait forever.
bool ranks_are_launched();

}  // namespace switchyard::tool
