// SPDX-License-Identifier: Apache-2.0
// The web parts of the pages, embedded from assets/ when the tool is built (CMakeLists.txt of this folder).
#pragma once

namespace switchyard::tool {

extern const char* const kPageStyle;   ///< of every page
extern const char* const kPlotStyle;   ///< of pages with plots besides
extern const char* const kDemoBody;    ///< of the demo's report, as
extern const char* const kDemoScript;  ///< its script fills it

}  // namespace switchyard::tool
