// SPDX-License-Identifier: Apache-2.0
// The GPU of an expert-compute object, and the initial checks of its calls. `where` is the class name.
#pragma once

#include <string>

#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/gpu_memory.hpp"
#include "gemm/gpu/grouped_params.hpp"
#include "switchyard/gemm.hpp"

namespace switchyard::detail::gemm {

/// The current device. Throws Error(unsupported) if it cannot run sm_90a kernels.
inline gpu::DeviceTraits usable_gpu(const char* where, int* device) {
  gpu::DeviceTraits traits;
  if (const gpu::Status status = gpu::current_device(device); status != gpu::kOk) {
    gpu::forget_error();
    throw Error(ErrorCode::unsupported, std::string(where) + ": no GPU can be used: " + gpu::text_of(status));
  }
  check_gpu(gpu::traits_of(&traits, *device), where, "properties of the GPU");
  if (traits.generation != 9) {
    throw Error(ErrorCode::unsupported, std::string(where) + ": GPU " + std::to_string(*device) + " (" + traits.name +
                                            ") has compute capability " + std::to_string(traits.generation) +
                                            ".x: it needs 9.0 (H100, H200)");
  }
  return traits;
}

/// Number of blocks for a call on `device`: num_sms if set, else one per multiprocessor. Throws Error(invalid_argument).
inline int blocks_of_call(const char* where, int device, const gpu::DeviceTraits& traits, const GroupedGemmOptions& options) {
  if (options.num_sms < 0 || options.num_sms > traits.multiprocessors) {
    throw Error(ErrorCode::invalid_argument, std::string(where) + ": num_sms = " + std::to_string(options.num_sms) +
                                                 ": must be in [0, " + std::to_string(traits.multiprocessors) + "]");
  }
  if (int current = -1; gpu::current_device(&current) != gpu::kOk || current != device) {
    throw Error(ErrorCode::invalid_argument, std::string(where) + ": GPU " + std::to_string(current) +
                                                 " is current, the object is of GPU " + std::to_string(device));
  }
  return options.num_sms > 0 ? options.num_sms : traits.multiprocessors;
}

/// Rows from `end` on are ignored.
inline RowRanges row_ranges(const ExpertRows& rows, int64_t end) {
  RowRanges ranges;
  ranges.wide = rows.num_rows != nullptr;
  ranges.num_rows = ranges.wide ? static_cast<const void*>(rows.num_rows) : rows.num_rows_32;
  ranges.first_row = rows.first_row;
  ranges.rows_per_expert = rows.rows_per_expert;
  ranges.end = end;
  return ranges;
}

}  // namespace switchyard::detail::gemm
