// SPDX-License-Identifier: Apache-2.0
// Runs the conformance suite for the CUDA archs: bulk copies with every stage count, lane copies, and inline copies of whole
// rows.
#include <gtest/gtest.h>

#include "gpu/arch/cuda_driver.cuh"  // must precede the suite

#include "conformance/arch_conformance.hpp"

namespace switchyard::conformance {

using CudaArchs = ::testing::Types<detail::Cuda, detail::CudaLanes, detail::CudaInline>;
struct CudaArchNames {
  template <class A>
  static std::string GetName(int) {
    return std::is_same_v<A, detail::Cuda> ? "Cuda" : std::is_same_v<A, detail::CudaLanes> ? "CudaLanes" : "CudaInline";
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Gpu, ArchConformance, CudaArchs, CudaArchNames);

}  // namespace switchyard::conformance
