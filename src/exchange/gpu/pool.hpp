// SPDX-License-Identifier: Apache-2.0
// The memory of one object's outputs on a GPU, handed out with its order: docs/design/0030-memory-with-its-order.md.
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

/// Work that the next user of a free range comes after.
struct StreamUse {
  Point point;
  bool call = false;  ///< a call of the pool's object: calls of that object come after it anyhow
  bool operator==(const StreamUse&) const = default;
};

/// Who takes memory.
struct Taker {
  enum class Kind : uint8_t {
    call,     ///< a call of the object, on `stream`, which comes after the object's calls before
    capture,  ///< the same, while `stream` is captured: its graph is launched after the object's calls before
    stream,   ///< what will be enqueued on `stream`
    nobody,   ///< any work from now on: idle memory, else this thread waits
  };
  Kind kind;
  gpu::Stream stream = nullptr;
  unsigned long long id = 0;  ///< of the stream; call and stream only

  bool is_call() const { return kind == Kind::call || kind == Kind::capture; }
  /// True if the stream waits for what this use comes after. Otherwise the calling thread waits.
  bool waits_on_stream() const { return kind == Kind::call || kind == Kind::stream; }
  /// Comes after `use` by itself.
  bool follows(const StreamUse& use) const {
    return (use.call && is_call()) || (waits_on_stream() && use.point->stream_id == id);
  }
};

/// Freed by the destructor, on any thread and also in a callback of the driver: not before all that used it is done.
struct CudaBlock final : OutputBlock, MemoryHolder, std::enable_shared_from_this<CudaBlock> {
  std::shared_ptr<CudaPool> pool;     ///< null: empty block
  std::shared_ptr<GraphArena> arena;  ///< of a captured call: its graph's memory
  size_t bytes = 0;
  Content content = Content::rows;
  bool has_stream = false;  ///< it was taken for `stream`, by `thread`
  gpu::Stream stream = nullptr;
  std::thread::id thread;
  unsigned long long capture = 0;                    ///< of the captured call that took it
  std::vector<std::weak_ptr<CudaBlock>> companions;  ///< what is delivered with these rows, and used with them

  ~CudaBlock() override;
  void used_by(void* stream) override;
  void used_on(gpu::Stream stream, const CaptureState& capture) override;
  /// A call of another object, up to `point`, uses it.
  void used_until(const Point& point);
  /// What was captured on `user` uses it.
  void used_in(const CaptureState& state, gpu::Stream user);

 private:
  friend class CudaPool;
  friend class GraphArena;
  StreamUsers users_;
  std::vector<gpu::Stream> captured_users_;  ///< in the capture of its own call
  std::vector<Point> points_;
};

/// An object's part of the heap for outputs. Any thread, unless a member says otherwise.
class CudaPool final : public KeepsRanges, public std::enable_shared_from_this<CudaPool> {
 public:
  /// Offsets in [begin, end) from `base`, on GPU `device`.
  CudaPool(int device, std::byte* base, size_t begin, size_t end, std::shared_ptr<StreamPoints> points)
      : device_(device), base_(base), ranges_(begin, end), points_(std::move(points)) {}

  /// A block for `taker`, whose stream waits for other streams that used the memory. Null if there is no room. The GPU must be
  /// current.
  std::shared_ptr<CudaBlock> take(size_t bytes, Content content, const Taker& taker);
  /// A block of the memory of the graph that is captured on `stream`.
  std::shared_ptr<CudaBlock> take(size_t bytes, Content content, gpu::Stream stream, GraphArena& arena);
  /// The object's last call that was not captured: blocks that are freed from now on come after it.
  void set_last_call(const Point& call);
  /// Text for an error: what is used and free.
  std::string describe() const;
  std::vector<HeapRange> kept() const override { return ranges_.kept(); }

  StreamPoints& points() const { return *points_; }
  /// Whether all that uses blocks that were freed is done. The GPU is current.
  bool is_idle();
  int device() const { return device_; }

 private:
  friend struct CudaBlock;
  friend class GraphArena;
  struct Freed {  // whose streams have not been marked yet
    size_t offset;
    std::vector<StreamUse> uses;
    StreamUsers users;
  };
  std::shared_ptr<CudaBlock> make_block(size_t bytes, Content content);
  void free(CudaBlock& block) noexcept;
  /// Gives `freed` to the ranges, after all that its streams were given so far. False: one of them is captured just now.
  bool settle(Freed& freed);
  void settle_freed();
  std::vector<StreamUse> uses_of(CudaBlock& block);
  /// Orders the taker after `uses`.
  void come_after(const std::vector<StreamUse>& uses, const Taker& taker) const;

  const int device_;
  std::byte* const base_;
  OrderedRanges<StreamUse> ranges_;
  const std::shared_ptr<StreamPoints> points_;
  mutable std::mutex mutex_;
  Point last_call_;
  std::vector<Freed> freed_;
};

/// The memory of the captured calls of one graph, or of several that are never in flight together. Each graph holds it, and so
/// does each block. A block that is let go while its graph is captured serves later calls of that capture. One thread at a time
/// takes; blocks are let go on any thread.
class GraphArena final : public std::enable_shared_from_this<GraphArena> {
 public:
  explicit GraphArena(std::shared_ptr<CudaPool> pool) : pool_(std::move(pool)) {}
  GraphArena(const GraphArena&) = delete;
  ~GraphArena();

  /// Before the first take() of a capture: its graph holds this from now on.
  void join(const CaptureState& capture);
  bool captures(unsigned long long id) const { return capture_ == id; }

 private:
  friend class CudaPool;
  friend struct CudaBlock;
  struct Part {
    size_t offset, bytes;
    Content content;
    bool held = true;
    std::vector<Point> after;     ///< of the capture that goes on
    std::vector<StreamUse> uses;  ///< outside of graphs
    StreamUsers users;
  };
  /// The smallest part that is free and holds `bytes`, or null.
  Part* find(size_t bytes, Content content);
  void let_go(CudaBlock& block) noexcept;

  const std::shared_ptr<CudaPool> pool_;
  std::mutex mutex_;
  std::vector<Part> parts_;
  std::atomic<unsigned long long> capture_ = 0;
};

}  // namespace switchyard::detail
