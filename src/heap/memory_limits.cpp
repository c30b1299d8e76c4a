// SPDX-License-Identifier: Apache-2.0
#include "heap/memory_limits.hpp"

#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>

namespace switchyard::detail {
namespace {

/// The number after `key` at the start of a line in `path`, or the file's first number if the key is empty.
std::optional<uint64_t> read_number(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    uint64_t number = 0;
    if (!key.empty() && (!(words >> word) || word != key)) continue;
    if ((words >> std::ws).peek() != '-' && words >> number) return number;  // a stream would wrap "-1"
    return std::nullopt;
  }
  return std::nullopt;
}

void consider(MemoryAvailable& least, uint64_t bytes, const std::string& limit) {
  if (bytes >= least.bytes) return;
  least.bytes = bytes;
  least.limit = limit;
}

uint64_t rest_of(uint64_t limit, uint64_t used) { return limit > used ? limit - used : 0; }

// ---- locating control groups ----

/// Mount point of a controller's hierarchy, and the part that is mounted there.
struct Mount {
  std::string at;
  std::string part;
};

/// Decodes escapes: spaces and similar characters are encoded as in "\040".
std::string unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto digit = [&](size_t k) { return i + k < text.size() && text[i + k] >= '0' && text[i + k] <= '7'; };
    if (text[i] == '\\' && digit(1) && digit(2) && digit(3)) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

/// True if `word` is an item of "a,b,c".
bool among(const std::string& word, const std::string& list) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

/// All mounts of the hierarchy for `controller` (version 1) or of the version 2 hierarchy. Example of a line:
/// "36 35 98:0 /part /at rw,noatime shared:1 - cgroup cgroup rw,memory".
std::vector<Mount> mounts_of(const std::string& controller, bool version1, const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, part, at, word, type, source, options;
    if (!(words >> skipped >> skipped >> skipped >> part >> at)) continue;
    while (words >> word && word != "-") {
    }
    if (!(words >> type >> source >> options)) continue;
    if (version1 ? type == "cgroup" && among(controller, options) : type == "cgroup2")
      mounts.push_back({unescaped(at), unescaped(part)});
  }
  if (!mounts.empty()) return mounts;
  if (version1) return {{"/sys/fs/cgroup/" + controller, "/"}};
  return {{"/sys/fs/cgroup", "/"}, {"/sys/fs/cgroup/unified", "/"}};
}

/// Version 1 before Linux 5.11: a group may exclude its descendants from accounting.
bool counts_children(const std::string& folder, const std::string& root) {
  return read_number(root + folder + "memory.use_hierarchy").value_or(1) != 0;
}

/// `path` relative to the mounted part of the hierarchy, without a trailing '/'; nullopt if it lies outside.
std::optional<std::string> path_below(const Mount& mount, std::string path) {
  if (mount.part != "/") {
    if (path.compare(0, mount.part.size(), mount.part) != 0) return std::nullopt;
    path.erase(0, mount.part.size());
    if (!path.empty() && path.front() != '/') return std::nullopt;
  }
  if (path.find("/..") != std::string::npos) return std::nullopt;  // outside a control group namespace
  while (!path.empty() && path.back() == '/') path.pop_back();
  return path;
}

/// Appends the folders of the group `path` and of its ancestors. In a container, the mounted part may be elsewhere in the
/// hierarchy; it is then the container's own group.
void add_groups(std::vector<ControlGroup>& out, const std::string& path, const std::string& controller, bool version1,
                const std::string& root) {
  const std::vector<Mount> mounts = mounts_of(controller, version1, root);
  const bool known = std::any_of(mounts.begin(), mounts.end(), [&](const Mount& m) { return path_below(m, path).has_value(); });
  for (const Mount& mount : mounts) {
    std::optional<std::string> below = path_below(mount, path);
    if (!below && known) continue;
    if (!below) below.emplace();
    for (bool own = true;; own = false) {
      const std::string folder = mount.at + *below + "/";
      if (!own && version1 && controller == "memory" && !counts_children(folder, root)) break;
      out.push_back({folder, version1});
      if (below->empty()) break;
      below->resize(below->find_last_of('/'));
    }
  }
}

// ---- reading their limits ----

struct ControlGroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;  // key in memory.stat
};
constexpr ControlGroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr ControlGroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};

void consider_group(MemoryAvailable& least, const ControlGroup& group, const std::string& root) {
  const ControlGroupFiles& files = group.version1 ? kVersion1 : kVersion2;
  const std::string folder = root + group.folder, statistics = folder + "memory.stat";
  const uint64_t usage = read_number(folder + files.usage).value_or(0);
  const uint64_t reclaimable = read_number(statistics, files.reclaimable).value_or(0);
  const auto allow = [&](std::optional<uint64_t> limit, const std::string& name) {
    constexpr uint64_t kUnlimited = uint64_t{1} << 62;  // version 1 prints "no limit" as a number near 2^63
    if (limit && *limit < kUnlimited) consider(least, rest_of(*limit, rest_of(usage, reclaimable)), group.folder + name);
  };
  allow(read_number(folder + files.limit), files.limit);
  // The minimum of the ancestors' limits, including those that a container cannot read.
  if (group.version1) allow(read_number(statistics, "hierarchical_memory_limit"), "memory.stat (hierarchical_memory_limit)");
}

