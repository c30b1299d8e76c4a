// SPDX-License-Identifier: Apache-2.0
// Choices made by default_ring() if memory is bounded, and settings that it rejects.
#include <gtest/gtest.h>

#include <string>

#include "modes/normal/normal_rig.hpp"
#include "switchyard/normal.hpp"

namespace harness {
namespace {

using switchyard::ErrorCode;
using switchyard::NormalConfig;
using switchyard::NormalExchange;
using switchyard::Staging;

/// A slot holds a row of 14336 bytes, 256 bytes for scales, and 128 for its record.
NormalConfig default_config() {
  NormalConfig config;
  config.hidden = 7168;
  config.num_experts = 256;
  config.topk = 8;
  config.max_tokens = 512;
  return config;
}

/// default_ring() never returns settings that are not allowed. Its result, passed in again, gives the same settings. If
/// max_bytes is too small, it throws and names the required memory.
TEST(Ring, UsualSettingsAreAllowedOrWhatIsNeededIsSaid) {
  NormalConfig config = default_config();
  constexpr int kWorld = 8;
  const size_t slot = 14336 + 256 + 128, flags = 2 * 64 * kWorld;  // flags of one channel
  for (const size_t ring_budget : {size_t{1}, flags, flags + 5 * kWorld * slot, flags + 8 * kWorld * slot - 1}) {
    config.ring.max_bytes = ring_budget;
    const Outcome o = outcome_of([&] { (void)default_ring(config, kWorld); });
    EXPECT_EQ(o.code, ErrorCode::invalid_argument) << ring_budget;
    EXPECT_EQ(o.text, "RingSettings::max_bytes = " + std::to_string(ring_budget) + ": must be 0 or at least " +
                          std::to_string(flags + 8 * kWorld * slot) +
                          ", for topk = 8 slots of one channel from each of 8 ranks");
    config.staging = Staging::ring;
    EXPECT_EQ(outcome_of([&] { (void)NormalExchange::memory_required(config, kWorld); }).text, o.text);
    config.staging = Staging::direct;
    EXPECT_EQ(outcome_of([&] { (void)NormalExchange::memory_required(config, kWorld); }).text, "") << "has no rings";
  }
  config.ring.num_channels = 3;
  const std::string three = outcome_of([&] { (void)default_ring(config, kWorld); }).text;
  EXPECT_NE(three.find(std::to_string(3 * (flags + 8 * kWorld * slot)) + ", for topk = 8 slots of 3 channels"),
            std::string::npos)
      << three;
  EXPECT_NE(three.find("; fewer channels need less"), std::string::npos) << three;
  config.ring.num_channels = 0;
  config.ring.max_bytes = flags + 8 * kWorld * slot;
  EXPECT_EQ(default_ring(config, kWorld).num_channels, 1);
  EXPECT_EQ(default_ring(config, kWorld).slots, 8);

  config.max_tokens = 3 << 20;  // many chunks longer than slots are possible
  config.topk = 2;
  config.ring = {0, 1 << 20, 0, 0};
  const switchyard::RingSettings defaults = default_ring(config, kWorld);
  EXPECT_EQ(defaults.slots, 1 << 20);
  config.ring = defaults;
  const switchyard::RingSettings again = default_ring(config, kWorld);
  EXPECT_EQ(again.num_channels, defaults.num_channels);
  EXPECT_EQ(again.slots, defaults.slots);
  EXPECT_EQ(again.send_chunk, defaults.send_chunk);
}

/// Specified slots are kept as long as reducing unspecified channels makes room; after that, they are reduced too.
TEST(Ring, NamedSlotsAreLoweredLast) {
  NormalConfig config = default_config();
  config.ring.slots = 64;
  constexpr int kWorld = 8;
  const auto bytes = [](int channels, int slots) {  // bytes of a rank
    return static_cast<size_t>(channels) * kWorld * (2 * 64 + static_cast<size_t>(slots) * (14336 + 256 + 128));
  };
  const int channels = default_ring(config, kWorld).num_channels;
  ASSERT_EQ(channels, 40);
  const auto expect = [&](size_t ring_budget, int expected_channels, int expected_slots) {
    config.ring.max_bytes = ring_budget;
    const switchyard::RingSettings defaults = default_ring(config, kWorld);
    EXPECT_EQ(defaults.num_channels, expected_channels) << ring_budget;
    EXPECT_EQ(defaults.slots, expected_slots) << ring_budget;
  };
  expect(bytes(40, 64), 40, 64);
  expect(bytes(40, 64) - 1, 20, 64);
  expect(bytes(1, 64), 1, 64);
  expect(bytes(1, 64) - 1, 1, 63);
  expect(bytes(1, 8), 1, 8);
  config.ring.num_channels = 4;  // also specified: slots are reduced at once
  expect(bytes(4, 64), 4, 64);
  expect(bytes(4, 64) - 1, 4, 63);
  config.ring = {};  // neither is specified: slots are reduced to K, then channels, which leaves room for more slots
  config.layout = switchyard::Layout::expert_major;
  expect(bytes(128, 20), 128, 20);
  expect(bytes(128, 20) - 1, 128, 19);
  expect(bytes(128, 8), 128, 8);
  expect(bytes(128, 8) - 1, 64, 16);
}

}  // namespace
}  // namespace harness
