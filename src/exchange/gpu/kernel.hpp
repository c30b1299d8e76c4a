// SPDX-License-Identifier: Apache-2.0
// Kernels as objects. Nothing else of the library launches one, so the list of all, which is loaded before any rank waits for
// another, follows from the kernels that there are.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "arch/gpu_runtime.hpp"
#include "exchange/gpu/check.hpp"
#include "protocol/call.hpp"

namespace switchyard::detail {

/// Shared memory that a block may have, and multiprocessors, of the current device.
struct DeviceLimits {
  int multiprocessors = 0;
  uint32_t shared_bytes = 0;
  bool dependent_launches = false;  ///< from sm_90 on, where a rank has its GPU to itself
};

/// What the arguments of a launch are made of that ends at once, because `call.abort_word` is not 0.
struct IdleCall {
  static constexpr size_t kStateBytes = 8192;
  CallContext call;
  void* state = nullptr;  ///< kStateBytes of device memory, zero: the state of any object, and what else a mode reads
};

/// The call that parameters of a kernel hold: `call`, or that of the algorithm's parameters `f`, `d`, `c` or `l` in them.
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

/// Makes parameters idle that hold a call and an object's state. Other types whose values matter have an overload.
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
  /// The largest number of warps that a block of any kernel has.
  static int most_warps();
  /// Loads it on the current device and lets it have the shared memory that its launches may ask for.
  virtual void prepare(const DeviceLimits& limits) const = 0;
  /// Enqueues a launch that ends at once: the first one may allocate local memory, which waits for all kernels of the GPU.
  virtual void warm_up(const IdleCall& idle, const DeviceLimits& limits, gpu::Stream stream) const = 0;

 protected:
  explicit KernelBase(int most_threads);
  ~KernelBase() = default;

  const int most_threads_;
};

/// A kernel that lives as long as the process: a constant at namespace scope.
template <class... Given>
class Kernel final : public KernelBase {
 public:
  using Entry = void (*)(Given...);
  /// Blocks have up to `most_threads`; `most_shared` is the dynamic shared memory that a launch may ask for, on a device of
  /// these limits. `name` is for errors.
  Kernel(const char* name, Entry entry, int most_threads, int (*most_shared)(const DeviceLimits&))
      : KernelBase(most_threads), name_(name), entry_(entry), most_shared_(most_shared) {}

  /// Enqueues it. Throws Error(system) naming the kernel.
  void launch(const Grid& grid, gpu::Stream stream, const std::type_identity_t<Given>&... given) const {
    check_cuda(gpu::launch(entry_, grid, stream, given...), name_);
  }
  void prepare(const DeviceLimits& limits) const override {
    check_cuda(gpu::allow_shared(entry_, most_shared_(limits)), name_);
  }
  void warm_up(const IdleCall& idle, const DeviceLimits& limits, gpu::Stream stream) const override {
    const auto shared = static_cast<uint32_t>(std::min(most_shared_(limits), kIdleShared));
    const int blocks = std::max(kMostOfCluster, limits.multiprocessors / kMostOfCluster * kMostOfCluster);
    launch({blocks, most_threads_, shared}, stream, idle_argument<std::remove_const_t<Given>>(idle)...);
  }

 private:
  static constexpr int kIdleShared = 4096;
  /// Most blocks of a cluster, of which a launch has whole ones.
  static constexpr int kMostOfCluster = 8;

  template <class T>
  static T idle_argument(const IdleCall& idle) {
    T argument{};
    if constexpr (requires { set_idle(argument, idle); }) set_idle(argument, idle);
    return argument;
  }

  const char* name_;
  Entry entry_;
  int (*most_shared_)(const DeviceLimits&);
};

}  // namespace switchyard::detail
