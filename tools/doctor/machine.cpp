// SPDX-License-Identifier: Apache-2.0
// doctor's findings about CPU, memory and processes.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "cli/style.hpp"
#include "doctor/doctor.hpp"
#include "measure/machine.hpp"
#include "run/ranks.hpp"

namespace switchyard::tool {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

std::set<std::string> cpu_flags() {
  std::ifstream in("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) flags.insert(word);
    break;
  }
  return flags;
}

/// The word in brackets in "always [madvise] never".
std::string chosen(const std::string& line) {
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  return open == std::string::npos || close == std::string::npos ? line : line.substr(open + 1, close - open - 1);
}

std::string limit_text(rlim_t value) { return value == RLIM_INFINITY ? "unlimited" : std::to_string(value); }

Finding feature(const std::set<std::string>& flags, const char* name, std::initializer_list<const char*> needed,
                const char* without) {
  Finding f{"CPU", name, Verdict::ok, "yes", "", ""};
  for (const char* flag : needed) {
    if (flags.count(flag) != 0) continue;
    f.verdict = Verdict::note;
    f.value = "no";
    f.reason = without;
  }
  return f;
}

/// Creates a memfd segment in the same way as the process backend and reports which call failed, if any.
Finding try_memfd() {
  Finding f{"Processes", "shared memory (memfd)", Verdict::ok, "memfd_create, fallocate and mmap work", "", ""};
  const int fd = memfd_create("switchyard-doctor", MFD_CLOEXEC);
  constexpr size_t kBytes = size_t{4} << 20;
  const char* step = "memfd_create";
  bool ok = fd >= 0;
  if (ok) {
    step = "fallocate";
    ok = posix_fallocate(fd, 0, kBytes) == 0;
  }
  if (ok) {
    step = "mmap";
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ok = at != MAP_FAILED;
    if (ok) munmap(at, kBytes);
  }
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!ok) {
    f.verdict = Verdict::no;
    f.value = std::string(step) + ": " + std::strerror(error);
    f.reason = "ranks as processes share memory through memfd segments";
    f.action =
        "allow memfd_create in the container's seccomp profile, or raise its memory limit; ranks as threads work without";
  }
  return f;
}

/// Passes a descriptor through a Unix socket, as the process backend does.
Finding try_descriptor_passing() {
  Finding f{"Processes", "descriptor passing", Verdict::ok, "Unix sockets pass file descriptors", "", ""};
  int pair[2] = {-1, -1};
  bool ok = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0;
  if (ok) {
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int passed = STDERR_FILENO;
    std::memcpy(CMSG_DATA(header), &passed, sizeof passed);
    ok = sendmsg(pair[0], &message, 0) == 1 && recvmsg(pair[1], &message, MSG_CMSG_CLOEXEC) == 1;
    header = CMSG_FIRSTHDR(&message);
    ok = ok && header != nullptr && header->cmsg_type == SCM_RIGHTS;
    if (ok) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header), sizeof received);
      close(received);
    }
  }
  const int error = errno;
  for (const int fd : pair) {
    if (fd >= 0) close(fd);
  }
  if (!ok) {
    f.verdict = Verdict::no;
    f.value = std::strerror(error);
    f.reason = "ranks as processes pass their memory to each other through Unix sockets";
    f.action = "allow AF_UNIX sockets in the container or sandbox; ranks as threads work without";
  }
  return f;
}

Finding open_files() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  Finding f{"Processes", "open files (ulimit -n)", Verdict::ok, limit_text(limit.rlim_cur), "", ""};
  if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < 512) {
    f.verdict = Verdict::limited;
    f.reason = "a group of W processes needs about 3 W descriptors in each, and W^2 in the first";
    f.action = "ulimit -n 4096";
  }
  return f;
}

Finding dev_shm() {
  Finding f{"Processes", "/dev/shm", Verdict::note, "not mounted", "not used by this library; NCCL and Open MPI use it", ""};
  struct statvfs fs {};
  if (statvfs("/dev/shm", &fs) != 0) return f;
  const double bytes = static_cast<double>(fs.f_blocks) * static_cast<double>(fs.f_frsize);
  f.value = binary_size(bytes);
  if (bytes < 256e6) {
    f.reason = "small: enough for this library, which does not use it, but not for NCCL or Open MPI beside it";
    f.action = "docker run --shm-size=2g";
  }
  return f;
}

}  // namespace

