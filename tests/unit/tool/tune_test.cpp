// SPDX-License-Identifier: Apache-2.0
// The values that `switchyard tune` chooses from fabricated times, and the parts of an older file that it keeps.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "switchyard/status.hpp"
#include "tools/tune/file.hpp"
#include "tools/tune/search.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

TuningKey key_of(const std::string& device, int64_t tokens) { return {device, TuningMode::low_latency, 2, 64, tokens}; }

/// A GPU with 132 multiprocessors. The functions define its call times.
struct Machine {
  std::function<double(const TuningValues&)> dispatch, combine;
  std::vector<std::string> measured;
  std::function<double(const TuningValues&)> quantised = [](const TuningValues& v) {  // the default is best
    return v.quantized_dispatch_sms == 0 ? 50.0 : 100.0;
  };
  json operator()(const TuningValues& v, const std::string& what) {
    measured.push_back(what);
    return {{"dispatch", {{"p50_us", dispatch(v)}}},
            {"combine", {{"p50_us", combine(v)}}},
            {"quantized_dispatch", {{"p50_us", quantised(v)}}}};
  }
  TuneFound normal(double slack = 0.03) {
    return tune_search(tune_stages(TuningMode::normal, 7168, 8, 132), slack,
                       [&](const TuningValues& v, const std::string& what) { return (*this)(v, what); });
  }
};

int sms_of(int value) { return value > 0 ? value : 24; }

TEST(TuneSearch, FewestMultiprocessorsWithinTheSlack) {
  // Calls take 100 us with 48 or more multiprocessors, 102 us with 40, and 104 us with 32.
  const auto flat_from_48 = [](int sms) { return sms >= 48 ? 100.0 : 100.0 + (48 - sms) * 0.25; };
  Machine m{[&](const TuningValues& v) { return flat_from_48(sms_of(v.dispatch_sms)); },
            [&](const TuningValues& v) { return 1000.0 / sms_of(v.combine_sms); },
            {}};
  EXPECT_EQ(m.normal(0.03).values, (TuningValues{40, 132, 0, 0, 0, 0, 0}));
  EXPECT_EQ(m.normal(0.00).values, (TuningValues{48, 132, 0, 0, 0, 0, 0}));
  EXPECT_EQ(m.normal(0.06).values.dispatch_sms, 0) << "24, the default, is left out";
  const auto within = m.normal(0.5).values;
  EXPECT_EQ(within.dispatch_sms, 4);
  EXPECT_EQ(within.combine_sms, 96);  // 1000 / 96 is within half of 1000 / 132
}

/// These values are searched in the same measurements as those of the other calls. The library's own choice is 64.
TEST(TuneSearch, DispatchesThatQuantiseHaveMultiprocessorsOfTheirOwn) {
  size_t max_measured = 0;
  const auto found = [&](const std::function<double(int sms)>& us) {
    Machine m{[](const TuningValues& v) { return 100.0 + std::abs(sms_of(v.dispatch_sms) - 16); },
              [](const TuningValues& v) { return 100.0 + std::abs(sms_of(v.combine_sms) - 48); },
              {},
              [&](const TuningValues& v) { return us(v.quantized_dispatch_sms > 0 ? v.quantized_dispatch_sms : 64); }};
    const TuningValues values = m.normal(0).values;
    max_measured = std::max(max_measured, m.measured.size());
    EXPECT_EQ(values.dispatch_sms, 16);
    EXPECT_EQ(values.combine_sms, 48);
    return values.quantized_dispatch_sms;
  };
  EXPECT_EQ(found([](int sms) { return 1000.0 / sms; }), 132);
  EXPECT_EQ(found([](int sms) { return 1000.0 / std::min(sms, 64); }), 0) << "64, the default, is left out";
  EXPECT_EQ(found([](int sms) { return 1000.0 / std::min(sms, 96); }), 96);
  EXPECT_EQ(found([](int sms) { return 100.0 + std::abs(sms - 24); }), 24) << "the default of other calls is not this one's";
  const std::vector<TuneStage> stages = tune_stages(TuningMode::normal, 7168, 8, 132);
  size_t candidates = 0;
  for (const TuneStage& stage : stages) {
    size_t max = 0;
    for (const TuneDimension& d : stage) max = std::max(max, d.candidates.size());
    candidates += max;
  }
  EXPECT_EQ(max_measured, candidates);
}

