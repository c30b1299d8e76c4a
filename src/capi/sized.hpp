// SPDX-License-Identifier: Apache-2.0
// Sized structs in the C ABI: reads and fills the structs of older and newer programs. The functions are inline so that the C
// functions of any library can use them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

#include "capi/guarded.hpp"

namespace switchyard::detail {

/// A struct of any version contains its size and at least one more word. A `struct_size` above the upper bound indicates
/// uninitialized memory.
inline constexpr size_t kMinStructBytes = 2 * sizeof(size_t);
inline constexpr size_t kMaxStructBytes = 4096;

/// Position of the first nonzero byte from `known` up to `size`; at least `size` if there is none.
inline size_t first_unknown(const void* given, size_t known, size_t size) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(given);
  while (known < size && bytes[known] == 0) ++known;
  return known;
}

inline bool is_plausible(size_t size) noexcept {
  return size >= kMinStructBytes && size <= kMaxStructBytes && size % sizeof(size_t) == 0;
}

inline size_t size_of(const void* given) noexcept {
  size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  return size;
}

/// Throws ArgumentError unless `given` is a struct that this library, which knows the first `known` bytes, can read. Returns
/// the struct's size.
inline size_t check_struct(const void* given, size_t known, const char* name) {
  require(given, name);
  const size_t size = size_of(given);
  if (!is_plausible(size))
    throw ArgumentError(std::string(name) + "->struct_size = " + std::to_string(size) +
                        ": start from the SY_..._INIT macro, which sets it (" + std::to_string(known) + " in this version)");
  if (const size_t at = first_unknown(given, known, size); at < size)
    throw ArgumentError(std::string(name) + "->struct_size = " + std::to_string(size) + ": the byte at offset " +
                        std::to_string(at) + " is not zero, but this version of the library knows only the first " +
                        std::to_string(known) + " bytes");
  return size;
}

/// Like check_struct(), but returns false instead of throwing.
inline bool is_valid_struct(const void* given, size_t known) noexcept {
  return given && is_plausible(size_of(given)) && first_unknown(given, known, size_of(given)) >= size_of(given);
}

/// Overlays `given` on `defaults`. T is a struct from capi/structs.hpp or capi/layer/structs.hpp; those files assert that it
/// has no padding.
template <class T>
T read_struct(const T* given, const T& defaults, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(size_t) == 0);
  T result = defaults;
  std::memcpy(&result, given, std::min(check_struct(given, sizeof(T), name), sizeof(T)));
  return result;
}

/// Fills the part of `*out` that the caller's version contains. `out` must have passed check_struct.
template <class T>
void write_struct(T* out, const T& value) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(size_t) == 0);
  const size_t size = size_of(out);
  std::memcpy(reinterpret_cast<std::byte*>(out) + sizeof size, reinterpret_cast<const std::byte*>(&value) + sizeof size,
              std::min(size, sizeof(T)) - sizeof size);
}

}  // namespace switchyard::detail