void consider_machine(MemoryAvailable& least, const std::string& root, const MemoryAsked& asked) {
  const std::string file = root + "/proc/meminfo";
  const auto kib = [&](const char* key) { return read_number(file, key); };
  if (const auto total = kib("MemTotal:")) least.machine_bytes = *total * 1024;
  if (least.machine_bytes == 0 && asked.machine != UINT64_MAX) least.machine_bytes = asked.machine;
  if (const auto available = kib("MemAvailable:")) {
    consider(least, *available * 1024, "MemAvailable of /proc/meminfo");
  } else if (const auto free = kib("MemFree:")) {  // before Linux 3.14
    consider(least, (*free + kib("Buffers:").value_or(0) + kib("Cached:").value_or(0)) * 1024,
             "MemFree, Buffers and Cached of /proc/meminfo");
  } else {
    consider(least, asked.free, "free memory, by sysinfo(2)");
  }
  const auto allowed = kib("CommitLimit:"), committed = kib("Committed_AS:");
  if (allowed && committed && read_number(root + "/proc/sys/vm/overcommit_memory").value_or(0) == 2)
    consider(least, rest_of(*allowed, *committed) * 1024, "CommitLimit of /proc/meminfo, vm.overcommit_memory = 2");
}

/// CPU quota. Version 1 has "cpu.cfs_quota_us" and "cpu.cfs_period_us"; version 2 has "cpu.max", for example "max 100000" or
/// "150000 100000".
double quota_of(const ControlGroup& group, const std::string& root) {
  const std::string folder = root + group.folder;
  double quota = 0, period = 0;
  if (group.version1) {
    const auto us = read_number(folder + "cpu.cfs_quota_us");  // -1 means none and is not parsed as a number here
    quota = static_cast<double>(us.value_or(0));
    period = static_cast<double>(read_number(folder + "cpu.cfs_period_us").value_or(0));
  } else {
    std::ifstream file(folder + "cpu.max");
    if (!(file >> quota >> period)) return 0;
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root + "/proc/self/cgroup");
  bool any = false;
  for (std::string line; std::getline(file, line);) {  // "4:cpu,memory:/a/b" (version 1) or "0::/a/b" (version 2)
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    any = true;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (path.empty() || path.front() != '/') continue;
    if (among(controller, controllers)) add_groups(groups, path, controller, true, root);
    if (line.compare(0, 3, "0::") == 0) add_groups(groups, path, controller, false, root);
  }
  if (!any) {  // a system without /proc
    add_groups(groups, "/", controller, true, root);
    add_groups(groups, "/", controller, false, root);
  }
  return groups;
}

MemoryAsked ask_about_memory() {
  MemoryAsked asked;
  struct sysinfo info {};
  if (::sysinfo(&info) == 0) {
    asked.free = (uint64_t{info.freeram} + info.bufferram) * info.mem_unit;
    asked.machine = uint64_t{info.totalram} * info.mem_unit;
  }
  rlimit space{};
  if (::getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) asked.address_space_limit = space.rlim_cur;
  return asked;
}

MemoryAvailable memory_available(const std::string& root, const MemoryAsked& asked) {
  MemoryAvailable least;
  consider_machine(least, root, asked);
  for (const ControlGroup& group : control_groups("memory", root)) consider_group(least, group, root);
  if (asked.address_space_limit != UINT64_MAX) {
    const uint64_t pages = read_number(root + "/proc/self/statm").value_or(0);
    consider(least, rest_of(asked.address_space_limit, pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE))),
             "RLIMIT_AS, see ulimit -v");
  }
  return least;
}

double cpu_quota(const std::string& root) {
  double least = 0;
  for (const ControlGroup& group : control_groups("cpu", root)) {
    const double quota = quota_of(group, root);
    if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
  }
  return least;
}

std::string describe_bytes(uint64_t bytes) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  if (bytes < kMiB) return std::to_string(bytes) + " bytes";
  char text[32];
  const bool large = bytes >= kGiB;
  const double value = static_cast<double>(bytes) / static_cast<double>(large ? kGiB : kMiB);
  std::snprintf(text, sizeof text, bytes % (large ? kGiB : kMiB) == 0 ? "%.0f %s" : "%.2f %s", value, large ? "GiB" : "MiB");
  return text;
}

}  // namespace switchyard::detail
