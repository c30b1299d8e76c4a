// SPDX-License-Identifier: Apache-2.0
#include "heap/gpu/cuda_heap.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "bootstrap/deadline.hpp"
#include "heap/collective_step.hpp"
#include "heap/gpu/device_guard.hpp"
#include "heap/gpu/device_memory.hpp"
#include "heap/gpu/driver.cuh"
#include "heap/gpu/process_id.hpp"
#include "heap/memory_limits.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Components of a heap.
struct CudaHeap::Parts {
  size_t bytes = 0;
  int device = -1;
  Kind kind = Kind::vmm;
  bool same_process = false;
  std::vector<int> users;
  std::vector<std::shared_ptr<DeviceSegment>> segments;
  Bootstrap* bootstrap = nullptr;
  Milliseconds deadline{0};
};

namespace {

using Kind = CudaHeap::Kind;
using Segments = std::vector<std::shared_ptr<DeviceSegment>>;

constexpr const char* kSubject = "symmetric heap";

enum class Preference : int32_t { any, vmm, ipc };

Preference preference_from_environment() {
  const char* const value = std::getenv("SWITCHYARD_CUDA_HEAP");
  const std::string text = value == nullptr ? "" : value;
  if (text.empty() || text == "auto") return Preference::any;
  if (text == "vmm") return Preference::vmm;
  if (text == "ipc") return Preference::ipc;
  throw Error(ErrorCode::invalid_argument, "SWITCHYARD_CUDA_HEAP = '" + text + "': must be auto, vmm or ipc");
}

/// A rank's input to the agreement on size and kind.
struct Proposal {
  uint64_t bytes = 0;
  uint64_t granularity = kHeapSegmentAlignment;
  int32_t device = -1;
  Preference preference = Preference::any;
  int32_t vmm = 0;
  int32_t reserved = 0;
  ProcessId process;
  std::array<char, 16> uuid = {};  ///< of the GPU: processes may number GPUs differently
};

std::array<char, 16> uuid_of(int device) {
  gpu::DeviceTraits traits;
  check(gpu::traits_of(&traits, device), "cudaGetDeviceProperties of GPU " + std::to_string(device));
  return traits.uuid;
}

Proposal make_proposal(size_t bytes, int device) {
  constexpr size_t kLargest = size_t{1} << 46;
  if (bytes <= kHeapHeaderBytes || bytes > kLargest) {
    throw Error(ErrorCode::invalid_argument,
                "heap_bytes = " + std::to_string(bytes) + ": must be more than " + std::to_string(kHeapHeaderBytes) +
                    " (the header) and at most " + std::to_string(kLargest),
                "heap_bytes");
  }
  Proposal proposal;
  proposal.bytes = bytes;
  proposal.preference = preference_from_environment();
  check_device_index(device);
  proposal.device = device;
  proposal.vmm = vmm_supported(device) ? 1 : 0;
  if (proposal.vmm != 0) proposal.granularity = std::max<uint64_t>(proposal.granularity, vmm_granularity(device));
  proposal.process = ProcessId::mine();
  proposal.uuid = uuid_of(device);
  return proposal;
}

struct Agreement {
  size_t bytes = 0;
  size_t granularity = 0;
  Kind kind = Kind::vmm;
};

/// A pure function of all proposals: every rank computes the same result or throws the same error.
Agreement agree(const std::vector<Proposal>& proposals) {
  Agreement result;
  bool want_ipc = false;
  int without_vmm = -1, insists = -1;
  for (size_t r = 0; r < proposals.size(); ++r) {
    const Proposal& c = proposals[r];
    if (c.bytes != proposals[0].bytes) {
      throw Error(ErrorCode::mismatch, "heap_bytes differs: rank 0 asks for " + std::to_string(proposals[0].bytes) +
                                           " and rank " + std::to_string(r) + " for " + std::to_string(c.bytes) +
                                           "; all ranks must pass the same size");
    }
    result.granularity = std::max(result.granularity, static_cast<size_t>(c.granularity));
    want_ipc = want_ipc || c.preference == Preference::ipc;
    if (c.preference == Preference::vmm) insists = static_cast<int>(r);
    if (c.vmm == 0) without_vmm = static_cast<int>(r);
  }
  if (insists >= 0 && (want_ipc || without_vmm >= 0)) {
    const std::string why = want_ipc ? "another rank has SWITCHYARD_CUDA_HEAP=ipc"
                                     : "the GPU of rank " + std::to_string(without_vmm) +
                                           " cannot export memory as a file descriptor; use auto or ipc";
    throw Error(ErrorCode::unsupported, "SWITCHYARD_CUDA_HEAP=vmm on rank " + std::to_string(insists) + ", but " + why);
  }
  result.kind = want_ipc || without_vmm >= 0 ? Kind::ipc : Kind::vmm;
  result.bytes = (proposals[0].bytes + result.granularity - 1) / result.granularity * result.granularity;
  return result;
}

/// Returns the proposals of the ranks on the host of `rank`.
std::vector<Proposal> proposals_of_host(const std::vector<Proposal>& proposals, const HostMap& hosts, int rank) {
  std::vector<Proposal> here;
  for (const int r : hosts.ranks_of(hosts.host_of(rank))) here.push_back(proposals[static_cast<size_t>(r)]);
  return here;
}

/// GPUs that are not visible to this process are not checked: mapping their memory fails if they are not peers.
void check_peers(const std::vector<Proposal>& proposals, int device) {
  std::vector<std::array<char, 16>> visible;
  for (int d = 0; d < count_devices(); ++d) visible.push_back(uuid_of(d));
  for (const Proposal& proposal : proposals) {
    const auto found = std::find(visible.begin(), visible.end(), proposal.uuid);
    if (found != visible.end()) check_peer_access(device, static_cast<int>(found - visible.begin()));
  }
}

std::vector<int> distinct(const std::vector<Proposal>& proposals) {
  std::vector<int> devices;
  for (const Proposal& proposal : proposals) devices.push_back(proposal.device);
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  return devices;
}

VmmSegment& vmm(const std::shared_ptr<DeviceSegment>& segment) { return static_cast<VmmSegment&>(*segment); }

void check_alignment(const DeviceSegment& segment) {
  if (reinterpret_cast<uintptr_t>(segment.data()) % kHeapSegmentAlignment == 0) return;
  throw Error(ErrorCode::system, "cudaIpc: a heap segment is not mapped at a multiple of " +
                                     std::to_string(kHeapSegmentAlignment) + " bytes; use SWITCHYARD_CUDA_HEAP=vmm");
}

/// Allocates memory for a reserved segment of this process and makes it accessible to all of the process's ranks.
void fill_mine(VmmSegment& segment, int device, size_t bytes, std::span<const int> users) {
  segment.map(PhysicalMemory::create(device, bytes), users);
  const DeviceGuard guard(device);
  fill_zero(segment.data(), bytes);
}

std::shared_ptr<DeviceSegment> malloc_zeroed(int device, size_t bytes) {
  auto segment = std::make_shared<MallocSegment>(device, bytes);
  check_alignment(*segment);
  const DeviceGuard guard(device);
  fill_zero(segment->data(), bytes);
  return segment;
}

/// True if rank `r` is on this rank's host, which maps its segment.
bool is_on_own_host(const Bootstrap& bootstrap, size_t r) {
  return bootstrap.host_map().together(bootstrap.rank(), static_cast<int>(r));
}

/// Allocates memory for all reserved segments of this rank: creates its own, passes it to the peers and maps theirs. `finish`
/// runs once this rank's memory is mapped and zeroed, before any peer continues.
template <class Finish>
void fill_by_descriptor(Bootstrap& bootstrap, const Deadline& deadline, int device, size_t bytes, const Segments& segments,
                        const Finish& finish) {
  const auto me = static_cast<size_t>(bootstrap.rank());
  PhysicalMemory mine;
  UniqueFd fd;
  run_step(bootstrap, deadline, kSubject, [&] {
    mine = PhysicalMemory::create(device, bytes);
    fd = mine.export_fd();
  });
  const std::vector<UniqueFd> fds = bootstrap.exchange_fds(fd.get(), deadline.remaining());
  run_step(bootstrap, deadline, kSubject, [&] {
    for (size_t r = 0; r < segments.size(); ++r) {
      if (r == me) {
        vmm(segments[r]).map(mine, std::span(&device, 1));
      } else if (segments[r]) {
        vmm(segments[r]).map(PhysicalMemory::import_from(fds[r].get()), std::span(&device, 1));
      }
    }
    const DeviceGuard guard(device);
    fill_zero(segments[me]->data(), bytes);
    finish();
  });
}

Segments share_vmm(Bootstrap& bootstrap, const Deadline& deadline, int device, const Agreement& plan) {
  Segments segments;
  run_step(bootstrap, deadline, kSubject, [&] {
    for (size_t r = 0; r < static_cast<size_t>(bootstrap.world()); ++r)
      segments.push_back(is_on_own_host(bootstrap, r) ? std::make_shared<VmmSegment>(device, plan.bytes, plan.granularity)
                                                      : nullptr);
  });
  fill_by_descriptor(bootstrap, deadline, device, plan.bytes, segments, [] {});
  return segments;
}

Segments share_ipc(Bootstrap& bootstrap, const Deadline& deadline, const std::vector<Proposal>& proposals,
                   const Agreement& plan) {
  struct Offer {
    IpcHandle handle;
    uint64_t address;
  };
  const auto me = static_cast<size_t>(bootstrap.rank());
  const int device = proposals[me].device;
  std::shared_ptr<DeviceSegment> mine;
  const std::vector<Offer> offers = propose_step(bootstrap, deadline, kSubject, [&] {
    mine = malloc_zeroed(device, plan.bytes);
    const DeviceGuard guard(device);
    return Offer{ipc_handle_of(mine->data()), reinterpret_cast<uint64_t>(mine->data())};
  });
  Segments segments(proposals.size());
  segments[me] = mine;
  run_step(bootstrap, deadline, kSubject, [&] {
    for (size_t r = 0; r < proposals.size(); ++r) {
      if (r == me || !is_on_own_host(bootstrap, r)) continue;
      if (proposals[r].process == proposals[me].process) {
        // A process cannot open its own handle and does not need to.
        enable_peer_access(device, proposals[r].device);
        segments[r] = std::make_shared<BorrowedSegment>(device, reinterpret_cast<std::byte*>(offers[r].address));
      } else {
        segments[r] = std::make_shared<IpcSegment>(device, offers[r].handle);
      }
      check_alignment(*segments[r]);
    }
  });
  return segments;
}

/// Threads: every rank creates its own segment, and all ranks on a host share the objects.
Segments share_objects(Bootstrap& bootstrap, const Deadline& deadline, const std::vector<Proposal>& proposals,
                       const Agreement& plan) {
  const int device = proposals[static_cast<size_t>(bootstrap.rank())].device;
  const std::vector<int> users = distinct(proposals_of_host(proposals, bootstrap.host_map(), bootstrap.rank()));
  std::shared_ptr<DeviceSegment> mine;
  run_step(bootstrap, deadline, kSubject, [&] {
    if (plan.kind == Kind::ipc) {
      for (const int peer : users) enable_peer_access(device, peer);
      mine = malloc_zeroed(device, plan.bytes);
    } else {
      auto segment = std::make_shared<VmmSegment>(device, plan.bytes, plan.granularity);
      fill_mine(*segment, device, plan.bytes, users);
      mine = std::move(segment);
    }
  });
  Segments segments;
  for (auto& object : bootstrap.exchange_objects(mine, deadline.remaining()))
    segments.push_back(is_on_own_host(bootstrap, segments.size()) ? std::static_pointer_cast<DeviceSegment>(object) : nullptr);
  return segments;
}

}  // namespace

