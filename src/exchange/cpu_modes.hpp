// SPDX-License-Identifier: Apache-2.0
// Who makes the objects of a group on the CPU. Their classes are templates on the arch.
#pragma once

#include <memory>

#include "switchyard/group.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

// The arch that a source with such a class is compiled for. The library has `Cpu`; tests compile the same sources once more for
// `CpuDeferred` (tests/testing).
#if !defined(SWITCHYARD_CPU_ARCH)
#define SWITCHYARD_CPU_ARCH Cpu
#endif

namespace switchyard::detail {

class NormalImpl;
class LowLatencyImpl;
class LedgerImpl;

template <class A>
std::unique_ptr<NormalImpl> make_cpu_normal(Group& group, const NormalConfig& config);
template <class A>
std::unique_ptr<LowLatencyImpl> make_cpu_low_latency(Group& group, const LowLatencyConfig& config);
template <class A>
std::unique_ptr<LedgerImpl> make_cpu_ledger(Group& group, const LedgerConfig& config);

struct CpuModes {
  std::unique_ptr<NormalImpl> (*make_normal)(Group&, const NormalConfig&);
  std::unique_ptr<LowLatencyImpl> (*make_low_latency)(Group&, const LowLatencyConfig&);
  std::unique_ptr<LedgerImpl> (*make_ledger)(Group&, const LedgerConfig&);
};
template <class A>
inline constexpr CpuModes kCpuModes{make_cpu_normal<A>, make_cpu_low_latency<A>, make_cpu_ledger<A>};

}  // namespace switchyard::detail
