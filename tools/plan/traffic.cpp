// SPDX-License-Identifier: Apache-2.0
#include "plan/traffic.hpp"

#include <algorithm>

#include "switchyard/group.hpp"

namespace switchyard::tool {

HostsOfRanks::HostsOfRanks(const std::vector<int>& ranks_of_hosts) : first_{0} {
  for (const int ranks : ranks_of_hosts) {
    host_of_.insert(host_of_.end(), static_cast<size_t>(ranks), hosts());
    first_.push_back(first_.back() + ranks);
  }
}

int HostsOfRanks::max_host_size() const {
  int max = 0;
  for (int h = 0; h < hosts(); ++h) max = std::max(max, size(h));
  return max;
}

Traffic::Traffic(HostsOfRanks where, int num_experts) : where_(std::move(where)) {
  const auto world = static_cast<size_t>(where_.world()), hosts = static_cast<size_t>(where_.hosts());
  // As in include/switchyard/normal.hpp, experts are consecutive, and the first E mod W ranks have one more than the others.
  const int each = num_experts / where_.world(), more = num_experts % where_.world();
  for (int r = 0; r < where_.world(); ++r) {
    const int count = each + (r < more ? 1 : 0);
    owner_.insert(owner_.end(), static_cast<size_t>(count), r);
  }
  pairs_.resize(world * world);
  routes_.resize(world * world);
  touching_.resize(world * hosts);
  tokens_.resize(world);
  rank_seen_.resize(world);
  host_seen_.resize(hosts);
}

void Traffic::add(int source, const Routing& routing) {
  const size_t hosts = static_cast<size_t>(where_.hosts()), s = static_cast<size_t>(source);
  max_tokens_ = std::max(max_tokens_, routing.num_tokens);
  for (int64_t t = 0; t < routing.num_tokens; ++t) {
    ++seen_;
    bool any = false;
    for (int64_t f = t * routing.topk; f < (t + 1) * routing.topk; ++f) {
      const int32_t id = routing.topk_ids[static_cast<size_t>(f)];
      if (id < 0) continue;
      any = true;
      const int rank = owner_[static_cast<size_t>(id)];
      ++routes_[at(source, rank)];
      if (rank_seen_[static_cast<size_t>(rank)] == seen_) continue;
      rank_seen_[static_cast<size_t>(rank)] = seen_;
      ++pairs_[at(source, rank)];
      const auto host = static_cast<size_t>(where_.host_of(rank));
      if (host_seen_[host] == seen_) continue;
      host_seen_[host] = seen_;
      ++touching_[s * hosts + host];
    }
    tokens_[s] += any ? 1 : 0;
  }
}

void Traffic::scale(int64_t counted, int64_t tokens) {
  scale_ = counted > 0 ? static_cast<double>(tokens) / static_cast<double>(counted) : 1;
}

int64_t counted_tokens(int64_t tokens, int max_world) {
  return std::min(tokens, std::max<int64_t>(1, kMaxCountedTokens / max_world));
}

std::vector<Traffic> count_large_traffic(const std::vector<HostsOfRanks>& groups, int64_t tokens, const RoutingSource& source) {
  std::vector<Traffic> all;
  int max = 1;
  for (const HostsOfRanks& group : groups) {
    max = std::max(max, group.world());
    all.emplace_back(group, source.experts());
  }
  const int64_t turns = (max + kMaxRanks - 1) / kMaxRanks;
  for (int r = 0; r < kMaxRanks && !groups.empty(); ++r) {
    const std::vector<Routing> batches = source.batches(r, tokens, turns);
    for (Traffic& one : all)
      for (int rank = r; rank < one.where().world(); rank += kMaxRanks)
        one.add(rank, batches[static_cast<size_t>(rank / kMaxRanks)]);
  }
  return all;
}

}  // namespace switchyard::tool
