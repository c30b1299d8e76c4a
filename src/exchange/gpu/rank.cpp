// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/rank.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "exchange/gpu/check.hpp"
#include "exchange/gpu/held_memory.hpp"
#include "exchange/gpu/kernel.hpp"
#include "exchange/group/exchange_base.hpp"
#include "heap/gpu/copy_stream.hpp"
#include "heap/gpu/device_guard.hpp"
#include "heap/gpu/device_memory.hpp"
#include "heap/gpu/driver.cuh"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

constexpr size_t kControlBytes = size_t{64} << 10;
constexpr size_t kFaultAt = kHeapHeaderBytes, kSoftFaultAt = kFaultAt + 512, kMailboxAt = kFaultAt + 1024,
                 kHostWordsAt = size_t{32} << 10;
static_assert(kHostWordsAt + HostWords::kMax * HostWords::kBytes <= kControlBytes);
constexpr size_t kClaimsAt = 0, kFailedAt = 128, kRegisteredAt = 192, kHeardAt = 200, kNumbersAt = 208, kDistancesAt = 256;

}  // namespace

CudaRank::CudaRank(CudaHeap& heap, SymmetricHeap& control, int ranks_on_gpu, bool threads, int num_sms)
    : heap_(heap), control_(control.view().base[control.view().rank]), ranks_on_gpu_(ranks_on_gpu), threads_(threads) {
  const DeviceGuard guard(device());
  gpu::DeviceTraits traits;
  check_cuda(gpu::traits_of(&traits, device()), "device properties");
  name_ = traits.name;
  limits_.multiprocessors = traits.multiprocessors;
  limits_.shared_bytes = static_cast<uint32_t>(traits.shared_bytes);
  max_warps_ = limits_.multiprocessors * KernelBase::max_warps();
  max_blocks_ = limits_.multiprocessors / ranks_on_gpu_;
  if (num_sms > max_blocks_)
    invalid("GroupOptions::num_sms", " = " + std::to_string(num_sms) + ": must be in [0, " + std::to_string(max_blocks_) +
                                         "] (multiprocessors of the GPU / ranks on it)");
  if (num_sms > 0) max_blocks_ = num_sms;
  // Otherwise, ranks that share a GPU would take multiprocessors from each other's plans.
  limits_.dependent_launches = traits.generation >= 9 && ranks_on_gpu == 1;
  copies_ = detail::copy_stream();
  control_shared_ = std::make_unique<SharedHostMemory>(device(), control_, kControlBytes);
  void* mapped = nullptr;
  check_cuda(gpu::device_address_of(&mapped, control_), "cudaHostGetDevicePointer");
  auto* host = static_cast<std::byte*>(mapped);
  host_abort_device_ = reinterpret_cast<uint64_t*>(host);
  fault_device_ = reinterpret_cast<FaultRecord*>(host + kFaultAt);
  soft_device_ = reinterpret_cast<SoftFault*>(host + kSoftFaultAt);
  mailbox_ = {control_ + kMailboxAt, host + kMailboxAt};
  const auto warps = static_cast<size_t>(max_warps()), world = static_cast<size_t>(heap_.view().world);
  const size_t waits_at = kDistancesAt + Group::kMaxRegistered * world * sizeof(uint64_t);
  counters_ = DeviceMemory(waits_at + warps * world * sizeof(WaitCounter), copies_);
  distances_ = counters_.as<uint64_t>(kDistancesAt);
  waits_ = counters_.as<WaitCounter>(waits_at);
  check_cuda(gpu::fill(counters_.as<std::byte>(kFailedAt), 1, 8, copies_), "cudaMemset");

  IdleCall idle;
  idle.call = context(1, Operation::none);
  idle.call.abort_word = counters_.as<uint64_t>(kFailedAt);
  const DeviceMemory zeros(IdleCall::kStateBytes, copies_);
  idle.state = zeros.as<void>();
  for (const KernelBase* kernel : KernelBase::all()) kernel->prepare(limits_);
  for (const KernelBase* kernel : KernelBase::all()) kernel->warm_up(idle, limits_, copies_);
  check_cuda(gpu::wait_for_stream(copies_), "first launch of the kernels");
}

