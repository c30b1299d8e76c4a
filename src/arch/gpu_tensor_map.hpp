// SPDX-License-Identifier: Apache-2.0
// Tensor maps: descriptions of tensors in GPU memory for the copy engine of sm_90. Host code; maps are passed as kernel
// arguments.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

#include "arch/gpu_runtime.hpp"

namespace switchyard::detail::gpu {

using TensorMap = CUtensorMap;
enum class ElementType : uint8_t { bf16, f16, f32, bytes };
/// Row size of a box in shared memory; its 16-byte pieces are permuted so that columns are in different banks.
enum class Swizzle : uint8_t { none, bytes_64, bytes_128 };

/// A dimension of a tensor and of its boxes. The first dimension is dense.
struct Dimension {
  uint64_t size = 0;
  uint64_t stride_bytes = 0;  ///< a multiple of 16; unused for the first dimension
  uint32_t box = 0;           ///< at most 256
};

/// Returns false if the driver rejects the parameters or does not support tensor maps.
inline bool make_tensor_map(TensorMap* map, const void* data, ElementType type, std::initializer_list<Dimension> dimensions,
                            Swizzle swizzle) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    if (driver_function(&function, "cuTensorMapEncodeTiled") != kOk) forget_error();
    return reinterpret_cast<Encode>(function);
  }();
  if (encode == nullptr) return false;
  constexpr uint32_t kMax = 5;
  uint64_t sizes[kMax] = {}, strides[kMax] = {};
  uint32_t box[kMax] = {}, steps[kMax] = {};
  uint32_t rank = 0;
  for (const Dimension& d : dimensions) {
    sizes[rank] = d.size;
    if (rank > 0) strides[rank - 1] = d.stride_bytes;
    box[rank] = d.box;
    steps[rank++] = 1;
  }
  const CUtensorMapDataType data_type = type == ElementType::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : type == ElementType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                        : type == ElementType::f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                                   : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return encode(map, data_type, rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle == Swizzle::bytes_128  ? CU_TENSOR_MAP_SWIZZLE_128B
                : swizzle == Swizzle::bytes_64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                               : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace switchyard::detail::gpu
