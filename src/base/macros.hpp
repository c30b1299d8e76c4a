// SPDX-License-Identifier: Apache-2.0
// Annotations of functions compiled for both host and device. The only macros that protocol code uses.
#pragma once

// Before a loop that runs few times or waits for memory: prevents unrolling.
#if defined(__CUDA_ARCH__)
#define SWITCHYARD_ROLLED _Pragma("unroll 1")
#else
#define SWITCHYARD_ROLLED
#endif

// Before a loop of few independent loads: several should be in flight.
#if defined(__CUDA_ARCH__)
#define SWITCHYARD_UNROLLED_BY_4 _Pragma("unroll 4")
#else
#define SWITCHYARD_UNROLLED_BY_4
#endif

// A function called within hot code that rarely does anything.
#if defined(__CUDA_ARCH__)
#define SWITCHYARD_OUTLINED __noinline__
#else
#define SWITCHYARD_OUTLINED
#endif

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SWITCHYARD_FN __host__ __device__
#define SWITCHYARD_INLINE __host__ __device__ __forceinline__
#else
#define SWITCHYARD_FN
#define SWITCHYARD_INLINE inline
#endif
