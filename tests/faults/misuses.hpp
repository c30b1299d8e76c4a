// SPDX-License-Identifier: Apache-2.0
// Misuse that the host can detect. Each case consists of valid calls of a mode and the way in which one rank makes one of them
// invalid.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <vector>

#include "harness/outcome.hpp"

namespace harness {

/// Misuse of an object owned by a `Rig`.
template <class Rig>
struct MisuseOf {
  const char* name;
  const char* in_text;  ///< the error must name the argument
  std::function<void(Rig&, bool spoil)> body;
  switchyard::ErrorCode code = switchyard::ErrorCode::invalid_argument;
};
using Misuse = MisuseOf<switchyard::Group>;
inline std::ostream& operator<<(std::ostream& out, const Misuse& m) { return out << m.name; }

/// Binds each misuse to its own rig, created by `make(group)`.
template <class Rig, class Make>
std::vector<Misuse> on_rigs(const std::vector<MisuseOf<Rig>>& misuses, Make make) {
  std::vector<Misuse> all;
  for (const auto& m : misuses) {
    const auto body = [body = m.body, make](switchyard::Group& group, bool spoil) {
      Rig rig = make(group);
      body(rig, spoil);
    };
    all.push_back({m.name, m.in_text, body, m.code});
  }
  return all;
}

/// The misusing rank receives an error about the argument; the other ranks receive an error that names that rank.
inline void expect_misuse(const std::vector<Outcome>& all, size_t bad, switchyard::ErrorCode code, const char* in_text) {
  EXPECT_EQ(code_name(all[bad].code), code_name(code)) << all[bad].text;
  EXPECT_NE(all[bad].text.find(in_text), std::string::npos) << all[bad].text;
  for (size_t r = 0; r < all.size(); ++r) {
    if (r == bad) continue;
    EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
    EXPECT_EQ(all[r].failed_rank, static_cast<int>(bad));
    EXPECT_EQ(code_name(all[r].reason), code_name(code)) << all[r].text;
  }
}

}  // namespace harness
