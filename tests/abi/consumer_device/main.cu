// SPDX-License-Identifier: Apache-2.0
// Creates its own row function for the current GPU. Without a GPU, the library throws an exception that says so.
#include <switchyard/cuda/row_function.cuh>
#include <switchyard/low_latency.hpp>

#include <cstdio>

namespace {

/// A clipped, gated unit for each element: expert e uses the e-th bias.
struct ClippedUnit {
  float bias[8];
  __device__ float operator()(float x, const switchyard::RowOrigin& row, int64_t) const {
    const float y = x + bias[row.expert % 8];
    return y / (1.0f + __expf(-y));
  }
};

}  // namespace

int main() {
  try {
    const switchyard::RowFunction f = switchyard::row_function_on_gpu(ClippedUnit{{0, 1, 2, 3, 4, 5, 6, 7}});
    switchyard::AllToAllOptions options;
    options.row_function = &f;
    const bool made = static_cast<bool>(*options.row_function);
    std::printf("%s: made for a GPU\n", made ? "PASS" : "FAIL");
    return made ? 0 : 1;
  } catch (const switchyard::Error& error) {
    const bool announced = error.code() == switchyard::ErrorCode::system;
    std::printf("%s without a GPU: %s\n", announced ? "PASS" : "FAIL", error.what());
    return announced ? 0 : 1;
  }
}
