// SPDX-License-Identifier: Apache-2.0
#include "report_html.hpp"

namespace switchyard::tool {

const char* const kReportStyle = R"css(
:root {
  --page: #f7f7f5; --card: #ffffff; --ink: #1c1c1a; --muted: #66655f; --line: #e3e2dd; --good: #0f7a43; --bad: #c22f2f;
  --move: #2a78d6; --compute: #169a6b; --plan: #6a55c9; --wait: #d4d3cd; --user: #b8860b; --call: #8d8c86; --accent: #2a78d6;
  --heat0: 235,242,251; --heat1: 18,74,145; --band: #f0efeb; --bar: #2a78d6; --peak: #d9622b; color-scheme: light;
}
@media (prefers-color-scheme: dark) { :root:not([data-theme="light"]) {
  --page: #121211; --card: #1c1c1a; --ink: #f1f0ec; --muted: #a5a49d; --line: #363632; --good: #4cc38a; --bad: #ff7a70;
  --move: #4a94ea; --compute: #25b883; --plan: #9a8af0; --wait: #4a4a45; --user: #d6a93a; --call: #8d8c86; --accent: #4a94ea;
  --heat0: 27,38,54; --heat1: 120,184,255; --band: #242421; --bar: #4a94ea; --peak: #f08a55; color-scheme: dark;
} }
:root[data-theme="dark"] {
  --page: #121211; --card: #1c1c1a; --ink: #f1f0ec; --muted: #a5a49d; --line: #363632; --good: #4cc38a; --bad: #ff7a70;
  --move: #4a94ea; --compute: #25b883; --plan: #9a8af0; --wait: #4a4a45; --user: #d6a93a; --call: #8d8c86; --accent: #4a94ea;
  --heat0: 27,38,54; --heat1: 120,184,255; --band: #242421; --bar: #4a94ea; --peak: #f08a55; color-scheme: dark;
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 28px 20px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 16px; margin: 0 0 10px; }
h2.second { margin-top: 22px; }
.head { display: flex; align-items: center; gap: 14px; flex-wrap: wrap; }
.lead { color: var(--muted); margin: 6px 0 20px; }
#verdict { font-weight: 700; padding: 3px 14px; border-radius: 999px; border: 2px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); }
button { font: inherit; font-size: 13px; color: var(--ink); background: var(--card); border: 1px solid var(--line);
  border-radius: 7px; padding: 4px 11px; cursor: pointer; }
button:hover { border-color: var(--muted); }
button[aria-pressed="true"] { background: var(--accent); border-color: var(--accent); color: #fff; }
#theme { margin-left: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin-bottom: 16px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 11px; }
.tile { padding: 12px 14px; }
.tile .label { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.3; }
.tile .note { color: var(--muted); font-size: 12px; margin: 0; line-height: 1.35; }
.card { padding: 16px 18px; margin-bottom: 16px; min-width: 0; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; align-items: stretch; }
@media (max-width: 860px) { .two { grid-template-columns: 1fr; gap: 0; } }
.note { color: var(--muted); font-size: 13px; margin: 10px 0 0; }
.switch { display: flex; gap: 6px; flex-wrap: wrap; margin-bottom: 10px; }
.bar { display: flex; justify-content: space-between; gap: 8px 20px; flex-wrap: wrap; align-items: center; margin-bottom: 4px; }
#legend { display: flex; gap: 14px; flex-wrap: wrap; font-size: 13px; color: var(--muted); }
#legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
svg { display: block; width: 100%; font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
svg text { fill: var(--muted); } svg text.strong { fill: var(--ink); } svg .axis { stroke: var(--line); }
#timeline svg { touch-action: pan-y; cursor: grab; user-select: none; }
#timeline svg.dragging { cursor: grabbing; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--muted); padding: 4px 8px; white-space: nowrap; }
td { text-align: right; padding: 3px 8px; border-top: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
#meta td:first-child { color: var(--muted); width: 130px; }
#meta td { text-align: left; white-space: normal; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.check { display: flex; gap: 10px; padding: 6px 0; border-top: 1px solid var(--line); font-size: 14px; }
.check:first-child { border-top: 0; }
.check b { font-size: 12px; padding-top: 2px; }
.check small { display: block; color: var(--muted); font-size: 12.5px; }
#tip { position: fixed; pointer-events: none; opacity: 0; z-index: 9; background: var(--ink); color: var(--page);
  padding: 6px 10px; border-radius: 7px;
  font-size: 13px; line-height: 1.4; max-width: 320px; white-space: pre-line; box-shadow: 0 4px 16px rgba(0,0,0,.25); }
@media print { #theme, .switch { display: none; } body { max-width: none; } .card { break-inside: avoid; } }
)css";

}  // namespace switchyard::tool