HeapView CudaHeap::view_of(const Parts& parts, int rank) {
  HeapView view;
  for (size_t r = 0; r < parts.segments.size(); ++r) view.base[r] = parts.segments[r] ? parts.segments[r]->data() : nullptr;
  view.bytes = parts.bytes;
  view.rank = rank;
  view.world = static_cast<int>(parts.segments.size());
  return view;
}

CudaHeap::CudaHeap(const HeapView& view, Parts parts)
    : SymmetricHeap(view, static_cast<size_t>(view.bytes)),
      device_(parts.device),
      kind_(parts.kind),
      same_process_(parts.same_process),
      users_(std::move(parts.users)),
      segments_(std::move(parts.segments)),
      bootstrap_(parts.bootstrap),
      deadline_(parts.deadline) {}

CudaHeap::~CudaHeap() { close(); }

std::unique_ptr<CudaHeap> CudaHeap::create(Bootstrap& bootstrap, size_t bytes, int device, Milliseconds budget) {
  const Deadline deadline(budget);
  const std::vector<Proposal> proposals =
      propose_step(bootstrap, deadline, kSubject, [&] { return make_proposal(bytes, device); });
  const Agreement plan = agree(proposals);
  const std::vector<Proposal> here = proposals_of_host(proposals, bootstrap.host_map(), bootstrap.rank());
  run_step(bootstrap, deadline, kSubject, [&] { check_peers(here, device); });

  Parts parts;
  parts.bytes = plan.bytes;
  parts.device = device;
  parts.kind = plan.kind;
  parts.same_process = bootstrap.same_process();
  parts.users = parts.same_process ? distinct(here) : std::vector<int>{device};
  if (parts.same_process) {
    parts.segments = share_objects(bootstrap, deadline, proposals, plan);
  } else if (plan.kind == Kind::vmm) {
    parts.segments = share_vmm(bootstrap, deadline, device, plan);
  } else {
    parts.segments = share_ipc(bootstrap, deadline, proposals, plan);
    parts.bootstrap = &bootstrap;
    parts.deadline = budget;
  }
  const HeapView view = view_of(parts, bootstrap.rank());
  return std::unique_ptr<CudaHeap>(new CudaHeap(view, std::move(parts)));
}

