// SPDX-License-Identifier: Apache-2.0
// The pages' web assets, embedded from assets/ when the tool is built (CMakeLists.txt in this folder).
#pragma once

namespace switchyard::tool {

extern const char* const kPageStyle;   ///< style of every page
extern const char* const kPlotStyle;   ///< additional style of pages with plots
extern const char* const kDemoBody;    ///< body of the demo's report
extern const char* const kDemoScript;  ///< script that fills kDemoBody

}  // namespace switchyard::tool
