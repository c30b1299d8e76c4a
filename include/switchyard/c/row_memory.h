// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: symmetric memory for external allocators, for example torch's CUDAPluggableAllocator, which calls functions with
/// these signatures. The rules of switchyard.h for errors, structs, ownership and threads apply.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_row_memory sy_row_memory;  ///< sy_row_memory_destroy

/// Collective. Allocates `bytes` bytes, the same number on all ranks, from the group's heap. Dispatch can write rows to this
/// memory, and combine can read rows from it, without a copy. Errors: as for sy_exchange_create.
sy_code sy_row_memory_create(sy_group* group, size_t bytes, sy_row_memory** memory);
/// The group and its heap stay alive until all memory from sy_row_memory_allocate is freed.
sy_code sy_row_memory_destroy(sy_row_memory* memory);
/// Local. Sets this thread's source for sy_row_memory_allocate; NULL: none. Does not keep `memory` alive.
sy_code sy_row_memory_use(const sy_row_memory* memory);
/// Returns at least `bytes` bytes, aligned to 512, from this thread's source. If the source is full, returns ordinary memory of
/// its rank; a dispatch or combine that uses it copies the rows once. NULL if memory of neither kind is available or no source
/// is set. The memory is for work on `stream` (cudaStream_t); `device` is ignored.
void* sy_row_memory_allocate(ptrdiff_t bytes, int device, void* stream);
/// Releases memory from sy_row_memory_allocate. May be called on any thread; does not wait. The memory is not reused until all
/// work enqueued on `stream` so far is done. Work on other streams must already be done, or `stream` must wait for it. If the
/// group was already destroyed, freeing its last allocation ends the group.
void sy_row_memory_free(void* memory, ptrdiff_t bytes, int device, void* stream);

/// CUDA: declares that `stream` (cudaStream_t) uses the library's memory at `memory` (rows, outputs, ordinary memory). The
/// memory is not reused until all work enqueued on `stream` before its destruction has finished. A graph being captured on
/// `stream` keeps the memory alive. The library declares the streams of its own calls. Local; no effect on the CPU. Errors:
/// invalid_argument if the library did not allocate memory at that address.
sy_code sy_group_used_by(sy_group* group, const void* memory, void* stream);

#ifdef __cplusplus
}
#endif
