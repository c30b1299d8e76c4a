// SPDX-License-Identifier: Apache-2.0
#include "cli/json_input.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/verb.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// A message from the parser, without its tag. It is printable, on one line and of limited length, because a file may contain
/// any bytes.
std::string readable(std::string what) {
  const size_t tag = what.find("[json.exception"), end = what.find("] ", tag);
  if (tag != std::string::npos && end != std::string::npos) what.erase(tag, end + 2 - tag);
  for (const char* words : {"parse error at ", "parse error: ", "syntax error "})
    if (const size_t at = what.find(words); at != std::string::npos) what.erase(at, std::strlen(words));
  std::replace_if(
      what.begin(), what.end(), [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
  constexpr size_t kMax = 200;
  return what.size() > kMax ? what.substr(0, kMax) + "..." : what;
}

}  // namespace

void refuse(const InputFile& file, const std::string& problem) {
  throw UsageError(fmt::format("{}: '{}' given, which {}; allowed: {}", file.flag, file.path, readable(problem), file.allowed));
}

json read_json(const InputFile& file) {
  errno = 0;
  std::ifstream in(file.path, std::ios::binary);
  if (!in) refuse(file, fmt::format("cannot be read: {}", std::strerror(errno)));
  std::error_code ignored;
  if (std::filesystem::is_directory(file.path, ignored)) refuse(file, fmt::format("cannot be read: {}", std::strerror(EISDIR)));
  const int first = in.peek();
  if (first == std::ifstream::traits_type::eof()) refuse(file, "is empty");
  if (first == 0x1f)
    refuse(file, fmt::format("is compressed with gzip; decompress it first: gzip -dc '{}' > decompressed.json", file.path));
  try {
    return json::parse(in);
  } catch (const json::exception& e) {
    refuse(file, std::string("is not JSON: ") + e.what());
  }
}

}  // namespace switchyard::tool
