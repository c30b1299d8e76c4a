// SPDX-License-Identifier: Apache-2.0
// The products of a fused layer on the CPU. The bits of each tile are identical to those of ExpertMlp::forward.
#pragma once

#include <memory>
#include <string>

#include "gemm/cpu/fused_interface.hpp"
#include "switchyard/expert.hpp"

namespace switchyard::detail {

class ExpertProducts : public FusedProducts {
 public:
  /// As ExpertMlp::implementation().
  virtual std::string implementation() const = 0;
};

/// `w13` and `w2` are as in the constructor of ExpertMlp. `object`: name in errors. `workers` is the number of workers in the
/// group, each with its own scratch. Throws Error(invalid_argument), Error(system).
std::shared_ptr<ExpertProducts> make_expert_products(const char* object, const ExpertShape& shape, const void* w13,
                                                     const void* w2, WeightStorage storage, int workers);
/// Weights, and the scratch memory of one worker.
ExpertMemory expert_products_memory(const ExpertShape& shape, WeightStorage storage);

}  // namespace switchyard::detail