std::vector<Finding> check_cpu() {
  const measure::Machine m = measure::this_machine();
  const std::set<std::string> flags = cpu_flags();
  std::vector<Finding> out;
  out.push_back({"CPU", "model", Verdict::ok, m.cpu_model + (m.virtual_machine ? " (virtual machine)" : ""), "", ""});
  Finding cores{"CPU", "cores", Verdict::ok, fmt::format("{} usable of {}", m.usable_cores(), m.logical_cpus), "", ""};
  if (m.usable_cores() < m.logical_cpus) {
    cores.verdict = Verdict::limited;
    cores.reason = m.cpu_quota > 0 && m.cpu_quota < m.allowed_cpus
                       ? fmt::format("the control group grants {:.1f} cores", m.cpu_quota)
                       : fmt::format("the affinity mask allows {}", m.allowed_cpus);
    cores.action = "start with more CPUs (docker --cpus, taskset, Slurm --cpus-per-task)";
  } else if (m.usable_cores() == 1) {
    cores.verdict = Verdict::limited;
    cores.reason = "ranks take turns on one core: everything works, slowly";
  }
  out.push_back(cores);
  if (m.threads_per_core > 1) {
    out.push_back({"CPU", "hyper-threads", Verdict::note, fmt::format("{} per core", m.threads_per_core), "", ""});
  }
  out.push_back({"CPU", "caches", Verdict::note,
                 fmt::format("L1d {}, L2 {} per core; last level {} in all", binary_size(static_cast<double>(m.l1d_bytes)),
                             binary_size(static_cast<double>(m.l2_bytes)), binary_size(static_cast<double>(m.llc_bytes))),
                 "", ""});
  if (m.numa_nodes > 1) {
    out.push_back({"CPU", "NUMA nodes", Verdict::note, std::to_string(m.numa_nodes),
                   "memory of another node is slower; pin ranks for stable figures", "switchyard bench --pin cores"});
  }
  out.push_back(feature(flags, "AVX2", {"avx2", "fma"}, "row operations use SSE4 or SSE2"));
  out.push_back(feature(flags, "AVX-512", {"avx512f", "avx512bw", "avx512vl"}, "row operations use AVX2"));
  out.push_back(feature(flags, "AVX-512 BF16", {"avx512_bf16"}, "bf16 matrix products are computed in float32"));
  out.push_back(feature(flags, "AMX BF16", {"amx_tile", "amx_bf16"}, "bf16 matrix products use vector instructions"));
  return out;
}

std::vector<Finding> check_memory() {
  const measure::Machine m = measure::this_machine();
  std::vector<Finding> out;
  Finding memory{
      "Memory",
      "available",
      Verdict::ok,
      m.memory_available == SIZE_MAX
          ? m.memory_limit
          : fmt::format("{} of {} ({})", binary_size(static_cast<double>(m.memory_available)),
                        m.memory_bytes > 0 ? binary_size(static_cast<double>(m.memory_bytes)) : "unknown", m.memory_limit),
      "",
      ""};
  if (m.memory_available < size_t{1} << 30) {
    memory.verdict = m.memory_available < size_t{128} << 20 ? Verdict::no : Verdict::limited;
    memory.reason = "the demo needs about 1 GiB";
    memory.action = "free memory, raise the container's limit, or use smaller shapes (--hidden, --tokens)";
  }
  out.push_back(memory);
  const std::string overcommit = first_line("/proc/sys/vm/overcommit_memory");
  if (overcommit == "2") {
    out.push_back({"Memory", "overcommit", Verdict::limited, "strict (vm.overcommit_memory = 2)",
                   "the heap's segments are reserved in full on every rank",
                   "choose the heap size closely (GroupOptions::heap_bytes)"});
  }
  const std::string thp = chosen(first_line("/sys/kernel/mm/transparent_hugepage/enabled"));
  Finding pages{"Memory", "large pages", Verdict::ok, thp.empty() ? "not reported" : "transparent: " + thp, "", ""};
  if (thp == "never") {
    pages.verdict = Verdict::note;
    pages.reason = "page table walks cost a few per cent of copy speed";
    pages.action = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)";
  }
  out.push_back(pages);
  rlimit space{};
  getrlimit(RLIMIT_AS, &space);
  if (space.rlim_cur != RLIM_INFINITY) {
    out.push_back({"Memory", "address space (ulimit -v)", Verdict::limited, binary_size(static_cast<double>(space.rlim_cur)),
                   "every rank maps the segments of all ranks", "ulimit -v unlimited"});
  }
  out.push_back(memory_finding(Backend::cpu, static_cast<int>(default_ranks(m)), m.memory_available));
  return out;
}

std::vector<Finding> check_processes() {
  std::vector<Finding> out{try_memfd(), try_descriptor_passing(), open_files(), dev_shm()};
  rlimit tasks{};
  getrlimit(RLIMIT_NPROC, &tasks);
  Finding f{"Processes", "threads (ulimit -u)", Verdict::ok, limit_text(tasks.rlim_cur), "", ""};
  if (tasks.rlim_cur != RLIM_INFINITY && tasks.rlim_cur < 256) {
    f.verdict = Verdict::limited;
    f.reason = "a group needs ranks x blocks x warps threads, and oneDNN one per rank";
    f.action = "ulimit -u 4096";
  }
  out.push_back(f);
  return out;
}

}  // namespace switchyard::tool
