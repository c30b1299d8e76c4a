// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI for bindings of other languages, which write down what a C compiler would read from the headers: what they check when
/// they load the library.
#pragma once

#include <stddef.h>

#include "switchyard/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Size of the struct `name`, for example "sy_normal_config", in the headers that this library was built with. All structs of
/// include/switchyard/c that begin with `struct_size` are known, those of the library switchyard_layer too. A binding that
/// counts more bytes was made for a newer library, and one that counts fewer leaves members at their defaults. Errors:
/// invalid_argument if there is no such struct or a pointer is NULL.
switchyard_code_t sy_struct_bytes(const char* name, size_t* bytes);

#ifdef __cplusplus
}
#endif
