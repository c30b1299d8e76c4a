// SPDX-License-Identifier: Apache-2.0
// Kernel-initiated puts and signals of a round between hosts. This is the only file that includes an NCCL header; the library
// calls only NCCL functions that are defined in that header.
#include <nccl_device.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "arch/cuda/cuda_hosts.cuh"
#include "exchange/gpu/check.hpp"
#include "exchange/gpu/frame.cuh"
#include "exchange/hosts/frame.cuh"
#include "exchange/hosts/gin.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail {

namespace {

static_assert(NCCL_VERSION_CODE >= kMinGinVersion,
              "CMake looks for a header of this version, and the compiler finds another one");

// The host code has its own definitions of these structs because it is shared with builds that lack the header.
static_assert(offsetof(ncclCommProperties, ginType) == offsetof(NcclProperties, gin_type) &&
              offsetof(ncclCommProperties, deviceApiSupport) == offsetof(NcclProperties, device_api) &&
              offsetof(ncclCommProperties, nLsaTeams) == offsetof(NcclProperties, lsa_teams) &&
              offsetof(ncclCommProperties, railedGinType) == offsetof(NcclProperties, railed_gin_type));
static_assert(offsetof(ncclDevCommRequirements, ginContextCount) == offsetof(NcclRequirements, gin_contexts) &&
              offsetof(ncclDevCommRequirements, ginSignalCount) == offsetof(NcclRequirements, gin_signals) &&
              offsetof(ncclDevCommRequirements, ginCounterCount) == offsetof(NcclRequirements, gin_counters) &&
              offsetof(ncclDevCommRequirements, ginConnectionType) == offsetof(NcclRequirements, gin_connection) &&
              offsetof(ncclDevCommRequirements, ginTrafficClass) == offsetof(NcclRequirements, gin_traffic_class) &&
              offsetof(ncclDevCommRequirements, ginVaSignalsRequired) == offsetof(NcclRequirements, va_signals));
static_assert(NCCL_GIN_CONNECTION_FULL == kNcclGinFull && NCCL_GIN_CONNECTION_RAIL == kNcclGinRail &&
              NCCL_API_MAGIC == kNcclMagic && NCCL_CONFIG_UNDEF_INT == INT_MIN);

/// Words of one carrier in GPU memory.
struct GinWords {
  uint64_t ended;  ///< not 0: rounds have been ended, and their data is not read
  uint64_t seen;   ///< last value read by the current wait, for its fault: signals may be anywhere in memory
};

struct GinParams {
  CallContext call;
  ncclDevComm comm;
  ncclWindow_t window;
  GinWords* words;
  int32_t ranks;
  int32_t num_parts;
  GinPart parts[kMaxRanks];
};
void set_idle(GinParams& p, const IdleCall& idle) { p.call = idle.call; }

/// Call from one warp.
__device__ bool has_ended(const GinParams& p) {
  return __shfl_sync(kAllLanes, ptx::load_acquire<Scope::system>(&p.words->ended), 0) != 0;
}

/// Maximum number of parts per lane.
constexpr int kPartsOfLane = (kMaxRanks + kLanes - 1) / kLanes;

/// The signal that a part waits for.
struct Missing {
  bool waits = false;
  uint64_t expected = 0, seen = 0;
};
/// Issues the part's put once, as soon as the peer is ready; `put` records whether it has been issued. Call from one lane.
__device__ Missing move_part(const GinParams& p, const ncclGin& gin, const GinPart& part, bool& put) {
  if (part.send_bytes != 0 && !put) {
    const uint64_t ready = gin.readSignal(gin_ready(part.place));
    if (ready <= part.sent) return {true, part.sent + 1, ready};
    const auto own = static_cast<ncclGinSignal_t>(gin_arrived(p.comm.rank));
    gin.put(ncclTeamWorld(p.comm), part.place, p.window, part.to, p.window, part.from, part.send_bytes,
            ncclGin_WeakSignalInc{own}, ncclGin_WeakCounterInc{static_cast<ncclGinCounter_t>(part.place)});
    put = true;
  }
  if (part.receive_bytes != 0) {
    const uint64_t arrived = gin.readSignal(gin_arrived(part.place));
    if (arrived <= part.received) return {true, part.received + 1, arrived};
  }
  if (part.send_bytes != 0) {  // the next piece is written to the same slot
    const uint64_t gone = gin.readCounter(static_cast<ncclGinCounter_t>(part.place));
    if (gone <= part.sent) return {true, part.sent + 1, gone};
  }
  return {};
}

}  // namespace

