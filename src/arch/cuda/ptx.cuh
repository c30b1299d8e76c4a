// SPDX-License-Identifier: Apache-2.0
// PTX instructions that arch/cuda needs and that CUDA C++ lacks, one function per instruction. Flags and rows have global
// addresses; `uint32_t` addresses refer to shared memory. Bulk copies and their helpers require sm_90; on older GPUs, their
// functions do nothing and are unreachable (kHasBulkCopies).
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/ops.hpp"
#include "base/number_formats.hpp"

namespace switchyard::detail::ptx {

// Flags. Scope::device orders within this GPU; Scope::system also orders with peers and the host.

template <Scope S>
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  if constexpr (S == Scope::system) {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  }
  return v;
}

template <Scope S>
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  if constexpr (S == Scope::system) {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  } else {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  }
  return v;
}

template <Scope S>
__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t v) {
  if constexpr (S == Scope::system) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
  }
}

// Words of sentinel rows, accessed 16 bytes at a time or singly, between any two ranks.
__device__ __forceinline__ void store_words(uint4* p, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_words(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return v;
}
__device__ __forceinline__ void store_word(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_word(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}

template <Scope S>
__device__ __forceinline__ void store_release(uint64_t* p, uint64_t v) {
  if constexpr (S == Scope::system) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
  } else {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
  }
}

/// Scope: this GPU.
__device__ __forceinline__ uint64_t add_relaxed(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(__cvta_generic_to_global(p)), "l"(v));
  return old;
}
/// Does not return the old value. There is one function per state space, because a generic atomic branches on the space.
__device__ __forceinline__ void reduce_add(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
__device__ __forceinline__ void reduce_max(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}

// This function and load_shared may be used in functions that are also compiled for the host, where they are never called.
SWITCHYARD_INLINE uint32_t shared_address(const void* p) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
#else
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p));
#endif
}

template <Scope S>
__device__ __forceinline__ uint64_t add_acq_rel(uint64_t* p, uint64_t v) {
  uint64_t old;
  if constexpr (S == Scope::system) {
    asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(p)), "l"(v)
                 : "memory");
  } else if constexpr (S == Scope::block) {  // in shared memory
    asm volatile("atom.acq_rel.cta.shared::cta.add.u64 %0, [%1], %2;" : "=l"(old) : "r"(shared_address(p)), "l"(v) : "memory");
  } else {
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(p)), "l"(v)
                 : "memory");
  }
  return old;
}

template <Scope S>
__device__ __forceinline__ void fence_acq_rel() {
  if constexpr (S == Scope::system) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
}

SWITCHYARD_INLINE uint32_t load_shared(uint32_t p) {
  uint32_t v = 0;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
#else
  (void)p;
#endif
  return v;
}
/// *p |= v, visible to other threads of the block.
__device__ __forceinline__ void or_shared(uint32_t p, uint32_t v) {
  asm volatile("red.relaxed.cta.shared::cta.or.b32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}

// Bulk copies. Sizes and addresses must be multiples of 16.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline constexpr bool kHasBulkCopies = true;

/// Order this thread's earlier ordinary accesses to global memory, or to its block's shared memory, before later bulk copies:
/// its own, and those of threads that synchronize with it afterwards. An acquire before the fence extends the order to the
/// released writes. Without a state space, the fence would wait for all of the thread's stores (docs/design/0066).
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
/// Makes initialized barriers visible to the bulk copy engine.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}

__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(dst)), "r"(src),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all bulk stores by this thread have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
/// Waits until all bulk stores by this thread are complete and visible to it; a later release by this thread covers them.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#else
inline constexpr bool kHasBulkCopies = false;

__device__ __forceinline__ void fence_proxy_async_global() {}
__device__ __forceinline__ void fence_proxy_async_shared() {}
__device__ __forceinline__ void mbarrier_init(uint32_t, uint32_t) {}
__device__ __forceinline__ void fence_mbarrier_init() {}
__device__ __forceinline__ void mbarrier_expect(uint32_t, uint32_t) {}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t, uint32_t) { return true; }
__device__ __forceinline__ void bulk_load(uint32_t, const void*, uint32_t, uint32_t) {}
__device__ __forceinline__ void bulk_store(void*, uint32_t, uint32_t) {}
__device__ __forceinline__ void bulk_commit() {}
__device__ __forceinline__ void bulk_wait_read() {}
__device__ __forceinline__ void bulk_wait() {}
#endif

__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

/// Copies four bytes from global to shared memory; the copy is complete only after async_copies_wait() by the same thread.
__device__ __forceinline__ void async_copy(uint32_t* dst, const uint32_t* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(dst))),
               "l"(__cvta_generic_to_global(src))
               : "memory");
}
__device__ __forceinline__ void async_copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Index of the multiprocessor on which this thread runs.
__device__ __forceinline__ uint32_t multiprocessor() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

__device__ __forceinline__ uint64_t global_timer() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

/// If the stream's next kernel is launched as a programmatic dependent, allows its blocks to start; that kernel must wait
/// before it reads anything.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Waits until the previous kernel has ended and its stores are visible. Returns at once if this kernel was not launched as a
/// dependent of it.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace switchyard::detail::ptx
