// SPDX-License-Identifier: Apache-2.0
// SY_GROUP_OPTIONS_INIT equals the C++ defaults. Other option structs are compared at compile time (src/capi/structs.hpp), but
// GroupOptions contains a string, which not every compiler can evaluate at compile time.
#include <gtest/gtest.h>

#include "switchyard/c/switchyard.h"
#include "switchyard/group.hpp"

namespace switchyard {
namespace {

TEST(GroupDefaults, AreTheSameInC) {
  const sy_group_options c = SY_GROUP_OPTIONS_INIT;
  const GroupOptions options;
  EXPECT_EQ(c.struct_size, sizeof c);
  EXPECT_EQ(c.heap_bytes, options.heap_bytes);
  EXPECT_EQ(c.timeout_ms, options.timeout.count());
  EXPECT_EQ(c.rendezvous_timeout_ms, options.rendezvous_timeout.count());
  EXPECT_EQ(c.num_blocks, options.num_blocks);
  EXPECT_EQ(c.num_warps, options.num_warps);
  EXPECT_EQ(c.num_sms, options.num_sms);
  EXPECT_EQ(static_cast<int>(c.backend), static_cast<int>(options.backend));
  EXPECT_EQ(c.device, options.device);
  EXPECT_EQ(c.host, nullptr);
  EXPECT_EQ(options.host, "");
  EXPECT_EQ(c.silence_ms, options.silence.count());
  EXPECT_EQ(static_cast<int>(c.network), static_cast<int>(options.network));
}

}  // namespace
}  // namespace switchyard
