// SPDX-License-Identifier: Apache-2.0
// Readers for tensor containers: byte sources, header parsers, and their common errors. A parser reads only the header and
// describes the file's contents; every size is checked against the file size before it is used for an allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/status.hpp"

namespace switchyard::detail {

/// `text` in quotes, printable and short for any input.
std::string quote_text(std::string_view text);

/// Throws Error(io) with the text "<file>: <part>: expected <expected>, found <found>".
[[noreturn]] void malformed(const std::string& file, const std::string& part, const std::string& expected,
                            const std::string& found);

/// Random access to the bytes of a file or a file image. Immutable; may be used by several threads concurrently.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual uint64_t size() const = 0;
  /// Fills `out` with the bytes from `offset` on; the range must be within size(). \throws Error(io).
  virtual void read(uint64_t offset, std::span<std::byte> out) const = 0;
  const std::string& name() const { return name_; }

 protected:
  explicit ByteSource(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

/// A regular file, opened separately for each read; its size must not change. \throws Error(io).
std::unique_ptr<ByteSource> open_file(const std::string& path);
/// A copy of `image`.
std::unique_ptr<ByteSource> copy_image(std::span<const std::byte> image, const std::string& name);

enum class ElementType : uint8_t { i8, u8, i16, u16, i32, u32, i64, u64, f32, f16, bf16, other };

/// True for types allowed for ids.
constexpr bool is_integer(ElementType type) { return type <= ElementType::u64; }

/// One tensor: header data that has been checked against the file size.
struct TensorInfo {
  std::string label;  ///< as in errors: "tensor 'rank0.topk_ids'", "array"
  ElementType type = ElementType::other;
  std::string spelled_type;  ///< as in the file
  std::vector<int64_t> shape;
  uint64_t offset = 0;  ///< of the first byte in the source
  const ByteSource* source = nullptr;
};

/// Bytes per element, for all types except `other`.
size_t element_bytes(ElementType type);
/// Computes the bytes of a tensor of this shape; returns false if the result overflows 63 bits or an extent is negative.
bool tensor_bytes(std::span<const int64_t> shape, size_t element, uint64_t* bytes);
/// "[4096, 8]".
std::string shape_text(std::span<const int64_t> shape);

struct TensorTable {
  std::map<std::string, TensorInfo> tensors;  ///< by name
  std::map<std::string, std::string> metadata;
};

/// Parses the header of a safetensors file: 8 bytes of header length, JSON, data without gaps. \throws Error(io).
TensorTable parse_safetensors(const ByteSource& source);

/// Throws Error(io) if the file begins like a file of another kind: Git LFS pointers, compressed files and archives, PyTorch's
/// files, web pages, JSON. The text gives the kind of the file and how to proceed.
void refuse_other_kinds(const ByteSource& source);

/// True if the file begins like a `.npy` file.
bool has_npy_magic(const ByteSource& source);
/// Parses the header of a `.npy` file: format 1, 2 or 3, little endian, C order, integers of 8 to 64 bits, float32 or float16.
/// \throws Error(io).
TensorInfo parse_npy(const ByteSource& source);

}  // namespace switchyard::detail
