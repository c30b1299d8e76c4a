// SPDX-License-Identifier: Apache-2.0
// Runs one function on every rank of a group: as threads of this process, or as processes that it starts.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "switchyard/group.hpp"

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
};

/// A rank threw, or its process ended. The text begins with the rank that was the cause.
class RankError : public std::runtime_error {
 public:
  RankError(int rank, const std::string& what) : std::runtime_error(what), rank_(rank) {}
  int rank() const { return rank_; }

 private:
  int rank_;
};

/// Element r is what `body` returned on rank r. If a rank throws, the others are ended (they get PeerFailed). Ranks as
/// processes are forked here and meet at a Unix socket in a private folder: the caller must not hold threads that `body` relies
/// on. \throws RankError
std::vector<nlohmann::json> run_ranks(const RankJob& job, const RankBody& body, const OnProgress& on_progress = {});

}  // namespace switchyard::tool
