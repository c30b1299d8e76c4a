// SPDX-License-Identifier: Apache-2.0
// Ranks as forked processes, for tests: see launch/forked_ranks.hpp. GoogleTest assertions inside a child are not reported: use
// me.require or throw.
#pragma once

#include <unistd.h>

#include <csignal>

#include "launch/forked_ranks.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace switchyard::test {

using launch::ChildRank;
using launch::Milliseconds;
using launch::RankEnd;

/// A rank that raises SIGPIPE ends by this signal, because the library must not raise it. A rank whose body returned but leaked
/// memory ends with code 97 (AddressSanitizer).
class ForkedRanks : public launch::ForkedRanks {
 public:
  ForkedRanks(int world, const Body& body)
      : launch::ForkedRanks(world, [&body](ChildRank& me) {
          std::signal(SIGPIPE, SIG_DFL);
          body(me);
#if defined(__SANITIZE_ADDRESS__)
          if (__lsan_do_recoverable_leak_check() != 0) ::_exit(97);
#endif
        }) {
  }
};

/// Runs `body` on every rank and returns the result of each.
inline std::vector<RankEnd> run_ranks(int world, const ForkedRanks::Body& body, Milliseconds deadline = Milliseconds{60000}) {
  return ForkedRanks(world, body).finish(deadline);
}

}  // namespace switchyard::test
