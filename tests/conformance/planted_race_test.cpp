// SPDX-License-Identifier: Apache-2.0
// Proves that ThreadSanitizer checks the row ops. A race is planted for each instruction set and each operand of each op: one
// thread runs the op, and another accesses one byte of the operand without synchronization. Every race must be reported. The
// same accesses, ordered by a release and an acquire, must not be reported. Builds with -fsanitize=thread only.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "arch/cpu/cpu_arch.hpp"

#if !defined(__SANITIZE_THREAD__)
#error "planted_race_test needs -fsanitize=thread"
#endif

namespace {

std::atomic<int> num_reports{0};

}  // namespace

// Called by ThreadSanitizer's runtime library for each race report.
extern "C" void __tsan_on_report(void*) { num_reports.fetch_add(1, std::memory_order_relaxed); }

// Planted races must neither be merged nor determine the exit status.
extern "C" const char* __tsan_default_options() {
  return "suppress_equal_stacks=0:suppress_equal_addresses=0:exitcode=0:halt_on_error=0:report_signal_unsafe=0";
}

namespace switchyard::detail {
namespace {

constexpr size_t kMaxBytes = 16384;

/// Operands of all ops. Each case names the byte that the second thread accesses.
struct Operands {
  alignas(64) uint8_t source[kMaxBytes];
  alignas(64) uint8_t other[kMaxBytes];
  alignas(64) uint8_t out[kMaxBytes];
  alignas(64) uint8_t out2[kMaxBytes];
};

struct Case {
  std::string name;
  std::function<void(CpuWarp&)> op;
  uint8_t* victim;  // a byte that the op reads or writes
};

void add_cases(std::vector<Case>& cases, Operands& m, const std::string& label, size_t bytes, DType type) {
  const auto hidden = static_cast<int64_t>(bytes / dtype_bytes(type, 1));
  const auto ends = [&](const std::string& name, const std::function<void(CpuWarp&)>& op, uint8_t* operand, size_t size) {
    cases.push_back({label + name + " first byte", op, operand});
    cases.push_back({label + name + " middle byte", op, operand + size / 2});
    cases.push_back({label + name + " last byte", op, operand + size - 1});
  };
  const auto copy = [&m, bytes](CpuWarp& w) { Cpu::copy(w, m.out, m.source, bytes); };
  ends("copy source", copy, m.source, bytes);
  ends("copy destination", copy, m.out, bytes);
  const auto multicast = [&m, bytes](CpuWarp& w) {
    Cpu::multicast_to(
        w, 2, [&m](int i) -> void* { return i == 0 ? m.out : m.out2; }, m.source, bytes);
  };
  ends("multicast source", multicast, m.source, bytes);
  ends("multicast destination 0", multicast, m.out, bytes);
  ends("multicast destination 1", multicast, m.out2, bytes);
  ends(
      "zero", [&m, bytes](CpuWarp& w) { Cpu::fill_zero(w, m.out, bytes); }, m.out, bytes);

  const size_t row_bytes = dtype_bytes(type, hidden);
  const auto reduce = [&m, type, hidden](CpuWarp& w) {
    const void* const rows[] = {m.source, m.source};
    const float weights[] = {1.0f, 2.0f};
    Cpu::reduce_rows(w, {m.out, rows, weights, 2, {m.other, nullptr}, type, hidden});
  };
  ends("reduce row", reduce, m.source, row_bytes);
  ends("reduce bias", reduce, m.other, row_bytes);
  ends("reduce output", reduce, m.out, row_bytes);

  for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
    const auto quantize = [&m, type, hidden, kind](CpuWarp& w) {
      Cpu::quantize_row(w, m.out, m.out2, m.source, type, hidden, kind);
    };
    ends("quantize source", quantize, m.source, row_bytes);
    ends("quantize codes", quantize, m.out, static_cast<size_t>(hidden));
    ends("quantize scales", quantize, m.out2, scale_row_bytes(hidden, kind));
  }
}

std::vector<Case> all_cases(Operands& m) {
  std::vector<Case> cases;
  add_cases(cases, m, "bf16 14336: ", 14336, DType::bf16);
  add_cases(cases, m, "bf16 with a tail: ", 1034, DType::bf16);
  add_cases(cases, m, "f16: ", 4096, DType::f16);
  add_cases(cases, m, "f32: ", 4096 + 12, DType::f32);
  add_cases(cases, m, "small: ", 6, DType::bf16);
  return cases;
}

/// Discards stderr, because a thousand reports are expected.
class Muted {
 public:
  Muted() : saved_(::dup(2)) {
    const int null = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
    ::dup2(null, 2);
    ::close(null);
  }
  ~Muted() {
    ::dup2(saved_, 2);
    ::close(saved_);
  }
  Muted(const Muted&) = delete;
  Muted& operator=(const Muted&) = delete;

