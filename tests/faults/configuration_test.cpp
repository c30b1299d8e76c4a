// SPDX-License-Identifier: Apache-2.0
// Object configurations, in all modes, that are invalid or differ from those of the peers.
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "harness/outcome.hpp"
#include "modes/fused/fused_moe_rig.hpp"
#include "modes/ledger/ledger_rig.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/normal/normal_rig.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::LedgerConfig;
using switchyard::LowLatencyConfig;
using switchyard::NormalConfig;
using switchyard::Staging;
using switchyard::detail::FusedMoeConfig;

struct Configuration {
  std::string name;
  const char* in_text;  ///< the error must name the field
  std::function<void()> measure;
  std::function<void(Group&, bool spoiled)> make;  ///< creates an object
};
std::ostream& operator<<(std::ostream& out, const Configuration& c) { return out << c.name; }

template <class Config>
using Spoils = std::vector<std::pair<const char*, void (*)(Config&)>>;

template <class Object, class Config>
void add(std::vector<Configuration>& all, const std::string& mode, const Config& valid, const Spoils<Config>& spoils) {
  for (size_t i = 0; i < spoils.size(); ++i) {
    Config config = valid;
    spoils[i].second(config);
    all.push_back({mode + "_" + std::to_string(i), spoils[i].first, [config] { (void)Object::memory_required(config, 2); },
                   [valid, config](Group& group, bool spoiled) { Object object(group, spoiled ? config : valid); }});
  }
}

void add_wrong_normal(std::vector<Configuration>& all) {
  add<switchyard::NormalExchange, NormalConfig>(all, "normal", NormalRig::config(),
                                                {{"hidden", [](NormalConfig& c) { c.hidden = 0; }},
                                                 {"hidden", [](NormalConfig& c) { c.hidden = 4; }},
                                                 {"num_experts", [](NormalConfig& c) { c.num_experts = 0; }},
                                                 {"topk", [](NormalConfig& c) { c.topk = 33; }},
                                                 {"max_tokens", [](NormalConfig& c) { c.max_tokens = -1; }},
                                                 {"expert_alignment", [](NormalConfig& c) { c.expert_alignment = 0; }}});
  add<switchyard::NormalExchange, NormalConfig>(all, "ring", NormalRig::config(Staging::ring),
                                                {{"slots", [](NormalConfig& c) { c.ring.slots = 1; }},
                                                 {"send_chunk", [](NormalConfig& c) { c.ring.send_chunk = 9; }},
                                                 {"num_channels", [](NormalConfig& c) { c.ring.num_channels = 257; }}});
}

void add_wrong_low_latency(std::vector<Configuration>& all) {
  using C = LowLatencyConfig;
  add<switchyard::LowLatencyExchange, C>(
      all, "low_latency", LowLatencyRig::config(),
      {{"hidden = 0", [](C& c) { c.hidden = 0; }},
       {"hidden = 1048577", [](C& c) { c.hidden = (1 << 20) + 1; }},
       {"multiple of 16", [](C& c) { c.hidden = 4; }},
       {"a row as it is sent", [](C& c) { c.hidden = 24; }},
       {"num_experts = 0", [](C& c) { c.num_experts = 0; }},
       {"topk = 0", [](C& c) { c.topk = 0; }},
       {"topk = 33", [](C& c) { c.topk = 33; }},
       {"max_tokens = 0", [](C& c) { c.max_tokens = 0; }},
       {"max_tokens = 65536", [](C& c) { c.max_tokens = 65536; }},
       {"dtype = fp8_e4m3", [](C& c) { c.dtype = switchyard::DType::fp8_e4m3; }},
       {"scales = 3", [](C& c) { c.scales = static_cast<switchyard::ScaleKind>(3); }},
       {"scale_group = 96", [](C& c) { c.scale_group = 96; }},
       {"scale_order = 2", [](C& c) { c.scale_order = static_cast<switchyard::ScaleOrder>(2); }},
       {"sending = 2", [](C& c) { c.sending = static_cast<switchyard::Sending>(2); }},
       {"pieces = -1", [](C& c) { c.pieces = -1; }},
       {"pieces = 17", [](C& c) { c.pieces = 17; }},
       {"rows of an output", [](C& c) {
          c.num_experts = 1 << 20;
          c.max_tokens = 65535;
        }}});
}

/// Uses its own products.
struct FusedObject : FusedMoeRig {
  using FusedMoeRig::FusedMoeRig;
  static auto memory_required(const FusedMoeConfig& config, int world) {
    return switchyard::detail::FusedMoe::memory_required(config, world, switchyard::Backend::cpu);
  }
};

std::vector<Configuration> wrong_configurations() {
  std::vector<Configuration> all;
  add_wrong_normal(all);
  add_wrong_low_latency(all);
  add<FusedObject, FusedMoeConfig>(all, "fused", FusedMoeRig::config(),
                                   {{"MoeLayerConfig::hidden = 60", [](FusedMoeConfig& c) { c.hidden = 60; }},
                                    {"MoeLayerConfig::intermediate = 0", [](FusedMoeConfig& c) { c.intermediate = 0; }},
                                    {"MoeLayerConfig::num_experts = 0", [](FusedMoeConfig& c) { c.num_experts = 0; }},
                                    {"MoeLayerConfig::topk = 33", [](FusedMoeConfig& c) { c.topk = 33; }},
                                    {"MoeLayerConfig::max_tokens = -1", [](FusedMoeConfig& c) { c.max_tokens = -1; }},
                                    {"MoeLayerConfig::capacity = -1", [](FusedMoeConfig& c) { c.capacity = -1; }}});
  using C = LedgerConfig;
  add<switchyard::LedgerCombine, C>(all, "ledger", published_config(4, 8, 2, 4),
                                    {{"LedgerConfig::hidden = 0", [](C& c) { c.hidden = 0; }},
                                     {"LedgerConfig::num_experts = 0", [](C& c) { c.num_experts = 0; }},
                                     {"LedgerConfig::topk = 33", [](C& c) { c.topk = 33; }},
                                     {"LedgerConfig::max_tokens = -1", [](C& c) { c.max_tokens = -1; }},
                                     {"LedgerConfig::dtype = fp8_e4m3", [](C& c) { c.dtype = switchyard::DType::fp8_e4m3; }},
                                     {"LedgerConfig::max_ledgers = 0", [](C& c) { c.max_ledgers = 0; }}});
  return all;
}

