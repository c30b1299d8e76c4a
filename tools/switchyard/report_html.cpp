// SPDX-License-Identifier: Apache-2.0
#include "report_html.hpp"

#include <stdexcept>

#include "../../bench/result_file.hpp"
#include "switchyard/status.hpp"

namespace switchyard::tool {
namespace {

/// JSON that may stand inside a script element: nothing in it can end the element.
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

constexpr const char* kBody = R"html(
<header>
  <div class="head"><h1>Switchyard demo</h1><span id="verdict"></span>
    <button id="theme" type="button">Light / dark</button></div>
  <p class="lead">One Mixture-of-Experts layer, run over several ranks: gate, dispatch, experts, combine. Every figure below is
    from this run.</p>
</header>
<noscript><p>This report draws itself with the script inside this file; switch JavaScript on to see it. Nothing is loaded from
  elsewhere.</p></noscript>
<main>
  <section id="tiles" class="tiles"></section>
  <div class="two">
    <section class="card"><h2>Traffic between ranks</h2><div class="switch" id="traffic-switch"></div><div id="traffic"></div>
      <p class="note" id="traffic-note"></p></section>
    <section class="card"><h2 id="throughput-title">Throughput against the copy limit</h2><div id="throughput"></div>
      <p class="note" id="throughput-note"></p>
      <h2 class="second">Checks</h2><div id="checks"></div></section>
  </div>
  <section class="card"><h2>Load of the experts</h2><div id="experts"></div><p class="note" id="experts-note"></p></section>
  <section class="card"><h2>Timeline</h2>
    <div class="bar"><div class="switch" id="timeline-switch"></div><div id="legend"></div></div>
    <div id="timeline"></div><p class="note" id="timeline-note"></p></section>
  <section class="card"><h2>Time by phase and rank</h2><div class="scroll" id="phases"></div>
    <p class="note">Milliseconds a step; of a rank with several workers, the one that spent most.</p></section>
  <section class="card"><h2>What was run</h2><div id="meta"></div></section>
</main>
<div id="tip" role="tooltip"></div>
)html";

}  // namespace

std::string report_html(const nlohmann::json& data) {
  std::string page = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  page +=
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Switchyard demo "
      "report</title>\n<style>";
  page += kReportStyle;
  page += "</style>\n</head>\n<body>";
  page += kBody;
  page += "<script type=\"application/json\" id=\"data\">" + embedded(data) + "</script>\n<script>";
  page += kReportScript;
  page += "</script>\n</body>\n</html>\n";
  return page;
}

void write_report(const std::string& path, const nlohmann::json& data) {
  try {
    bench::write_file(path, report_html(data));
  } catch (const std::runtime_error& error) {
    throw Error(ErrorCode::io, error.what());
  }
}

}  // namespace switchyard::tool
