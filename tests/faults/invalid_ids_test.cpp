// SPDX-License-Identifier: Apache-2.0
// Ids that are neither -1 nor an expert, in every mode: InvalidIds::count counts them and produces the same bits as -1 in their
// place. InvalidIds::raise is covered by the misuse tests of each mode.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "modes/flat/flat_rig.hpp"
#include "modes/fused/fused_moe_rig.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/normal/normal_rig.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::Group;
using switchyard::InvalidIds;
using switchyard::Layout;
using switchyard::Staging;

constexpr int64_t kRoutes = SmallArguments::kTokens * SmallArguments::kTopk;

/// Rank r has r + 1 invalid ids and two ids equal to -1.
struct Ids {
  explicit Ids(int rank) : invalid(rank + 1) {
    const int64_t outside[] = {SmallArguments::kExperts, -2, std::numeric_limits<int32_t>::max(),
                               std::numeric_limits<int32_t>::min()};
    const int64_t beyond[] = {(int64_t{1} << 32) + 3, -(int64_t{1} << 32), std::numeric_limits<int64_t>::max(),
                              std::numeric_limits<int64_t>::min()};
    for (int64_t f = 0; f < kRoutes; ++f) narrow.push_back(static_cast<int32_t>((f * 3 + rank) % SmallArguments::kExperts));
    narrow[1] = narrow[6] = -1;
    cleaned.assign(narrow.begin(), narrow.end());
    wide.assign(narrow.begin(), narrow.end());
    for (int i = 0; i <= rank; ++i) {
      const auto at = static_cast<size_t>(2 + 3 * i);
      narrow[at] = static_cast<int32_t>(outside[i]);
      wide[at] = beyond[i];
      cleaned[at] = -1;
    }
  }
  int64_t invalid;
  std::vector<int32_t> narrow, cleaned;
  std::vector<int64_t> wide;
};

template <class Config>
Config counting(Config config) {
  config.invalid_ids = InvalidIds::count;
  return config;
}

/// `with` creates an object that counts invalid ids and passes its callback a function that makes the calls and returns the
/// number counted.
struct Mode {
  std::string name;
  std::function<void(Group&,
                     const std::function<void(const std::function<int64_t(const ExpertIds&)>&, const std::vector<uint16_t>&)>&)>
      with;
};
std::ostream& operator<<(std::ostream& out, const Mode& m) { return out << m.name; }

Mode normal(const std::string& name, Staging staging, Layout layout) {
  return {name, [=](Group& group, const auto& use) {
            NormalRig rig(group, counting(NormalRig::config(staging, layout)));
            int64_t before = 0;
            use(
                [&](const ExpertIds& ids) {
                  const auto d = rig.exchange.dispatch(rig.x(), ids, rig.weights.data());
                  rig.combine(d);
                  const int64_t all = rig.exchange.invalid_ids(), now = all - before;
                  before = all;
                  EXPECT_EQ(d.handle.invalid_ids(), now);
                  EXPECT_EQ(d.invalid_ids.size(), 1u);
                  EXPECT_EQ(d.invalid_ids[0], now);
                  return now;
                },
                rig.out);
          }};
}

/// Creates the Mode for a rig type; `object(rig)` returns the rig's object.
template <class Rig, class Object, class Call>
Mode mode(const std::string& name, Object object, Call call) {
  return {name, [=](Group& group, const auto& use) {
            Rig rig(group, counting(Rig::config()));
            int64_t before = 0;
            use(
                [&](const ExpertIds& ids) {
                  call(rig, ids);
                  const int64_t all = object(rig).invalid_ids(), now = all - before;
                  before = all;
                  return now;
                },
                rig.out);
          }};
}

std::vector<Mode> modes() {
  const auto exchange = [](auto& rig) -> auto& { return rig.exchange; };
  const auto layer = [](auto& rig) -> auto& { return rig.layer; };
  return {normal("by_rank", Staging::direct, Layout::rank_major),
          normal("by_expert", Staging::direct, Layout::expert_major),
          normal("ring", Staging::ring, Layout::rank_major),
          mode<LowLatencyRig>("low_latency", exchange,
                              [](LowLatencyRig& rig, const ExpertIds& ids) {
                                rig.exchange.dispatch(rig.x(), ids, rig.output, rig.options());
                                rig.combine();
                              }),
          mode<FlatRig>("flat", exchange,
                        [](FlatRig& rig, const ExpertIds& ids) {
                          auto a = rig.arguments();
                          a.ids = ids;
                          rig.call(a);
                        }),
          mode<FusedMoeRig>("fused", layer, [](FusedMoeRig& rig, const ExpertIds& ids) {
            rig.layer.forward(rig.rows.data(), ids, rig.weights.data(), rig.out.data());
          })};
}

class CountedIds : public testing::TestWithParam<Mode> {};

TEST_P(CountedIds, AreNoExpertsAndInvalidIdsOfTheRankAlone) {
  for (const char* const hosts : {"", "a,a,b"}) {
    const bool one_host = GetParam().name == "flat" || GetParam().name == "fused" || GetParam().name == "ring";
    if (*hosts != '\0' && one_host) continue;
    auto options = options_with(600s);
    options.host = hosts;
    const auto all = outcomes(3, options, [](Group& group) {
      const Ids ids(group.rank());
      GetParam().with(group, [&](const auto& call, const std::vector<uint16_t>& out) {
        constexpr int64_t kTokens = SmallArguments::kTokens;
        EXPECT_EQ(call(ExpertIds::of(ids.cleaned.data(), kTokens, SmallArguments::kTopk)), 0);
        const std::vector<uint16_t> expected = out;
        EXPECT_EQ(call(ExpertIds::of(ids.narrow.data(), kTokens, SmallArguments::kTopk)), ids.invalid);
        EXPECT_EQ(out, expected);
        EXPECT_EQ(call(ExpertIds::of(ids.wide.data(), kTokens, SmallArguments::kTopk)), ids.invalid);
        EXPECT_EQ(out, expected);
      });
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, CountedIds, testing::ValuesIn(modes()), [](const auto& m) { return m.param.name; });

/// A combine rejects weights that it would not apply.
TEST(WeightsOfCombine, ThatAreNotAppliedAreRefused) {
  const auto all = outcomes(1, options_with(60s), [](Group& group) {
    NormalRig rig(group, NormalRig::config(Staging::direct, Layout::expert_major));
    const auto d = rig.dispatch();
    switchyard::CombineOptions o;
    o.order = switchyard::CombineOrder::per_route;
    o.topk_weights = rig.weights.data();
    o.apply_weights = false;
    expect_text(outcome_of([&] { rig.exchange.combine(d.x, d.handle, rig.out.data(), o); }), ErrorCode::invalid_argument,
                "CombineOptions::topk_weights is given, but apply_weights is false");
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

}  // namespace
}  // namespace harness
