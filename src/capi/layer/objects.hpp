// SPDX-License-Identifier: Apache-2.0
// Helpers shared by the layer library's C functions.
#pragma once

#include <memory>

#include "capi/guarded.hpp"
#include "capi/layer/structs.hpp"

namespace switchyard::detail {

/// Creates the object `*out`, called `name` in errors: `make()` returns its C++ object, the first member of Object.
template <class Object, class Make>
sy_code make_object(const char* name, Object** out, Make&& make) noexcept {
  if (out) *out = nullptr;
  return guarded([&] {
    require(out, name);
    *out = std::make_unique<Object>(Object{make()}).release();
  });
}

}  // namespace switchyard::detail
