// SPDX-License-Identifier: Apache-2.0
// The rate of the library's row quantization by itself, which is the limit of a quantizing dispatch.
#pragma once

#include <cstdint>

namespace switchyard::measure {

/// Enqueues work on `stream`: `sms` blocks read `rows` bf16 rows of `hidden` columns and quantize them into shared memory with
/// float32 scales. `sink`: 4 bytes of device memory, which are not written. hidden is a multiple of 512.
/// \throws std::runtime_error naming the failed call
void enqueue_quantize(void* stream, const void* rows, int64_t num_rows, int64_t hidden, int sms, void* sink);

}  // namespace switchyard::measure
