// SPDX-License-Identifier: Apache-2.0
// GPU memory that is released while work that uses it may still be enqueued: docs/design/0059-memory-in-flight.md. Host code.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "arch/gpu_order.hpp"

namespace switchyard::detail {

/// Streams with enqueued work that uses an allocation, tracked until it is released. Not thread-safe. The GPU must be current.
class StreamUsers {
 public:
  bool empty() const { return users_.empty() && points_.empty(); }
  size_t size() const { return users_.size() + points_.size(); }
  bool has_streams() const { return !users_.empty(); }
  /// True if points were recorded earlier. Other uses of their streams may be later.
  bool has_points() const {
    return !points_.empty() || std::any_of(users_.begin(), users_.end(), [](const User& u) { return u.point != nullptr; });
  }
  /// `stream` must not be in capture.
  void add(gpu::Stream stream, StreamPoints& points) {
    User& user = of(stream, std::this_thread::get_id());
    if (gpu::is_per_thread(stream)) user.point = points.mark(stream, stream_id(stream));
  }
  /// Adds a stream without a point, for cudaStreamPerThread; its thread either releases the memory itself or has no work
  /// enqueued.
  void add_unmarked(gpu::Stream stream, std::thread::id thread) { of(stream, thread); }
  void add(const StreamUsers& others) {
    users_.insert(users_.end(), others.users_.begin(), others.users_.end());
    points_.insert(points_.end(), others.points_.begin(), others.points_.end());
  }

  /// Replaces each stream by a point after the work enqueued on it so far; the stream may be destroyed afterwards. Streams that
  /// are being captured remain, because an event would become part of the capture. Returns true if no stream remains.
  bool settle(StreamPoints& points) {
    for (size_t i = 0; i < users_.size();) {
      if (!settle(users_[i], points)) {
        ++i;
        continue;
      }
      users_[i] = std::move(users_.back());
      users_.pop_back();
    }
    return users_.empty();
  }
  /// settle(); if no stream remains, moves the points to the end of `marks`, else returns false.
  bool mark(StreamPoints& points, std::vector<Point>& marks) {
    if (!settle(points)) return false;
    marks.insert(marks.end(), std::make_move_iterator(points_.begin()), std::make_move_iterator(points_.end()));
    points_.clear();
    return true;
  }

 private:
  struct User {
    gpu::Stream stream;
    std::thread::id thread;
    Point point;  ///< cudaStreamPerThread: its work when it was added; only `thread` can address this stream
  };
  User& of(gpu::Stream stream, std::thread::id thread) {
    const auto same = [&](const User& u) { return u.stream == stream && (!gpu::is_per_thread(stream) || u.thread == thread); };
    const auto at = std::find_if(users_.begin(), users_.end(), same);
    return at != users_.end() ? *at : users_.emplace_back(User{stream, thread, nullptr});
  }
  /// Does not throw, so that no stream depends on another. Returns false if a later attempt is needed.
  bool settle(const User& user, StreamPoints& points) noexcept try {
    if (gpu::is_per_thread(user.stream) && user.thread != std::this_thread::get_id()) {
      if (user.point) points_.push_back(user.point);  // the only known point of another thread's stream
      return true;
    }
    try {
      if (gpu::is_legacy(user.stream) ? gpu::legacy_is_blocked() : capture_of(user.stream).active) return false;
    } catch (const Error&) {
      return true;  // not a stream
    }
    points_.push_back(points.mark(user.stream, stream_id(user.stream)));
    return true;
  } catch (const std::exception&) {
    return false;
  }

  std::vector<User> users_;
  std::vector<Point> points_;  ///< of settled streams
};

/// Returns the pointer for the users of an object that graphs may also keep alive. When its last copy is dropped, T::settle(),
/// which must not throw, records the points of the streams that used the object. These streams must exist until then; they may
/// be destroyed before the graphs.
template <class T>
std::shared_ptr<T> settled_when_dropped(std::shared_ptr<T> object) {
  T* const p = object.get();
  return {p, [object = std::move(object)](T*) mutable {
            if (object.use_count() > 1 && !in_driver_callback()) object->settle();  // else the destructor does so
            object.reset();
          }};
}

/// Counts the holders (graphs with calls, or a rank) that must be destroyed before a resource can be freed.
using HoldCounter = std::shared_ptr<std::atomic<int>>;

/// Represents one hold during its lifetime.
class HoldMark {
 public:
  explicit HoldMark(HoldCounter holds) : holds_(std::move(holds)) { ++*holds_; }
  ~HoldMark() { --*holds_; }
  HoldMark(const HoldMark&) = delete;
  HoldMark& operator=(const HoldMark&) = delete;

