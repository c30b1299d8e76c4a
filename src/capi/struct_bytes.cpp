// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>

#include "capi/guarded.hpp"
#include "switchyard/c/binding.h"
#include "switchyard/c/gemm_gradients.h"
#include "switchyard/c/layer.h"
#include "switchyard/c/expert_map.h"
#include "switchyard/c/ledger.h"
#include "switchyard/c/low_latency.h"
#include "switchyard/c/trace.h"
#include "switchyard/c/tuning.h"

using namespace switchyard::detail;

namespace {

struct NamedSize {
  const char* name;
  size_t bytes;
};

constexpr NamedSize kStructs[] = {
#define SY_STRUCT(name) {#name, sizeof(name)},
#include "capi/structs.def"
};

}  // namespace

extern "C" sy_code sy_struct_bytes(const char* name, size_t* bytes) {
  return guarded([&] {
    require(name, "name");
    require(bytes, "bytes");
    for (const NamedSize& known : kStructs) {
      if (std::strcmp(known.name, name) == 0) {
        *bytes = known.bytes;
        return;
      }
    }
    throw ArgumentError("name = \"" + std::string(name) + "\": must be a struct of include/switchyard/c");
  });
}
