// SPDX-License-Identifier: Apache-2.0
// Compute resources of a rank's lane: memory, streams, jobs and graphs on the CPU (place_cpu.cpp) or on a GPU (place_cuda.cu),
// depending on the linked file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

#include "soak/jobs.hpp"
#include "switchyard/types.hpp"

namespace soak {

#if defined(SWITCHYARD_TEST_CUDA)
inline constexpr auto kBackend = switchyard::Backend::cuda;
#else
inline constexpr auto kBackend = switchyard::Backend::cpu;
#endif

/// Number of GPUs in this machine; 0 on the CPU. Does not initialize a GPU in this process.
int count_gpus();
/// Number of multiprocessors for each call on a lane, with `lanes` lanes on each of `world` ranks; 0 on the CPU.
int num_sms_for(int world, int lanes);

/// Sums over ranks with another library's collective, on its own stream. Null if unavailable.
class AllReduce {
 public:
  virtual ~AllReduce() = default;  ///< ends work in flight whether or not it can complete
  /// Sums in place; enqueued on the lane's stream 2.
  virtual void sum(float* numbers, size_t count) = 0;
};
/// Gathers `bytes` bytes from every rank into `all`.
using Gather = std::function<void(const void* mine, size_t bytes, void* all)>;

class Place {
 public:
  /// Creates the resources for rank `rank` of `world`. Construct it in the thread that will use it.
  Place(int rank, int world);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  /// Zeroed memory of the lane's device, valid until this object is destroyed.
  std::byte* allocate(size_t bytes);
  template <class T>
  T* make(size_t count) {
    return reinterpret_cast<T*>(allocate(count * sizeof(T)));
  }
  template <class T>
  T read(const T* from) {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    copy_out(&value, from, sizeof value);
    return value;
  }

  /// \throws std::runtime_error with `what` if `stream` is captured and the capture has been invalidated.
  void check_capture(void* stream, const char* what) const;
  /// Returns one of three streams; null on the CPU.
  void* stream(int i) const;
  /// Orders later work on `after` after the work enqueued so far on `before`.
  void order(void* before, void* after);
  bool done(void* stream) const;
  void finish(void* stream);
  /// Runs job(i) for all i. Supports every job in jobs.hpp, and MakeInputs.
  template <class Job>
  void run(const Job& job, void* stream);

  class Graph {
   public:
    virtual ~Graph() = default;
    virtual void launch(void* stream) = 0;
  };
  /// Captures the work that `enqueue` enqueues on `stream` as a graph. On the CPU, which has no graphs, each launch calls
  /// `enqueue`.
  std::unique_ptr<Graph> capture(void* stream, const std::function<void()>& enqueue);

  /// Collective, using `gather`. Returns null if no such library is available, or if ranks share a device.
  std::unique_ptr<AllReduce> make_all_reduce(const Gather& gather);

 private:
  void copy_out(void* to, const void* from, size_t bytes);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace soak
