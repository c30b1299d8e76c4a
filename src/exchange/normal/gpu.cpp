// SPDX-License-Identifier: Apache-2.0
// The exchange object on a GPU: memory, stream order and the frame of its calls. The calls are in gpu_calls.cpp.
#include "exchange/normal/gpu.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "switchyard/status.hpp"

namespace switchyard::detail {

CudaNormal::CudaNormal(Group& group, CudaRank& gpu, const NormalConfig& c) : NormalImpl(group, c, CountsAt::device), gpu_(gpu) {
  if (through_rings()) group_.require_one_host("NormalConfig::staging = ring", "use Staging::direct");
  construct([&] {
    const DeviceGuard guard(gpu_.device());
    if (const int max = max_cuda_experts(config.layout); config.num_experts > max)
      invalid("NormalConfig::num_experts",
              " = " + std::to_string(config.num_experts) + ": CUDA takes at most " + std::to_string(max) + " in this layout");
    if (config.max_tokens > kMaxTokensPerPlanBlock * gpu_.max_blocks())
      invalid("NormalConfig::max_tokens", " = " + std::to_string(config.max_tokens) + ": CUDA takes at most " +
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
  if (!spans_hosts()) return;
  group_.collectively("NormalExchange", [&] {
    const DeviceGuard guard(gpu_.device());
    hosts_ = std::make_unique<GpuHostLinks>(group_, gpu_, config.topk, config.max_tokens, config.layout == Layout::expert_major,
                                            control_);
  });
}

void CudaNormal::build() {
  make_pool();
  const auto columns = static_cast<size_t>(world() + config.num_experts);
  streams_at_ = (kObjectStateBytes + (static_cast<size_t>(gpu_.max_blocks()) + 1) * columns * 4 + 127) / 128 * 128;
  state_ = DeviceMemory(streams_at_ + static_cast<size_t>(rings_.num_streams()) * sizeof(RingStream), gpu_.copy_stream());
  ObjectState initial{};
  initial.epoch = epoch_before(first_epoch_);
  check_cuda(gpu::copy_to_device(state_.as<void>(), &initial, sizeof initial, gpu_.copy_stream()), "state");
  std::byte* const segment = group_.heap->view().base[rank()];
  set_device_flags(segment + control_.base, control_.flags_bytes(), flag_word(initial.epoch), gpu_.copy_stream());
  if (through_rings())
    set_device_flags(segment + rings_.base, rings_.flags_bytes(), flag_word(initial.epoch), gpu_.copy_stream());
  order_.emplace(gpu_, "NormalExchange", object_, config.invalid_ids);
  const auto tables = static_cast<size_t>(carve_tables(nullptr, shape_of(config.max_tokens)).bytes);
  spare_tables_ = pool_->take(tables, Content::staging, Taker{Taker::Kind::nobody});
  if (!spare_tables_)
    invalid("NormalConfig::pool_bytes",
            " = " + std::to_string(config.pool_bytes) + ": the tables of one handle alone need " + std::to_string(tables));
}

void CudaNormal::make_pool() {
  const MemoryRequirement need = NormalExchange::memory_required(config, world(), Backend::cuda);
  if (through_rings()) {
    private_pool_ = DeviceMemory(need.private_bytes, gpu_.copy_stream());
    pool_base_ = private_pool_.as<std::byte>();
    pool_ = std::make_shared<CudaPool>(gpu_.device(), pool_base_, 0, need.private_bytes, gpu_.shared_points());
    return;
  }
  const size_t begin = heap_offset_ + need.control_bytes;
  pool_base_ = group_.heap->view().base[rank()];
  pool_ = std::make_shared<CudaPool>(gpu_.device(), pool_base_, begin, begin + need.pool_bytes, gpu_.shared_points());
  group_.heap->add_pool(heap_offset_, pool_);
}

RingParts CudaNormal::ring_parts() const {
  RingParts ring;
  ring.rings = rings_;
  ring.streams = state_.as<RingStream>(streams_at_);
  ring.send_chunk = send_chunk(config, rings_);
  return ring;
}

void CudaNormal::reserve_slots() {
  const DeviceGuard guard(gpu_.device());
  slots_ = DeviceMemory(static_cast<size_t>(SelectedSlots::bytes(config.max_tokens * config.topk)), gpu_.copy_stream());
}

CudaNormal::~CudaNormal() {
  try {
    const DeviceGuard guard(gpu_.device());
    if (!order_) return;
    if (hosts_) order_->wait();  // this host takes part in the rounds of its calls
    hosts_.reset();
    spare_tables_.reset();
    MemoryUses uses = order_->uses();
    uses.and_until([pool = pool_] { return pool->is_idle(); });
    state_.end_after(uses);
    slots_.end_after(uses);
    private_pool_.end_after(uses);
    gpu_.end_block(give_up_heap(), uses);
    order_.reset();
  } catch (const Error&) {
    // Without a context, there is nothing left to free.
  }
}

TablesShape CudaNormal::shape_of(int64_t tokens) const {
  const ExpertRanges map{config.num_experts, world()};
  return {world(), config.num_experts, map.count(rank()), config.topk, tokens, config.layout == Layout::expert_major};
}

std::unique_ptr<NormalImpl::Call> CudaNormal::begin(const Frame& frame) {
  auto call = std::make_unique<CudaCall>(gpu_.device());
  gpu_.check_sms(frame.options, frame.num_sms);
  for (const Operand& operand : frame.operands)
    gpu_.check_pointer(operand.name, operand.data, operand.alignment, frame.known_memory);
  const bool combines = frame.operation == Operation::combine;
  NormalCall kind = combines ? NormalCall::combine : NormalCall::dispatch;
  if (frame.extra_work == ExtraWork::copies) kind = NormalCall::copying_combine;
  if (frame.extra_work == ExtraWork::quantises && !through_rings()) kind = NormalCall::quantising_dispatch;
  call->launch = normal_launch(tuned_, kind, frame.num_sms, gpu_.max_blocks());
  call->sms_named = frame.num_sms != 0;
  if (through_rings()) call->launch.warps = kMoveWarps;
  call->context = gpu_.context(bounded_ns(group_.options.timeout), frame.operation);
  order_->set_counters(call->context);
  call->at = order_->begin(static_cast<gpu::Stream>(frame.stream));
  call->captured = call->at.capture.active;
  if (hosts_ && call->captured)
    throw Error(ErrorCode::unsupported,
                "on GPUs of several hosts calls wait for their placements and cannot be captured; leave them out of the graph");
  call->words = gpu_.words(call->captured);
  call->always_pushes = call->launch.blocks >= kPushFrom;
  for (const Operand& operand : frame.operands) use(operand.data, *call);
  return call;
}

void CudaNormal::end(Call& given) {
  const auto& call = static_cast<const CudaCall&>(given);
  order_->end(call.at, call.launch.blocks * call.launch.warps);
  if (call.captured) return;
  pool_->set_last_call(order_->last());
  for (const std::shared_ptr<CudaBlock>& block : call.foreign) block->used_until(order_->last());
  if (call.hosts) call.hosts->used = order_->last();
  if (call.made) call.made->until = order_->last();
}

void CudaNormal::use(const std::shared_ptr<CudaBlock>& block, CudaCall& call) const {
  if (!block || !block->pool) return;
  if (call.captured)
    block->used_in(call.at.capture, call.stream());
  else if (block->pool != pool_)
    call.foreign.push_back(block);
}

void CudaNormal::use(const void* address, CudaCall& call) const {
  const std::shared_ptr<MemoryHolder> holder = address ? gpu_.holders().find(address) : nullptr;
  if (const auto block = std::dynamic_pointer_cast<CudaBlock>(holder))
    use(block, call);
  else if (holder)
    holder->used_on(call.stream(), call.at.capture);
}

GraphArena& CudaNormal::arena_of(const CaptureState& capture) {
  std::shared_ptr<GraphArena> arena = shared_arena_ ? shared_arena_ : arena_.lock();
  if (!arena || (!shared_arena_ && !arena->captures(capture.id))) arena = std::make_shared<GraphArena>(pool_);
  arena->join(capture);  // the graph keeps it alive
  if (!shared_arena_) arena_ = arena;
  return *arena;
}

std::shared_ptr<CudaBlock> CudaNormal::checked_block(std::shared_ptr<CudaBlock> block, size_t bytes) {
  if (!block) throw_pool_exhausted(bytes, pool_->describe());
  if (block->data) gpu_.holders().remember(block->data, block->bytes, block);
  return block;
}

std::shared_ptr<CudaBlock> CudaNormal::take(size_t bytes, Content content, const CallStream& at) {
  if (!at.capture.active) return take(bytes, content, Taker{Taker::Kind::call, at.stream, at.id});
  return checked_block(pool_->take(bytes, content, at.stream, arena_of(at.capture)), bytes);
}

std::shared_ptr<CudaBlock> CudaNormal::take(size_t bytes, Content content, const Taker& taker) {
  return checked_block(pool_->take(bytes, content, taker), bytes);
}

std::shared_ptr<void> CudaNormal::make_graph_memory() { return std::make_shared<GraphArena>(pool_); }

void CudaNormal::use_graph_memory(std::shared_ptr<void> memory) {
  shared_arena_ = std::static_pointer_cast<GraphArena>(std::move(memory));
}

std::shared_ptr<OutputBlock> CudaNormal::allocate(Call& call, size_t bytes, Content content) {
  return take(bytes, content, static_cast<const CudaCall&>(call).at);
}

std::shared_ptr<OutputBlock> CudaNormal::allocate_for(const RowStream& on, size_t bytes) {
  const DeviceGuard guard(gpu_.device());
  if (!on.named) return take(bytes, Content::rows, Taker{Taker::Kind::nobody});
  auto* const stream = static_cast<gpu::Stream>(on.stream);
  const CaptureState capture = capture_of(stream);
  return capture.active ? take(bytes, Content::rows, CallStream{stream, capture})
                        : take(bytes, Content::rows, Taker{Taker::Kind::stream, stream, stream_id(stream)});
}

CallStatistics CudaNormal::last_call() {
  const DeviceGuard guard(gpu_.device());
  CallStatistics s = order_->statistics();
  ObjectState state{};
  check_cuda(gpu::copy_to_host(&state, state_.as<void>(), sizeof state, gpu_.copy_stream()), "statistics");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "statistics");
  s.network_bytes = network_bytes_;
  s.plan_us = static_cast<double>(state.plan_end_ns - state.plan_begin_ns) * 1e-3;
  return s;
}

std::unique_ptr<NormalImpl> NormalImpl::make_on_gpu(Group& group, const NormalConfig& config) {
  return std::make_unique<CudaNormal>(group, rank_of(group), config);
}

}  // namespace switchyard::detail
