// SPDX-License-Identifier: Apache-2.0
#include "switchyard/c/trace.h"
#include "switchyard/c/tuning.h"
#include "switchyard/group.hpp"

#include <algorithm>

#include "capi/objects.hpp"
#include "capi/internal_exports.hpp"
#include "capi/structs.hpp"
#include "switchyard/tuning.hpp"

using namespace switchyard;
using namespace switchyard::detail;

namespace {

/// A group and its trace. The trace is declared first and is therefore destroyed after the group.
struct Recording {
  std::shared_ptr<Trace> trace;
  Group group;
};

std::unique_ptr<sy_group> wrap(Group group) {
  const auto whole = std::make_shared<Recording>(Recording{nullptr, std::move(group)});
  return std::make_unique<sy_group>(sy_group{{whole, &whole->group}, &whole->trace});
}

}  // namespace

extern "C" {

void sy_internal_share_group_1(const sy_group* group, std::shared_ptr<Group>* share) noexcept { *share = group->group; }

sy_code sy_group_in_process(int32_t world, const sy_group_options* options, sy_group** groups) {
  return guarded([&] {
    require(groups, "groups");
    require_range("world", world, 1, SY_MAX_RANKS);
    std::fill(groups, groups + world, nullptr);
    std::vector<std::unique_ptr<sy_group>> wrapped;
    for (Group& group : Group::in_process(world, from_c(options))) wrapped.push_back(wrap(std::move(group)));
    for (auto& group : wrapped) *groups++ = group.release();
  });
}

sy_code sy_group_connect(int32_t rank, int32_t world, const char* store, const char* token, const sy_group_options* options,
                         sy_group** group) {
  return guarded([&] {
    require(group, "group");
    *group = nullptr;
    require(store, "store");
    require(token, "token");
    *group = wrap(Group::connect(rank, world, store, token, from_c(options))).release();
  });
}

sy_code sy_group_from_environment(const sy_group_options* options, sy_group** group) {
  return guarded([&] {
    require(group, "group");
    *group = nullptr;
    *group = wrap(Group::from_environment(from_c(options))).release();
  });
}

sy_code sy_group_destroy(sy_group* group) {
  delete group;
  return SY_OK;
}

sy_code sy_group_rank(const sy_group* group, int32_t* rank) {
  return guarded([&] {
    require(group, "group");
    require(rank, "rank");
    *rank = group->group->rank();
  });
}

sy_code sy_group_size(const sy_group* group, int32_t* size) {
  return guarded([&] {
    require(group, "group");
    require(size, "size");
    *size = group->group->size();
  });
}

sy_code sy_group_hosts(const sy_group* group, int32_t* hosts, int32_t* host) {
  return guarded([&] {
    require(group, "group");
    if (hosts) *hosts = group->group->hosts();
    if (host) *host = group->group->host();
  });
}

sy_code sy_group_host_of(const sy_group* group, int32_t rank, int32_t* host) {
  return guarded([&] {
    require(group, "group");
    require(host, "host");
    *host = group->group->host_of(rank);
  });
}

sy_code sy_group_set_timeout(sy_group* group, int64_t timeout_ms) {
  return guarded([&] {
    require(group, "group");
    group->group->set_timeout(std::chrono::milliseconds(timeout_ms));
  });
}

sy_code sy_group_barrier(sy_group* group) {
  return collective_on(group, "group", [&] { group->group->barrier(); });
}

sy_code sy_group_all_gather(sy_group* group, const void* mine, size_t bytes, void* all) {
  return collective_on(group, "group", [&] {
    if (bytes > 0) {
      require(mine, "mine");
      require(all, "all");
    }
    group->group->all_gather(mine, bytes, all);
  });
}

sy_code sy_group_agree(sy_group* group, const char* subject, sy_code code, const char* text, const void* mine, size_t bytes,
                       void* all) {
  return collective_on(group, "group", [&] {
    const auto share = [&] {
      require(subject, "subject");
      require_range("code", code, SY_OK, SY_SYSTEM);
      if (code != SY_OK) throw Error(static_cast<ErrorCode>(code), text ? text : "");
    };
    group->group->agree(subject ? subject : "sy_group_agree", share, mine, bytes, all);
  });
}

sy_code sy_group_check(const sy_group* group) {
  return guarded([&] {
    require(group, "group");
    group->group->check();
  });
}

sy_code sy_group_abort(sy_group* group, int32_t reason) {
  return guarded([&] {
    require(group, "group");
    require_range("reason", reason, 1, 255);
    group->group->abort(reason);
  });
}

sy_code sy_group_leave(sy_group* group) {
  return guarded([&] {
    require(group, "group");
    group->group->leave();
  });
}

sy_code sy_group_wait_statistics(const sy_group* group, int32_t peer, sy_wait_statistics* statistics) {
  return guarded([&] {
    require(group, "group");
    require_range("peer", peer, 0, group->group->size() - 1);
    check_struct(statistics, sizeof *statistics, "statistics");
    fill(statistics, group->group->wait_statistics()[static_cast<size_t>(peer)]);
  });
}

sy_code sy_group_heap(const sy_group* group, size_t* used, size_t* size) {
  return guarded([&] {
    require(group, "group");
    if (used) *used = group->group->heap_used();
    if (size) *size = group->group->heap_size();
  });
}

sy_code sy_group_register_memory(sy_group* group, void* memory, size_t bytes, sy_registered** registered) {
  if (!group || !registered) return guarded([&] { require(nullptr, group ? "registered" : "group"); });
  *registered = nullptr;
  return collective(*group->group, [&] { *registered = new sy_registered{group->group->register_memory(memory, bytes)}; });
}

sy_code sy_registered_destroy(sy_registered* registered) {
  delete registered;
  return SY_OK;
}

sy_code sy_group_sleep(sy_group* group) {
  return collective_on(group, "group", [&] { group->group->sleep(); });
}

sy_code sy_group_wake(sy_group* group) {
  return collective_on(group, "group", [&] { group->group->wake(); });
}

sy_code sy_tuning_find(const char* path, const sy_tuning_key* key, sy_tuning_values* values) {
  return guarded([&] {
    check_struct(values, sizeof *values, "values");
    const TuningKey twin = from_c(key);
    fill(values, (path ? Tuning({TuningFile::read(path)}) : Tuning::from_environment()).find(twin));
  });
}

}  // extern "C"
