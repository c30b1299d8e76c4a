// SPDX-License-Identifier: Apache-2.0
#include "report/plot.hpp"

#include <fmt/core.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/json_input.hpp"
#include "cli/outputs.hpp"
#include "cli/verb.hpp"
#include "measure/result_file.hpp"
#include "report/bench_page.hpp"
#include "report/plan_page.hpp"
#include "report/tune_page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

std::string page_of(const json& document, const InputFile& file) {
  const json schema = document.is_object() ? document.value("schema", json()) : json();
  try {
    if (schema == "switchyard.bench/1") return bench_html(document);
    if (schema == "switchyard.tune/1") return tune_html(document);
    if (schema == "switchyard.plan/1") return plan_html(document);
  } catch (const json::exception& e) {
    refuse(file, std::string("lacks figures of its schema: ") + e.what());
  }
  refuse(file, "has a schema other than switchyard.bench/1, switchyard.tune/1 and switchyard.plan/1");
}

}  // namespace

int run_plot(const PlotOptions& options) {
  const std::string html =
      !options.html_path.empty() ? options.html_path : std::filesystem::path(options.file).replace_extension(".html").string();
  const InputFile file{"FILE", options.file, "JSON that bench, tune or plan wrote with --json"};
  const json document = read_json(file);
  std::error_code ignored;
  if (std::filesystem::equivalent(options.file, html, ignored))
    throw UsageError(fmt::format("--html: '{}' given, which is FILE itself; allowed: another file", html));
  const std::string page = page_of(document, file);
  check_outputs({{"--html", html, page.size()}});
  measure::write_file(html, page);
  if (html != measure::kStandardOutput) fmt::print("written to {}\n", html);
  return kExitOk;
}

}  // namespace switchyard::tool
