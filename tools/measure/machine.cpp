// SPDX-License-Identifier: Apache-2.0
#include "measure/machine.hpp"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "heap/memory_limits.hpp"

namespace switchyard::measure {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

/// Value of `key` in a file with "key<separator>value" lines; "" if absent.
std::string lookup(const std::string& path, const std::string& key, char separator) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const size_t at = line.find(separator);
    if (at == std::string::npos) continue;
    std::string name = line.substr(0, at);
    name.erase(name.find_last_not_of(" \t") + 1);
    if (name != key) continue;
    std::string value = line.substr(at + 1);
    value.erase(0, value.find_first_not_of(" \t\""));
    value.erase(value.find_last_not_of(" \t\"\r") + 1);
    return value;
  }
  return "";
}

/// Parses "32K", "1024K", "32M" or "263 kB" as bytes.
size_t parse_size(const std::string& text) {
  std::istringstream in(text);
  size_t value = 0;
  char unit = 0;
  in >> value >> unit;
  switch (std::toupper(static_cast<unsigned char>(unit))) {
    case 'K': return value << 10;
    case 'M': return value << 20;
    case 'G': return value << 30;
    default: return value;
  }
}

void read_caches(Machine& m) {
  std::set<std::pair<int, std::string>> seen;  // (level, CPUs that share it)
  size_t per_level[5] = {};
  for (const int cpu : m.cpus) {
    const std::string base = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index";
    for (int i = 0; i < 8; ++i) {
      const std::string dir = base + std::to_string(i) + "/";
      const std::string type = first_line(dir + "type");
      if (type.empty()) break;
      if (type == "Instruction") continue;
      const int level = std::atoi(first_line(dir + "level").c_str());
      const size_t bytes = parse_size(first_line(dir + "size"));
      if (level < 1 || level > 4) continue;
      if (level == 1) m.l1d_bytes = bytes;
      if (level == 2) m.l2_bytes = bytes;
      if (seen.insert({level, first_line(dir + "shared_cpu_list")}).second) per_level[level] += bytes;
    }
  }
  for (const size_t bytes : per_level) m.llc_bytes = bytes > 0 ? bytes : m.llc_bytes;
  if (m.llc_bytes == 0) {  // no sysfs: the C library's value, else a common size
    const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    m.llc_bytes = l3 > 0 ? static_cast<size_t>(l3) : size_t{32} << 20;
  }
}

void read_limits(Machine& m) {
  m.cpu_quota = detail::cpu_quota();
  const detail::MemoryAvailable memory = detail::memory_available();
  m.memory_bytes = memory.machine_bytes;
  m.memory_available = memory.bytes;
  m.memory_limit = memory.limit;
}

}  // namespace

int Machine::usable_cores() const {
  const int quota = cpu_quota > 0 ? std::max(1, static_cast<int>(std::lround(cpu_quota))) : allowed_cpus;
  return std::max(1, std::min(allowed_cpus, quota));
}

Machine this_machine() {
  Machine m;
  m.cpu_model = lookup("/proc/cpuinfo", "model name", ':');
  if (m.cpu_model.empty()) m.cpu_model = "unknown";
  m.virtual_machine = lookup("/proc/cpuinfo", "flags", ':').find(" hypervisor") != std::string::npos;
  m.os = lookup("/etc/os-release", "PRETTY_NAME", '=');
  utsname name{};
  if (uname(&name) == 0) m.kernel = name.release;
  m.kernel = m.kernel.substr(0, m.kernel.find('-'));  // the version without the build suffix
  m.logical_cpus = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &mask)) m.cpus.push_back(cpu);
    }
  }
  if (m.cpus.empty()) m.cpus.push_back(0);
  m.allowed_cpus = static_cast<int>(m.cpus.size());
  const std::string siblings = first_line("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
  m.threads_per_core = siblings.find_first_of(",-") != std::string::npos ? 2 : 1;
  m.numa_nodes = 0;
  while (std::filesystem::exists("/sys/devices/system/node/node" + std::to_string(m.numa_nodes))) ++m.numa_nodes;
  m.numa_nodes = std::max(1, m.numa_nodes);
  read_caches(m);
  read_limits(m);
  return m;
}

void pin_thread(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int cpu : cpus) CPU_SET(cpu, &mask);
  sched_setaffinity(0, sizeof mask, &mask);  // best effort: a container may forbid it, and the figures stay valid
}

std::vector<int> share_of_cpus(const Machine& machine, int index, int count) {
  const int n = static_cast<int>(machine.cpus.size());
  if (count >= n) return {machine.cpus[static_cast<size_t>(index % n)]};
  const auto first = machine.cpus.begin() + index * n / count;
  const auto last = machine.cpus.begin() + (index + 1) * n / count;
  return {first, last};
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm tm{};
  gmtime_r(&now, &tm);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &tm);
  return text;
}

}  // namespace switchyard::measure
