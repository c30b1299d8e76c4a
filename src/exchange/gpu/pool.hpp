// SPDX-License-Identifier: Apache-2.0
// Output memory of one object on a GPU, allocated together with its ordering; see docs/design/0030-memory-with-its-order.md.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "arch/gpu_deferred_frees.hpp"
#include "exchange/gpu/memory_holders.hpp"
#include "exchange/group/output_block.hpp"
#include "heap/ordered_ranges.hpp"

namespace switchyard::detail {

class CudaPool;
class GraphArena;

/// Work that the next user of a free range must follow.
struct StreamUse {
  Point point;
  bool call = false;  ///< a call of the pool's object, which is ordered with later calls of the object anyway
  bool operator==(const StreamUse&) const = default;
};

/// The requester of memory.
struct Taker {
  enum class Kind : uint8_t {
    call,     ///< a call of the object, on `stream`, which follows the object's earlier calls
    capture,  ///< like `call`, while `stream` is captured: the graph is launched after the object's earlier calls
    stream,   ///< work that will be enqueued on `stream`
    nobody,   ///< any future work: takes idle memory, else this thread waits
  };
  Kind kind;
  gpu::Stream stream = nullptr;
  unsigned long long id = 0;  ///< of the stream; call and stream only

  bool is_call() const { return kind == Kind::call || kind == Kind::capture; }
  /// True if the stream waits for the earlier uses; otherwise the calling thread waits.
  bool waits_on_stream() const { return kind == Kind::call || kind == Kind::stream; }
  /// True if this use is ordered after `use` in any case.
  bool follows(const StreamUse& use) const {
    return (use.call && is_call()) || (waits_on_stream() && use.point->stream_id == id);
  }
};

/// Freed by the destructor, on any thread and even inside a driver callback, but only after all work that used it is done.
struct CudaBlock final : OutputBlock, MemoryHolder, std::enable_shared_from_this<CudaBlock> {
  std::shared_ptr<CudaPool> pool;     ///< null: empty block
  std::shared_ptr<GraphArena> arena;  ///< for a captured call: its graph's memory
  size_t bytes = 0;
  Content content = Content::rows;
  bool has_stream = false;  ///< taken for `stream`, by `thread`
  gpu::Stream stream = nullptr;
  std::thread::id thread;
  unsigned long long capture = 0;                    ///< id of the capture whose call took it
  std::vector<std::weak_ptr<CudaBlock>> companions;  ///< blocks delivered and used together with these rows

  ~CudaBlock() override;
  void used_by(void* stream) override;
  void used_on(gpu::Stream stream, const CaptureState& capture) override;
  /// A call of another object uses the block up to `point`.
  void used_until(const Point& point);
  /// Work captured on `user` uses the block.
  void used_in(const CaptureState& state, gpu::Stream user);
  /// Records points on the streams that used the block.
  void settle() noexcept;

 private:
  friend class CudaPool;
  friend class GraphArena;
  StreamUsers users_;
  std::vector<gpu::Stream> captured_users_;  ///< in the capture of its own call
  std::vector<Point> points_;
};

/// The part of the heap for an object's outputs. Thread-safe unless noted otherwise.
class CudaPool final : public KeepsRanges, public std::enable_shared_from_this<CudaPool> {
 public:
  /// Manages offsets [begin, end) relative to `base` on GPU `device`.
  CudaPool(int device, std::byte* base, size_t begin, size_t end, std::shared_ptr<StreamPoints> points)
      : device_(device), base_(base), ranges_(begin, end), points_(std::move(points)) {}

  /// Returns a block for `taker`; the taker's stream waits for other streams that used the memory. Returns null if there is no
  /// room. The GPU must be current.
  std::shared_ptr<CudaBlock> take(size_t bytes, Content content, const Taker& taker);
  /// Returns a block from the memory of the graph being captured on `stream`.
  std::shared_ptr<CudaBlock> take(size_t bytes, Content content, gpu::Stream stream, GraphArena& arena);
  /// Sets the object's last call that was not captured; blocks freed from now on are ordered after it.
  void set_last_call(const Point& call);
  /// Used and free memory, as text for error messages.
  std::string describe() const;
  std::vector<HeapRange> kept() const override { return ranges_.kept(); }

  StreamPoints& points() const { return *points_; }
  /// True if all uses of freed blocks are over. The GPU must be current.
  bool is_idle();
  int device() const { return device_; }

 private:
  friend struct CudaBlock;
  friend class GraphArena;
  struct Freed {  // the uses on its streams are not marked yet
    size_t offset;
    std::vector<StreamUse> uses;
    StreamUsers users;
  };
  std::shared_ptr<CudaBlock> make_block(size_t bytes, Content content);
  void free(CudaBlock& block) noexcept;
  /// Moves `freed` to the free ranges, ordered after all work enqueued on its streams so far. Returns false if one of the
  /// streams is being captured.
  bool settle(Freed& freed);
  void settle_freed();
  std::vector<StreamUse> uses_of(CudaBlock& block);
  /// Orders the taker after `uses`.
  void order_after_uses(const std::vector<StreamUse>& uses, const Taker& taker) const;

  const int device_;
  std::byte* const base_;
  OrderedRanges<StreamUse> ranges_;
  const std::shared_ptr<StreamPoints> points_;
  mutable std::mutex mutex_;
  Point last_call_;
  std::vector<Freed> freed_;
  int settling_ = 0;  ///< threads in settle_freed()
};

/// Memory for the captured calls of one graph, or of several graphs that are never in flight together. Each graph and each
/// block holds a reference. A block released while its graph is being captured is reused by later calls of that capture. Only
/// one thread at a time may take blocks; blocks may be released on any thread.
class GraphArena final : public std::enable_shared_from_this<GraphArena> {
 public:
  explicit GraphArena(std::shared_ptr<CudaPool> pool) : pool_(std::move(pool)) {}
  GraphArena(const GraphArena&) = delete;
  ~GraphArena();

  /// Call before the first take() of a capture; the captured graph holds a reference from then on.
  void join(const CaptureState& capture);
  bool captures(unsigned long long id) const { return capture_ == id; }

 private:
  friend class CudaPool;
  friend struct CudaBlock;
  struct Part {
    size_t offset, bytes;
    Content content;
    bool held = true;
    std::vector<Point> after;     ///< in the current capture
    std::vector<StreamUse> uses;  ///< outside graphs
    StreamUsers users;
  };
  /// The smallest free part that holds `bytes`, or null.
  Part* find(size_t bytes, Content content);
  void release(CudaBlock& block) noexcept;
  /// Records the points of the block's uses: in the current capture in `after`, and outside it in the block. Returns false if
  /// this failed.
  bool order_after(CudaBlock& block, std::vector<Point>& after) noexcept;

  const std::shared_ptr<CudaPool> pool_;
  std::mutex mutex_;
  std::vector<Part> parts_;
  std::atomic<unsigned long long> capture_ = 0;
};

}  // namespace switchyard::detail
