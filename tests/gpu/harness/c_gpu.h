/* SPDX-License-Identifier: Apache-2.0 */
/* Shared parts of C programs on a GPU. Memory is on the current GPU; a failure is a failed check. */
#pragma once

#include <stddef.h>

/* Returns whether a GPU is visible. If not, prints that and sets the program's exit status: 0 if SWITCHYARD_GPU_OPTIONAL is 1.
 * Kernels are loaded immediately instead of when they first run. */
int gpu_is_visible(int* status);

/* Returns a copy of host memory. */
void* on_gpu(const void* host, size_t bytes);
/* Returns memory filled with one byte value, complete when the call returns. */
void* filled_on_gpu(int byte, size_t bytes);
void read_back(void* host, const void* device, size_t bytes);
void free_all(void* const* memory, size_t number_of);