std::vector<std::unique_ptr<CudaHeap>> CudaHeap::create_in_process(const HostMap& hosts, const std::vector<int>& devices,
                                                                   size_t bytes) {
  if (devices.empty() || devices.size() > static_cast<size_t>(kMaxRanks)) {
    throw Error(ErrorCode::invalid_argument,
                "devices: names " + std::to_string(devices.size()) + " ranks, must be from 1 to " + std::to_string(kMaxRanks));
  }
  std::vector<Proposal> proposals;
  for (const int device : devices) proposals.push_back(make_proposal(bytes, device));
  const Agreement plan = agree(proposals);
  std::vector<std::vector<int>> users;  // by host: the GPUs that use its segments
  for (int host = 0; host < hosts.hosts(); ++host) {
    const std::vector<Proposal> here = proposals_of_host(proposals, hosts, hosts.ranks_of(host).front());
    users.push_back(distinct(here));
    for (const int device : users.back()) {
      check_peers(here, device);
      if (plan.kind == Kind::vmm) continue;
      for (const int peer : users.back()) enable_peer_access(device, peer);
    }
  }
  const auto users_of_host = [&](size_t r) -> const std::vector<int>& {
    return users[static_cast<size_t>(hosts.host_of(static_cast<int>(r)))];
  };
  Segments segments;
  for (size_t r = 0; r < devices.size(); ++r) {
    if (plan.kind == Kind::ipc) {
      segments.push_back(malloc_zeroed(devices[r], plan.bytes));
      continue;
    }
    auto segment = std::make_shared<VmmSegment>(devices[r], plan.bytes, plan.granularity);
    fill_mine(*segment, devices[r], plan.bytes, users_of_host(r));
    segments.push_back(std::move(segment));
  }
  std::vector<std::unique_ptr<CudaHeap>> heaps;
  for (size_t r = 0; r < devices.size(); ++r) {
    Parts copy;
    copy.bytes = plan.bytes;
    copy.kind = plan.kind;
    copy.same_process = true;
    copy.device = devices[r];
    copy.users = users_of_host(r);
    for (size_t s = 0; s < devices.size(); ++s)
      copy.segments.push_back(hosts.together(static_cast<int>(r), static_cast<int>(s)) ? segments[s] : nullptr);
    const HeapView view = view_of(copy, static_cast<int>(r));
    heaps.push_back(std::unique_ptr<CudaHeap>(new CudaHeap(view, std::move(copy))));
  }
  return heaps;
}

