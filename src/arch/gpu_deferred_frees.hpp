// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that ends while work that uses it may still be enqueued: docs/design/0059-memory-in-flight.md. Host code.
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

/// Streams on which work that uses some memory is enqueued, until the memory ends. Not thread safe. The GPU is current.
class StreamUsers {
 public:
  bool empty() const { return users_.empty(); }
  /// `stream` is not captured.
  void add(gpu::Stream stream, StreamPoints& points) {
    User& user = of(stream, std::this_thread::get_id());
    if (gpu::is_per_thread(stream)) user.point = points.mark(stream, stream_id(stream));
  }
  /// The same without a point of cudaStreamPerThread, whose thread ends the memory itself or has nothing enqueued.
  void add_unmarked(gpu::Stream stream, std::thread::id thread) { of(stream, thread); }
  void add(const StreamUsers& others) { users_.insert(users_.end(), others.users_.begin(), others.users_.end()); }

  /// Appends a point on each stream to `marks`. False, and nothing is appended, while one of them is captured: an event would
  /// be part of the capture. A stream that its owner has destroyed has none: streams end after their work, or after memory that
  /// they use.
  bool mark(StreamPoints& points, std::vector<Point>& marks) const {
    const std::thread::id here = std::this_thread::get_id();
    std::vector<const User*> alive;
    for (const User& user : users_) {
      if (!gpu::is_per_thread(user.stream)) {
        try {
          if (capture_of(user.stream).active) return false;
        } catch (const Error&) {
          continue;
        }
      }
      alive.push_back(&user);
    }
    std::vector<Point> made;
    for (const User* const user : alive) {
      if (!gpu::is_per_thread(user->stream) || user->thread == here)
        made.push_back(points.mark(user->stream, stream_id(user->stream)));
      else if (user->point)
        made.push_back(user->point);  // all that is known of another thread's stream
    }
    marks.insert(marks.end(), std::make_move_iterator(made.begin()), std::make_move_iterator(made.end()));
    return true;
  }

 private:
  struct User {
    gpu::Stream stream;
    std::thread::id thread;
    Point point;  ///< cudaStreamPerThread: its work when it was named; only `thread` knows it by this name
  };
  User& of(gpu::Stream stream, std::thread::id thread) {
    const auto same = [&](const User& u) { return u.stream == stream && (!gpu::is_per_thread(stream) || u.thread == thread); };
    const auto at = std::find_if(users_.begin(), users_.end(), same);
    return at != users_.end() ? *at : users_.emplace_back(User{stream, thread, nullptr});
  }
  std::vector<User> users_;
};

/// Things that must end before something is freed, counted: graphs that hold calls, or a rank.
using Holds = std::shared_ptr<std::atomic<int>>;

/// Counts a hold while it lives.
class HoldMark {
 public:
  explicit HoldMark(Holds holds) : holds_(std::move(holds)) { ++*holds_; }
  ~HoldMark() { --*holds_; }
  HoldMark(const HoldMark&) = delete;
  HoldMark& operator=(const HoldMark&) = delete;

 private:
  Holds holds_;
};

/// All that uses some memory when it ends. Nobody else may have the memory before over().
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
  MemoryUses& while_held(Holds holds) {
    holds_.push_back(std::move(holds));
    return *this;
  }
  MemoryUses& and_until(std::function<bool()> over) {
    others_.push_back(std::move(over));
    return *this;
  }

  bool is_held() const {
    return std::any_of(holds_.begin(), holds_.end(), [](const Holds& h) { return *h > 0; });
  }
  /// After over(): whether points are left, and not others alone.
  bool of_calls() const { return !marks_.empty() || !users_.empty(); }
  /// Whether all of it is done. The first question outside of a capture marks the streams. Neither waits nor throws. The GPU is
  /// current; not in a callback of the driver.
  bool over() noexcept try {
    if (is_held()) return false;
    const RelaxedCapture relaxed;  // some stream of this thread may be captured
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
  std::vector<Holds> holds_;
  std::vector<std::function<bool()>> others_;
};

/// An allocation: of the device's pool in the order of `stream`, or null: of cudaMalloc.
struct Allocation {
  void* data = nullptr;
  gpu::Stream stream = nullptr;
  void* context = nullptr;  ///< current_context() when it was made

  void release() const noexcept {
    const CurrentContext current(context);
    if ((stream != nullptr ? gpu::release_in_order(data, stream) : gpu::release(data)) != gpu::kOk) gpu::forget_error();
  }
};

/// Memory that has ended, until nothing uses it any more. Looked at whenever memory is made or ends; nothing waits. Any thread,
/// also a callback of the driver.
class DeferredFrees {
 public:
  /// For the life of the process: groups, ranks and objects end before what uses their memory.
  static DeferredFrees& of_process() {
    static auto* const all = new DeferredFrees;
    return *all;
  }
  void defer(const Allocation& memory, MemoryUses uses) noexcept {
    if (memory.data == nullptr) return;
    try {
      const std::lock_guard lock(mutex_);
      ended_.push_back({memory, std::move(uses)});
    } catch (const std::exception&) {
      return;  // without memory for a note of it, it stays allocated
    }
    sweep();
  }
  /// Frees what nothing uses any more.
  void sweep() noexcept {
    if (in_driver_callback()) return;
    std::vector<Ended> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(ended_);
    }
    if (all.empty()) return;
    // No lock: a callback of the driver may ask for it while a call of the runtime waits for the driver.
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
