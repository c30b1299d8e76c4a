// SPDX-License-Identifier: Apache-2.0
// Code shared by the NCCL carrier tests: a fake library, and carrier specs for named hosts.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bootstrap/host_map.hpp"
#include "carrier/nccl/comms.hpp"
#include "unit/carrier/fake_nccl.hpp"

namespace switchyard::detail::nccl_tests {

using test::FakeNccl;
using Log = std::vector<std::string>;

/// Stream marks that count as reached when the test says so.
struct HandMarks final : StreamMarks {
  std::shared_ptr<const void> mark(void*) override { return captured ? nullptr : std::make_shared<int>(++made); }
  bool reached(const void* mark) noexcept override { return *static_cast<const int*>(mark) <= passed; }
  void order(void* stream, const void* mark) override {
    ordered.push_back(std::to_string(reinterpret_cast<uintptr_t>(stream)) + " after " +
                      std::to_string(*static_cast<const int*>(mark)));
  }
  int made = 0;
  std::atomic<int> passed = 0;  ///< also queried by threads that end communicators
  bool captured = false;        ///< whether streams are being captured
  Log ordered;
};

/// The library named by the environment variable `variable`, as NCCL `version`.
class FakeNcclTest : public testing::Test {
 protected:
  FakeNcclTest(const char* variable, int version) : variable_(variable), version_(version) {}
  void SetUp() override {
    ::setenv("SWITCHYARD_NCCL", std::getenv(variable_), 1);
    api_ = load_nccl();
    EXPECT_EQ(api_.version, version_);
    void* const library = ::dlopen(std::getenv(variable_), RTLD_NOW);
    fake_ = reinterpret_cast<FakeNccl* (*)()>(::dlsym(library, "fake_nccl"))();
    fake_->reset();
  }

  /// Lets the threads that end communicators finish within the test that started them.
  void TearDown() override {
    const auto left = [&] {
      const std::lock_guard lock(fake_->mutex);
      return fake_->comms - fake_->ended;
    };
    for (int i = 0; i < 20000 && left() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(left(), 0);
  }

  /// The carrier spec of rank `rank` among hosts with these names.
  NcclCarrierSpec spec_of(int rank, const std::vector<std::string>& places) {
    const HostMap map{std::span<const std::string>(places)};
    NcclCarrierSpec spec;
    spec.rank = rank;
    std::map<int, int> index;
    for (int rail = 0; rail < map.rails(); ++rail) {
      std::vector<int> ranks = map.rail_ranks(rail);
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
      index[rail] = static_cast<int>(spec.rails.size());
      spec.rails.push_back({std::move(ranks), {}});
      api_.get_id(&spec.rails.back().id);
    }
    spec.rail_to = [index, map, rank](int peer) {
      const auto found = index.find(map.rail_between(rank, peer));
      return found == index.end() ? -1 : found->second;
    };
    spec.deadline = std::chrono::milliseconds(2000);
    spec.marks = marks_;
    return spec;
  }

  /// Waits until the fake library has recorded `last`.
  Log wait_for_log(const std::string& last) {
    Log all;
    for (int i = 0; i < 20000 && (all.empty() || all.back() != last); ++i) {
      for (std::string& text : fake_->take_log()) all.push_back(std::move(text));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return all;
  }

  const char* const variable_;
  const int version_;
  NcclApi api_;
  FakeNccl* fake_ = nullptr;
  std::shared_ptr<HandMarks> marks_ = std::make_shared<HandMarks>();
  std::array<std::byte, 64> out_{}, in_{};
  void* const stream_ = reinterpret_cast<void*>(uintptr_t{9});
};

}  // namespace switchyard::detail::nccl_tests
