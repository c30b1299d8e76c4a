// SPDX-License-Identifier: Apache-2.0
// Options of calls whose C struct has the member known_memory, which the C++ struct does not have: the C layer passes it beside
// the options (known_memory.hpp of exchange/normal, exchange/low_latency and layer).
#pragma once

#include <utility>

#include "capi/structs.hpp"

namespace switchyard::detail {

template <class Options>
struct CallOptions {
  decltype(twin_of(std::declval<const Options&>(), "")) twin{};
  bool known_memory = kInit<Options>.known_memory != 0;
};

/// Converts a struct that has been read. `name`: the argument's name in errors.
template <class Options>
CallOptions<Options> call_options(const Options& read, const char* name = "options") {
  return {twin_of(read, name), to_bool_of(name, "known_memory", read.known_memory)};
}

/// Reads a struct of any version; null means defaults. Throws ArgumentError.
template <class Options>
CallOptions<Options> read_options(const Options* given, const char* name = "options") {
  if (!given) return {};
  return call_options(read_struct(given, kInit<Options>, name), name);
}

}  // namespace switchyard::detail
