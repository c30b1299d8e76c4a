// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "routing/tensor_file.hpp"

namespace switchyard::detail {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLargestSafetensorsHeader = 100'000'000;  // the limit of the format's own library
constexpr const char* kMetadata = "__metadata__";

/// One header entry as written.
struct Entry {
  std::string dtype;
  std::vector<int64_t> shape, offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

/// Receives the header's JSON event by event, so that memory use is proportional to the data kept. A method that returns false
/// ends the parse; `part`, `expected` and `found` then give the reason.
class SafetensorsHeaderReader : public nlohmann::json_sax<json> {
 public:
  std::map<std::string, Entry> entries;
  std::map<std::string, std::string> metadata;
  std::string part = "header", expected, found;

  bool null() override { return skips() || (state_ == State::root && key_ == kMetadata) || unexpected("null"); }
  bool boolean(bool value) override { return skips() || unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return skips() || unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return skips() || unexpected(quote_text(text)); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (skips()) return true;
    if (list_ == nullptr || value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return unexpected(std::to_string(value));
    }
    list_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (skips()) {
      // a foreign field of an entry
    } else if (state_ == State::metadata) {
      metadata[key_] = value;
    } else if (state_ == State::tensor && key_ == "dtype") {
      entry_->dtype = value;
    } else {
      return unexpected(quote_text(value));
    }
    return true;
  }