CudaRank::~CudaRank() {
  try {
    self_.reset();
    const DeviceGuard guard(device());
    gpu::wait_for_stream(copies_);
    if (drained_.valid()) drained_.wait();  // replays use the memory freed now; their waits have deadlines
    counters_ = DeviceMemory();
    ended_.clear();
    *running_ = 0;
    DeferredFrees::of_process().sweep();
    points_->close();
  } catch (const Error&) {
    // The context and everything in it no longer exist.
  }
}

void CudaRank::note_capture(const CaptureState& capture) {
  if (last_capture_.exchange(capture.id) == capture.id) return;
  keep_in_graph(std::make_shared<HoldMark>(graphs_), capture.graph);
}

CudaRank::Users CudaRank::sweep_ended() noexcept try {
  const DeviceGuard guard(device());
  const std::lock_guard lock(ended_mutex_);
  Users users = Users::none;
  std::erase_if(ended_, [&](Ended& each) {
    if (each.uses.over()) return true;
    users = std::max(users, each.uses.is_held() ? Users::graphs : each.uses.of_calls() ? Users::calls : Users::others);
    return false;
  });
  return users;
} catch (const Error&) {
  return Users::none;  // without a context, nothing runs
}

void CudaRank::end_block(HeapBlock block, MemoryUses uses) noexcept {
  {
    const std::lock_guard lock(ended_mutex_);
    ended_.push_back({std::move(block), std::move(uses)});
  }
  sweep_ended();
}

void CudaRank::end_block(HeapBlock block, std::function<bool()> over) noexcept {
  end_block(std::move(block), MemoryUses(points_).and_until(std::move(over)));
}

bool CudaRank::wait_for_ended(std::chrono::milliseconds of_calls, std::chrono::milliseconds of_others) noexcept {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLook{1}, kGraceOfGraphs{50};
  const Clock::time_point begin = Clock::now();
  for (;;) {
    const Users users = sweep_ended();
    const auto waited = Clock::now() - begin;
    if (users == Users::none || (users == Users::graphs && waited > kGraceOfGraphs)) return true;
    if (waited > (users == Users::others ? of_others : of_calls)) return false;
    std::this_thread::sleep_for(kLook);
  }
}

void CudaRank::await_ended(Milliseconds deadline) {
  const DeviceGuard guard(device());
  DeferredFrees::of_process().sweep();
  if (!wait_for_ended(deadline, deadline))
    throw Error(ErrorCode::peer_timeout, "work of an object that was destroyed still runs after " +
                                             std::to_string(deadline.count()) + " ms, in memory that the new one may get");
}

std::function<bool()> CudaRank::end_of_use(void* stream) {
  const DeviceGuard guard(device());
  StreamUsers users;
  users.add(static_cast<gpu::Stream>(stream), *points_);
  auto uses = std::make_shared<MemoryUses>(points_);
  uses->on(std::move(users));
  (void)uses->over();  // marks the stream, unless it is captured
  return [uses, gpu = device()] {
    const DeviceGuard current(gpu);
    return uses->over();
  };
}

void CudaRank::used_by(const char* name, const void* memory, void* stream) {
  const DeviceGuard guard(device());
  const std::shared_ptr<MemoryHolder> holder = holders_.find(memory);
  if (!holder) invalid(name, ": no memory of the library's lies there");
  holder->used_on(static_cast<gpu::Stream>(stream), capture_of(static_cast<gpu::Stream>(stream)));
}

