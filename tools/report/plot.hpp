// SPDX-License-Identifier: Apache-2.0
// `switchyard plot`: generates the page for an earlier measurement.
#pragma once

#include <string>

#include "cli/verb.hpp"

namespace switchyard::tool {

extern const Verb kPlotVerb;

struct PlotOptions {
  std::string file;       ///< output of `bench --json`, `tune --json` or `plan --json`
  std::string html_path;  ///< empty: `file` with the extension .html
};

/// Writes the page that --html would have written in that run. \throws UsageError, std::runtime_error \returns the exit status
int run_plot(const PlotOptions& options);

}  // namespace switchyard::tool
