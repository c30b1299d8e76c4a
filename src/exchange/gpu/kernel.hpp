// SPDX-License-Identifier: Apache-2.0
// Kernels as objects. All kernel launches in the library use them, so the list of kernels is complete by construction; all
// kernels are loaded before any rank waits for another.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "arch/gpu_runtime.hpp"
#include "exchange/gpu/check.hpp"
#include "protocol/call.hpp"

namespace switchyard::detail {

/// Number of multiprocessors of the current device, and shared memory available to a block.
struct DeviceLimits {
  int multiprocessors = 0;
  uint32_t shared_bytes = 0;
  bool dependent_launches = false;  ///< sm_90 or newer, and the rank has its GPU to itself
};

/// Resources for the arguments of a launch that ends at once because `call.abort_word` is not 0.
struct IdleCall {
  static constexpr size_t kStateBytes = 8192;
  CallContext call;
  void* state = nullptr;  ///< kStateBytes of zeroed device memory: the state of any object, and other data of a mode
};

/// The call in a kernel's parameters: their member `call`, or the call in the algorithm parameters `f`, `d`, `c` or `l`.
template <class Params>
CallContext& call_in(Params& p) {
  if constexpr (requires { p.call; })
    return p.call;
  else if constexpr (requires { p.f; })
    return call_in(p.f);
  else if constexpr (requires { p.d; })
    return call_in(p.d);
  else if constexpr (requires { p.c; })
    return call_in(p.c);
  else
    return call_in(p.l);
}

/// Fills the parameters with an idle call and an idle object state. Types with other significant values have an overload.
template <class Params>
requires requires(Params& p) { p.state; }
void set_idle(Params& p, const IdleCall& idle) {
  call_in(p) = idle.call;
  p.state = static_cast<decltype(p.state)>(idle.state);
}

using gpu::Grid;

class KernelBase {
 public:
  KernelBase(const KernelBase&) = delete;
  KernelBase& operator=(const KernelBase&) = delete;
  static const std::vector<const KernelBase*>& all();
  /// Maximum number of warps per block across all kernels.
  static int max_warps();
  /// Loads the kernel on the current device and grants it the shared memory that its launches may request.
  virtual void prepare(const DeviceLimits& limits) const = 0;
  /// Enqueues a launch that ends at once: a kernel's first launch may allocate local memory, which waits for all kernels on the
  /// GPU.
  virtual void warm_up(const IdleCall& idle, const DeviceLimits& limits, gpu::Stream stream) const = 0;

 protected:
  explicit KernelBase(int max_threads);
  ~KernelBase() = default;

  const int max_threads_;
};

/// A kernel, defined as a constant at namespace scope; it exists until the process ends.
template <class... Given>
class Kernel final : public KernelBase {
 public:
  using Entry = void (*)(Given...);
  /// Blocks have up to `max_threads` threads; `max_shared` returns the dynamic shared memory that a launch may request on a
  /// device with the given limits. `name` is for errors.
  Kernel(const char* name, Entry entry, int max_threads, int (*max_shared)(const DeviceLimits&))
      : KernelBase(max_threads), name_(name), entry_(entry), max_shared_(max_shared) {}

  /// Enqueues the kernel. Throws Error(system), naming the kernel.
  void launch(const Grid& grid, gpu::Stream stream, const std::type_identity_t<Given>&... given) const {
    check_cuda(gpu::launch(entry_, grid, stream, given...), name_);
  }
  void prepare(const DeviceLimits& limits) const override { check_cuda(gpu::allow_shared(entry_, max_shared_(limits)), name_); }
  void warm_up(const IdleCall& idle, const DeviceLimits& limits, gpu::Stream stream) const override {
    const auto shared = static_cast<uint32_t>(std::min(max_shared_(limits), kIdleShared));
    const int blocks = std::max(kMaxClusterBlocks, limits.multiprocessors / kMaxClusterBlocks * kMaxClusterBlocks);
    launch({blocks, max_threads_, shared}, stream, idle_argument<std::remove_const_t<Given>>(idle)...);
  }

 private:
  static constexpr int kIdleShared = 4096;
  /// Maximum blocks per cluster; a launch consists of whole clusters.
  static constexpr int kMaxClusterBlocks = 8;

  template <class T>
  static T idle_argument(const IdleCall& idle) {
    T argument{};
    if constexpr (requires { set_idle(argument, idle); }) set_idle(argument, idle);
    return argument;
  }

  const char* name_;
  Entry entry_;
  int (*max_shared_)(const DeviceLimits&);
};

}  // namespace switchyard::detail
