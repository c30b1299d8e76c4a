// SPDX-License-Identifier: Apache-2.0
#include "report/assets.hpp"

namespace switchyard::tool {

const char* const kPageStyle =
#include "page.css.inc"
    ;
const char* const kPlotStyle =
#include "plots.css.inc"
    ;
const char* const kDemoBody =
#include "demo.html.inc"
    ;
const char* const kDemoScript =
#include "demo.js.inc"
    ;

}  // namespace switchyard::tool