 private:
  HoldCounter holds_;
};

/// All uses of an allocation at the time of its release. The memory must not be reused before over().
class MemoryUses {
 public:
  explicit MemoryUses(std::shared_ptr<StreamPoints> points = nullptr) : points_(std::move(points)) {}
  MemoryUses& on(StreamUsers users) {
    users_ = std::move(users);
    return *this;
  }
  MemoryUses& until(const Point& point) {
    if (point) marks_.push_back(point);
    return *this;
  }
  MemoryUses& while_held(HoldCounter holds) {
    holds_.push_back(std::move(holds));
    return *this;
  }
  MemoryUses& and_until(std::function<bool()> over) {
    others_.push_back(std::move(over));
    return *this;
  }

  bool is_held() const {
    return std::any_of(holds_.begin(), holds_.end(), [](const HoldCounter& h) { return *h > 0; });
  }
  /// After over(): returns true if points remain, rather than only other conditions.
  bool of_calls() const { return !marks_.empty() || !users_.empty(); }
  /// Replaces streams by points (StreamUsers::settle()). Call on the thread that releases the memory, before other threads can
  /// call over(): the owner may destroy the streams afterwards. The GPU must be current; must not be called in a driver
  /// callback.
  void settle() noexcept try {
    if (!users_.has_streams()) return;
    const RelaxedCapture relaxed;  // a stream of this thread may be captured
    users_.settle(*points_);
  } catch (const std::exception&) {
    // over() retries.
  }
  /// Returns true if all uses have finished. Calls settle() first. Neither waits nor throws. The GPU must be current; must not
  /// be called in a driver callback.
  bool over() noexcept try {
    settle();
    if (is_held()) return false;
    const RelaxedCapture relaxed;
    if (!users_.empty()) {
      if (!users_.mark(*points_, marks_)) return false;
      users_ = {};
    }
    std::erase_if(marks_, [](const Point& point) { return StreamPoints::reached(*point); });
    std::erase_if(others_, [](const std::function<bool()>& other) { return other(); });
    return marks_.empty() && others_.empty();
  } catch (const std::exception&) {
    return false;
  }

 private:
  std::shared_ptr<StreamPoints> points_;
  StreamUsers users_;
  std::vector<Point> marks_;
  std::vector<HoldCounter> holds_;
  std::vector<std::function<bool()>> others_;
};

/// An allocation: made from the device's pool in stream order on `stream`, or by cudaMalloc if that is null.
struct Allocation {
  void* data = nullptr;
  gpu::Stream stream = nullptr;
  void* context = nullptr;  ///< current_context() at allocation

  void release() const noexcept {
    const CurrentContext current(context);
    gpu::CaptureMode mode = gpu::kRelaxedCapture;  // some stream of this thread may be captured
    const bool relaxed = gpu::exchange_capture_mode(&mode) == gpu::kOk;
    if ((stream != nullptr ? gpu::release_in_order(data, stream) : gpu::release(data)) != gpu::kOk) gpu::forget_error();
    if (relaxed) (void)gpu::exchange_capture_mode(&mode);
  }
};

/// Released memory that is still in use. Checked whenever memory is allocated or released, without waiting. May be called from
/// any thread, including in a driver callback.
class DeferredFrees {
 public:
  /// Exists until the process ends, because groups, ranks and objects are destroyed before the work that uses their memory
  /// ends.
  static DeferredFrees& of_process() {
    static auto* const all = new DeferredFrees;
    return *all;
  }
  void defer(const Allocation& memory, MemoryUses uses) noexcept {
    if (memory.data == nullptr) return;
    try {
      if (!in_driver_callback()) {
        const CurrentContext current(memory.context);
        uses.settle();
      }
      const std::lock_guard lock(mutex_);
      ended_.push_back({memory, std::move(uses)});
    } catch (const std::exception&) {
      return;  // without memory for a record, the allocation is never freed
    }
    sweep();
  }
  /// Frees memory that is no longer in use.
  void sweep() noexcept {
    if (in_driver_callback()) return;
    std::vector<Ended> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(ended_);
    }
    if (all.empty()) return;
    // Called without the lock, because a driver callback may acquire it while a runtime call waits for the driver.
    std::erase_if(all, [](Ended& each) {
      const CurrentContext current(each.memory.context);
      if (!each.uses.over()) return false;
      each.memory.release();
      return true;
    });
    const std::lock_guard lock(mutex_);
    ended_.insert(ended_.end(), std::make_move_iterator(all.begin()), std::make_move_iterator(all.end()));
  }

 private:
  struct Ended {
    Allocation memory;
    MemoryUses uses;
  };
  std::mutex mutex_;
  std::vector<Ended> ended_;
};

}  // namespace switchyard::detail
