/* SPDX-License-Identifier: Apache-2.0 */
/* What C programs on a GPU have alike. The memory is of the current GPU; what fails is a failed check. */
#pragma once

#include <stddef.h>

/* Whether a GPU is visible. If not, says so, and sets the status that the program ends with: 0 where SWITCHYARD_GPU_OPTIONAL
 * is 1. Kernels are loaded at once, not when they first run. */
int gpu_is_visible(int* status);

/* A copy of host memory. */
void* on_gpu(const void* host, size_t bytes);
/* Memory of one byte's value, there when the call returns. */
void* filled_on_gpu(int byte, size_t bytes);
void read_back(void* host, const void* device, size_t bytes);
void free_all(void* const* memory, size_t number_of);
