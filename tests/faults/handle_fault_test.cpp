// SPDX-License-Identifier: Apache-2.0
// Incorrectly used handles, from another rank, shape, dispatch or group, and correctly used handles restored from bytes.
#include <gtest/gtest.h>

#include "modes/normal/normal_rig.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::CombineOptions;
using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::NormalConfig;
using switchyard::Staging;

TEST(Handles, OfAnotherRankOrShapeAreRefused) {
  std::vector<std::vector<std::byte>> saved(2);
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    NormalRig rig(group);
    saved[static_cast<size_t>(group.rank())] = rig.dispatch().handle.serialize();
    group.barrier();
    const auto theirs = switchyard::Handle::deserialize(saved[static_cast<size_t>(1 - group.rank())]);
    (void)rig.exchange.dispatch(rig.x(), group.rank() == 0 ? theirs : switchyard::Handle::deserialize(saved[1]));
  });
  EXPECT_EQ(code_name(all[0].code), "invalid_argument");
  EXPECT_NE(all[0].text.find("rank 1 of 2"), std::string::npos) << all[0].text;
  EXPECT_EQ(all[1].failed_rank, 0);
}

/// Ranks pass handles from different dispatches to one call. The dispatches belong to one object, or to two objects with the
/// same shape.
TEST(Mismatch, HandlesOfOtherDispatches) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (const bool cached : {true, false}) {
      for (const bool other_object : {true, false}) {
        expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
          NormalConfig config = NormalRig::config(staging);
          NormalRig rig(group, config), second(group, config);
          const Dispatched d = rig.dispatch();
          const Dispatched e = other_object ? second.dispatch() : rig.dispatch();
          const auto& handle = group.rank() == 1 ? e.handle : d.handle;
          if (cached) {
            (void)rig.exchange.dispatch(rig.x(), handle, DispatchOptions());
          } else {
            rig.exchange.combine(d.x, handle, rig.out.data(), CombineOptions());
          }
        }));
      }
    }
  }
}

/// The same call with handles from another group of the same shape.
TEST(Mismatch, HandlesOfAnotherGroup) {
  std::vector<std::vector<std::byte>> theirs(2);
  for (const Outcome& o : outcomes(2, options_with(60s), [&](Group& group) {
         theirs[static_cast<size_t>(group.rank())] = NormalRig(group).dispatch().handle.serialize();
         group.barrier();
       }))
    EXPECT_EQ(code_name(o.code), "ok") << o.text;
  for (const bool cached : {true, false}) {
    for (const bool on_all : {true, false}) {
      const auto all = outcomes(2, options_with(60s), [&](Group& group) {
        NormalRig rig(group);
        const Dispatched d = rig.dispatch();
        const auto other = switchyard::Handle::deserialize(theirs[static_cast<size_t>(group.rank())]);
        const auto& handle = on_all || group.rank() == 1 ? other : d.handle;
        if (cached) {
          (void)rig.exchange.dispatch(rig.x(), handle, DispatchOptions());
        } else {
          rig.exchange.combine(d.x, handle, rig.out.data(), CombineOptions());
        }
      });
      if (!on_all) expect_mismatch(all);
      for (const Outcome& o : all) EXPECT_TRUE(!on_all || o.code == ErrorCode::ok) << o.text;
    }
  }
}

TEST(Handles, OfOneDispatchAsBytesOnSomeRanks) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    const auto all = outcomes(3, options_with(60s), [&](Group& group) {
      NormalRig rig(group, NormalRig::config(staging)), second(group, NormalRig::config(staging));
      const Dispatched d = rig.dispatch();
      const auto handle = group.rank() == 1 ? switchyard::Handle::deserialize(d.handle.serialize()) : d.handle;
      NormalRig& user = staging == Staging::direct ? second : rig;  // any object of the same shape works
      const Dispatched again = user.exchange.dispatch(user.x(), handle, DispatchOptions());
      user.exchange.combine(again.x, handle, user.out.data(), CombineOptions());
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

}  // namespace
}  // namespace harness
