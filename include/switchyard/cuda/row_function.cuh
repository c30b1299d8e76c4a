// SPDX-License-Identifier: Apache-2.0
/// \file
/// Row functions for CUDA groups. For nvcc (C++20, sm_80 or later); requires the CMake target switchyard::device, which adds
/// the library's device headers to the include path. Compile against the headers of the library that you link.
#pragma once

#include <type_traits>

#include "exchange/low_latency/flat_kernel.cuh"
#include "switchyard/row_function.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

namespace detail {

/// Adapts the caller's function to the protocol's interface.
template <class F>
struct MadeByFunction {
  F f;
  template <class N>
  __device__ void operator()(float* x, N, const RowOrigin& row, int64_t column) const {
#pragma unroll
    for (int i = 0; i < N::value; ++i) x[i] = f(x[i], row, column + i);
  }
};

inline void check_row_function_step(gpu::Status status, const char* what) {
  if (status == gpu::kOk) return;
  gpu::forget_error();
  throw Error(ErrorCode::system, std::string("row_function_on_gpu: ") + what + ": " + gpu::text_of(status));
}

template <class F>
class GpuRowFunction final : public CudaRowFunction {
 public:
  explicit GpuRowFunction(const F& f) : make_{f} {
    check_row_function_step(gpu::current_device(&device), "current device");
    gpu::DeviceTraits traits;
    check_row_function_step(gpu::traits_of(&traits, device), "device properties");
    DeviceLimits limits;
    limits.shared_bytes = static_cast<uint32_t>(traits.shared_bytes);
    check_row_function_step(prepare_flat_kernels<MadeByFunction<F>>(limits), "no kernel for this GPU");
    warm_up(limits);
  }
  gpu::Status launch(const CudaFlat& p, int blocks, const DeviceLimits& limits, gpu::Stream stream) const override {
    return launch_flat(p, make_, blocks, limits, stream);
  }

 private:
  /// The first launch of a kernel may allocate memory, which waits for all kernels on the GPU. These launches return
  /// immediately because the abort word is set.
  void warm_up(const DeviceLimits& limits) const {
    uint64_t* words = nullptr;
    check_row_function_step(gpu::allocate(reinterpret_cast<void**>(&words), 2 * sizeof(EpochState) + 256), "memory");
    gpu::Status status = gpu::fill(words, 0, 2 * sizeof(EpochState) + 256, nullptr);
    if (status == gpu::kOk) status = gpu::fill(words, 1, sizeof(uint64_t), nullptr);
    CudaFlat p;
    p.f.d.call.abort_word = words;
    p.state = reinterpret_cast<EpochState*>(words + 16);
    if (status == gpu::kOk) status = launch(p, 1, limits, nullptr);
    p.f.d.call.device_trace.records = reinterpret_cast<DeviceRecord*>(words + 16);  // the tracing kernel
    if (status == gpu::kOk) status = launch(p, 1, limits, nullptr);
    if (status == gpu::kOk) status = gpu::wait_for_device();
    (void)gpu::release(words);
    check_row_function_step(status, "first launch");
  }

  MadeByFunction<F> make_;
};

}  // namespace detail

/// Creates a row function for the current device, which must be the rank's GPU.
///
/// `f` must be trivially copyable and have `__device__ float operator()(float x, const RowOrigin& row, int64_t column) const`,
/// which is called for every element of every (token, expert) row that this rank's experts process. `x` is the element as
/// float32; the result is rounded once to the row type. Pointers in `f` must stay valid until all calls that use `f` have
/// ended.
///
/// Do not call on the hot path: it loads the kernels and waits for the device. No rank on the device may have a call in flight,
/// and no stream of the device may be capturing. \throws Error(system), including if the file was not compiled for this GPU.
template <class F>
RowFunction row_function_on_gpu(const F& f) {
  static_assert(std::is_trivially_copyable_v<F>, "row_function_on_gpu: the function travels as a kernel's argument");
  static_assert(std::is_invocable_r_v<float, const F&, float, const RowOrigin&, int64_t>,
                "row_function_on_gpu: needs float operator()(float x, const RowOrigin& row, int64_t column) const");
  return RowFunction(std::make_shared<const detail::GpuRowFunction<F>>(f));
}

}  // namespace switchyard