void CudaHeap::close() noexcept {
  if (segments_.empty()) return;
  const auto me = static_cast<size_t>(view().rank);
  if (bootstrap_ != nullptr) {
    const std::shared_ptr<DeviceSegment> mine = segments_[me];
    segments_.clear();  // peers' memory first, because the peers free it after the barrier
    try {
      bootstrap_->barrier(deadline_);
    } catch (const PeerFailed&) {
      // That process has closed its mappings, or has ended and thereby lost them. A third process may be late; its mapping
      // stays valid because the driver counts references to the memory, although the documentation does not guarantee this.
    } catch (...) {
      static_cast<MallocSegment&>(*mine).abandon();
    }
    bootstrap_ = nullptr;
  }
  segments_.clear();
  kept_.clear();
}

void CudaHeap::keep_ranges(std::span<const Range> keep) {
  if (segments_.empty()) throw Error(ErrorCode::invalid_argument, "sleep: the heap is closed");
  if (kind_ != Kind::vmm) throw Error(ErrorCode::unsupported, "sleep: a heap of kind ipc cannot give back its memory");
  check_keep(keep);
  const DeviceGuard guard(device_);
  check(gpu::wait_for_device(), "sleep: work on GPU " + std::to_string(device_));
  std::vector<Kept> kept;
  for (const auto& [offset, bytes] : keep) {
    kept.push_back({offset, std::vector<std::byte>(bytes)});
    if (bytes > 0) copy_to_host(kept.back().bytes.data(), view().base[view().rank] + offset, bytes);
  }
  kept_ = std::move(kept);
}

