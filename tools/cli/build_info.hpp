// SPDX-License-Identifier: Apache-2.0
// Identity of this build and location of its data files.
#pragma once

#include <string>

namespace switchyard::tool {

/// Version, as in "0.2.0".
std::string version();
/// `git describe` at configuration time, or "unknown".
std::string source_commit();
/// Version, commit, compiler and build type in one line.
std::string build_description();
/// Path of the running executable.
std::string executable_path();
/// Path of `relative` below the source tree, the installed share folder or a bundle, whichever is found first; "" if none
/// contains it. SWITCHYARD_DATA_DIR is searched first, if set.
std::string find_data_file(const std::string& relative);
/// The locations searched by find_data_file, for error messages.
std::string data_search_path(const std::string& relative);

}  // namespace switchyard::tool
