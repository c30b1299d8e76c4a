// SPDX-License-Identifier: Apache-2.0
// The object: memory, order of streams, facade. Calls: cuda_dispatch.cpp, cuda_combine.cpp.
#include "exchange/cuda/cuda_normal.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

/// Initial value of every flag: the epoch before the first.
void set_device_flags(std::byte* flags, int64_t bytes, uint64_t word, cudaStream_t stream) {
  const std::vector<uint64_t> words(static_cast<size_t>(bytes) / 8, word);
  check_cuda(cudaMemcpyAsync(flags, words.data(), words.size() * 8, cudaMemcpyHostToDevice, stream), "flags");
  check_cuda(cudaStreamSynchronize(stream), "flags");
}

}  // namespace

CudaPool::~CudaPool() {
  if (event_) cudaEventDestroy(event_);
}

void CudaPool::take_back(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const auto captured = [](cudaStream_t user) {  // an event would make this call part of the capture
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(user, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
  };
  const auto later = std::partition(freed_.begin(), freed_.end(), [&](const Freed& block) {
    return std::none_of(block.users.begin(), block.users.end(), captured);
  });
  for (auto it = freed_.begin(); it != later; ++it) {
    const Freed& block = *it;
    for (cudaStream_t user : block.users) {
      if (!event_) check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
      check_cuda(cudaEventRecord(event_, user), "cudaEventRecord");
      check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
    }
    memory.release(block.offset);
  }
  freed_.erase(freed_.begin(), later);
}

void CudaPool::take_back_now() {
  const std::lock_guard lock(mutex_);
  if (freed_.empty()) return;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another stream of this thread may be captured
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode");
  cudaError_t status = cudaSuccess;
  for (const Freed& block : freed_) {
    for (cudaStream_t user : block.users)
      if (status == cudaSuccess) status = cudaStreamSynchronize(user);
    memory.release(block.offset);
  }
  freed_.clear();
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode");
  check_cuda(status, "wait for the users of a freed block");
}

void CudaPool::free_later(size_t offset, std::vector<cudaStream_t> users) noexcept {
  const std::lock_guard lock(mutex_);
  freed_.push_back({offset, std::move(users)});
}

void CudaPool::remember(const std::shared_ptr<CudaBlock>& block) {
  const std::lock_guard lock(mutex_);
  std::erase_if(remembered_, [](const std::weak_ptr<CudaBlock>& b) { return b.expired(); });
  remembered_.push_back(block);
}

std::shared_ptr<CudaBlock> CudaPool::holder_of(const std::byte* p) {
  const std::less<const std::byte*> below;
  std::vector<std::shared_ptr<CudaBlock>> others;  // the last user of one may let go meanwhile: not under the lock
  const std::lock_guard lock(mutex_);
  for (const std::weak_ptr<CudaBlock>& b : remembered_) {
    std::shared_ptr<CudaBlock> block = b.lock();
    if (block && !below(p, block->data) && below(p, block->data + block->bytes)) return block;
    others.push_back(std::move(block));
  }
  return nullptr;
}

CudaBlock::~CudaBlock() {
  if (!pool) return;
  if (users.empty())
    pool->memory.release(offset);
  else
    pool->free_later(offset, std::move(users));
}

void CudaBlock::used_by(void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if (std::find(users.begin(), users.end(), s) == users.end()) users.push_back(s);
  for (const std::weak_ptr<CudaBlock>& companion : companions)
    if (const auto block = companion.lock()) block->used_by(stream);
}

CudaNormal::CudaNormal(Group& group, CudaRank& gpu, const NormalConfig& c) : NormalImpl(group, c), gpu_(gpu) {
  construct([&] {
    const DeviceGuard guard(gpu_.device());
    if (const int most = most_cuda_experts(config.layout); config.num_experts > most)
      invalid("NormalConfig::num_experts = " + std::to_string(config.num_experts) + ": CUDA takes at most " +
              std::to_string(most) + " in this layout");
    if (config.max_tokens > kMaxTokensPerPlanBlock * gpu_.max_blocks())
      invalid("NormalConfig::max_tokens = " + std::to_string(config.max_tokens) + ": CUDA takes at most " +
              std::to_string(kMaxTokensPerPlanBlock * gpu_.max_blocks()) + " on this GPU");
    const MemoryRequirement need = NormalExchange::memory_required(config, world(), Backend::cuda);
    rings_ = ring_layout(config, world());
    const bool by_expert = config.layout == Layout::expert_major;
    if (!through_rings())
      tuned_ = group_.tuned(by_expert ? TuningMode::normal_expert_major : TuningMode::normal, config.hidden, config.max_tokens);
    const size_t flags = need.control_bytes + static_cast<size_t>(through_rings() ? rings_.flags_bytes() : 0);
    heap_offset_ = take_heap(need.total(), flags);
    control_ = ControlLayout{heap_offset_, world(), config.num_experts};
    rings_.base = heap_offset_ + need.control_bytes;
    build();
  });
}

void CudaNormal::build() {
  make_pool();
  const auto columns = static_cast<size_t>(world() + config.num_experts);
  streams_at_ = (kObjectStateBytes + (static_cast<size_t>(gpu_.max_blocks()) + 1) * columns * 4 + 127) / 128 * 128;
  state_ = DeviceMemory(streams_at_ + static_cast<size_t>(rings_.num_streams()) * sizeof(RingStream), gpu_.copy_stream());
  ObjectState initial{};
  initial.epoch = (config.first_epoch - 1) & kEpochMask;
  check_cuda(cudaMemcpyAsync(state_.as<void>(), &initial, sizeof initial, cudaMemcpyHostToDevice, gpu_.copy_stream()), "state");
  std::byte* const segment = group_.heap->view().base[rank()];
  set_device_flags(segment + control_.base, control_.flags_bytes(), flag_word(initial.epoch), gpu_.copy_stream());
  if (through_rings())
    set_device_flags(segment + rings_.base, rings_.flags_bytes(), flag_word(initial.epoch), gpu_.copy_stream());
  order_.emplace(gpu_);
  const auto tables = static_cast<size_t>(carve_tables(nullptr, shape_of(config.max_tokens)).bytes);
  spare_tables_ = std::make_shared<CudaBlock>();
  if (!reserve(*spare_tables_, tables, Content::rows))
    invalid("NormalConfig::pool_bytes = " + std::to_string(config.pool_bytes) + ": the tables of one handle alone need " +
            std::to_string(tables));
}

void CudaNormal::make_pool() {
  const MemoryRequirement need = NormalExchange::memory_required(config, world(), Backend::cuda);
  if (through_rings()) {
    private_pool_ = DeviceMemory(need.private_bytes, gpu_.copy_stream());
    pool_base_ = private_pool_.as<std::byte>();
    pool_ = std::make_shared<CudaPool>(0, need.private_bytes);
    return;
  }
  const size_t begin = heap_offset_ + need.control_bytes;
  pool_base_ = group_.heap->view().base[rank()];
  pool_ = std::make_shared<CudaPool>(begin, begin + need.pool_bytes);
  group_.heap->add_pool(heap_offset_, std::shared_ptr<const OffsetAllocator>(pool_, &pool_->memory));
}

RingParts CudaNormal::ring_parts() const {
  RingParts ring;
  ring.rings = rings_;
  ring.streams = state_.as<RingStream>(streams_at_);
  ring.send_chunk = send_chunk(config, rings_);
  return ring;
}

CudaNormal::~CudaNormal() {
  try {
    const DeviceGuard guard(gpu_.device());
    order_.reset();
    state_ = DeviceMemory();
    private_pool_ = DeviceMemory();
  } catch (const Error&) {
    // Without a context nothing is left to free.
  }
  spare_tables_.reset();
}

TablesShape CudaNormal::shape_of(int64_t tokens) const {
  const ExpertMap map{config.num_experts, world()};
  return {world(), config.num_experts, map.count(rank()), config.topk, tokens, config.layout == Layout::expert_major};
}

CudaNormal::Call::Call(CudaNormal& object, void* given, int num_sms, Operation operation)
    : guard(object.gpu_.device()), stream(static_cast<cudaStream_t>(given)) {
  launch = normal_launch(object.tuned_, operation == Operation::combine, num_sms, object.gpu_.max_blocks());
  if (object.through_rings()) launch.warps = kMoveWarps;
  context = object.gpu_.context(bounded_ns(object.group_.options.timeout), operation);
  context.registered = object.group_.registered_slots();
  context.moved = object.order_->moved();
  graph = object.order_->begin(stream);
  if (capturing()) {  // what came before is ordered before the launch of the graph by its user
    object.pool_->take_back_now();
    return;
  }
  object.pool_->take_back(stream);
}

void CudaNormal::end(const Call& call) { order_->end(call.stream, call.capturing(), call.launch.blocks * call.launch.warps); }

bool CudaNormal::reserve(CudaBlock& block, size_t bytes, Content content) const {
  if (bytes == 0) return true;
  const auto offset = pool_->memory.allocate(bytes, 128, content == Content::handle ? bytes : 0);
  if (!offset) return false;
  block.pool = pool_;
  block.offset = *offset;
  block.bytes = bytes;
  block.data = pool_base_ + *offset;
  return true;
}

std::shared_ptr<CudaBlock> CudaNormal::allocate(size_t bytes, const Call* call, Content content) {
  auto block = std::make_shared<CudaBlock>();
  if (!reserve(*block, bytes, content)) {
    const OffsetAllocator::Usage u = pool_->memory.usage();
    throw Error(ErrorCode::pool_exhausted,
                "rank " + std::to_string(rank()) + ": the output pool has no room for " + std::to_string(bytes) + " bytes: " +
                    std::to_string(u.used) + " of " + std::to_string(u.capacity) + " are in use, the largest free block has " +
                    std::to_string(u.largest_free) + " (destroy outputs, or raise NormalConfig::pool_bytes)");
  }
  pool_->remember(block);
  if (call && call->capturing()) give_to_graph(block, call->graph);
  return block;
}

void retain_in_graph(cudaGraph_t graph, void* object, void (*release)(void*)) {
  cudaUserObject_t held = nullptr;
  const cudaError_t status = cudaUserObjectCreate(&held, object, release, 1, cudaUserObjectNoDestructorSync);
  if (status != cudaSuccess) release(object);
  check_cuda(status, "cudaUserObjectCreate");
  check_cuda(cudaGraphRetainUserObject(graph, held, 1, cudaGraphUserObjectMove), "cudaGraphRetainUserObject");
}

RowBuffer CudaNormal::allocate_rows(const Handle& handle, DType type) {
  group_.check_usable("allocate_rows");
  check_handle(handle);
  if (type != DType::bf16 && type != DType::f16 && type != DType::f32)
    invalid("allocate_rows: type = " + std::to_string(static_cast<int>(type)) + ": combine takes bf16, f16 or f32 rows");
  const int64_t rows = handle.data().rows_allocated;
  const DeviceGuard guard(gpu_.device());
  pool_->take_back_now();
  auto block =
      allocate(static_cast<size_t>(rows) * static_cast<size_t>(config.hidden) * dtype_bytes(type), nullptr, Content::rows);
  const Rows view{block->data, rows, config.hidden, type, nullptr, ScaleKind::none};
  return RowBuffer(std::move(block), view);
}

CallStatistics CudaNormal::last_call() {
  const DeviceGuard guard(gpu_.device());
  CallStatistics s = order_->statistics();
  ObjectState state{};
  check_cuda(cudaMemcpyAsync(&state, state_.as<void>(), sizeof state, cudaMemcpyDeviceToHost, gpu_.copy_stream()),
             "statistics");
  check_cuda(cudaStreamSynchronize(gpu_.copy_stream()), "statistics");
  s.plan_us = static_cast<double>(state.plan_end_ns - state.plan_begin_ns) * 1e-3;
  return s;
}

}  // namespace switchyard::detail
