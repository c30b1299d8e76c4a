// SPDX-License-Identifier: Apache-2.0
#include "protocol/flat_function.hpp"

namespace harness {

switchyard::RowFunction flat_function(float offset) { return switchyard::RowFunction::on_cpu(FlatFunction{offset}); }

}  // namespace harness
