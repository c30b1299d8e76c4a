// SPDX-License-Identifier: Apache-2.0
#include "result_file.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace switchyard::bench {
namespace {

namespace fs = std::filesystem;

bool is_device_or_pipe(const fs::file_status& status) {
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

/// The file that `path` leads to.
fs::path target_of(const std::string& path) {
  std::error_code not_there;
  const fs::path target = fs::canonical(path, not_there);
  return not_there ? fs::path(path) : target;
}

/// The new file, of this process.
fs::path draft_of(const fs::path& target) {
  return target.parent_path() / (".switchyard-" + std::to_string(getpid()) + ".tmp");
}

/// "" or what went wrong.
std::string written(const fs::path& path, const std::string& text) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  return out ? "" : std::strerror(errno);
}

std::string replaced(const fs::path& target, const fs::file_status& before, const std::string& text) {
  const fs::path draft = draft_of(target);
  std::string problem = written(draft, text);
  std::error_code error;
  if (problem.empty() && fs::exists(before)) fs::permissions(draft, before.permissions(), error);
  if (problem.empty() && !error) fs::rename(draft, target, error);
  if (error) problem = written(target, text);  // a mount of its own
  fs::remove(draft, error);
  return problem;
}

}  // namespace

void write_file(const std::string& path, const std::string& text) {
  std::error_code not_there;
  const fs::file_status before = fs::status(path, not_there);
  const std::string problem = is_device_or_pipe(before) ? written(path, text) : replaced(target_of(path), before, text);
  if (!problem.empty()) throw std::runtime_error("cannot write " + path + ": " + problem);
}

std::string why_not_writable(const std::string& path) {
  std::error_code error;
  const fs::file_status before = fs::status(path, error);
  if (fs::is_directory(before)) return std::strerror(EISDIR);
  if (fs::exists(before) && access(path.c_str(), W_OK) != 0) return std::strerror(errno);
  if (is_device_or_pipe(before)) return "";
  const fs::path draft = draft_of(target_of(path));
  std::string problem = written(draft, "");
  fs::remove(draft, error);
  return problem;
}

}  // namespace switchyard::bench
