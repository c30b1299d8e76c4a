// SPDX-License-Identifier: Apache-2.0
#include "cli/build_info.hpp"

#include <fmt/core.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "switchyard/version.h"

// CMake sets these; the defaults are for manual builds.
#ifndef SWITCHYARD_COMMIT
#define SWITCHYARD_COMMIT "unknown"
#endif
#ifndef SWITCHYARD_BUILT_BACKENDS
#define SWITCHYARD_BUILT_BACKENDS "cpu"
#endif
#ifndef SWITCHYARD_BUILD_KIND
#define SWITCHYARD_BUILD_KIND ""
#endif
#ifndef SWITCHYARD_SOURCE_DATA_DIR
#define SWITCHYARD_SOURCE_DATA_DIR ""
#endif

namespace switchyard::tool {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> data_dirs() {
  std::vector<fs::path> dirs;
  if (const char* chosen = std::getenv("SWITCHYARD_DATA_DIR")) dirs.emplace_back(chosen);
  const fs::path bin = fs::path(executable_path()).parent_path();
  dirs.push_back(bin.parent_path() / "share" / "switchyard");  // an installation or a bundle
  dirs.push_back(bin.parent_path() / "data");
  const std::string source = SWITCHYARD_SOURCE_DATA_DIR;
  if (!source.empty()) dirs.emplace_back(source);
  for (fs::path up = bin; up.has_relative_path(); up = up.parent_path())
    dirs.push_back(up / "data");  // a build tree inside the source tree
  return dirs;
}

}  // namespace

std::string version() { return SY_VERSION_STRING; }
std::string source_commit() { return SWITCHYARD_COMMIT; }

std::string build_description() {
#if defined(__clang__)
  const std::string compiler = fmt::format("clang {}.{}", __clang_major__, __clang_minor__);
#else
  const std::string compiler = fmt::format("gcc {}.{}", __GNUC__, __GNUC_MINOR__);
#endif
  const std::string kind = SWITCHYARD_BUILD_KIND;
  return fmt::format("{}, commit {}, {}{}, backends: {}", version(), source_commit(), compiler, kind.empty() ? "" : ", " + kind,
                     SWITCHYARD_BUILT_BACKENDS);
}

std::string executable_path() {
  std::error_code error;
  const fs::path path = fs::read_symlink("/proc/self/exe", error);
  return error ? "" : path.string();
}

std::string find_data_file(const std::string& relative) {
  std::error_code error;
  for (const fs::path& dir : data_dirs()) {
    if (fs::is_regular_file(dir / relative, error)) return (dir / relative).lexically_normal().string();
  }
  return "";
}

std::string data_search_path(const std::string& relative) {
  std::string out;
  for (const fs::path& dir : data_dirs()) out += (out.empty() ? "" : ", ") + (dir / relative).lexically_normal().string();
  return out;
}

}  // namespace switchyard::tool
