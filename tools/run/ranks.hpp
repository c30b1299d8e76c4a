// SPDX-License-Identifier: Apache-2.0
// Runs one function on every rank of a group: as threads of this process, as processes that it starts, or as one of those that
// a launcher started.
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

/// What a rank tells while it works. Calls are cheap, local, and may come from any rank.
class RankLink {
 public:
  virtual ~RankLink() = default;
  virtual void progress(int64_t done, const std::string& note) = 0;
};

using RankBody = std::function<nlohmann::json(Group& group, RankLink& link)>;
/// Called from the rank's thread, or for processes from the caller's.
using OnProgress = std::function<void(int rank, int64_t done, const std::string& note)>;

struct RankJob {
  int world = 1;
  bool processes = false;
  GroupOptions group;
  std::vector<std::vector<int>> cpus;  ///< per rank, or empty: rank r's thread, or whole process, is pinned to cpus[r]
  std::string size_flags = "--tokens, --hidden or --ranks";  ///< what to make smaller if the heaps find no room
};

/// A rank threw while it worked, or its process ended. The text begins with the rank that was the cause. The code is that of
/// its Error; `system` if it had no memory or was killed; else `peer_failed`.
class RankError : public Error {
 public:
  RankError(int rank, ErrorCode code, const std::string& what, const std::string& field = {})
      : Error(code, what, field), rank_(rank) {}
  int rank() const { return rank_; }
  /// Calls that had what they need went wrong. Otherwise they were refused, or the system had no room for them.
  bool blames_exchange() const;

 private:
  int rank_;
};

/// Element r is what `body` returned on rank r. If a rank throws, the others are ended (they get PeerFailed). Ranks as
/// processes are forked here and meet at an abstract Unix socket: the caller must not hold threads that `body` relies on.
/// \throws RankError; Error, the same for threads and processes, if the group cannot be formed.
std::vector<nlohmann::json> run_ranks(const RankJob& job, const RankBody& body, const OnProgress& on_progress = {});

/// On the CPU, where the number is not asked for: 2 ranks, or 8 with 16 cores or more; and so many warps that all cores work.
int64_t default_ranks(const measure::Machine& machine);
int64_t default_warps(const measure::Machine& machine, int64_t blocks_of_all_ranks);

/// If torchrun, mpirun, srun or SWITCHYARD_ variables made this process one of several ranks: from now on run_ranks runs that
/// rank alone, every rank returns the results of all, and one that fails throws for itself. \returns which, or nothing
std::optional<Membership> join_launched_ranks();
/// True if join_launched_ranks() found a launcher. What one rank alone decides, such as to stop early, leaves the others
/// waiting.
bool ranks_are_launched();

}  // namespace switchyard::tool
