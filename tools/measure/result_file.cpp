// SPDX-License-Identifier: Apache-2.0
#include "measure/result_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace switchyard::measure {
namespace {

namespace fs = std::filesystem;

bool is_device_or_pipe(const fs::file_status& status) {
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

/// The file to which `path` resolves.
fs::path target_of(const std::string& path) {
  std::error_code ignored;
  const fs::path target = fs::canonical(path, ignored);
  return ignored ? fs::path(path) : target;
}

/// This process's temporary file.
fs::path draft_of(const fs::path& target) {
  return target.parent_path() / (".switchyard-" + std::to_string(getpid()) + ".tmp");
}

/// Writes the file. \returns "" or the error
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
  if (error) problem = written(target, text);  // the file is a mount point
  fs::remove(draft, error);
  return problem;
}

/// Descriptor of the original standard output after it has been claimed.
int standard_output = STDOUT_FILENO;

std::string written_to_standard_output(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(standard_output, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::strerror(errno);
    done += static_cast<size_t>(n);
  }
  return "";
}

}  // namespace

void claim_standard_output() {
  if (standard_output != STDOUT_FILENO) return;
  std::fflush(stdout);
  const int kept = ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (kept < 0 || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0)
    throw std::runtime_error(std::string("cannot write standard output: ") + std::strerror(errno));
  standard_output = kept;
}

void write_file(const std::string& path, const std::string& text) {
  if (path == kStandardOutput) {
    const std::string problem = written_to_standard_output(text);
    if (!problem.empty()) throw std::runtime_error("cannot write standard output: " + problem);
    return;
  }
  std::error_code ignored;
  const fs::file_status before = fs::status(path, ignored);
  const std::string problem = is_device_or_pipe(before) ? written(path, text) : replaced(target_of(path), before, text);
  if (!problem.empty()) throw std::runtime_error("cannot write " + path + ": " + problem);
}

std::string why_not_writable(const std::string& path, size_t least) {
  if (path == kStandardOutput) return "";
  std::error_code error;
  const fs::file_status before = fs::status(path, error);
  if (fs::is_directory(before)) return std::strerror(EISDIR);
  if (fs::exists(before) && access(path.c_str(), W_OK) != 0) return std::strerror(errno);
  if (is_device_or_pipe(before)) return "";
  const fs::path draft = draft_of(target_of(path));
  std::string problem = written(draft, std::string(least, ' '));  // fails on a full disk or at a file size limit
  fs::remove(draft, error);
  return problem;
}

}  // namespace switchyard::measure
