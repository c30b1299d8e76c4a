// SPDX-License-Identifier: Apache-2.0
// Interface of the tool's verbs, and the tool's exit statuses.
#pragma once

#include <functional>
#include <stdexcept>

namespace switchyard::tool {

class Options;

/// Exit statuses, as documented in docs/cli.md.
enum ExitCode : int { kExitOk = 0, kExitCheckFailed = 1, kExitUsage = 2, kExitRuntime = 3 };

/// The command line is invalid; the exit status is 2. The text names the flag, its value and the allowed values.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Runs a verb with the parsed options. \returns the exit status
using VerbRun = std::function<int()>;

/// A verb, defined in its own folder next to its implementation. tools/verbs.cpp lists all verbs.
struct Verb {
  const char* name;
  const char* help;                  ///< one line, for the list of verbs
  VerbRun (*add)(Options& options);  ///< declares the options; the returned function holds their values
};

}  // namespace switchyard::tool
