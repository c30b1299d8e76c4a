// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/kernel.hpp"

#include <algorithm>

namespace switchyard::detail {

namespace {

constexpr int kLanesOfWarp = 32;

/// Created by the first kernel because kernels are constants in many files, whose initialization order is unspecified.
std::vector<const KernelBase*>& list() {
  static auto* const kernels = new std::vector<const KernelBase*>;
  return *kernels;
}

}  // namespace

KernelBase::KernelBase(int max_threads) : max_threads_(max_threads) { list().push_back(this); }

const std::vector<const KernelBase*>& KernelBase::all() { return list(); }

int KernelBase::max_warps() {
  int threads = 0;
  for (const KernelBase* kernel : list()) threads = std::max(threads, kernel->max_threads_);
  return threads / kLanesOfWarp;
}

}  // namespace switchyard::detail