namespace gin {

/// One warp, with one lane per peer. Arriving data is complete before the kernel ends, so later work may read it.
__global__ void __launch_bounds__(kLanes) exchange_hosts_kernel(const __grid_constant__ GinParams p) {
  __shared__ CallContext call;
  copy_to_shared(p.call, call);
  __syncthreads();
  uint64_t abort = 0;
  if (threadIdx.x == 0) {
    abort = load_abort_words(call);
    if (abort != 0) report_abort(p.call, abort, call.epoch);
  }
  if (__syncthreads_or(abort != 0)) return;  // the communicator may no longer exist
  if (has_ended(p)) return;
  CudaWarp w(CudaWarp::Bare{});
  const ncclGin gin(p.comm, 0);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < p.num_parts; i += kLanes) {
    if (p.parts[i].receive_bytes == 0) continue;
    gin.signal(ncclTeamWorld(p.comm), p.parts[i].place,
               ncclGin_WeakSignalInc{static_cast<ncclGinSignal_t>(gin_ready(p.comm.rank))});
  }
  bool put[kPartsOfLane] = {};
  WaitClock<CudaHosts> clock;
  int awaited = -1;
  while (true) {
    Missing missing;
    int missing_peer = -1;
#pragma unroll
    for (int k = 0; k < kPartsOfLane; ++k) {
      const int i = lane + k * kLanes;
      if (i >= p.num_parts) continue;
      const Missing of = move_part(p, gin, p.parts[i], put[k]);
      if (of.waits && missing_peer < 0) missing = of, missing_peer = p.parts[i].peer;
    }
    const unsigned waiting = __ballot_sync(kAllLanes, missing_peer >= 0);
    if (waiting == 0) break;
    const int first = __ffs(static_cast<int>(waiting)) - 1;
    const int now = __shfl_sync(kAllLanes, missing_peer, first);
    const uint64_t expected = __shfl_sync(kAllLanes, missing.expected, first);
    if (lane == first) p.words->seen = missing.seen;
    __syncwarp();
    if (awaited < 0)
      clock.begin(now);
    else if (awaited != now)
      clock.charge(w, call, now);
    awaited = now;
    if (!clock.keep_waiting(w, call, Site::network, &p.words->seen, expected)) return;
    if (clock.is_check_due() && has_ended(p)) return;
  }
  if (awaited >= 0) clock.charge(w, call, awaited);
}

/// Resets the signals of a new communicator, through which no rank sends yet. One block.
__global__ void __launch_bounds__(kLanes) reset_hosts_kernel(const __grid_constant__ GinParams p) {
  if (p.ranks == 0) return;  // warm-up
  const ncclGin gin(p.comm, 0);
  for (int i = static_cast<int>(threadIdx.x); i < gin_signals(p.ranks); i += kLanes)
    gin.resetSignal(static_cast<ncclGinSignal_t>(i));
  for (int i = static_cast<int>(threadIdx.x); i < gin_counters(p.ranks); i += kLanes)
    gin.resetCounter(static_cast<ncclGinCounter_t>(i));
}

}  // namespace gin

namespace {

constexpr auto kNoShared = [](const DeviceLimits&) { return 0; };
const Kernel<const GinParams> exchange_parts("gin exchange kernel", gin::exchange_hosts_kernel, kLanes, kNoShared);
const Kernel<const GinParams> reset_signals("gin reset kernel", gin::reset_hosts_kernel, kLanes, kNoShared);

class KernelsOfGin final : public GpuGin {
 public:
  explicit KernelsOfGin(CudaRank& gpu) : gpu_(gpu), words_(sizeof(GinWords), gpu.copy_stream()) {}
  ~KernelsOfGin() override { words_.end_after(gpu_.until_end()); }  // a kernel may still run

  int header_version() const override { return NCCL_VERSION_CODE; }
  size_t device_comm_bytes() const override { return sizeof(ncclDevComm); }

  void set_call(Operation operation, std::chrono::nanoseconds timeout) override {
    operation_ = operation;
    timeout_ = timeout;
  }

  void reset(const GinRail& rail) override {
    reset_signals.launch({1, kLanes, 0}, gpu_.copy_stream(), params_of(rail));
    check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "reset of NCCL's signals");
  }

  void copy(std::byte* to, const std::byte* from, size_t bytes, void* stream) override {
    check_cuda(gpu::copy_on_device(to, from, bytes, static_cast<gpu::Stream>(stream)), "copy to or from a window");
  }

  void end() noexcept override {
    static constexpr uint64_t kEnded = 1;
    (void)gpu::copy_to_device(&words_.as<GinWords>()->ended, &kEnded, sizeof kEnded, gpu_.copy_stream());
  }

  void exchange(const GinRail& rail, uint64_t round, std::span<const GinPart> parts, void* stream) override {
    GinParams p = params_of(rail);
    p.call = gpu_.context(static_cast<uint64_t>(timeout_.count()), operation_);
    p.call.epoch = round;
    p.num_parts = static_cast<int32_t>(parts.size());
    std::copy(parts.begin(), parts.end(), p.parts);
    exchange_parts.launch({1, kLanes, 0}, static_cast<gpu::Stream>(stream), p);
  }

 private:
  GinParams params_of(const GinRail& rail) const {
    GinParams p{};
    p.words = words_.as<GinWords>();
    std::memcpy(&p.comm, rail.device_comm, sizeof p.comm);
    p.window = static_cast<ncclWindow_t>(rail.window);
    p.ranks = rail.ranks;
    return p;
  }

  CudaRank& gpu_;
  DeviceMemory words_;
  Operation operation_ = Operation::none;
  std::chrono::nanoseconds timeout_{0};
};

}  // namespace

std::shared_ptr<GpuGin> make_gpu_gin(CudaRank& gpu) { return std::make_shared<KernelsOfGin>(gpu); }

}  // namespace switchyard::detail
