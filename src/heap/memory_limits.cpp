// SPDX-License-Identifier: Apache-2.0
#include "heap/memory_limits.hpp"

#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>

namespace switchyard::detail {
namespace {

/// The number after `key` at the start of a line of `path`, or the first number of the file for an empty key.
std::optional<uint64_t> read_number(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    uint64_t number = 0;
    if (!key.empty() && (!(words >> word) || word != key)) continue;
    if (words >> number) return number;
    return std::nullopt;
  }
  return std::nullopt;
}

struct ControlGroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // key in memory.stat
};
constexpr ControlGroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                         "total_inactive_file"};
constexpr ControlGroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

void consider(MemoryAvailable& least, uint64_t bytes, const std::string& limit) {
  if (bytes < least.bytes) least = {bytes, limit};
}

/// Every ancestor of the group may set the limit. In a container the path may not exist below the mount, but the mount itself
/// does.
void consider_group(MemoryAvailable& least, const std::string& root, std::string path, const ControlGroupFiles& files) {
  for (;;) {
    const std::string folder = files.mount + path + (path.empty() || path.back() != '/' ? "/" : "");
    const auto limit = read_number(root + folder + files.limit);
    const auto usage = read_number(root + folder + files.usage);
    constexpr uint64_t kUnlimited = uint64_t{1} << 62;  // version 1 prints "no limit" as a number near 2^63
    if (limit && usage && *limit < kUnlimited) {
      const uint64_t reclaimable = read_number(root + folder + "memory.stat", files.reclaimable).value_or(0);
      const uint64_t busy = *usage > reclaimable ? *usage - reclaimable : 0;
      consider(least, *limit > busy ? *limit - busy : 0, folder + files.limit);
    }
    if (path.empty() || path == "/") return;
    path.resize(path.find_last_of('/'));
  }
}

}  // namespace

MemoryAvailable memory_available(const std::string& root) {
  MemoryAvailable least;
  if (const auto kib = read_number(root + "/proc/meminfo", "MemAvailable:"))
    consider(least, *kib * 1024, "MemAvailable of /proc/meminfo");
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;  // "4:cpu,memory:/a/b" (version 1) or "0::/a/b" (version 2)
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = std::string(",").append(line, first + 1, second - first - 1).append(",");
    const std::string path = line.substr(second + 1);
    if (path.empty() || path.front() != '/') continue;
    if (controllers.find(",memory,") != std::string::npos) consider_group(least, root, path, kVersion1);
    if (line.compare(0, 3, "0::") == 0) consider_group(least, root, path, kVersion2);
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