void CudaRank::drain() noexcept {
  using namespace std::chrono_literals;
  constexpr auto kLook = 1ms, kGrace = 1000ms, kGraceOfCalls = 30000ms;
  constexpr int kLooks = 50;
  const auto still_waits = [&] { return drained_.valid() && drained_.wait_for(0ms) != std::future_status::ready; };
  if (still_waits()) return;
  const auto wait = [gpu = device()] {
    try {
      const DeviceGuard guard(gpu);
      (void)gpu::wait_for_device();
    } catch (const Error&) {
      // Without a context, nothing runs.
    }
  };
  try {
    const DeviceGuard guard(device());
    const bool ended = wait_for_ended(kGraceOfCalls, kGrace);
    for (int i = 0; i<kLooks&& * graphs_> 0; ++i) std::this_thread::sleep_for(kLook);
    if (ended && *graphs_ == 0) return;
    drained_ = std::async(std::launch::async, wait);
    drained_.wait_for(kGrace);
  } catch (const std::exception&) {
    wait();
  }
}

void CudaRank::finish() noexcept try {
  const DeviceGuard guard(device());
  const RelaxedCapture relaxed;  // a stream of this thread may be captured
  (void)gpu::wait_for_device();
} catch (const Error&) {
  // Without a context, nothing runs.
}

HostWords CudaRank::take_host_words() {
  const std::lock_guard lock(words_mutex_);
  size_t n = 0;
  while (n < HostWords::kMax && words_taken_[n]) ++n;
  if (n == HostWords::kMax) return {};
  words_taken_.set(n);
  const size_t at = kHostWordsAt + n * HostWords::kBytes;
  std::memset(control_ + at, 0, HostWords::kBytes);
  return {reinterpret_cast<uint64_t*>(control_ + at), host_abort_device_ + at / sizeof(uint64_t)};
}

void CudaRank::release_host_words(const HostWords& words) {
  if (words.host == nullptr || *graphs_ > 0) return;  // a replay may still write them
  const std::lock_guard lock(words_mutex_);
  words_taken_.reset(static_cast<size_t>(reinterpret_cast<std::byte*>(words.host) - control_ - kHostWordsAt) /
                     HostWords::kBytes);
}

CallContext CudaRank::context(uint64_t timeout_ns, Operation operation) const {
  CallContext call;
  call.heap = heap_.view();
  call.timeout_ns = timeout_ns;
  call.operation = operation;
  call.abort_word = reinterpret_cast<const uint64_t*>(call.heap.base[call.heap.rank]);
  call.host_abort_word = host_abort_device_;
  call.registered = counters_.as<uint64_t>(kRegisteredAt);
  call.left_ranks = host_abort_device_ + offsetof(HeapHeader, left_ranks) / sizeof(uint64_t);
  call.fault = fault_device_;
  call.fault_claims = counters_.as<uint64_t>(kClaimsAt);
  call.waits = waits_;
  call.device_trace = tracing_.trace();
  return call;
}

RankWords CudaRank::words(bool captured) const {
  RankWords words;
  words.heard = heard_;
  if (captured) words.heard_now = counters_.as<uint64_t>(kHeardAt);
  words.fault_numbers = counters_.as<uint64_t>(kNumbersAt);
  return words;
}

const char* CudaRank::advice() const noexcept {
  if (!threads_ || ranks_on_gpu_ == 1) return "";
  return "Or it could not begin: ranks that are threads of one process share this GPU. Each needs streams of its own, all used "
         "before the first call, no more of them together than CUDA_DEVICE_MAX_CONNECTIONS (set it to 32 before CUDA starts). "
         "And no rank may allocate, free, load a kernel or launch a graph that is not uploaded while another's kernel waits";
}

const FaultRecord* CudaRank::fault() const noexcept {
  auto& found = const_cast<FaultRecord&>(host_fault_);  // checked first: once set, kernels record only that they were aborted
  if (std::atomic_ref(found.ready).load(std::memory_order_acquire) != 0) return &host_fault_;
  auto* record = reinterpret_cast<FaultRecord*>(control_ + kFaultAt);
  return std::atomic_ref(record->ready).load(std::memory_order_acquire) != 0 ? record : nullptr;
}