 private:
  int saved_;
};

/// Runs the op on one thread, then writes the victim byte on another. The flag between them orders the two in time; only with
/// `synchronised` does ThreadSanitizer also consider them ordered. Returns the number of reports.
int run_case(const Case& one, bool synchronised) {
  const int before = num_reports.load(std::memory_order_relaxed);
  std::atomic<bool> done{false};
  const auto release = synchronised ? std::memory_order_release : std::memory_order_relaxed;
  const auto acquire = synchronised ? std::memory_order_acquire : std::memory_order_relaxed;
  std::thread toucher([&] {
    while (!done.load(acquire)) std::this_thread::yield();
    *static_cast<volatile uint8_t*>(one.victim) = 1;
  });
  std::thread actor([&] {
    CpuWarp warp(0, 0, 1, 1, nullptr);
    one.op(warp);
    Cpu::settle(warp);
    done.store(true, release);
  });
  actor.join();
  toucher.join();
  return num_reports.load(std::memory_order_relaxed) - before;
}

class PlantedRace : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    for (const SimdTarget& target : simd_targets()) {
      if (GetParam() == target.name) force_simd_target(target.id);
    }
    ASSERT_EQ(GetParam(), current_simd_target().name);
  }
  void TearDown() override { force_simd_target(0); }
};

/// num_cases() counts the cases, and run_fresh() returns the number of reports for one of them. Each case uses fresh memory:
/// accesses from earlier cases would otherwise fill ThreadSanitizer's four shadow cells per address and displace those of this
/// case.
size_t num_cases() { return all_cases(*std::make_unique<Operands>()).size(); }
int run_fresh(size_t index, bool synchronised, std::string* name) {
  const auto operands = std::make_unique<Operands>();
  const Case one = all_cases(*operands)[index];
  *name = one.name;
  return run_case(one, synchronised);
}

TEST_P(PlantedRace, EachIsReported) {
  for (size_t i = 0, n = num_cases(); i < n; ++i) {
    std::string name;
    int reports;
    {
      const Muted muted;
      reports = run_fresh(i, false, &name);
    }
    EXPECT_GE(reports, 1) << "ThreadSanitizer is blind to: " << name;
  }
}

TEST_P(PlantedRace, OrderedAccessesAreNot) {
  for (size_t i = 0, n = num_cases(); i < n; ++i) {
    std::string name;
    EXPECT_EQ(run_fresh(i, true, &name), 0) << name;
  }
}

std::vector<std::string> target_names() {
  std::vector<std::string> names;
  for (const SimdTarget& target : simd_targets()) names.emplace_back(target.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Targets, PlantedRace, ::testing::ValuesIn(target_names()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace switchyard::detail

// Options in the environment would override those above, and a run that stops at its first race proves nothing.
int main(int argc, char** argv) {
  if (std::getenv("TSAN_OPTIONS") != nullptr) {
    ::unsetenv("TSAN_OPTIONS");
    ::execv("/proc/self/exe", argv);
    return 1;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
