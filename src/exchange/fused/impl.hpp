// SPDX-License-Identifier: Apache-2.0
// What stands behind FusedMoe. GPUs alone have it.
#pragma once

#include <memory>
#include <span>

#include "exchange/fused/sizes.hpp"
#include "exchange/group/exchange_base.hpp"
#include "switchyard/fused.hpp"

namespace switchyard::detail {

/// Throws invalid_argument naming the field.
void check_config(const FusedMoeConfig& config, int world);
/// Most rows of a rank's experts.
int64_t most_rows(const FusedMoeConfig& config, int world);

/// Symmetric memory without a base.
FusedLayout layout_of(const FusedMoeConfig& config, int world);

class FusedImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  virtual ~FusedImpl() = default;
  FusedImpl(const FusedImpl&) = delete;
  FusedImpl& operator=(const FusedImpl&) = delete;
  static std::unique_ptr<FusedImpl> make_on_gpu(Group& group, const FusedMoeConfig& config, const void* w13,
                                                const void* w2);  // gpu.cpp

  virtual void forward(const void* x, const ExpertIds& ids, const float* weights, void* out, const FusedMoeCall& call) = 0;
  virtual void* tokens() const = 0;
  virtual std::span<const uint8_t> dropped() const = 0;
  virtual CallStatistics last_call() = 0;

  const FusedMoeConfig config;

 protected:
  FusedImpl(Group& group, const FusedMoeConfig& c) : ExchangeBase(group), config(c) {}
};

}  // namespace switchyard::detail
