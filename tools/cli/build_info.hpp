// SPDX-License-Identifier: Apache-2.0
// Identity of this build, and the location of its data files.
#pragma once

#include <string>

namespace switchyard::tool {

/// Version, as in "0.1.0".
std::string version();
/// `git describe` at configure time, or "unknown".
std::string source_commit();
/// Version, commit, compiler and build type in one line.
std::string build_description();
/// Path of the running executable.
std::string executable_path();
/// Path of `relative` below the source tree, the installed share folder or a bundle, whichever exists first; "" if none does.
/// SWITCHYARD_DATA_DIR, if set, is searched first.
std::string find_data_file(const std::string& relative);
/// The places that find_data_file searched, for error messages.
std::string data_search_path(const std::string& relative);

}  // namespace switchyard::tool