void CudaRank::record(const FaultRecord& fault) {
  if (std::atomic_ref(host_fault_.ready).load(std::memory_order_acquire) != 0) return;
  host_fault_ = fault;
  std::atomic_ref(host_fault_.ready).store(1, std::memory_order_release);
}

void CudaRank::raise_soft_fault(const char* context) {
  auto* record = reinterpret_cast<SoftFault*>(control_ + kSoftFaultAt);
  if (std::atomic_ref(record->ready).load(std::memory_order_acquire) == 0) return;
  const SoftFault fault = *record;
  std::atomic_ref(record->ready).store(0, std::memory_order_release);
  if (fault.number > heard_) {
    heard_ = fault.number;
    write_word(kHeardAt, fault.number);  // also for graphs that are captured later
  }
  const auto code = static_cast<ErrorCode>(fault.code);
  std::string text = std::string(context) + ": in call " + std::to_string(fault.epoch) + " rank " + std::to_string(fault.rank);
  if (code == ErrorCode::capacity_exceeded && fault.needed > 0)
    text += " would have received " + std::to_string(fault.needed) + " rows, its capacity is " + std::to_string(fault.capacity);
  else if (code != ErrorCode::capacity_exceeded)
    text += std::string(" had no room for its rows (") + to_string(code) + ")";
  else
    text += " would have received more rows than its capacity";
  text += "; nothing was moved and the group can be used";
  if (fault.left_out != 0)
    text += std::string("; a ") + operation_name(static_cast<Operation>(fault.left_out)) + " by its handle was left out";
  throw Error(code, text);
}

void CudaRank::watch_ids(CountedIds* object) {
  const std::lock_guard lock(watching_);
  watched_.push_back(object);
}
void CudaRank::forget_ids(CountedIds* object) noexcept {
  const std::lock_guard lock(watching_);
  std::erase(watched_, object);
}

uint64_t CudaRank::read_invalid_ids(const CountedIds& object) const {
  const RelaxedCapture relaxed;  // a stream of this thread may be captured
  return download(&object.counts->total, 1)[0];
}

void CudaRank::raise_invalid_ids(const char* context) {
  const std::atomic_ref bell(*reinterpret_cast<uint64_t*>(control_ + kInvalidBellAt));
  if (bell.load(std::memory_order_acquire) == 0) return;
  bell.store(0);  // before the counts are read, so that a later count sets it again
  std::string text;
  const std::lock_guard lock(watching_);
  for (CountedIds* const object : watched_) {
    const uint64_t total = read_invalid_ids(*object), fresh = total - std::exchange(object->reported, total);
    if (fresh == 0) continue;
    text += (text.empty() ? ": " : "; ") + std::string(object->object) + " (object " + std::to_string(object->number) +
            " of the group): " + std::to_string(fresh) + " ids were neither -1 nor an expert, and their routes went nowhere";
  }
  if (!text.empty()) throw Error(ErrorCode::invalid_argument, std::string(context) + text, "topk_ids");
}

void CudaRank::start_trace(int blocks, int warps, size_t capacity) {
  const DeviceGuard guard(device());
  tracing_.start(blocks, warps, capacity, mailbox_, copies_);
}
void CudaRank::stop_trace(Tracer& tracer) {
  const DeviceGuard guard(device());
  tracing_.stop(tracer, mailbox_, copies_);
}

template <class T>
std::vector<T> CudaRank::download(const T* from, size_t count) const {
  const DeviceGuard guard(device());
  std::vector<T> out(count);
  check_cuda(gpu::copy_to_host(out.data(), from, count * sizeof(T), copies_), "copy of counters");
  check_cuda(gpu::wait_for_stream(copies_), "copy of counters");
  return out;
}

