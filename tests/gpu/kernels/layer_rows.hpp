// SPDX-License-Identifier: Apache-2.0
// Arguments for layers that are too large to be generated on the host, and a comparison of results.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace harness {

/// `count` bf16 values of a row-major array: multiples of `scale` / 128 in [-scale, scale), each derived from its index and
/// `seed`. `scale` is a power of two.
void launch_layer_rows(uint16_t* to, int64_t count, uint32_t seed, float scale, cudaStream_t stream);
/// [tokens, topk]: experts that differ within a token and occur about equally often. `experts` is a power of two divisible by
/// `topk`.
void launch_layer_ids(int32_t* to, int64_t tokens, int topk, int experts, cudaStream_t stream);
/// [count]: in [0.25, 1.25).
void launch_layer_weights(float* to, int64_t count, uint32_t seed, cudaStream_t stream);
/// Adds the number of differing words to *differ, and lowers *first to the smallest index of a differing word.
void launch_compare(const uint32_t* a, const uint32_t* b, int64_t words, unsigned long long* differ, unsigned long long* first,
                    cudaStream_t stream);

}  // namespace harness
