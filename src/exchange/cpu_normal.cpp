// SPDX-License-Identifier: Apache-2.0
// Normal mode on the CPU: the object and the frame of every collective call.
#include "exchange/cpu_normal.hpp"

#include <algorithm>
#include <string>

#include "exchange/enum_checks.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

CpuBlock::~CpuBlock() {
  if (pool) pool->release(offset);
  if (recycler) recycler->give(std::move(owned));
}

CpuNormal::CpuNormal(Group& group, const NormalConfig& c) : NormalImpl(group, c) {
  construct([&] { build(); });
}

void CpuNormal::build() {
  const MemoryRequirement need = NormalExchange::memory_required(config, world());
  rings_ = ring_layout(config, world());
  const size_t flags = need.control_bytes + static_cast<size_t>(rings_.num_channels > 0 ? rings_.flags_bytes() : 0);
  heap_offset_ = take_heap(need.total(), flags);
  control_ = ControlLayout{heap_offset_, world(), config.num_experts};
  rings_.base = heap_offset_ + need.control_bytes;
  ring_streams_.resize(static_cast<size_t>(rings_.num_streams()));
  const size_t pool_at = heap_offset_ + need.control_bytes + need.ring_bytes;
  pool_ = std::make_shared<OffsetAllocator>(pool_at, pool_at + need.pool_bytes);
  counts_row_.resize(static_cast<size_t>(control_.counts_row_bytes()));
  const int64_t staged =
      round_up(config.hidden, 128) + round_up(static_cast<int64_t>(scale_row_bytes(config.hidden, ScaleKind::f32)), 128);
  group_.pool.reserve_scratch(static_cast<size_t>(staged));
  epoch_ = (config.first_epoch - 1) & kEpochMask;
  std::byte* mine = group_.heap->view().base[rank()];
  set_flags(mine + heap_offset_, control_.flags_bytes(), sizeof(uint64_t), flag_word(epoch_));
  if (rings_.num_channels > 0) set_flags(mine + rings_.base, rings_.flags_bytes(), RingLayout::kLine, flag_word(epoch_));
}

CallContext CpuNormal::begin_call(Operation operation) {
  group_.enter(operation, object_);
  CallContext call = group_.begin_call(operation);
  epoch_ = (epoch_ + 1) & kEpochMask;
  call.epoch = epoch_;
  return call;
}

uint64_t CpuNormal::call_number() const { return (epoch_ - config.first_epoch + 1) & kEpochMask; }

void CpuNormal::raise(const char* operation) { group_.raise_fault(operation, call_number()); }

void CpuNormal::throw_mismatch(const char* operation, int rank) {
  group_.throw_mismatch(std::string(operation) + " (call " + std::to_string(call_number()) + ")", rank);
}

void CpuNormal::end_call(uint64_t start_ns) {
  const double plan_us = stats_.plan_us;
  stats_ = sum_moved(group_.moved);
  stats_.plan_us = plan_us;
  stats_.total_us = static_cast<double>(Cpu::now_ns() - start_ns) * 1e-3;
}

void CpuNormal::check_placements(const CallContext& call, uint64_t sig, const char* operation, const std::exception_ptr& own) {
  if (all_agree(call, control_, sig)) return;
  if (own) rethrow_agreed(own);
  for (int r = 0; r < world(); ++r) {
    const Placement& place = *call.heap.local(control_.placement(call.epoch, r));
    if (place.signature != sig || !reachable(call, place)) throw_mismatch(operation, r);
    if (place.status != 0)
      throw AgreedError(static_cast<ErrorCode>(place.status),
                        std::string(operation) + " (call " + std::to_string(call_number()) + "): rank " + std::to_string(r) +
                            " has no room for its rows (" + to_string(static_cast<ErrorCode>(place.status)) +
                            "); nothing was moved and the group can be used");
  }
}

std::shared_ptr<CpuBlock> CpuNormal::allocate(size_t bytes) {
  auto block = std::make_shared<CpuBlock>();
  if (bytes == 0) return block;  // no rows need no memory, also where the pool is empty or full
  if (config.staging == Staging::ring) {
    try {
      block->owned = buffers_->take(bytes);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::pool_exhausted, "rank " + std::to_string(rank()) + ": the system has no " + std::to_string(bytes) +
                                                 " bytes of memory left for rows, which ring staging keeps in private memory; "
                                                 "free outputs or dispatch fewer tokens at a time");
    }
    block->recycler = buffers_;
    block->data = block->owned.data.get();
    return block;
  }
  const auto offset = pool_->allocate(bytes, 128);
  if (!offset) {
    const OffsetAllocator::Usage u = pool_->usage();
    throw Error(ErrorCode::pool_exhausted,
                "rank " + std::to_string(rank()) + ": the output pool has no room for " + std::to_string(bytes) + " bytes: " +
                    std::to_string(u.used) + " of " + std::to_string(u.capacity) + " are in use, the largest free block has " +
                    std::to_string(u.largest_free) + "; free outputs or raise NormalConfig::pool_bytes");
  }
  block->pool = pool_;
  block->offset = *offset;
  block->data = group_.heap->view().base[rank()] + *offset;
  return block;
}

RowBuffer CpuNormal::allocate_rows(const Handle& handle, DType type, const RowStream&) {
  group_.check_usable("allocate_rows");
  check_handle(handle);
  check_combining_type("allocate_rows: type", type);
  const int64_t rows = handle.data().rows;
  auto block = allocate(static_cast<size_t>(rows) * static_cast<size_t>(config.hidden) * dtype_bytes(type));
  const Rows view{block->data, rows, config.hidden, type, nullptr, ScaleKind::none};
  return RowBuffer(std::move(block), view);
}

std::unique_ptr<NormalImpl> make_cpu_normal(Group& group, const NormalConfig& config) {
  return std::make_unique<CpuNormal>(group, config);
}

}  // namespace switchyard::detail