class WrongConfiguration : public testing::TestWithParam<Configuration> {};

TEST_P(WrongConfiguration, NamesTheField) {
  const Configuration& c = GetParam();
  const Outcome o = outcome_of(c.measure);
  EXPECT_EQ(code_name(o.code), "invalid_argument") << c.in_text;
  EXPECT_NE(o.text.find(c.in_text), std::string::npos) << o.text;
  for (const Outcome& end : outcomes(2, options_with(60s), [&](Group& group) { c.make(group, true); })) {
    EXPECT_EQ(code_name(end.code), "invalid_argument") << end.text;
    EXPECT_NE(end.text.find(c.in_text), std::string::npos) << end.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, WrongConfiguration, testing::ValuesIn(wrong_configurations()),
                         [](const auto& c) { return c.param.name; });

TEST(WrongConfiguration, OfTooManyRanks) {
  EXPECT_EQ(
      code_name(outcome_of([] { (void)switchyard::LowLatencyExchange::memory_required(LowLatencyRig::config(), 65); }).code),
      "invalid_argument");
}

std::vector<Configuration> other_configurations() {
  std::vector<Configuration> all;
  add<switchyard::NormalExchange, NormalConfig>(
      all, "normal", NormalRig::config(),
      {{"hidden", [](NormalConfig& c) { c.hidden = 128; }},
       {"num_experts", [](NormalConfig& c) { c.num_experts = 9; }},
       {"topk", [](NormalConfig& c) { c.topk = 3; }},
       {"max_tokens", [](NormalConfig& c) { c.max_tokens = 7; }},
       {"expert_alignment", [](NormalConfig& c) { c.expert_alignment = 2; }},
       {"layout", [](NormalConfig& c) { c.layout = switchyard::Layout::expert_major; }},
       {"staging", [](NormalConfig& c) { c.staging = Staging::ring; }}});
  using C = LowLatencyConfig;
  add<switchyard::LowLatencyExchange, C>(all, "low_latency", LowLatencyRig::config(),
                                         {{"hidden", [](C& c) { c.hidden = 128; }},
                                          {"num_experts", [](C& c) { c.num_experts = 9; }},
                                          {"topk", [](C& c) { c.topk = 3; }},
                                          {"max_tokens", [](C& c) { c.max_tokens = 7; }},
                                          {"dtype", [](C& c) { c.dtype = switchyard::DType::f16; }},
                                          {"scales", [](C& c) { c.scales = switchyard::ScaleKind::ue8m0; }},
                                          {"scale_group", [](C& c) { c.scale_group = 32; }},
                                          {"scale_order", [](C& c) { c.scale_order = switchyard::ScaleOrder::column_major; }},
                                          {"sending", [](C& c) { c.sending = switchyard::Sending::per_route; }},
                                          {"pieces", [](C& c) { c.pieces = 2; }}});
  using F = FusedMoeConfig;
  add<FusedObject, F>(all, "fused", FusedMoeRig::config(),
                      {{"hidden", [](F& c) { c.hidden = 128; }},
                       {"intermediate", [](F& c) { c.intermediate = 40; }},
                       {"num_experts", [](F& c) { c.num_experts = 9; }},
                       {"topk", [](F& c) { c.topk = 3; }},
                       {"max_tokens", [](F& c) { c.max_tokens = 7; }},
                       {"capacity", [](F& c) { c.capacity = 5; }},
                       {"overflow", [](F& c) { c.overflow = switchyard::Overflow::drop_and_report; }}});
  add<switchyard::LedgerCombine, LedgerConfig>(all, "ledger", published_config(4, 8, 2, 4),
                                               {{"topk", [](LedgerConfig& c) { c.topk = 3; }}});
  return all;
}

class OtherConfiguration : public testing::TestWithParam<Configuration> {};

TEST_P(OtherConfiguration, OfOneRankIsAMismatch) {
  const auto all = outcomes(3, options_with(60s), [&](Group& group) { GetParam().make(group, group.rank() == 1); });
  expect_mismatch(all);
  for (const Outcome& o : all)
    for (const std::string& part : {"::" + std::string(GetParam().in_text) + " = ", std::string(" on rank 0 and "),
                                    std::string(" on rank 1: must be equal on all ranks")})
      EXPECT_NE(o.text.find(part), std::string::npos) << part << ": " << o.text;
}

TEST(OtherObject, OfOneRankIsAMismatch) {
  const auto all = outcomes(2, options_with(60s), [](Group& group) {
    if (group.rank() == 0)
      NormalRig rig(group);
    else
      LowLatencyRig rig(group);
  });
  for (const Outcome& o : all) expect_text(o, ErrorCode::mismatch, "rank 0 makes NormalExchange and rank 1 LowLatencyExchange");
}

INSTANTIATE_TEST_SUITE_P(Faults, OtherConfiguration, testing::ValuesIn(other_configurations()),
                         [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace harness
