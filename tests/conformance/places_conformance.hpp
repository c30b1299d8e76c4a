// SPDX-License-Identifier: Apache-2.0
// Conformance tests for sums over looked-up rows and for rows transformed by a function. Included by arch_conformance.hpp only.
#pragma once

#include "conformance/arithmetic_conformance.hpp"

namespace switchyard::conformance {

// Sums rows at scattered places, in the order of the places.
TYPED_TEST_P(ArchConformance, ReduceFromPlacesIsTheSameSum) {
  for (const DType type : kRowTypes) {
    for (const int n : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, kMaxRanks}) {
      if (n > kPlaces<TypeParam>) break;
      for (const int64_t columns : {8, 129, 1024}) {
        const int64_t hidden = whole_elements<TypeParam>(columns, type);
        Reduction<TypeParam> work(type, hidden, n, ArchDriver<TypeParam>::kWholeRowsOnly ? 0 : n % 3, n % 2 == 0, 0);
        work.fill(static_cast<Content>(n % 3), this->random_);
        const std::vector<std::byte> want = work.expected();
        std::vector<int> places;
        for (int i = 0, spare = kPlaces<TypeParam> - n; i < n; ++i) {
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

// Each element is computed with its own column, in two calls whose sources may change once the calls are drained.
TYPED_TEST_P(ArchConformance, MapTurnsEveryElement) {
  for (const DType type : kRowTypes) {
    for (const int64_t hidden : {0, 1, 7, 8, 129, 256, 257, 1000}) {
      for (const size_t misalignment : {0, 16, 4, 62}) {
        const size_t bytes = dtype_bytes(type, hidden);
        const size_t offset = element_offset<TypeParam>(misalignment, dtype_bytes(type, 1));
        Guarded<TypeParam> src(bytes, offset), one(bytes, 0), two(bytes, offset);
        std::vector<std::byte> want[2];
        Guarded<TypeParam>* const out[] = {&one, &two};
        for (int call = 0; call < 2; ++call) {
          fill_row(src.data(), type, hidden, static_cast<Content>(call), this->random_);
          want[call].resize(bytes);
          for (int64_t c = 0; c < hidden; ++c) {
            const volatile float product = reference_load(src.data(), type, c) * 3;  // volatile: one rounding per operation
            reference_store(want[call].data(), type, c, product + static_cast<float>(c % 64));
          }
          this->warp_.map_row(out[call]->data(), src.data(), type, hidden);
          this->warp_.drain_sources();
        }
        this->warp_.settle();
        for (int call = 0; call < 2; ++call) {
          ASSERT_TRUE(out[call]->guards_intact());
          for (int64_t c = 0; c < hidden; ++c)
            ASSERT_TRUE(same_element(out[call]->data(), want[call].data(), type, c)) << "hidden " << hidden;
        }
      }
    }
  }
}

}  // namespace switchyard::conformance
