// SPDX-License-Identifier: Apache-2.0
#include "routing/tensor_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/unique_fd.hpp"

namespace switchyard::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor data is read as it lies in the file");

std::string reason(int error) { return std::generic_category().message(error); }

class FileSource final : public ByteSource {
 public:
  explicit FileSource(const std::string& path) : ByteSource(path) { open(&size_); }

  uint64_t size() const override { return size_; }

  void read(uint64_t offset, std::span<std::byte> out) const override {
    uint64_t now = 0;
    const UniqueFd fd = open(&now);
    if (now != size_) malformed(name(), "file", bytes_text(size_) + " as when it was opened", bytes_text(now));
    while (!out.empty()) {
      const ssize_t got = ::pread(fd.get(), out.data(), out.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw Error(ErrorCode::io, name() + ": cannot read: " + reason(errno));
      if (got == 0) malformed(name(), "file", bytes_text(size_), "its end at byte " + std::to_string(offset));
      offset += static_cast<uint64_t>(got);
      out = out.subspan(static_cast<size_t>(got));
    }
  }

 private:
  static std::string bytes_text(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

  UniqueFd open(uint64_t* size) const {
    // Non-blocking, because the name may refer to a pipe.
    UniqueFd fd(::open(name().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd) throw Error(ErrorCode::io, name() + ": cannot open: " + reason(errno));
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) throw Error(ErrorCode::io, name() + ": cannot stat: " + reason(errno));
    if (!S_ISREG(status.st_mode)) malformed(name(), "file", "a regular file", "a pipe, device or folder");
    *size = static_cast<uint64_t>(status.st_size);
    return fd;
  }

  uint64_t size_ = 0;
};

class ImageSource final : public ByteSource {
 public:
  ImageSource(std::span<const std::byte> image, const std::string& name)
      : ByteSource(name), image_(image.begin(), image.end()) {}
  uint64_t size() const override { return image_.size(); }
  void read(uint64_t offset, std::span<std::byte> out) const override {
    if (!out.empty()) std::memcpy(out.data(), image_.data() + offset, out.size());
  }

 private:
  std::vector<std::byte> image_;
};

}  // namespace

std::string quote_text(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string out = "'";
  for (const char c : text.substr(0, kLongest)) {
    if (c >= ' ' && c <= '~') {
      out += c;
    } else {
      constexpr const char* kDigits = "0123456789abcdef";
      const auto byte = static_cast<unsigned char>(c);
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out + (text.size() > kLongest ? "...'" : "'");
}

void malformed(const std::string& file, const std::string& part, const std::string& expected, const std::string& found) {
  throw Error(ErrorCode::io, file + ": " + part + ": expected " + expected + ", found " + found);
}

std::unique_ptr<ByteSource> open_file(const std::string& path) { return std::make_unique<FileSource>(path); }

std::unique_ptr<ByteSource> copy_image(std::span<const std::byte> image, const std::string& name) {
  return std::make_unique<ImageSource>(image, name);
}

size_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::i8:
    case ElementType::u8: return 1;
    case ElementType::i16:
    case ElementType::u16: return 2;
    case ElementType::i64:
    case ElementType::u64: return 8;
    case ElementType::i32:
    case ElementType::u32:
    case ElementType::f32: return 4;
    case ElementType::f16:
    case ElementType::bf16: return 2;
    case ElementType::other: break;
  }
  return 0;
}

bool tensor_bytes(std::span<const int64_t> shape, size_t element, uint64_t* bytes) {
  int64_t total = static_cast<int64_t>(element);
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return false;
    empty |= extent == 0;
  }
  for (const int64_t extent : shape) {
    if (!empty && __builtin_mul_overflow(total, extent, &total)) return false;
  }
  *bytes = empty ? 0 : static_cast<uint64_t>(total);
  return true;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace switchyard::detail
