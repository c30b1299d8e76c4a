// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard plot`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "report/plot.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, PlotOptions& o) {
  add.group("What to plot");
  add.argument("FILE", o.file, "Figures that bench, tune or plan wrote with --json, here or elsewhere");
  add.group("Output");
  add.file("--html", o.html_path, "The page; by itself FILE with .html in place of its ending");
  add.footer(
      "\nNothing is measured: the page is the one that --html of that run writes.\n"
      "\nExample:\n"
      "  switchyard plot results.json --html results.html\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<PlotOptions>();
  declare(options, *o);
  return [o] { return run_plot(*o); };
}

}  // namespace

const Verb kPlotVerb{"plot", "Write the page with plots for figures that were measured or predicted earlier", add};

}  // namespace switchyard::tool
