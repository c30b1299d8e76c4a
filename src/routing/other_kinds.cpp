// SPDX-License-Identifier: Apache-2.0
// Recognizes, by their first bytes, files of other kinds that were passed in place of a recording.
#include <algorithm>
#include <string_view>

#include "routing/tensor_file.hpp"

namespace switchyard::detail {
namespace {

using namespace std::string_view_literals;

constexpr size_t kLongestStart = 512;

struct Kind {
  std::string_view start;
  const char* text;  ///< kind of the file, and how to proceed
};
constexpr Kind kKinds[] = {
    {"version https://git-lfs.github.com/spec/"sv, "a Git LFS pointer (git lfs pull fetches the file that it stands for)"},
    {"\x1f\x8b\x08"sv, "a gzip file (decompress it: gunzip)"},
    {"\x28\xb5\x2f\xfd"sv, "a zstd file (decompress it: unzstd)"},
    {"\xfd\x37zXZ\0"sv, "an xz file (decompress it: unxz)"},
    {"BZh"sv, "a bzip2 file (decompress it: bunzip2)"},
    {"PK\x05\x06"sv, "an empty zip archive"},
    {"\x89HDF\r\n\x1a\n"sv, "an HDF5 file (save the ids with numpy.save or safetensors instead)"},
    {"PAR1"sv, "a Parquet file (save the ids with numpy.save or safetensors instead)"},
};
constexpr const char* kTorch = "a PyTorch file (torch.load it, then save its tensors with safetensors.torch.save_file)";

constexpr const char* kBase64 =
    "base64 text (base64.b64decode it, numpy.frombuffer with the type and shape that its maker names, then numpy.save the ids)";
constexpr const char* kCsv = "CSV text (numpy.loadtxt with dtype=int and its delimiter, then numpy.save the ids)";

bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/// True for "<!DOCTYPE html", "<html", "<?xml" after optional blanks and a byte order mark, in upper or lower case.
bool begins_as_page(std::string_view text) {
  for (const std::string_view tag : {"<!doctype"sv, "<html"sv, "<head"sv, "<?xml"sv}) {
    const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
    if (text.size() >= tag.size() &&
        std::equal(tag.begin(), tag.end(), text.begin(), [&](char a, char b) { return a == lower(b); }))
      return true;
  }
  return false;
}

/// Kind of a zip archive, determined by the name of its first member.
const char* kind_of_zip(std::string_view start) {
  constexpr size_t kNameLength = 26, kName = 30;
  std::string_view name = start.substr(std::min(kName, start.size()));
  if (start.size() > kNameLength + 1) {
    const auto byte = [&](size_t at) { return static_cast<size_t>(static_cast<unsigned char>(start[at])); };
    name = name.substr(0, byte(kNameLength) | byte(kNameLength + 1) << 8);
  }
  if (name.ends_with(".npy")) return "a .npz archive (numpy.load it, then numpy.save its array topk_ids as .npy)";
  const std::string_view file = name.substr(name.rfind('/') + 1);
  for (const std::string_view member : {"data.pkl"sv, ".format_version"sv, "byteorder"sv, "version"sv})
    if (file == member) return kTorch;
  return "a zip archive (unpack it)";
}

/// Kind of a text file that is neither a web page nor JSON.
const char* kind_of_text(std::string_view text) {
  constexpr size_t kShortestBase64 = 32;
  const auto letter = [](char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); };
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto of_base64 = [&](char c) {
    return letter(c) || digit(c) || "+/-_="sv.find(c) != std::string_view::npos || c == '\n' || c == '\r';
  };
  const auto of_numbers = [&](char c) { return digit(c) || blank(c) || "+-.,;"sv.find(c) != std::string_view::npos; };
  if (text.empty()) return nullptr;
  const std::string_view line = text.substr(0, text.find('\n'));
  if (line.find_first_of(",;\t"sv) != std::string_view::npos ||
      (std::all_of(text.begin(), text.end(), of_numbers) && std::any_of(text.begin(), text.end(), blank)))
    return kCsv;
  return text.size() >= kShortestBase64 && std::all_of(text.begin(), text.end(), of_base64) ? kBase64 : nullptr;
}

const char* kind_of(std::string_view start) {
  for (const Kind& kind : kKinds)
    if (start.starts_with(kind.start)) return kind.text;
  if (start.starts_with("PK\x03\x04"sv)) return kind_of_zip(start);
  if (start.size() > 262 && start.substr(257, 5) == "ustar"sv) return "a tar archive (unpack it)";
  // A pickle with protocol 2 to 5; those written by PyTorch before 1.6 begin with a magic number.
  if (start.size() >= 2 && start[0] == '\x80' && start[1] >= 2 && start[1] <= 5)
    return start.find("\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv) < 8
               ? kTorch
               : "a Python pickle (load it, then save the ids with numpy.save or safetensors)";
  if (start.starts_with("\xef\xbb\xbf"sv)) start.remove_prefix(3);
  while (!start.empty() && blank(start.front())) start.remove_prefix(1);
  if (begins_as_page(start)) return "a web page, for example of a login or an error (download the file itself)";
  const bool text =
      std::all_of(start.begin(), start.end(), [](char c) { return blank(c) || static_cast<unsigned char>(c) >= ' '; });
  if (!text) return nullptr;
  if (start.starts_with('{') || start.starts_with('['))
    return "JSON text (save the ids with numpy.save or safetensors instead)";
  return kind_of_text(start);
}

}  // namespace

void refuse_other_kinds(const ByteSource& source) {
  std::string start(std::min<uint64_t>(source.size(), kLongestStart), '\0');
  source.read(0, std::as_writable_bytes(std::span(start)));
  // A header length that happens to match the magic of another kind is followed by JSON.
  if (start.size() > 8 && start.substr(4, 4) == "\0\0\0\0"sv && (start[8] == '{' || blank(start[8]))) return;
  if (const char* kind = kind_of(start)) malformed(source.name(), "file", "a safetensors or .npy file", kind);
}

}  // namespace switchyard::detail
