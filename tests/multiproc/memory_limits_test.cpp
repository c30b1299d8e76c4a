// SPDX-License-Identifier: Apache-2.0
// Memory limits of a process: the machine, control groups of both versions, and the address space. The tests read them from
// folders that stand in for /.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "heap/memory_limits.hpp"
#include "heap/segment.hpp"

namespace switchyard {
namespace {

using namespace detail;

/// A folder of files that stand in for /proc and /sys.
class FakeSystem {
 public:
  FakeSystem() {
    char folder[] = "/tmp/switchyard-test-XXXXXX";
    if (::mkdtemp(folder) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = folder;
  }
  ~FakeSystem() { std::filesystem::remove_all(root_); }
  void put(const std::string& path, const std::string& content) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << content;
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

TEST(MemoryAvailable, TakesTheLeastOfMachineAndGroups) {
  const FakeSystem system;
  EXPECT_EQ(memory_available(system.root()).bytes, UINT64_MAX) << "nothing is known";
  system.put("/proc/meminfo", "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:    2000 kB\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 2000u * 1024);
  EXPECT_EQ(memory_available(system.root()).limit, "MemAvailable of /proc/meminfo");

  system.put("/proc/self/cgroup", "0::/outer/inner\n");
  system.put("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
  system.put("/sys/fs/cgroup/outer/inner/memory.current", "900000\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 2000u * 1024) << "no limit";
  system.put("/sys/fs/cgroup/outer/memory.max", "1500000\n");
  system.put("/sys/fs/cgroup/outer/memory.current", "1000000\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 500000u) << "the parent's limit counts";
  EXPECT_EQ(memory_available(system.root()).limit, "/sys/fs/cgroup/outer/memory.max");
  system.put("/sys/fs/cgroup/outer/memory.stat", "anon 5\ninactive_file 300000\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 800000u) << "file cache can be taken back";
  system.put("/sys/fs/cgroup/outer/memory.current", "2500000\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 0u) << "over its limit";
}

TEST(MemoryAvailable, UnderstandsVersionOneAndContainers) {
  const FakeSystem system;
  system.put("/proc/self/cgroup", "3:cpu,memory:/docker/abc\n2:pids:/x\n");
  system.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // no limit
  system.put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "100\n");
  EXPECT_EQ(memory_available(system.root()).bytes, UINT64_MAX);
  system.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "70000\n");  // in a container, whose group is the root of the mount
  EXPECT_EQ(memory_available(system.root()).bytes, 69900u);
}

TEST(MemoryAvailable, FindsGroupsByTheirMounts) {
  const FakeSystem system;
  // A subtree of the version 1 hierarchy is mounted at a path that contains a space, and version 2 at another path.
  system.put("/proc/self/mountinfo",
             "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
             "35 31 0:32 /docker /groups/of\\040memory rw,relatime shared:7 - cgroup cgroup rw,memory\n"
             "36 31 0:33 / /groups/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
             "37 31 0:34 /other /groups/foreign rw,relatime - cgroup cgroup rw,memory\n"
             "41 31 0:38 / /groups/two rw,relatime - cgroup2 cgroup2 rw\n");
  system.put("/proc/self/cgroup", "4:memory:/docker/outer/inner\n2:cpu,cpuacct:/docker/outer\n0::/slice\n");
  const std::string memory = "/groups/of memory/";
  system.put(memory + "outer/inner/memory.limit_in_bytes", "9223372036854771712\n");
  system.put(memory + "outer/memory.limit_in_bytes", "800000\n");
  system.put(memory + "outer/memory.usage_in_bytes", "300000\n");
  system.put("/groups/foreign/memory.limit_in_bytes", "5\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 500000u) << "an ancestor's limit counts, another container's does not";
  EXPECT_EQ(memory_available(system.root()).limit, memory + "outer/memory.limit_in_bytes");
  system.put(memory + "outer/memory.stat", "cache 7\ntotal_inactive_file 100000\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 600000u);
  system.put(memory + "outer/inner/memory.usage_in_bytes", "1000\n");
  system.put(memory + "outer/inner/memory.stat", "hierarchical_memory_limit 401000\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 400000u) << "an ancestor that is not mounted here";
  system.put("/groups/two/slice/memory.max", "4096\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 4096u) << "usage unknown";
  EXPECT_EQ(memory_available(system.root()).limit, "/groups/two/slice/memory.max");

  EXPECT_EQ(cpu_quota(system.root()), 0) << "no limit";
  system.put("/groups/cpu/docker/outer/cpu.cfs_quota_us", "-1\n");
  system.put("/groups/cpu/docker/outer/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(system.root()), 0) << "-1: no limit";
  system.put("/groups/cpu/docker/cpu.cfs_quota_us", "350000\n");
  system.put("/groups/cpu/docker/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(system.root()), 3.5);
  system.put("/groups/two/cpu.max", "150000 100000\n");
  system.put("/groups/two/slice/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota(system.root()), 1.5);
}

TEST(MemoryAvailable, LeavesOutAncestorsThatDoNotCount) {
  const FakeSystem system;
  system.put("/proc/self/cgroup", "4:memory:/a/b\n");
  system.put("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n");
  system.put("/sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n");
  system.put("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "5000\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 5000u);
  system.put("/sys/fs/cgroup/memory/a/memory.use_hierarchy", "1\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 1000u);
}

TEST(MemoryAvailable, WithoutProcAsksTheSystem) {
  const FakeSystem system;
  MemoryAsked asked;
  asked.free = 7000000;
  asked.machine = 9000000;
  EXPECT_EQ(memory_available(system.root(), asked).bytes, 7000000u);
  EXPECT_EQ(memory_available(system.root(), asked).machine_bytes, 9000000u);
  asked.address_space_limit = 6000000;
  EXPECT_EQ(memory_available(system.root(), asked).bytes, 6000000u) << "what is mapped is unknown";
  system.put("/proc/self/statm", "100 50 20 1 0 30 0\n");
  EXPECT_EQ(memory_available(system.root(), asked).bytes, 6000000u - 100 * page_bytes());
  EXPECT_NE(memory_available(system.root(), asked).limit.find("ulimit -v"), std::string::npos);
  system.put("/sys/fs/cgroup/memory.max", "5000000\n");
  EXPECT_EQ(memory_available(system.root(), asked).bytes, 5000000u) << "the group is found where it usually is";
  system.put("/proc/meminfo", "MemTotal: 10 kB\nMemFree: 1 kB\nBuffers: 2 kB\nCached: 3 kB\n");
  EXPECT_EQ(memory_available(system.root(), asked).bytes, 6u * 1024);
  EXPECT_EQ(memory_available(system.root(), asked).machine_bytes, 10u * 1024);

  const MemoryAsked here = ask_about_memory();
  EXPECT_GT(here.free, 0u);
  EXPECT_LT(here.free, here.machine);
  EXPECT_LT(here.machine, uint64_t{1} << 50);
}

TEST(MemoryAvailable, StrictOvercommitLimitsWhatMayBeCommitted) {
  const FakeSystem system;
  system.put("/proc/meminfo", "MemAvailable: 900 kB\nCommitLimit: 500 kB\nCommitted_AS: 300 kB\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 900u * 1024);
  system.put("/proc/sys/vm/overcommit_memory", "2\n");
  EXPECT_EQ(memory_available(system.root()).bytes, 200u * 1024);
}

TEST(MemoryAvailable, OfThisMachineIsKnown) {
  const MemoryAvailable available = memory_available();
  EXPECT_GT(available.bytes, 0u);
  EXPECT_LT(available.bytes, uint64_t{1} << 50);
}

TEST(DescribeBytes, IsExactOrRounded) {
  EXPECT_EQ(describe_bytes(4096), "4096 bytes");
  EXPECT_EQ(describe_bytes(size_t{256} << 20), "256 MiB");
  EXPECT_EQ(describe_bytes(size_t{3} << 19), "1.50 MiB");
  EXPECT_EQ(describe_bytes(size_t{3} << 30), "3 GiB");
}

}  // namespace
}  // namespace switchyard
