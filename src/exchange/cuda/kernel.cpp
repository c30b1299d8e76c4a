// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/kernel.hpp"

namespace switchyard::detail {

namespace {

/// Made by the first kernel: kernels are constants of many files, initialised in any order.
std::vector<const KernelBase*>& list() {
  static auto* const kernels = new std::vector<const KernelBase*>;
  return *kernels;
}

}  // namespace

KernelBase::KernelBase() { list().push_back(this); }

const std::vector<const KernelBase*>& KernelBase::all() { return list(); }

}  // namespace switchyard::detail
