// SPDX-License-Identifier: Apache-2.0
/// \file
/// The caller's element-wise expert function for LowLatencyExchange::moe_all_to_all, applied in the launch that transfers the
/// rows. RowFunction::on_cpu creates it for a CPU group, and row_function_on_gpu (cuda/row_function.cuh, compiled with nvcc)
/// for a CUDA group.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "switchyard/types.hpp"

namespace switchyard {

/// A row and the expert that processes it.
struct RowOrigin {
  int32_t expert = 0;  ///< in [0, E)
  int32_t rank = 0;    ///< rank that holds the token
  int32_t token = 0;   ///< its index on that rank
  int32_t k = 0;       ///< first of the token's choices equal to this expert
};

namespace detail {

/// Base class of a function for one backend. Each backend has a derived type with its own call interface.
struct RowFunctionBase {
  explicit RowFunctionBase(Backend b) noexcept : backend(b) {}
  RowFunctionBase(const RowFunctionBase&) = delete;
  RowFunctionBase& operator=(const RowFunctionBase&) = delete;
  virtual ~RowFunctionBase() = default;
  const Backend backend;
};

struct CpuRowFunction : RowFunctionBase {
  CpuRowFunction() noexcept : RowFunctionBase(Backend::cpu) {}
  /// Computes x[i] = f(x[i], row, column + i) for i in [0, n). Called by several workers concurrently.
  virtual void apply(float* x, int64_t n, const RowOrigin& row, int64_t column) const noexcept = 0;
};

}  // namespace detail

/// Element-wise row function for one backend, or none. Cheap to copy; may be destroyed as soon as the call that used it has
/// returned.
class RowFunction {
 public:
  RowFunction() = default;
  explicit RowFunction(std::shared_ptr<const detail::RowFunctionBase> impl) noexcept : impl_(std::move(impl)) {}

  /// `f(float x, const RowOrigin& row, int64_t column) -> float` must be const and not throw (an exception terminates the
  /// program). It is called for every element of every (token, expert) row that this rank's experts process, concurrently by
  /// all workers of the rank. `x` is the element as float32; the result is rounded once to the row type.
  template <class F>
  static RowFunction on_cpu(F f) {
    struct Function final : detail::CpuRowFunction {
      explicit Function(F g) : f(std::move(g)) {}
      void apply(float* x, int64_t n, const RowOrigin& row, int64_t column) const noexcept override {
        for (int64_t i = 0; i < n; ++i) x[i] = f(x[i], row, column + i);
      }
      F f;
    };
    return RowFunction(std::make_shared<const Function>(std::move(f)));
  }

  explicit operator bool() const noexcept { return impl_ != nullptr; }
  const detail::RowFunctionBase* impl() const noexcept { return impl_.get(); }  ///< library internal

 private:
  std::shared_ptr<const detail::RowFunctionBase> impl_;
};

}  // namespace switchyard
