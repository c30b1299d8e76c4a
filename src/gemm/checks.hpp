// SPDX-License-Identifier: Apache-2.0
// Argument checks shared by GroupedGemm, gradients and ExpertMlp. `where` is the function or class named in errors.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/gemm.hpp"

namespace switchyard::detail {

inline void require(bool ok, const char* where, const std::string& what) {
  if (!ok) throw Error(ErrorCode::invalid_argument, std::string(where) + ": " + what);
}

/// Alignment required by loads and stores in GPU kernels.
inline void check_aligned(const char* where, const char* name, const void* p) {
  constexpr uintptr_t kAlignment = 16;
  require(p != nullptr, where, std::string(name) + " is null");
  require(reinterpret_cast<uintptr_t>(p) % kAlignment == 0, where, std::string(name) + " must begin at a multiple of 16 bytes");
}

/// Checks rows of `columns` elements of `type`; `data` must not be null if there are rows.
inline void check_rows(const char* where, const char* name, const ConstRows& given, DType type, int64_t columns) {
  const std::string text = name;
  constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1024;
  require(given.dtype == type, where, text + " is of " + to_string(given.dtype) + ": must be of " + to_string(type));
  require(given.cols == columns, where,
          text + " has " + std::to_string(given.cols) + " columns: must have " + std::to_string(columns));
  require(given.rows >= 0 && given.rows <= kMaxRows, where,
          text + " has " + std::to_string(given.rows) + " rows: must have 0 to " + std::to_string(kMaxRows));
  require(given.data != nullptr || given.rows == 0, where, text + " is null: allowed if it has no rows");
}

inline void check_experts(const char* where, int num_experts) {
  require(num_experts >= 1 && num_experts <= kMaxGemmExperts, where,
          "num_experts = " + std::to_string(num_experts) + ": must be in [1, " + std::to_string(kMaxGemmExperts) + "]");
}

/// Checks N, K and similar sizes.
inline void check_columns(const char* where, const char* member, int64_t value, int64_t multiple) {
  require(value >= multiple && value <= kMaxGemmColumns && value % multiple == 0, where,
          std::string(member) + " = " + std::to_string(value) + ": must be a multiple of " + std::to_string(multiple) +
              " from " + std::to_string(multiple) + " to " + std::to_string(kMaxGemmColumns));
}

inline void check_ranges(const char* where, const ExpertRows& rows) {
  require((rows.num_rows != nullptr) != (rows.num_rows_32 != nullptr), where, "rows: give num_rows or num_rows_32");
  require(rows.first_row != nullptr || rows.rows_per_expert >= 0, where,
          "rows.rows_per_expert = " + std::to_string(rows.rows_per_expert) + ": must not be negative");
}

}  // namespace switchyard::detail
