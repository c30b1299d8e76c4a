# SPDX-License-Identifier: Apache-2.0
# switchyard_deps::dnnl, which only libswitchyard_layer needs. Also installed; include it after Dependencies.cmake.
include_guard(GLOBAL)
switchyard_find_library(dnnl oneapi/dnnl/dnnl.hpp dnnl libdnnl-dev)
