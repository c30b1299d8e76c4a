// SPDX-License-Identifier: Apache-2.0
// Annotations of functions that both host and device compilers see. The only macros that protocol code uses.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SWITCHYARD_FN __host__ __device__
#define SWITCHYARD_INLINE __host__ __device__ __forceinline__
#else
#define SWITCHYARD_FN
#define SWITCHYARD_INLINE inline
#endif
