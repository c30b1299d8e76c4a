// SPDX-License-Identifier: Apache-2.0
// Sized structs of the C ABI: reading those of older and newer programs, and their C++ twins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/enum_text.hpp"
#include "capi/errors.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::detail {

/// A struct of any version holds its size and one more word. Above the upper bound `struct_size` is taken for uninitialised
/// memory.
inline constexpr size_t kMinStructBytes = 2 * sizeof(size_t);
inline constexpr size_t kMaxStructBytes = 4096;

/// Throws ArgumentError unless `given` is a struct that this library, which knows `known` bytes of it, understands. Returns its
/// size.
size_t check_struct(const void* given, size_t known, const char* name);
/// The same as an answer.
bool is_valid_struct(const void* given, size_t known) noexcept;

/// `given` over `defaults`. No members may be split or hidden in padding: sizes are whole words.
template <class T>
T read_struct(const T* given, const T& defaults, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T> &&
                sizeof(T) % sizeof(size_t) == 0);
  T result = defaults;
  std::memcpy(&result, given, std::min(check_struct(given, sizeof(T), name), sizeof(T)));
  return result;
}

/// Fills as much of `*out` as the caller's version of it has. `out` must have passed check_struct.
template <class T>
void write_struct(T* out, const T& value) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(size_t) == 0);
  size_t size = 0;
  std::memcpy(&size, out, sizeof size);
  std::memcpy(reinterpret_cast<std::byte*>(out) + sizeof size, reinterpret_cast<const std::byte*>(&value) + sizeof size,
              std::min(size, sizeof(T)) - sizeof size);
}

/// C++ twins. NULL stands for defaults where the header says so; everything is checked that the C++ type could not express.
GroupOptions to_options(const sy_group_options* options);
NormalConfig to_config(const sy_normal_config* config);
DispatchOptions to_options(const sy_dispatch_options* options);
CombineOptions to_options(const sy_combine_options* options);
ConstRows to_rows(const sy_const_row_view* rows, const char* name);
ExpertIds to_ids(const sy_expert_ids* ids);
/// Throws ArgumentError unless `value` is one of E's.
template <NamedEnum E>
E to_enum(const char* name, int32_t value) {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (static_cast<int32_t>(known.value) == value) return known.value;
  throw ArgumentError(std::string(name) + " = " + std::to_string(value) + ": must be " + numbered_names<E>());
}

/// Fill the caller's struct.
void write_requirement(sy_memory_requirement* to, const MemoryRequirement& from);
void write_statistics(sy_call_statistics* to, const CallStatistics& from);
void write_rows(sy_row_view* to, const Rows& from);

}  // namespace switchyard::detail
