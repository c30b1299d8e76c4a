// SPDX-License-Identifier: Apache-2.0
// The library's quantisation of rows by itself: what bounds a dispatch that quantises.
#pragma once

#include <cstdint>

namespace switchyard::measure {

/// Enqueues: `rows` bf16 rows of `hidden` columns are read and quantised into shared memory, by `sms` blocks, with float32
/// scales. `sink`: 4 bytes of device memory, which nothing is written to. hidden is a multiple of 512.
/// \throws std::runtime_error naming the call that failed
void enqueue_quantize(void* stream, const void* rows, int64_t num_rows, int64_t hidden, int sms, void* sink);

}  // namespace switchyard::measure
