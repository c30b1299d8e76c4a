// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI for bindings in other languages: checks that a binding runs when it loads the library, because it repeats the
/// declarations of the headers.
#pragma once

#include <stddef.h>

#include "switchyard/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Size of the struct `name`, for example "sy_normal_config", in the headers that this library was built with. Covers all
/// structs of include/switchyard/c that begin with `struct_size`, including those of the library switchyard_layer. A binding
/// with a larger size was made for a newer library; one with a smaller size leaves members at their defaults. Errors:
/// invalid_argument if there is no such struct or a pointer is NULL.
sy_code sy_struct_bytes(const char* name, size_t* bytes);

#ifdef __cplusplus
}
#endif
