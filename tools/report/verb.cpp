// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard plot`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "report/plot.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, PlotOptions& o) {
  add.group("What to plot");
  add.argument("FILE", o.file, "JSON that bench, tune or plan wrote with --json, on any machine");
  add.group("Output");
  add.file("--html", o.html_path, "The page [FILE with the extension .html]");
  add.footer(
      "\nNothing is measured. The page is identical to the one that --html writes during the run.\n"
      "\nExample:\n"
      "  switchyard plot results.json --html results.html\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<PlotOptions>();
  declare(options, *o);
  return [o] { return run_plot(*o); };
}

}  // namespace

const Verb kPlotVerb{"plot", "Write a page of plots from the JSON of an earlier bench, tune or plan", add};

}  // namespace switchyard::tool
