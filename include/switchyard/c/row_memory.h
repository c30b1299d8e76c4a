// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI of symmetric memory for allocators of others, as torch's
/// CUDAPluggableAllocator, which call functions of these types. What
/// switchyard.h says of errors, structs, ownership and threads holds here too.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_row_memory sy_row_memory;  ///< sy_row_memory_destroy

/// Collective; takes `bytes` of the group's heap, the same number on all ranks. Rows that a dispatch is to write there arrive
/// there, and combines read rows there, both without a copy. Errors: as sy_exchange_create.
switchyard_code_t sy_row_memory_create(sy_group* group, size_t bytes, sy_row_memory** memory);
/// The group, and its heap with it, stay until what sy_row_memory_allocate gave is freed.
switchyard_code_t sy_row_memory_destroy(sy_row_memory* memory);
/// Local. What sy_row_memory_allocate takes from in this thread from now on; NULL: nothing. It does not keep `memory` alive.
switchyard_code_t sy_row_memory_use(const sy_row_memory* memory);
/// At least `bytes` at a multiple of 512 of what this thread uses; where that has no room left, ordinary memory of its rank,
/// which costs a dispatch one copy of its rows and a combine one of its. NULL: without memory of either kind, or where nothing
/// is used. For work on `stream` (cudaStream_t); `device` is not looked at.
void* sy_row_memory_allocate(ptrdiff_t bytes, int device, void* stream);
/// Gives back what sy_row_memory_allocate returned. Any thread; waits for nothing. Nobody else has the memory before all work
/// that was enqueued on `stream` so far is done. Work on other streams is done, or `stream` waits for it. With the last of a
/// group that was destroyed before, the group ends here.
void sy_row_memory_free(void* memory, ptrdiff_t bytes, int device, void* stream);

/// CUDA: what is enqueued on `stream` (cudaStream_t) until the library's memory at `memory` (rows, outputs, ordinary memory) is
/// destroyed uses it: nobody else has it before. A graph that is captured there keeps it. The streams of the library's calls
/// are known. Local; nothing on the CPU. Errors: invalid_argument if no such memory lies there.
switchyard_code_t sy_group_used_by(sy_group* group, const void* memory, void* stream);

#ifdef __cplusplus
}
#endif
