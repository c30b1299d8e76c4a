// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI of memory that CUDA graphs share. What switchyard.h says of errors,
/// structs, ownership and threads holds here too.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_graph_memory sy_graph_memory;  ///< sy_graph_memory_destroy

/// CUDA: memory that the captured calls of several graphs share. Graphs that are captured while it is set take theirs from it
/// together: they must not be in flight at the same time, and what one of them leaves must not be read after another was
/// launched. `memory` NULL in sy_exchange_use_graph_memory: each graph has its own (the default). It may be destroyed at any
/// time after the captures; graphs keep what they need. CPU: no effect.
switchyard_code_t sy_exchange_make_graph_memory(sy_exchange* exchange, sy_graph_memory** memory);
switchyard_code_t sy_exchange_use_graph_memory(sy_exchange* exchange, const sy_graph_memory* memory);
switchyard_code_t sy_graph_memory_destroy(sy_graph_memory* memory);

#ifdef __cplusplus
}
#endif
