// SPDX-License-Identifier: Apache-2.0
// Annotations of functions that both host and device compilers see. The only macros that protocol code uses.
#pragma once

// In front of a loop that runs few times or waits for memory: its code is not to grow.
#if defined(__CUDA_ARCH__)
#define SWITCHYARD_ROLLED _Pragma("unroll 1")
#else
#define SWITCHYARD_ROLLED
#endif

// In front of a loop of few independent loads: several are to be under way.
#if defined(__CUDA_ARCH__)
#define SWITCHYARD_UNROLLED_BY_4 _Pragma("unroll 4")
#else
#define SWITCHYARD_UNROLLED_BY_4
#endif

// A function that is called in the middle of others' hot code and rarely does anything.
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