/// Threads share the mappings: each rank unmaps only its own segment.
void CudaHeap::unmap_mine() {
  for (size_t r = 0; r < segments_.size(); ++r) {
    if (segments_[r] && (!same_process_ || r == static_cast<size_t>(view().rank))) vmm(segments_[r]).unmap();
  }
}

void CudaHeap::restore() {
  const DeviceGuard guard(device_);
  for (const Kept& kept : kept_) {
    if (!kept.bytes.empty()) copy_to_device(view().base[view().rank] + kept.offset, kept.bytes.data(), kept.bytes.size());
  }
}

void CudaHeap::sleep(Bootstrap& bootstrap, std::span<const Range> keep, Milliseconds budget) {
  const Deadline deadline(budget);
  run_step(bootstrap, deadline, kSubject, [&] { keep_ranges(keep); });
  asleep_ = true;
  run_step(bootstrap, deadline, kSubject, [&] { unmap_mine(); });
}

void CudaHeap::wake(Bootstrap& bootstrap, Milliseconds budget) {
  const Deadline deadline(budget);
  run_step(bootstrap, deadline, kSubject, [&] {
    if (!asleep_) throw Error(ErrorCode::invalid_argument, "wake: the heap does not sleep");
    unmap_mine();  // mappings left by a failed attempt
  });
  try {
    if (same_process_) {
      run_step(bootstrap, deadline, kSubject, [&] {
        fill_mine(vmm(segments_[static_cast<size_t>(view().rank)]), device_, size(), users_);
        restore();
      });
    } else {
      fill_by_descriptor(bootstrap, deadline, device_, size(), segments_, [&] { restore(); });
    }
  } catch (...) {
    try {
      unmap_mine();
    } catch (const Error&) {
      // The next attempt retries this and reports the error.
    }
    throw;
  }
  kept_.clear();
  asleep_ = false;
}

}  // namespace switchyard::detail