TEST(TuneSearch, LaterStagesHaveWhatEarlierOnesChose) {
  std::set<int> seen;
  Machine m{[&](const TuningValues& v) {
              if (v.dispatch_warps > 0) seen.insert(v.dispatch_sms);
              // Fewer warps are faster only on 48 SMs; two stages are always faster.
              const bool here = v.dispatch_sms == 48;
              return (here ? 100.0 : 200.0) + (here && v.dispatch_warps == 8 ? -20 : 0) + (v.dispatch_stages == 2 ? -10 : 0);
            },
            [](const TuningValues&) { return 50.0; },
            {}};
  EXPECT_EQ(m.normal().values, (TuningValues{48, 4, 0, 8, 2, 0, 0}));
  EXPECT_EQ(seen, std::set<int>{48});
}

TEST(TuneSearch, TheDefaultStaysUnlessBeatenTwice) {
  int calls = 0;
  // 12 warps win by chance, but only the first time.
  Machine m{[&](const TuningValues& v) { return v.dispatch_warps == 12 && ++calls == 1 ? 50.0 : 100.0; },
            [](const TuningValues& v) { return v.combine_warps == 16 ? 98.0 : 100.0; },  // within the slack
            {}};
  const TuneFound found = m.normal();
  EXPECT_EQ(found.values, (TuningValues{4, 4, 0, 0, 0, 0, 0}));
  EXPECT_EQ(calls, 2);
  for (const TuneTrial& t : found.trials) {
    if (t.chosen) {
      EXPECT_EQ(t.is_default, t.name != "dispatch_sms" && t.name != "combine_sms") << t.name;
    }
  }
  Machine sure{[](const TuningValues& v) { return v.dispatch_warps == 12 ? 90.0 : 100.0; },
               [](const TuningValues& v) { return v.combine_warps == 16 ? 90.0 : 100.0; },
               {}};
  EXPECT_EQ(sure.normal().values, (TuningValues{4, 4, 0, 12, 0, 16, 0}));
}

TEST(TuneSearch, WhatCannotBeMeasuredIsNotChosen) {
  const auto measure = [](const TuningValues& v, const std::string&) -> json {
    if (v.pieces == 1) return {{"problem", "a piece of 7168 columns needs too much shared memory"}};
    const double us = 100.0 - v.pieces;
    return {{"dispatch", {{"p50_us", us}}},
            {"combine_per_route", {{"p50_us", us}}},
            {"combine_per_rank", {{"p50_us", us}}},
            {"both_per_route", {{"p50_us", us}}},
            {"both_per_rank", {{"p50_us", us}}}};
  };
  const TuneFound found = tune_search(tune_stages(TuningMode::low_latency, 7168, 8, 0), 0.03, measure);
  EXPECT_EQ(found.values.pieces, 16);
  ASSERT_EQ(found.trials.front().value, 1);
  EXPECT_NE(found.trials.front().problem.find("shared memory"), std::string::npos);
  EXPECT_EQ(found.trials.front().us, 0);
}

TEST(TuneSearch, AReportWithoutProblemsMayBeChosen) {  // a ledger's report always has a "problem" field
  const auto measure = [](const TuningValues& v, const std::string&) -> json {
    return {{"problem", ""}, {"passed", true}, {"kernel_us", {{"median", v.chunk_kib == 32 ? 35.0 : 61.0}}}};
  };
  const TuneFound found = tune_search(tune_stages(TuningMode::ledger, 7168, 8, 132), 0.03, measure);
  EXPECT_EQ(found.values.chunk_kib, 32);
}

