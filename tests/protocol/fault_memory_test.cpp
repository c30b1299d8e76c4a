// SPDX-License-Identifier: Apache-2.0
// A rank that runs out of private memory anywhere in a collective call: it throws an Error, and its peers hear of it, whether
// they then throw that they were told or the same. Deadlines are beyond this program's time limit.
//
// Executable: fault_memory_test, which replaces operator new. Label: none. Timeout: 120 s.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "protocol/departures.hpp"

namespace {

/// Allocations of this thread until one fails, and the ones after it succeed; -1: none fails.
thread_local int allocations_left = -1;

void* allocate(std::size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  if (void* const p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
void* allocate(std::size_t bytes, std::align_val_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  const auto a = static_cast<std::size_t>(alignment);
  if (void* const p = std::aligned_alloc(a, (bytes + a - 1) / a * a)) return p;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return allocate(bytes, alignment); }
void* operator new[](std::size_t bytes, std::align_val_t alignment) { return allocate(bytes, alignment); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;

class WithoutMemory : public testing::TestWithParam<Departure> {};

/// The n-th allocation of the call fails on one rank, for every n that the call has.
TEST_P(WithoutMemory, TheCallFailsEverywhereAtOnce) {
  constexpr int kMost = 2000;
  switchyard::GroupOptions options = options_with(600s);
  options.rendezvous_timeout = 600s;
  options.num_warps = 1;  // all allocations are the calling thread's
  int n = 0;
  for (bool failed = true; failed && n < kMost; ++n) {
    bool all_granted = false;
    const auto all = outcomes(2, options, [&](Group& group) {
      try {
        GetParam().body(group, [&] {
          if (group.rank() == 1) allocations_left = n;
        });
      } catch (const std::bad_alloc&) {
        allocations_left = -1;
        ADD_FAILURE() << "allocation " << n << ": not an Error";
        group.abort(1);
      } catch (...) {
        allocations_left = -1;
        throw;
      }
      if (group.rank() == 1) all_granted = std::exchange(allocations_left, -1) >= 0;
      group.barrier();  // a rank that had its part of the call already hears of it here
    });
    failed = !all_granted;
    if (all[1].code == ErrorCode::ok) {  // also if it could do without the allocation that failed
      EXPECT_EQ(code_name(all[0].code), "ok") << n << ": " << all[0].text;
      continue;
    }
    EXPECT_EQ(code_name(all[1].code), "system") << n << ": " << all[1].text;
    const bool told = all[0].code == ErrorCode::peer_failed && all[0].failed_rank == 1;
    EXPECT_TRUE(told || all[0].code == ErrorCode::system) << n << ": " << shown(all[0]);
  }
  EXPECT_LT(n, kMost);
}

INSTANTIATE_TEST_SUITE_P(Faults, WithoutMemory, testing::ValuesIn(departures()),
                         [](const auto& d) { return std::string(d.param.name); });

}  // namespace
}  // namespace harness
