// SPDX-License-Identifier: Apache-2.0
// Host memory that kernels can write, and its end.
#pragma once

#include <cstddef>

namespace switchyard::detail {

/// Host memory that is registered with a GPU. Its end waits for all that runs on that GPU, and while it waits no other thread
/// of the process can launch anything there: see end_device.
class SharedHostMemory {
 public:
  SharedHostMemory(int device, std::byte* memory, size_t bytes);
  ~SharedHostMemory();
  SharedHostMemory(const SharedHostMemory&) = delete;
  SharedHostMemory& operator=(const SharedHostMemory&) = delete;
  /// The rank has left: nobody writes it any more. \returns whether no other rank of the process has such memory in use
  bool retire();

 private:
  int device_;
  std::byte* memory_;
  bool in_use_ = true;
};

}  // namespace switchyard::detail
