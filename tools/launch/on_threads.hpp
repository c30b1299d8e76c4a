// SPDX-License-Identifier: Apache-2.0
// Runs ranks of any kind as threads.
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace switchyard::launch {

/// Runs body(0) to body(n - 1), each on its own thread. Returns when all threads have ended. No exception may escape a body.
template <class Body>
void on_threads(size_t n, const Body& body) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < n; ++r) threads.emplace_back([&body, r] { body(r); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace switchyard::launch
