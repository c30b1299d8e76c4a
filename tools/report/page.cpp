// SPDX-License-Identifier: Apache-2.0
#include "report/page.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "cli/style.hpp"
#include "report/assets.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// Description of the machine, or "" for figures that were not measured.
std::string machine_of(const json& d) {
  std::string out;
  if (!d.contains("machine")) return out;
  if (d.contains("gpus")) {
    const json& names = d.at("gpus").at("names");
    out = fmt::format("{} x {}, ", names.size(), names.empty() ? "GPU" : names[0].get<std::string>());
  }
  const json& m = d.at("machine");
  return out + m.value("cpu", std::string("CPU")) + fmt::format(", {}", counted(m.value("usable_cores", int64_t{0}), "core")) +
         "; ";
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string page_head(const std::string& title, const std::string& lead, const json& document) {
  std::string page =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n<title>" +
      title + "</title>\n<style>";
  page += kPageStyle;
  page += kPlotStyle;
  return page + fmt::format(
                    "</style>\n</head>\n<body>\n<header><div class=\"head\"><h1>{}</h1></div>\n"
                    "<p class=\"lead\">{}<br>{}commit {}, {}</p></header>\n<main>\n",
                    title, lead, escaped(machine_of(document)), escaped(document.value("commit", std::string())),
                    escaped(document.value("date", std::string())));
}

}  // namespace switchyard::tool