  bool start_object(size_t) override {
    if (starts_skipped()) return true;
    if (state_ == State::start) {
      state_ = State::root;
    } else if (state_ == State::root) {
      state_ = key_ == kMetadata ? State::metadata : State::tensor;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (ends_skipped()) return true;
    if (state_ == State::tensor && !(entry_->has_dtype && entry_->has_shape && entry_->has_offsets)) {
      const char* missing = !entry_->has_dtype ? "dtype" : !entry_->has_shape ? "shape" : "data_offsets";
      return fail(std::string("an entry ") + missing, "none");
    }
    state_ = state_ == State::root ? State::end : State::root;
    part = "header";
    return true;
  }

  bool start_array(size_t) override {
    if (starts_skipped()) return true;
    if (state_ != State::tensor || list_ != nullptr) return unexpected("an array");
    list_ = key_ == "shape" ? &entry_->shape : key_ == "data_offsets" ? &entry_->offsets : nullptr;
    return list_ != nullptr || unexpected("an array");
  }

  bool end_array() override {
    if (ends_skipped()) return true;
    list_ = nullptr;
    return true;
  }

  bool key(string_t& name) override {
    if (skipped_depth_ > 0) return true;
    key_ = name;
    if (state_ == State::tensor) return mark_field();
    if (state_ == State::metadata)
      return metadata.emplace(name, "").second || fail("different names", quote_text(name) + " twice");
    if (name == kMetadata) {
      part = std::string("header entry ") + kMetadata;
      return !std::exchange(seen_metadata_, true) || fail("one such entry", "two");
    }
    part = "tensor " + quote_text(name);
    const auto [at, is_new] = entries.try_emplace(name);
    entry_ = &at->second;
    return is_new || fail("one tensor of this name", "two");
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    part = "header";
    // The JSON library's text without its bracketed code, which is of no use to users.
    std::string text = error.what();
    text = text.substr(std::min(text.size(), text.find(']') + 1));
    return fail("JSON", "an error at byte " + std::to_string(position) + ":" + text);
  }

 private:
  enum class State { start, root, metadata, tensor, end };

  bool fail(const std::string& want, const std::string& got) {
    expected = want;
    found = got;
    return false;
  }

  bool mark_field() {
    bool* has = key_ == "dtype"          ? &entry_->has_dtype
                : key_ == "shape"        ? &entry_->has_shape
                : key_ == "data_offsets" ? &entry_->has_offsets
                                         : nullptr;
    if (has == nullptr) return skip_next_ = true;  // the format's own library ignores other fields
    return !std::exchange(*has, true) || fail("one entry " + key_, "two");
  }

  /// True if a value belongs to an ignored field or is nested in one.
  bool skips() { return skipped_depth_ > 0 || std::exchange(skip_next_, false); }
  bool starts_skipped() {
    const bool skip = skips();
    if (skip) ++skipped_depth_;
    return skip;
  }
  bool ends_skipped() {
    if (skipped_depth_ == 0) return false;
    --skipped_depth_;
    return true;
  }

  bool unexpected(const std::string& got) {
    switch (state_) {
      case State::start:
      case State::end: return fail("a JSON object", got);
      case State::root: return fail("an object", got);
      case State::metadata: return fail("a text as value of " + quote_text(key_), got);
      case State::tensor: break;
    }
    if (key_ == "dtype") return fail("a text as dtype", got);
    return fail("non-negative integers as " + key_, got);
  }

  State state_ = State::start;
  std::string key_;
  Entry* entry_ = nullptr;
  std::vector<int64_t>* list_ = nullptr;
  bool seen_metadata_ = false;
  bool skip_next_ = false;     ///< the next value belongs to an ignored field
  int64_t skipped_depth_ = 0;  ///< number of open objects and arrays inside such a value
};

struct NamedType {
  const char* name;
  ElementType type;
  size_t bytes;
};
constexpr NamedType kTypes[] = {
    {"I8", ElementType::i8, 1},         {"U8", ElementType::u8, 1},         {"I16", ElementType::i16, 2},
    {"U16", ElementType::u16, 2},       {"I32", ElementType::i32, 4},       {"U32", ElementType::u32, 4},
    {"I64", ElementType::i64, 8},       {"U64", ElementType::u64, 8},       {"F32", ElementType::f32, 4},
    {"F16", ElementType::f16, 2},       {"BF16", ElementType::bf16, 2},     {"BOOL", ElementType::other, 1},
    {"F8_E4M3", ElementType::other, 1}, {"F8_E5M2", ElementType::other, 1}, {"F64", ElementType::other, 8},
};

/// Converts the entry to a tensor whose data lies within the `data_bytes` after the header.
TensorInfo check_entry(const ByteSource& source, const std::string& name, Entry& entry, uint64_t data_bytes) {
  TensorInfo info;
  info.label = "tensor " + quote_text(name);
  info.spelled_type = entry.dtype;
  info.shape = std::move(entry.shape);
  info.source = &source;
  const auto bad = [&](const std::string& expected, const std::string& found) {
    malformed(source.name(), info.label, expected, found);
  };
  const std::string offsets = shape_text(entry.offsets);
  if (entry.offsets.size() != 2 || entry.offsets[0] > entry.offsets[1]) bad("data_offsets [begin, end]", offsets);
  if (static_cast<uint64_t>(entry.offsets[1]) > data_bytes) {
    bad("data_offsets within the file's " + std::to_string(data_bytes) + " bytes of data", offsets);
  }
  const auto type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const NamedType& t) { return entry.dtype == t.name; });
  if (type != std::end(kTypes)) {
    info.type = type->type;
    uint64_t bytes = 0;
    const bool fits = tensor_bytes(info.shape, type->bytes, &bytes);
    if (!fits || static_cast<int64_t>(bytes) != entry.offsets[1] - entry.offsets[0]) {
      bad((fits ? std::to_string(bytes) : std::string("more than 2^63")) + " bytes for " + entry.dtype + " " +
              shape_text(info.shape),
          std::to_string(entry.offsets[1] - entry.offsets[0]) + " by its data_offsets");
    }
  }
  info.offset = static_cast<uint64_t>(entry.offsets[0]);
  return info;
}

/// Throws unless the tensors fill the data contiguously.
void check_coverage(const ByteSource& source, const std::map<std::string, Entry>& entries, uint64_t data_bytes) {
  struct Range {
    int64_t begin, end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  ranges.reserve(entries.size());
  for (const auto& [name, entry] : entries) ranges.push_back({entry.offsets[0], entry.offsets[1], &name});
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  int64_t covered = 0;
  for (const Range& range : ranges) {
    if (range.begin != covered) {
      malformed(source.name(), "tensor " + quote_text(*range.name),
                "data from byte " + std::to_string(covered) + ", after its predecessor, without gap or overlap",
                "byte " + std::to_string(range.begin));
    }
    covered = range.end;
  }
  if (static_cast<uint64_t>(covered) != data_bytes) {
    malformed(source.name(), "file", std::to_string(covered) + " bytes of data, as the tensors need",
              std::to_string(data_bytes));
  }
}

}  // namespace

TensorTable parse_safetensors(const ByteSource& source) {
  refuse_other_kinds(source);
  const uint64_t size = source.size();
  if (size < kLengthBytes + 2) {
    malformed(source.name(), "file", "a safetensors or .npy file of at least 10 bytes", std::to_string(size) + " bytes");
  }
  std::byte raw[kLengthBytes];
  source.read(0, raw);
  uint64_t length = 0;
  std::memcpy(&length, raw, sizeof length);
  const uint64_t limit = std::min(size - kLengthBytes, kLargestSafetensorsHeader);
  if (length < 2 || length > limit) {
    malformed(source.name(), "header", "a safetensors header length of 2 to " + std::to_string(limit) + " in the first 8 bytes",
              std::to_string(length));
  }
  std::vector<char> text(length);
  source.read(kLengthBytes, std::as_writable_bytes(std::span(text)));

  SafetensorsHeaderReader reader;
  if (!json::sax_parse(text.data(), text.data() + text.size(), &reader)) {
    malformed(source.name(), reader.part, reader.expected, reader.found);
  }
  const uint64_t data_bytes = size - kLengthBytes - length;
  TensorTable table;
  table.metadata = std::move(reader.metadata);
  for (auto& [name, entry] : reader.entries) {
    TensorInfo info = check_entry(source, name, entry, data_bytes);
    info.offset += kLengthBytes + length;
    table.tensors.emplace(name, std::move(info));
  }
  check_coverage(source, reader.entries, data_bytes);
  return table;
}

}  // namespace switchyard::detail
