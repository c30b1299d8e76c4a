// SPDX-License-Identifier: Apache-2.0
// The part of the conformance suite about sums over looked-up rows. Included by arch_conformance.hpp only.
#pragma once

#include "conformance/arithmetic_conformance.hpp"

namespace switchyard::conformance {

// Rows at scattered places, in their order.
TYPED_TEST_P(ArchConformance, ReduceFromPlacesIsTheSameSum) {
  for (const DType type : kRowTypes) {
    for (const int n : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, kMaxRanks}) {
      for (const int64_t hidden : {int64_t{8}, int64_t{129}, int64_t{1024}}) {
        Reduction<TypeParam> work(type, hidden, n, n % 3, n % 2 == 0, 0);
        work.fill(static_cast<Content>(n % 3), this->random_);
        const std::vector<std::byte> want = work.expected();
        std::vector<int> places;
        for (int i = 0, spare = kMaxRanks - n; i < n; ++i) {
          const int skip = spare > 0 ? static_cast<int>(this->random_() % static_cast<uint64_t>(std::min(spare, 3) + 1)) : 0;
          spare -= skip;
          places.push_back((places.empty() ? 0 : places.back() + 1) + skip);
        }
        this->for_each_variant([&] {
          work.out.refill();
          this->warp_.reduce_rows_from(work.spec(), places);
          this->warp_.settle();
          ASSERT_TRUE(work.matches(want));
        });
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace switchyard::conformance
