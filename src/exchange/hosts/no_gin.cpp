// SPDX-License-Identifier: Apache-2.0
// In builds without NCCL's header, rounds between hosts are groups of NCCL sends and receives.
#include "exchange/hosts/gin.hpp"

namespace switchyard::detail {

std::shared_ptr<GpuGin> make_gpu_gin(CudaRank&) { return nullptr; }

}  // namespace switchyard::detail
