// SPDX-License-Identifier: Apache-2.0
// `switchyard plot`: the page of figures that were measured earlier.
#pragma once

#include <string>

#include "cli/verb.hpp"

namespace switchyard::tool {

extern const Verb kPlotVerb;

struct PlotOptions {
  std::string file;       ///< what `bench --json`, `tune --json` or `plan --json` wrote
  std::string html_path;  ///< empty: `file` with .html in place of its ending
};

/// Writes what --html of that run wrote. \throws UsageError, std::runtime_error \returns the exit status
int run_plot(const PlotOptions& options);

}  // namespace switchyard::tool
