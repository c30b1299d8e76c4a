// SPDX-License-Identifier: Apache-2.0
// Annotations for functions compiled for both host and device. Protocol code uses no other macros.
#pragma once

// Placed before a loop that has few iterations or waits for memory, to prevent unrolling.
#if defined(__CUDA_ARCH__)
#define SWITCHYARD_ROLLED _Pragma("unroll 1")
#else
#define SWITCHYARD_ROLLED
#endif

// Placed before a loop with few independent loads, to keep several in flight.
#if defined(__CUDA_ARCH__)
#define SWITCHYARD_UNROLLED_BY_4 _Pragma("unroll 4")
#else
#define SWITCHYARD_UNROLLED_BY_4
#endif

// For a function that is called in hot code but rarely has work to do.
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
