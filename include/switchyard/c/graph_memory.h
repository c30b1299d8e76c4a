// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: memory shared by CUDA graphs. The rules of switchyard.h for errors, structs, ownership and threads apply.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_graph_memory sy_graph_memory;  ///< sy_graph_memory_destroy

/// CUDA: memory shared by the captured calls of several graphs. Graphs captured while it is set share this memory; they must
/// not be in flight at the same time, and launching one invalidates the results of the others. If `memory` is NULL in
/// sy_exchange_use_graph_memory, each graph has its own memory (the default). It may be destroyed at any time after the
/// captures; memory that graphs use stays allocated. CPU: no effect.
sy_code sy_exchange_make_graph_memory(sy_exchange* exchange, sy_graph_memory** memory);
sy_code sy_exchange_use_graph_memory(sy_exchange* exchange, const sy_graph_memory* memory);
sy_code sy_graph_memory_destroy(sy_graph_memory* memory);

#ifdef __cplusplus
}
#endif
