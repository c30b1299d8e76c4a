// SPDX-License-Identifier: Apache-2.0
// Creates the implementation of a mode's public class. Groups and GPU ranks do not depend on any mode.
#pragma once

#include <memory>

#include "exchange/group/impl.hpp"

namespace switchyard::detail {

/// Builds without a GPU toolkit contain neither the modes' gpu.cpp files nor groups with a device.
#ifndef SWITCHYARD_HAS_GPU_CODE
#error "src/exchange/CMakeLists.txt says for which sources this is known"
#endif
inline constexpr bool kHasGpuCode = SWITCHYARD_HAS_GPU_CODE != 0;

/// Collective; creates the implementation of a mode for the group's kind of memory. A mode defines Impl::make_on_cpu, for a
/// given arch, in its cpu.cpp and Impl::make_on_gpu in its gpu.cpp. `object` is the name of the public class, for errors.
/// `instead` is null unless the object needs the memory of all ranks; then it names the alternative on several hosts. On GPUs,
/// all modes need the memory of all ranks, except those that declare Impl::kGpusSpanHosts.
template <class Impl, class Config>
std::unique_ptr<Impl> make_on(const char* object, Group& group, const Config& config, const char* instead = nullptr) {
  return group.impl().collective_call(object, [&] {
    if (instead) group.impl().require_one_host(object, instead);
    if constexpr (!requires { Impl::kGpusSpanHosts; })
      if (group.impl().device) group.impl().require_one_host(object, "on GPUs, use a group per host");
    if constexpr (kHasGpuCode)
      if (group.impl().device) return Impl::make_on_gpu(group, config);
    if (group.impl().defers_copies) return make_deferred<Impl, Config>(group, config);
    return Impl::template make_on_cpu<Cpu>(group, config);
  });
}

}  // namespace switchyard::detail
