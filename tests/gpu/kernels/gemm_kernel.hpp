// SPDX-License-Identifier: Apache-2.0
// A tensor-core matrix product that occupies all multiprocessors of a GPU and runs concurrently with calls, and marks that show
// which work was in flight at the same time. All launches enqueue and return; every kernel terminates on its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/macros.hpp"

namespace harness {

/// In device memory, initially zero. Tickets are numbered from 1 in the order in which they were drawn on this GPU.
struct GemmMarks {
  static constexpr int kMax = 16384;  ///< launches
  uint32_t tickets;                   ///< drawn so far
  uint32_t begun_blocks[kMax], ended_blocks[kMax];
  uint32_t begun[kMax], ended[kMax];  ///< ticket of a launch's first block at its begin, and of the last block at its end
};

/// C = kRounds * A * B, in kRounds passes. A is blocks * kTile x kDepth and B is kDepth x kTile, both bf16; C is float32. All
/// sums are integers that are exact in float32.
struct Gemm {
  static constexpr int kTile = 128, kDepth = 256, kRounds = 64;
  int blocks = 0;  ///< maximum number that fits the GPU at once
  void *a = nullptr, *b = nullptr;
  float* c = nullptr;
  GemmMarks* marks = nullptr;
  volatile uint32_t* begun = nullptr;  ///< mapped host memory: number of launches that have begun, and that have ended
  volatile uint32_t* ended = nullptr;

  static SWITCHYARD_FN constexpr int a_value(int64_t row, int k) { return static_cast<int>((3 * row + 5 * k) % 7) - 3; }
  static SWITCHYARD_FN constexpr int b_value(int k, int column) { return (2 * k + 11 * column) % 5 - 2; }
};

/// The value of Gemm::blocks for the current GPU.
int gemm_blocks();
/// Writes A and B.
void launch_gemm_inputs(const Gemm& gemm, cudaStream_t stream);
/// Launches product number n, counted from 0 in stream order.
void launch_gemm(const Gemm& gemm, int n, cudaStream_t stream);
/// Draws a ticket in stream order.
void launch_ticket(GemmMarks* marks, uint32_t* to, cudaStream_t stream);

}  // namespace harness
