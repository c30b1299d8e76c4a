// SPDX-License-Identifier: Apache-2.0
// What a verb of the tool is, and how it ends.
#pragma once

#include <functional>
#include <stdexcept>

namespace switchyard::tool {

class Options;

/// Exit statuses, as documented in docs/cli.md.
enum ExitCode : int { kExitOk = 0, kExitCheckFailed = 1, kExitUsage = 2, kExitRuntime = 3 };

/// The command line is wrong: exit status 2. The text names the flag, what was given and what is allowed.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Runs a verb with the options that were given. \returns the exit status
using VerbRun = std::function<int()>;

/// One verb. Its room defines it next to what it does; tools/verbs.cpp lists all of them.
struct Verb {
  const char* name;
  const char* help;                  ///< one line, for the list of verbs
  VerbRun (*add)(Options& options);  ///< declares the options; what it returns holds their values
};

}  // namespace switchyard::tool
