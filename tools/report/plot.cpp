// SPDX-License-Identifier: Apache-2.0
#include "report/plot.hpp"

#include <fmt/core.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cli/outputs.hpp"
#include "cli/verb.hpp"
#include "measure/result_file.hpp"
#include "report/bench_page.hpp"
#include "report/plan_page.hpp"
#include "report/tune_page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

json document_in(const std::string& path) {
  std::ifstream in(path);
  if (!in || std::filesystem::is_directory(path))
    throw UsageError(
        fmt::format("FILE: '{}' given, which cannot be read; allowed: what bench, tune or plan wrote with --json", path));
  try {
    return json::parse(in);
  } catch (const json::parse_error& e) {
    throw std::runtime_error(fmt::format("{}: not JSON: {}", path, e.what()));
  }
}

std::string page_of(const json& document, const std::string& path) {
  const json schema = document.is_object() ? document.value("schema", json()) : json();
  try {
    if (schema == "switchyard.bench/1") return bench_html(document);
    if (schema == "switchyard.tune/1") return tune_html(document);
    if (schema == "switchyard.plan/1") return plan_html(document);
  } catch (const json::exception& e) {
    throw std::runtime_error(fmt::format("{}: something is missing that bench, tune and plan write: {}", path, e.what()));
  }
  throw UsageError(
      fmt::format("FILE: '{}' given, which does not say that its schema is switchyard.bench/1, switchyard.tune/1 or "
                  "switchyard.plan/1",
                  path));
}

}  // namespace

int run_plot(const PlotOptions& options) {
  const std::string html =
      !options.html_path.empty() ? options.html_path : std::filesystem::path(options.file).replace_extension(".html").string();
  const json document = document_in(options.file);
  std::error_code not_there;
  if (std::filesystem::equivalent(options.file, html, not_there))
    throw UsageError(fmt::format("--html: '{}' given, which is FILE itself; allowed: another file", html));
  const std::string page = page_of(document, options.file);
  check_outputs({{"--html", html, page.size()}});
  measure::write_file(html, page);
  if (html != measure::kStandardOutput) fmt::print("written to {}\n", html);
  return kExitOk;
}

}  // namespace switchyard::tool
