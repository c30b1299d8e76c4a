// SPDX-License-Identifier: Apache-2.0
// Options of calls whose C struct has the member known_memory, which the C++ struct does not have: the C layer passes it beside
// the options (exchange/normal/known_memory.hpp, exchange/low_latency/known_memory.hpp).
#pragma once

#include <utility>

#include "capi/structs.hpp"

namespace switchyard::detail {

template <class Options>
struct CallOptions {
  decltype(twin_of(std::declval<const Options&>(), "")) twin{};
  bool known_memory = kInit<Options>.known_memory != 0;
};

/// Converts a struct that has been read.
template <class Options>
CallOptions<Options> call_options(const Options& read) {
  return {twin_of(read, "options"), to_bool_of("options", "known_memory", read.known_memory)};
}

/// Reads a struct of any version; null means defaults. Throws ArgumentError.
template <class Options>
CallOptions<Options> read_options(const Options* given) {
  if (!given) return {};
  return call_options(read_struct(given, kInit<Options>, "options"));
}

}  // namespace switchyard::detail