std::vector<WaitCounter> CudaRank::wait_counters() const {
  return download(waits_, static_cast<size_t>(max_warps()) * static_cast<size_t>(heap_.view().world));
}

namespace {

/// The other ranks' buffers, which kernels of this rank may still read when the registration ends.
struct Reach {
  Reach(int gpu, std::weak_ptr<CudaRank*> rank, int registration) : device(gpu), owner(std::move(rank)), slot(registration) {}
  Reach(const Reach&) = delete;
  ~Reach() {
    try {
      const DeviceGuard guard(device);
      const RelaxedCapture relaxed;  // another stream of this thread may be captured
      if (const auto rank = owner.lock()) (*rank)->set_registered(slot, false);
      gpu::wait_for_device();
    } catch (const Error&) {
      // Without a context, nothing runs.
    }
  }
  int device;
  std::weak_ptr<CudaRank*> owner;
  int slot;
  std::shared_ptr<PeerRange> range;
};

}  // namespace

std::shared_ptr<void> CudaRank::ordinary_memory(size_t bytes, void* stream) {
  const DeviceGuard guard(device());
  const auto memory = HeldMemory::make(bytes, *this);
  memory->used_on(static_cast<gpu::Stream>(stream), capture_of(static_cast<gpu::Stream>(stream)));
  return {memory, memory->data()};
}

std::vector<std::byte*> CudaRank::reach(Bootstrap& bootstrap, int slot, void* memory, size_t bytes, Milliseconds deadline,
                                        std::shared_ptr<void>& mapping) {
  auto reach = std::make_shared<Reach>(device(), self_, slot);
  reach->range = heap_.register_range(bootstrap, memory, bytes, deadline);
  std::vector<std::byte*> at;
  for (int r = 0; r < bootstrap.world(); ++r) at.push_back(reach->range->at(r));
  mapping = std::move(reach);
  return at;
}

const uint64_t* CudaRank::upload_distances(int slot, const std::vector<uint64_t>& distances) {
  const DeviceGuard guard(device());
  uint64_t* const to = distances_ + static_cast<size_t>(slot) * distances.size();
  check_cuda(gpu::copy_to_device(to, distances.data(), distances.size() * sizeof(uint64_t), copies_), "copy of distances");
  check_cuda(gpu::wait_for_stream(copies_), "copy of distances");
  set_registered(slot, true);
  return to;
}

void CudaRank::set_registered(int slot, bool registered) {
  const std::lock_guard lock(registering_);
  const uint64_t bit = uint64_t{1} << slot;
  registered_ = registered ? registered_ | bit : registered_ & ~bit;
  write_word(kRegisteredAt, registered_);
}

void CudaRank::write_word(size_t at, uint64_t value) const {
  const DeviceGuard guard(device());
  const RelaxedCapture relaxed;  // some stream of this thread may be captured
  check_cuda(gpu::copy_to_device(counters_.as<uint64_t>(at), &value, sizeof value, copies_), "copy of a word");
  check_cuda(gpu::wait_for_stream(copies_), "copy of a word");
}

DeviceLimits CudaRank::limits_of_call(int num_sms) const {
  DeviceLimits limits = limits_;
  const int max = num_sms > 0 ? num_sms : max_blocks_;
  if (max < limits.multiprocessors) limits.dependent_launches = false;
  return limits;
}

void CudaRank::check_sms(const char* name, int num_sms) const {
  if (num_sms < 0 || num_sms > max_blocks())
    invalid(std::string(name) + "::num_sms", " = " + std::to_string(num_sms) + ": must be in [0, " +
                                                 std::to_string(max_blocks()) +
                                                 "] (multiprocessors of the GPU / ranks on it, or GroupOptions::num_sms)");
}

