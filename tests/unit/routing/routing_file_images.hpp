// SPDX-License-Identifier: Apache-2.0
// Routing files assembled byte by byte, for tests and the fuzz target; independent of the library's writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace switchyard::images {

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline std::string little_endian(uint64_t value, size_t count) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFF);
  return bytes;
}

/// A safetensors file with the given JSON header and data.
inline std::string safetensors(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

/// One header entry, without a comma.
inline std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, size_t begin,
                         size_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" + std::to_string(begin) +
         "," + std::to_string(end) + "]}";
}

/// A JSON object with these entries.
inline std::string object(const std::vector<std::string>& entries) {
  std::string text;
  for (const std::string& e : entries) {
    text += text.empty() ? '{' : ',';
    text += e;
  }
  return text + "}";
}

/// A metadata entry with one string.
inline std::string metadata(const std::string& key, const std::string& value) {
  std::string text = "\"__metadata__\":{\"";
  return text.append(key).append("\":\"").append(value).append("\"}");
}

/// A .npy file of format version `major` with the given header text and data.
inline std::string npy(const std::string& header, const std::string& data, int major = 1) {
  return std::string("\x93NUMPY") + static_cast<char>(major) + '\0' + little_endian(header.size(), major == 1 ? 2 : 4) +
         header + data;
}

/// The header as written by numpy.
inline std::string npy_dict(const std::string& descr, const std::string& shape, const std::string& order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }          \n";
}

inline std::span<const std::byte> span_of(const std::string& bytes) { return std::as_bytes(std::span(bytes)); }

}  // namespace switchyard::images
