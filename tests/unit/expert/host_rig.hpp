// SPDX-License-Identifier: Apache-2.0
// CPU implementation of the Rig in expert_layer.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "switchyard/types.hpp"

namespace switchyard::testing {

/// A rank that runs as a thread.
class HostRig {
 public:
  static constexpr Backend kBackend = Backend::cpu;
  void* allocate(size_t bytes) {
    memory_.push_back(std::make_unique<std::byte[]>(bytes));
    return memory_.back().get();
  }
  void write(void* to, const void* from, size_t bytes) {
    std::copy_n(static_cast<const std::byte*>(from), bytes, static_cast<std::byte*>(to));
  }
  void read(void* to, const void* from, size_t bytes) { write(to, from, bytes); }
  void* stream() const { return nullptr; }

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

}  // namespace switchyard::testing