void CudaRank::check_stream(gpu::Stream stream) const {
  if (gpu::is_legacy(stream) || gpu::is_per_thread(stream)) return;
  int on = -1;
  const gpu::Status status = gpu::device_of(stream, &on);
  if (status != gpu::kOk) {
    gpu::forget_error();
    invalid("stream", std::string(": not a stream of GPU ") + std::to_string(device()) + " (" + gpu::text_of(status) + ")");
  }
  if (on != device())
    invalid("stream", " is one of GPU " + std::to_string(on) + ", this rank's GPU is " + std::to_string(device()));
}

void CudaRank::check_pointer(const char* name, const void* p, size_t alignment, bool known) const {
  if (!p) return;
  if (reinterpret_cast<uintptr_t>(p) % alignment != 0)
    invalid(std::string(name) + ": address must be a multiple of " + std::to_string(alignment) + " bytes");
  if (known || heap_.view().contains(p) || holders_.find(p)) return;
  const gpu::MemoryPlace place = place_of(p);
  if (place.kind == gpu::MemoryKind::managed) return;
  if (place.kind != gpu::MemoryKind::device)
    invalid(std::string(name) + " is host memory: a CUDA group takes device memory of GPU " + std::to_string(device()));
  if (place.device != device())
    invalid(std::string(name) + " lies on GPU " + std::to_string(place.device) + ", this rank's GPU is " +
            std::to_string(device()));
}

namespace {

int device_of(const GroupOptions& options, int rank) {
  const int devices = count_devices();
  const int device = options.device < 0 ? rank % devices : options.device;
  check_device_index(device);
  return device;
}

/// Identity of a GPU: its PCI address on its machine and a globally unique number.
struct DeviceAddress {
  char text[32] = {};
  std::array<char, 16> uuid{};
  bool operator==(const DeviceAddress& other) const { return std::strcmp(text, other.text) == 0 && uuid == other.uuid; }
};
DeviceAddress address_of(int device) {
  DeviceAddress address;
  check_cuda(gpu::pci_address(address.text, sizeof address.text, device), "cudaDeviceGetPCIBusId");
  gpu::DeviceTraits traits;
  check_cuda(gpu::traits_of(&traits, device), "device properties");
  address.uuid = traits.uuid;
  return address;
}

}  // namespace

DeviceParts join_device(Bootstrap& bootstrap, const GroupOptions& options) {
  DeviceParts parts;
  const int device = device_of(options, bootstrap.rank());
  const DeviceAddress mine = address_of(device);
  const std::vector<DeviceAddress> all = bootstrap.gather(mine, options.rendezvous_timeout);
  parts.control = SymmetricHeap::create(bootstrap, kControlBytes, options.rendezvous_timeout);
  auto heap = CudaHeap::create(bootstrap, options.heap_bytes, device, options.rendezvous_timeout);
  parts.rank = std::make_unique<CudaRank>(*heap, *parts.control, static_cast<int>(std::count(all.begin(), all.end(), mine)),
                                          false, options.num_sms);
  parts.heap = std::move(heap);
  bootstrap.barrier(options.rendezvous_timeout);  // no kernel may wait for a peer that is still allocating
  return parts;
}

std::vector<DeviceParts> devices_in_process(const HostMap& hosts, const GroupOptions& options) {
  std::vector<int> devices;
  for (int r = 0; r < hosts.world(); ++r) devices.push_back(device_of(options, r));
  auto controls = SymmetricHeap::create_in_process(hosts, kControlBytes);
  auto heaps = CudaHeap::create_in_process(hosts, devices, options.heap_bytes);
  std::vector<DeviceParts> parts(static_cast<size_t>(hosts.world()));
  for (size_t r = 0; r < parts.size(); ++r) {
    parts[r].control = std::move(controls[r]);
    parts[r].rank = std::make_unique<CudaRank>(*heaps[r], *parts[r].control,
                                               static_cast<int>(std::count(devices.begin(), devices.end(), devices[r])), true,
                                               options.num_sms);
    parts[r].heap = std::move(heaps[r]);
  }
  return parts;
}

}  // namespace switchyard::detail
