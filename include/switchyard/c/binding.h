// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI for bindings in other languages: a binding duplicates the header declarations and therefore verifies them when it
/// loads the library.
#pragma once

#include <stddef.h>

#include "switchyard/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Size of the struct `name`, for example "sy_normal_config", in the headers with which this library was built. Covers all
/// structs of include/switchyard/c that begin with `struct_size`, including those of the library switchyard_layer. A binding
/// with a larger size was built for a newer library; with a smaller size, the members that it lacks keep their defaults.
/// Errors: invalid_argument if there is no such struct or a pointer is NULL.
sy_code sy_struct_bytes(const char* name, size_t* bytes);

#ifdef __cplusplus
}
#endif
