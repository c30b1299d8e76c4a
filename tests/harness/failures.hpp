// SPDX-License-Identifier: Apache-2.0
// Mismatches as data: ranks, which are threads or processes, collect messages, and the test then asserts that there are none.
#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

namespace harness {

/// Mismatches of one rank. The first few are kept; the others are only counted.
class Failures {
 public:
  explicit Failures(std::string subject = {}) : subject_(std::move(subject)) {}

  void set_context(const std::string& context) { context_ = context; }
  void add(const std::string& what) {
    if (++count_ <= kKept) texts_.push_back(subject_ + " " + context_ + ": " + what);
  }
  template <class A, class B>
  bool equal(const A& expected, const B& actual, const std::string& name) {
    if (expected == static_cast<A>(actual)) return true;
    std::ostringstream text;
    text << name << ": expected " << expected << ", got " << actual;
    add(text.str());
    return false;
  }
  bool check(bool ok, const std::string& what) {
    if (!ok) add(what);
    return ok;
  }
  /// Compares element by element; `actual` may be any range with size() and [].
  template <class A, class B>
  bool equal_range(const A& expected, const B& actual, const std::string& name) {
    if (!equal(expected.size(), actual.size(), name + " size")) return false;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == actual[i]) continue;
      std::ostringstream text;
      text << name << "[" << i << "]: expected " << +expected[i] << ", got " << +actual[i];
      add(text.str());
      return false;
    }
    return true;
  }
  bool any() const { return count_ != 0; }
  std::vector<std::string> take() const {
    auto texts = texts_;
    if (count_ > kKept) texts.push_back(subject_ + " and " + std::to_string(count_ - kKept) + " more");
    return texts;
  }

 private:
  static constexpr size_t kKept = 8;
  std::string subject_, context_;
  std::vector<std::string> texts_;
  size_t count_ = 0;
};

}  // namespace harness
