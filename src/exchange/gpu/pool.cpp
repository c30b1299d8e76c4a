// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/pool.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "exchange/gpu/check.hpp"
#include "heap/gpu/device_guard.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

/// Above this number of free ranges, ranges without remaining users are joined.
constexpr size_t kMaxFreeRanges = 24;

}  // namespace

// ---- a block ----

CudaBlock::~CudaBlock() {
  if (!pool) return;
  if (arena)
    arena->release(*this);
  else
    pool->free(*this);
}

void CudaBlock::used_by(void* given) {
  if (pool) {
    auto* const user = static_cast<gpu::Stream>(given);
    const DeviceGuard guard(pool->device());
    used_on(user, capture_of(user));
  }
  for (const std::weak_ptr<CudaBlock>& companion : companions)
    if (const auto block = companion.lock()) block->used_by(given);
}

void CudaBlock::used_on(gpu::Stream user, const CaptureState& state) {
  if (!pool) return;
  if (state.active)
    used_in(state, user);
  else
    users_.add(user, pool->points());
}

void CudaBlock::used_in(const CaptureState& state, gpu::Stream user) {
  if (!arena || state.id != capture || gpu::is_per_thread(user)) return keep_in_graph(shared_from_this(), state.graph);
  if (user != stream && std::find(captured_users_.begin(), captured_users_.end(), user) == captured_users_.end())
    captured_users_.push_back(user);
}

void CudaBlock::used_until(const Point& point) {
  if (pool && point) points_.push_back(point);
}

void CudaBlock::settle() noexcept try {
  if (!pool) return;
  if (!arena) {
    if (has_stream && content != Content::staging) users_.add_unmarked(stream, thread);
    has_stream = false;  // CudaPool::free() does not add it again
  }
  const DeviceGuard guard(pool->device());
  const RelaxedCapture relaxed;  // a stream of this thread may be captured
  users_.settle(pool->points());
} catch (const std::exception&) {
  // The pool retries.
}

// ---- the pool ----

std::shared_ptr<CudaBlock> CudaPool::make_block(size_t bytes, Content content) {
  auto block = std::make_shared<CudaBlock>();
  block->bytes = bytes;
  block->content = content;
  block->thread = std::this_thread::get_id();
  return settled_when_dropped(std::move(block));
}

std::shared_ptr<CudaBlock> CudaPool::take(size_t bytes, Content content, const Taker& taker) {
  auto block = make_block(bytes, content);
  if (bytes == 0) return block;
  settle_freed();
  const auto over = [](const StreamUse& use) { return StreamPoints::reached(*use.point); };
  if (ranges_.pieces() > kMaxFreeRanges) ranges_.forget(over);
  const auto cost = [&](const StreamUse& use) { return taker.follows(use) || over(use) ? 0 : 1; };
  const auto taken = ranges_.take(bytes, content == Content::handle ? bytes : 0, cost);
  if (!taken) return nullptr;
  try {
    order_after_uses(taken->after, taker);
  } catch (...) {
    auto after = taken->after;
    ranges_.give(taken->offset, std::move(after));
    throw;
  }
  block->pool = shared_from_this();
  block->offset = taken->offset;
  block->data = base_ + taken->offset;
  block->has_stream = taker.kind != Taker::Kind::nobody;
  block->stream = taker.stream;
  return block;
}

void CudaPool::order_after_uses(const std::vector<StreamUse>& uses, const Taker& taker) const {
  for (const StreamUse& use : uses) {
    if (taker.follows(use) || use.point->known_reached.load(std::memory_order_acquire)) continue;
    const RelaxedCapture relaxed;  // some stream of this thread may be captured
    if (taker.waits_on_stream())
      StreamPoints::order(taker.stream, taker.id, *use.point);
    else
      StreamPoints::wait(*use.point);
  }
}

std::shared_ptr<CudaBlock> CudaPool::take(size_t bytes, Content content, gpu::Stream stream, GraphArena& arena) {
  std::shared_ptr<CudaBlock> block;
  std::vector<Point> after;
  bool reused = false;
  {
    const std::lock_guard lock(arena.mutex_);
    if (GraphArena::Part* const part = bytes > 0 ? arena.find(bytes, content) : nullptr) {
      block = make_block(part->bytes, content);
      block->pool = shared_from_this();
      block->offset = part->offset;
      block->data = base_ + part->offset;
      part->held = reused = true;
      after = std::move(part->after);
      part->after.clear();
    }
  }
  if (!reused) {
    block = take(bytes, content, Taker{Taker::Kind::capture, stream});
    if (!block || !block->pool) return block;
    const std::lock_guard lock(arena.mutex_);
    arena.parts_.push_back({block->offset, bytes, content, true, {}, {}, {}});
  }
  block->arena = arena.shared_from_this();
  block->capture = arena.capture_;
  block->has_stream = true;
  block->stream = stream;
  const unsigned long long id = captured_stream_id(stream);
  for (const Point& point : after) StreamPoints::order(stream, id, *point);
  return block;
}

void CudaPool::set_last_call(const Point& call) {
  const std::lock_guard lock(mutex_);
  last_call_ = call;
}

std::vector<StreamUse> CudaPool::uses_of(CudaBlock& block) {
  std::vector<StreamUse> uses;
  for (Point& point : block.points_) uses.push_back({std::move(point), false});
  const std::lock_guard lock(mutex_);
  if (last_call_) uses.push_back({last_call_, true});
  return uses;
}