TEST(TuneSearch, WhatThereIsToTune) {
  for (const TuningMode mode : {TuningMode::normal, TuningMode::normal_expert_major, TuningMode::flat, TuningMode::ledger})
    EXPECT_TRUE(tune_stages(mode, 7168, 8, 0).empty());
  const auto cpu = tune_stages(TuningMode::low_latency, 7168, 8, 0);
  ASSERT_EQ(cpu.size(), 1u);
  ASSERT_EQ(cpu[0].size(), 1u);
  EXPECT_STREQ(cpu[0][0].name, "pieces");
  EXPECT_EQ(cpu[0][0].default_value, 8);
  EXPECT_EQ(tune_stages(TuningMode::low_latency, 300, 1, 0)[0][0].candidates, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(tune_stages(TuningMode::low_latency, 100, 1, 0)[0][0].candidates, (std::vector<int>{1}));
  const auto names = [](TuningMode mode) {
    std::vector<std::string> all;
    for (const TuneStage& stage : tune_stages(mode, 7168, 8, 132))
      for (const TuneDimension& d : stage) all.emplace_back(d.name);
    return all;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(TuningMode::normal), (Names{"dispatch_sms", "combine_sms", "quantized_dispatch_sms", "dispatch_warps",
                                              "combine_warps", "dispatch_stages"}));
  EXPECT_EQ(names(TuningMode::low_latency),
            (Names{"dispatch_sms", "combine_sms", "dispatch_warps", "combine_warps", "pieces"}));
  EXPECT_EQ(names(TuningMode::flat), (Names{"sms", "warps"}));
  EXPECT_EQ(names(TuningMode::ledger), (Names{"sms", "warps", "chunk_kib"}));
  // Every candidate is a valid value in a file.
  for (const TuningMode mode :
       {TuningMode::normal, TuningMode::normal_expert_major, TuningMode::low_latency, TuningMode::flat, TuningMode::ledger})
    for (const int sms : {1, 5, 66, 114, 132})
      for (const TuneStage& stage : tune_stages(mode, 7168, 8, sms))
        for (const TuneDimension& d : stage) {
          EXPECT_EQ(std::count(d.candidates.begin(), d.candidates.end(), d.default_value), 1) << d.name;
          for (const int value : d.candidates) {
            EXPECT_LE(value, d.smallest ? sms : std::string(d.name) == "chunk_kib" ? 128 : 20) << d.name;
            TuningEntry entry{{"gpu", mode, 1, 1, 1}, {}};
            entry.values.*d.target = value;
            const auto file = TuningFile::parse(std::string(TuningFile::first_line()) + "\n" + entry.text(), "f");
            EXPECT_EQ(file.entries.at(0).values, entry.values) << entry.text();
          }
        }
}

/// A final comparison whose runs have these figures in each round, without and with the values. Further rounds repeat the last
/// one.
struct Compared {
  TuningMode mode;
  int max_sms = 132;
  std::vector<std::string> measured;
  TuneVerdict operator()(const TuningValues& values, const std::vector<std::pair<json, json>>& rounds, double slack = 0.03) {
    const auto stages = tune_stages(mode, 7168, 4, max_sms);
    return tune_compare(mode, stages, values, slack, rounds.front().first, [&](bool with) {
      const size_t round = std::min(measured.size() / 2, rounds.size() - 1);
      measured.emplace_back(with ? "with" : "without");
      return with ? rounds[round].second : rounds[round].first;
    });
  }
};
json normal_run(double dispatch, double combine, double quantised = 100) {
  return {{"dispatch", {{"p50_us", dispatch}}},
          {"combine", {{"p50_us", combine}}},
          {"quantized_dispatch", {{"p50_us", quantised}}}};
}
json low_latency_run(double dispatch, double combine, double both) {
  json run = {{"dispatch", {{"p50_us", dispatch}}}};
  for (const char* order : {"per_route", "per_rank"}) {
    run[std::string("combine_") + order] = {{"p50_us", combine}};
    run[std::string("both_") + order] = {{"p50_us", both}};
  }
  return run;
}
/// Returns the reason for dropping normal-mode values that change the times of dispatch and combine from 100 us to these.
std::string dropped_normal(const TuningValues& values, double dispatch, double combine, double slack = 0.03) {
  return Compared{TuningMode::normal, 132, {}}(values, {{normal_run(100, 100), normal_run(dispatch, combine)}}, slack).dropped;
}
const TuningValues kFewerSms{16, 0, 0, 0, 0, 0, 0}, kMoreSms{16, 48, 0, 0, 0, 0, 0}, kWarpsOnly{0, 0, 0, 8, 0, 0, 0};

TEST(TuneCompare, AnEntryIsWorthItByAGainOrByFewerMultiprocessors) {
  EXPECT_EQ(dropped_normal(kMoreSms, 100, 96), "");
  EXPECT_EQ(dropped_normal(kWarpsOnly, 96, 102.9), "") << "a figure may lose the slack if another gains";
  EXPECT_EQ(dropped_normal(kFewerSms, 102.9, 100), "") << "16 instead of 24";
  const std::string nothing = "not faster by more than the slack, nor do calls take fewer multiprocessors";
  EXPECT_EQ(dropped_normal(kWarpsOnly, 100, 100), nothing);
  EXPECT_EQ(dropped_normal(kWarpsOnly, 97.5, 97.5), nothing) << "within the slack";
  EXPECT_EQ(dropped_normal(kMoreSms, 100, 98), nothing) << "dispatch takes fewer, combine more";
  EXPECT_EQ(dropped_normal(kMoreSms, 100, 98, 0.01), "") << "a smaller slack";
  EXPECT_EQ(dropped_normal(kWarpsOnly, 100, 100, 0), nothing);
  EXPECT_EQ(dropped_normal(kWarpsOnly, 99.9, 100, 0), "");
}

TEST(TuneCompare, NoFigureMayBeSlowerByMoreThanTheSlack) {
  EXPECT_EQ(dropped_normal(kFewerSms, 103.1, 100), "slower by more than the slack: dispatch (+3.1 %)");
  EXPECT_EQ(dropped_normal(kMoreSms, 50, 104), "slower by more than the slack: combine (+4.0 %)") << "whatever the other gains";
  EXPECT_EQ(dropped_normal(kWarpsOnly, 105, 106), "slower by more than the slack: dispatch (+5.0 %), combine (+6.0 %)");
}

TEST(TuneCompare, DispatchesThatQuantiseAreAFigure) {
  TuningValues values = kFewerSms;
  values.quantized_dispatch_sms = 48;
  const auto dropped = [&](double quantised) {
    return Compared{TuningMode::normal_expert_major, 132, {}}(values, {{normal_run(100, 100), normal_run(100, 100, quantised)}})
        .dropped;
  };
  EXPECT_EQ(dropped(103.1), "slower by more than the slack: quantized_dispatch (+3.1 %)");
  EXPECT_EQ(dropped(100), "");
  values.quantized_dispatch_sms = 96;
  EXPECT_EQ(dropped(100), "not faster by more than the slack, nor do calls take fewer multiprocessors")
      << "more than by default";
  EXPECT_EQ(dropped(96), "");
  values = kMoreSms;
  EXPECT_EQ(dropped(96), "") << "a gain of these alone is one";
}

/// All figures considered by any stage are compared at the end.
TEST(TuneCompare, FiguresOfAMode) {
  using Figures = std::vector<std::string>;
  EXPECT_EQ(tune_figures(TuningMode::low_latency),
            (Figures{"/dispatch/p50_us", "/combine_per_route/p50_us", "/combine_per_rank/p50_us", "/both_per_route/p50_us",
                     "/both_per_rank/p50_us"}));
  for (const TuningMode mode :
       {TuningMode::normal, TuningMode::normal_expert_major, TuningMode::low_latency, TuningMode::flat, TuningMode::ledger}) {
    const Figures all = tune_figures(mode);
    for (const int max : {0, 132})
      for (const TuneStage& stage : tune_stages(mode, 7168, 4, max))
        for (const TuneDimension& d : stage)
          for (const char* const metric : d.metrics) EXPECT_EQ(std::count(all.begin(), all.end(), metric), 1) << metric;
  }
}

TEST(TuneCompare, BothCallsOfLowLatencyCount) {
  const TuningValues values{96, 112, 0, 0, 0, 0, 0};
  const json untuned = low_latency_run(20, 22, 40);
  Compared compared{TuningMode::low_latency, 132, {}};
  // Each call alone is as fast as with all multiprocessors, but consecutive calls are not.
  EXPECT_EQ(compared(values, {{untuned, low_latency_run(20, 22, 42)}}).dropped,
            "slower by more than the slack: both_per_route (+5.0 %), both_per_rank (+5.0 %)");
  EXPECT_EQ((Compared{TuningMode::low_latency, 132, {}}(values, {{untuned, low_latency_run(20, 22, 40)}}).dropped), "");
  json one = untuned;  // one combine order cannot compensate for another
  one["combine_per_rank"]["p50_us"] = 23;
  one["combine_per_route"]["p50_us"] = 15;
  EXPECT_EQ((Compared{TuningMode::low_latency, 132, {}}(values, {{untuned, one}}).dropped),
            "slower by more than the slack: combine_per_rank (+4.5 %)");
}

TEST(TuneCompare, OfThreeRoundsInTurnTheBestOfEachFigure) {
  Compared compared{TuningMode::normal, 132, {}};
  const TuneVerdict kept =
      compared(kWarpsOnly, {{normal_run(100, 120), normal_run(120, 100)}, {normal_run(130, 100), normal_run(90, 130)}});
  EXPECT_EQ(compared.measured, (std::vector<std::string>{"without", "with", "without", "with", "without", "with"}));
  ASSERT_EQ(kept.gains.size(), 3u);
  EXPECT_EQ(kept.gains[0].of, "dispatch");
  EXPECT_EQ(kept.gains[0].before, 100);
  EXPECT_EQ(kept.gains[0].after, 90);
  EXPECT_EQ(kept.gains[0].text(), "-10.0 %");
  EXPECT_EQ(kept.gains[1].of, "combine");
  EXPECT_EQ(kept.gains[1].before, 100);
  EXPECT_EQ(kept.gains[1].after, 100);
  EXPECT_EQ(kept.dropped, "");
}

TEST(TuneCompare, WithoutValuesOrOnceDroppedNothingIsGained) {
  Compared compared{TuningMode::normal, 132, {}};
  const TuneVerdict none = compared({}, {{normal_run(100, 120), normal_run(1, 1)}});
  EXPECT_TRUE(compared.measured.empty());
  EXPECT_EQ(none.dropped, "");
  ASSERT_EQ(none.gains.size(), 3u);
  EXPECT_EQ(none.gains[1].before, 120);
  EXPECT_EQ(none.gains[1].after, 120);
  const TuneVerdict dropped = compared(kWarpsOnly, {{normal_run(100, 120), normal_run(110, 120)}});
  EXPECT_NE(dropped.dropped, "");
  EXPECT_EQ(dropped.gains[0].after, 100);
}

TEST(TuneFile, EntriesOfTheSameKeyAreReplacedOthersStay) {
  const std::string old =
      "switchyard-tuning 1\n"
      "# mine\n"
      "\n"
      "# of 16\n"
      "# again of 16\n"
      "device=\"cpu\" mode=low_latency ranks=2 hidden=64 tokens=16 pieces=1\n"
      "\n"
      "# of 32\n"
      "device=\"cpu\" mode=low_latency ranks=2 hidden=64 tokens=32 pieces=2\n";
  const std::string text =
      merged(old, {{{key_of("cpu", 16), {0, 0, 0, 0, 0, 0, 5}}, {"new", "newer"}}, {{key_of("gpu", 32), {}}, {}}});
  EXPECT_EQ(text,
            "switchyard-tuning 1\n"
            "# mine\n"
            "\n"
            "# of 32\n"
            "device=\"cpu\" mode=low_latency ranks=2 hidden=64 tokens=32 pieces=2\n"
            "\n"
            "# new\n"
            "# newer\n"
            "device=\"cpu\" mode=low_latency ranks=2 hidden=64 tokens=16 pieces=5\n"
            "\n"
            "device=\"gpu\" mode=low_latency ranks=2 hidden=64 tokens=32\n");
  // Merging the same entries again changes only their order.
  EXPECT_EQ(merged(text, {{{key_of("gpu", 32), {}}, {}}}), text);
}

TEST(TuneFile, OverridesAreInForceWhileTheyLive) {
  setenv("SWITCHYARD_TUNING", "/nonexistent/before", 1);
  {
    TuningOverride over;
    EXPECT_EQ(Tuning::from_environment().find(key_of("cpu", 16)), TuningValues{});
    over.set({{key_of("cpu", 16), {0, 0, 0, 0, 0, 0, 5}}, {key_of("cpu", 16), {0, 0, 0, 0, 0, 0, 6}}});
    EXPECT_EQ(Tuning::from_environment().find(key_of("cpu", 99)).pieces, 5);
    over.set({{key_of("cpu", 16), {}}});  // shorter than the previous content
    EXPECT_EQ(Tuning::from_environment().files()[0].entries.size(), 1u);
    EXPECT_EQ(Tuning::from_environment().find(key_of("cpu", 99)), TuningValues{});
  }
  EXPECT_STREQ(std::getenv("SWITCHYARD_TUNING"), "/nonexistent/before");
  unsetenv("SWITCHYARD_TUNING");
}

}  // namespace
}  // namespace switchyard::tool
