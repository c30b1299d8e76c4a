// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "routing/tensor_file.hpp"

namespace switchyard::detail {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr uint64_t kPreamble = 8;  // magic, major, minor
constexpr uint64_t kLargestNpyHeader = 1 << 20;
constexpr size_t kMaxDimensions = 8;

/// Reads the header: a Python dictionary with a string, a bool and a tuple of integers.
class NpyHeaderReader {
 public:
  NpyHeaderReader(const ByteSource& source, std::string_view text) : source_(source), text_(text) {}

  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;

  void read() {
    bool has_descr = false, has_order = false, has_shape = false;
    take('{', "'{'");
    while (!try_take('}')) {
      const std::string key = read_text("a quoted name or '}'");
      take(':', "':'");
      bool* has = key == "descr" ? &has_descr : key == "fortran_order" ? &has_order : key == "shape" ? &has_shape : nullptr;
      if (has == nullptr) bad("entries descr, fortran_order and shape", quote_text(key));
      if (std::exchange(*has, true)) bad("one entry " + key, "two");
      read_value(key);
      if (!try_take(',') && peek() != '}') bad("',' or '}'", rest());
    }
    if (peek() != '\0') bad("nothing after '}'", rest());
    if (!has_descr || !has_order || !has_shape) {
      bad(std::string("an entry ") + (!has_descr ? "descr" : !has_order ? "fortran_order" : "shape"), "none");
    }
  }

 private:
  [[noreturn]] void bad(const std::string& expected, const std::string& found) const {
    malformed(source_.name(), "header", expected, found);
  }
  std::string rest() const { return at_ < text_.size() ? quote_text(text_.substr(at_)) : "its end"; }

  /// Returns the next non-blank character, '\0' at the end.
  char peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool try_take(char c) {
    if (peek() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }
  void take(char c, const char* what) {
    if (!try_take(c)) bad(what, rest());
  }

  std::string read_text(const char* what) {
    const char quote = peek();
    if (quote != '\'' && quote != '"') bad(what, rest());
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) bad("a closing quote", rest());
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }

  void read_value(const std::string& key) {
    if (key == "descr") {
      if (peek() == '[') bad("descr of a plain number", "a structured type " + rest());
      descr = read_text("a quoted type as descr");
    } else if (key == "fortran_order") {
      const std::string_view left = (peek(), text_.substr(at_));
      if (!left.starts_with("True") && !left.starts_with("False")) bad("True or False as fortran_order", rest());
      fortran_order = left.starts_with("True");
      at_ += fortran_order ? 4 : 5;
    } else {
      read_shape();
    }
  }

  void read_shape() {
    take('(', "'(' before shape");
    while (!try_take(')')) {
      peek();
      int64_t extent = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), extent);
      if (error != std::errc() || extent < 0) bad("non-negative integers below 2^63 as shape", rest());
      if (shape.size() == kMaxDimensions) bad("at most " + std::to_string(kMaxDimensions) + " dimensions", "more");
      shape.push_back(extent);
      at_ = static_cast<size_t>(end - text_.data());
      try_take('L');  // written by Python 2
      if (!try_take(',') && peek() != ')') bad("',' or ')' in shape", rest());
    }
  }

  const ByteSource& source_;
  std::string_view text_;
  size_t at_ = 0;
};

ElementType type_of(const ByteSource& source, const std::string& descr) {
  constexpr std::pair<std::string_view, ElementType> kTypes[] = {
      {"|i1", ElementType::i8},  {"|u1", ElementType::u8},  {"<i2", ElementType::i16}, {"<u2", ElementType::u16},
      {"<i4", ElementType::i32}, {"<u4", ElementType::u32}, {"<i8", ElementType::i64}, {"<u8", ElementType::u64},
      {"<f4", ElementType::f32}, {"<f2", ElementType::f16}};
  for (const auto& [name, type] : kTypes)
    if (descr == name) return type;
  malformed(source.name(), "array", "descr '|i1', '<i2', '<i4', '<i8' or the same with u (ids), '<f4' or '<f2' (weights)",
            quote_text(descr) + (descr.starts_with('>') ? ", which is big endian" : ""));
}

}  // namespace

bool has_npy_magic(const ByteSource& source) {
  char start[kMagic.size()];
  if (source.size() < sizeof start) return false;
  source.read(0, std::as_writable_bytes(std::span(start)));
  return std::string_view(start, sizeof start) == kMagic;
}

TensorInfo parse_npy(const ByteSource& source) {
  const uint64_t size = source.size();
  if (!has_npy_magic(source)) {
    refuse_other_kinds(source);
    malformed(source.name(), "file", "the mark of .npy files in the first 6 bytes", "another beginning");
  }
  if (size < kPreamble + 4)
    malformed(source.name(), "file", "a .npy file of at least 12 bytes", std::to_string(size) + " bytes");
  unsigned char start[kPreamble + 4];
  source.read(0, std::as_writable_bytes(std::span(start)));
  const unsigned major = start[6];
  if (major < 1 || major > 3) {
    malformed(source.name(), "header", "format version 1, 2 or 3", std::to_string(major) + "." + std::to_string(start[7]));
  }
  const uint64_t length_bytes = major == 1 ? 2 : 4;
  uint64_t length = start[8] | uint64_t{start[9]} << 8;
  if (major != 1) length |= uint64_t{start[10]} << 16 | uint64_t{start[11]} << 24;
  const uint64_t limit = std::min(size - kPreamble - length_bytes, kLargestNpyHeader);
  if (length > limit) {
    malformed(source.name(), "header", "a length of at most " + std::to_string(limit), std::to_string(length));
  }
  std::string text(length, '\0');
  source.read(kPreamble + length_bytes, std::as_writable_bytes(std::span(text)));
  NpyHeaderReader reader(source, text);
  reader.read();

  TensorInfo info;
  info.label = "array";
  info.spelled_type = reader.descr;
  info.type = type_of(source, reader.descr);
  info.shape = std::move(reader.shape);
  info.offset = kPreamble + length_bytes + length;
  info.source = &source;
  if (reader.fortran_order) {
    malformed(source.name(), "array", "C order (save numpy.ascontiguousarray of it)", "fortran_order True");
  }
  uint64_t bytes = 0;
  const bool fits = tensor_bytes(info.shape, element_bytes(info.type), &bytes);
  if (!fits || bytes != size - info.offset) {
    malformed(source.name(), "array",
              (fits ? std::to_string(bytes) : std::string("more than 2^63")) + " bytes of data for " +
                  quote_text(info.spelled_type) + " " + shape_text(info.shape),
              std::to_string(size - info.offset));
  }
  return info;
}

}  // namespace switchyard::detail
