// SPDX-License-Identifier: Apache-2.0
// Calls of LowLatencyExchange with one more argument, for bindings. If `known_memory` is true, the caller guarantees that all
// memory passed to the call belongs to this rank's GPU, as a framework can for its tensors. The call then omits the driver
// query per pointer, which takes more host time than all other checks; everything else is checked. No effect on the CPU.
#pragma once

#include "switchyard/low_latency.hpp"

namespace switchyard::detail {

struct LowLatencyCalls {
  static void dispatch(LowLatencyExchange& exchange, const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output,
                       const LowLatencyDispatchOptions& options, bool known_memory);
  static ReceiveHook dispatch_send(LowLatencyExchange& exchange, const ConstRows& x, const ExpertIds& ids,
                                   LowLatencyOutput& output, const LowLatencyDispatchOptions& options, bool known_memory);
  static void combine(LowLatencyExchange& exchange, const ConstRows& y, const LowLatencyOutput& output, void* out,
                      const LowLatencyCombineOptions& options, bool known_memory);
  static ReceiveHook combine_send(LowLatencyExchange& exchange, const ConstRows& y, const LowLatencyOutput& output, void* out,
                                  const LowLatencyCombineOptions& options, bool known_memory);
};

}  // namespace switchyard::detail
