// SPDX-License-Identifier: Apache-2.0
#include "report/demo_page.hpp"

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "measure/result_file.hpp"
#include "report/assets.hpp"
#include "switchyard/status.hpp"

namespace switchyard::tool {
namespace {

/// JSON for embedding in a script element. It cannot contain the element's closing tag.
std::string embedded(const nlohmann::json& data) {
  const std::string text = data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

std::string report_html(const nlohmann::json& data) {
  std::string page = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  page +=
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Switchyard demo "
      "report</title>\n<style>";
  page += kPageStyle;
  page += "</style>\n</head>\n<body>";
  page += kDemoBody;
  page += "<script type=\"application/json\" id=\"data\">" + embedded(data) + "</script>\n<script>";
  page += kDemoScript;
  page += "</script>\n</body>\n</html>\n";
  return page;
}

void write_report(const std::string& path, const nlohmann::json& data) {
  try {
    measure::write_file(path, report_html(data));
  } catch (const std::runtime_error& error) {
    throw Error(ErrorCode::io, error.what());
  }
}

}  // namespace switchyard::tool