void CudaPool::free(CudaBlock& block) noexcept {
  Freed freed{block.offset, uses_of(block), std::move(block.users_)};
  if (block.has_stream && block.content != Content::staging) freed.users.add_unmarked(block.stream, block.thread);
  if (in_driver_callback() || !settle(freed)) {
    const std::lock_guard lock(mutex_);
    freed_.push_back(std::move(freed));
  }
}

bool CudaPool::settle(Freed& freed) try {
  if (freed.users.empty()) {  // used only by calls
    ranges_.give(freed.offset, std::move(freed.uses));
    return true;
  }
  const DeviceGuard guard(device_);
  const bool has_earlier = freed.users.has_points();
  const RelaxedCapture relaxed;  // a stream of this thread may be captured
  freed.uses.reserve(freed.uses.size() + freed.users.size());
  std::vector<Point> marks;
  if (!freed.users.mark(*points_, marks)) return false;
  // A use that precedes a mark on the same stream needs no separate point. An earlier point may precede the use.
  if (!has_earlier)
    std::erase_if(freed.uses, [&](const StreamUse& use) {
      return std::any_of(marks.begin(), marks.end(),
                         [&](const Point& mark) { return mark->stream_id == use.point->stream_id; });
    });
  for (Point& mark : marks) freed.uses.push_back({std::move(mark), false});
  ranges_.give(freed.offset, std::move(freed.uses));
  return true;
} catch (const std::exception&) {
  return false;  // it stays taken until a later attempt
}

void CudaPool::settle_freed() {
  std::vector<Freed> left;
  {
    const std::lock_guard lock(mutex_);
    if (freed_.empty()) return;
    left.swap(freed_);
    ++settling_;
  }
  std::erase_if(left, [&](Freed& freed) { return settle(freed); });
  const std::lock_guard lock(mutex_);
  --settling_;
  freed_.insert(freed_.end(), std::make_move_iterator(left.begin()), std::make_move_iterator(left.end()));
}

bool CudaPool::is_idle() {
  settle_freed();
  {
    const std::lock_guard lock(mutex_);
    if (settling_ > 0 || !freed_.empty()) return false;
  }
  bool all = true;
  ranges_.forget([&](const StreamUse& use) {
    const bool over = StreamPoints::reached(*use.point);
    all = all && over;
    return over;
  });
  const std::lock_guard lock(mutex_);
  return all && freed_.empty();  // remaining `freed_` belong to captured streams, whose state is unknown
}

std::string CudaPool::describe() const {
  const OffsetAllocator::Usage u = ranges_.usage();
  size_t waiting = 0;
  {
    const std::lock_guard lock(mutex_);
    waiting = freed_.size();
  }
  return std::to_string(u.used) + " of " + std::to_string(u.capacity) + " are in use, the largest free block has " +
         std::to_string(u.largest_free) +
         (waiting == 0 ? "" : ", " + std::to_string(waiting) + " freed blocks belong to streams that are captured just now");
}

// ---- graphs ----

void GraphArena::join(const CaptureState& capture) {
  if (capture_ == capture.id) return;
  keep_in_graph(shared_from_this(), capture.graph);
  capture_ = capture.id;
  const std::lock_guard lock(mutex_);
  for (Part& part : parts_) part.after.clear();  // of another capture, which never overlaps this one
}

GraphArena::Part* GraphArena::find(size_t bytes, Content content) {
  Part* best = nullptr;
  for (Part& part : parts_)
    if (!part.held && part.content == content && part.bytes >= bytes && (best == nullptr || part.bytes < best->bytes))
      best = &part;
  return best;
}

bool GraphArena::order_after(CudaBlock& block, std::vector<Point>& after) noexcept try {
  if (in_driver_callback()) return true;
  const DeviceGuard guard(pool_->device());
  const RelaxedCapture relaxed;  // another stream of this thread may be captured
  std::vector<gpu::Stream> streams = std::move(block.captured_users_);
  streams.push_back(block.stream);
  for (gpu::Stream stream : streams) {
    const CaptureState state = capture_of(stream);
    if (state.active && state.id == block.capture) after.push_back(pool_->points().mark(stream, captured_stream_id(stream)));
  }
  block.users_.settle(pool_->points());
  return true;
} catch (const std::exception&) {
  return false;
}

void GraphArena::release(CudaBlock& block) noexcept try {
  std::vector<Point> after;
  const bool ordered = order_after(block, after);
  std::vector<StreamUse> uses;
  for (Point& point : block.points_) uses.push_back({std::move(point), false});
  const std::lock_guard lock(mutex_);
  const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& p) { return p.offset == block.offset; });
  part->after = std::move(after);
  part->uses.insert(part->uses.end(), uses.begin(), uses.end());
  part->users.add(block.users_);
  part->held = !ordered;  // a block whose uses in the capture are unknown is not reused in this graph
} catch (const std::exception&) {
  // The block is not reused in this graph.
}

GraphArena::~GraphArena() {
  for (Part& part : parts_) {
    CudaPool::Freed freed{part.offset, std::move(part.uses), std::move(part.users)};
    const std::lock_guard lock(pool_->mutex_);
    if (pool_->last_call_) freed.uses.push_back({pool_->last_call_, true});
    pool_->freed_.push_back(std::move(freed));
  }
}

}  // namespace switchyard::detail
