// SPDX-License-Identifier: Apache-2.0
#include "tune/file.hpp"

#include <fmt/core.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "cli/words.hpp"
#include "switchyard/status.hpp"

namespace switchyard::tool {
namespace {

constexpr const char* kVariable = "SWITCHYARD_TUNING";

bool is_comment(const std::string& line) {
  const size_t begin = line.find_first_not_of(" \t");
  return begin != std::string::npos && line[begin] == '#';
}

}  // namespace

std::string read_or_new(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error) || std::filesystem::is_empty(path, error))
    return std::string(TuningFile::first_line()) + "\n";
  (void)TuningFile::read(path);
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string merged(const std::string& text, const std::vector<CommentedEntry>& entries) {
  std::vector<std::string> lines = split(text, '\n');
  std::set<size_t> gone;
  for (const TuningEntry& old : TuningFile::parse(text, "tuning").entries) {
    if (std::none_of(entries.begin(), entries.end(), [&](const CommentedEntry& e) { return e.entry.key == old.key; })) continue;
    size_t line = static_cast<size_t>(old.line) - 1;
    gone.insert(line);
    while (line > 1 && is_comment(lines[line - 1])) gone.insert(--line);
    if (line > 1 && lines[line - 1].empty()) gone.insert(line - 1);  // the empty line that separates it from the previous entry
  }
  std::string out;
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  for (size_t i = 0; i < lines.size(); ++i)
    if (gone.count(i) == 0) out += lines[i] + "\n";
  for (const CommentedEntry& e : entries) {
    out += "\n";
    for (const std::string& comment : e.comments) out += "# " + comment + "\n";
    out += e.entry.text() + "\n";
  }
  return out;
}

// The file is in memory, so forked ranks inherit it, and nothing is left behind wherever this process ends.
TuningOverride::TuningOverride() : file_(memfd_create("switchyard-tune", 0)) {
  const char* before = std::getenv(kVariable);
  was_set_ = before != nullptr;
  if (was_set_) before_ = before;
  if (file_ < 0) throw Error(ErrorCode::system, fmt::format("memfd_create: {}", std::strerror(errno)));
  set({});
  setenv(kVariable, fmt::format("/proc/self/fd/{}", file_).c_str(), 1);
}

TuningOverride::~TuningOverride() {
  if (was_set_)
    setenv(kVariable, before_.c_str(), 1);
  else
    unsetenv(kVariable);
  close(file_);
}

void TuningOverride::set(const std::vector<TuningEntry>& entries) {
  std::string text = std::string(TuningFile::first_line()) + "\n";
  for (const TuningEntry& entry : entries) text += entry.text() + "\n";
  if (ftruncate(file_, 0) != 0 || pwrite(file_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    throw Error(ErrorCode::system, fmt::format("memory for a tuning file: {}", std::strerror(errno)));
}

}  // namespace switchyard::tool
