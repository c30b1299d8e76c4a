// SPDX-License-Identifier: Apache-2.0
#include "demo/demo.hpp"
#include "verbs.hpp"

namespace switchyard::tool {

std::span<const Verb* const> all_verbs() {
  static constexpr const Verb* kVerbs[] = {&kDemoVerb};
  return kVerbs;
}

}  // namespace switchyard::tool
