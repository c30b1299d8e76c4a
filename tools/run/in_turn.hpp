// SPDX-License-Identifier: Apache-2.0
// A series of measurements that may end early. The results of finished measurements are kept.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "cli/progress.hpp"

namespace switchyard::tool {

/// The reason why a series of measurements ended early, if it did.
struct Stopped {
  std::string what;
  std::exception_ptr error;
  std::shared_ptr<const void> guard;  ///< keeps signals from ending the program, so results can be written
  /// The exit status. Call it after the results are written. \throws the error, or ends the program like Ctrl-C
  int status(bool passed) const;
};
/// Calls one(0), one(1), ..., each of which returns the final text of its stage of `progress`. An exception from the first call
/// is rethrown; an exception from a later call ends the series and is returned. The first Ctrl-C, SIGTERM or SIGHUP also ends
/// the series as soon as the current call returns; ranks started by a launcher are ended at once.
Stopped in_turn(Progress& progress, size_t count, const std::function<std::string(size_t)>& one);

}  // namespace switchyard::tool
