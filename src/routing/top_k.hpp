// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace switchyard::detail {

/// Collects the `k` largest elements from a stream of (index, value), in descending order of value; ties keep the order of the
/// stream. Values must be ordered (no NaN).
class TopK {
 public:
  explicit TopK(int k) : k_(k) {
    indices_.reserve(static_cast<size_t>(k));
    values_.reserve(static_cast<size_t>(k));
  }
  void clear() {
    indices_.clear();
    values_.clear();
  }
  void offer(int32_t index, float value) {
    if (static_cast<int>(values_.size()) == k_) {
      if (!(value > values_.back())) return;
      indices_.pop_back();
      values_.pop_back();
    }
    size_t at = values_.size();
    while (at > 0 && value > values_[at - 1]) --at;
    indices_.insert(indices_.begin() + static_cast<std::ptrdiff_t>(at), index);
    values_.insert(values_.begin() + static_cast<std::ptrdiff_t>(at), value);
  }
  std::span<const int32_t> indices() const { return indices_; }

 private:
  int k_;
  std::vector<int32_t> indices_;
  std::vector<float> values_;
};

}  // namespace switchyard::detail
