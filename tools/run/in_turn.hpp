// SPDX-License-Identifier: Apache-2.0
// A series of measurements that may end before its last one: what was measured is kept.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "cli/progress.hpp"

namespace switchyard::tool {

/// What ended a series of measurements before its last one, if anything did.
struct Stopped {
  std::string what;
  std::exception_ptr error;
  std::shared_ptr<const void> guard;  ///< while it lives, a signal does not end the program: what was measured gets written
  /// The exit status. \throws the error, or ends the program as Ctrl-C does: call it when what was measured is written
  int status(bool passed) const;
};
/// Calls one(0), one(1), ..., each of which returns the words that its stage of `progress` ends with. What the first call
/// throws is thrown, what a later one throws ends the series and is returned. So does the first Ctrl-C, SIGTERM or SIGHUP, when
/// the call under way has returned; ranks of a launcher it ends at once.
Stopped in_turn(Progress& progress, size_t count, const std::function<std::string(size_t)>& one);

}  // namespace switchyard::tool
