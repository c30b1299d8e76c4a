// SPDX-License-Identifier: Apache-2.0
// Tokens as fp8 with one scale each, for layers with ScaleGranularity::per_channel.
#pragma once

#include <memory>

#include "layer/impl.hpp"

namespace switchyard::detail {

/// Quantizes the tokens of a call into memory that this object owns. All scales in a token's row of scales are equal, so that
/// the rows are also valid for kernels that expect one scale per 128 columns.
class TokenQuantiser {
 public:
  virtual ~TokenQuantiser() = default;
  /// Enqueues the work on call.stream; `num_sms` limits the multiprocessors, 0: all. The result is valid until the next call.
  /// For arguments that a dispatch of the result rejects (too many tokens, memory or a stream of another GPU), enqueues
  /// nothing: the dispatch also reports them to the other ranks. Throws Error(system), of which the other ranks are not
  /// informed.
  virtual ConstRows quantise(const ConstRows& x, const FormCall& call, int num_sms) = 0;
};

/// Allocates on the current GPU; throws Error(system).
std::unique_ptr<TokenQuantiser> make_gpu_token_quantiser(const LayerSetup& setup);

}  // namespace switchyard::detail
