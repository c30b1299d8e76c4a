// SPDX-License-Identifier: Apache-2.0
// The page of `bench --html`, generated from fabricated results.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tools/report/bench_page.hpp"
#include "tools/report/tune_page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

json times(double p50) { return {{"p50_us", p50}, {"p99_us", 1.1 * p50}}; }

json run(const char* backend, int tokens, int sms, double us) {
  return {{"config",
           {{"backend", backend},
            {"ranks", 4},
            {"ranks_are", "threads"},
            {"sms", sms},
            {"tokens_per_rank", tokens},
            {"hidden", 7168},
            {"experts", 256},
            {"topk", 8},
            {"layout", "rank_major"},
            {"dtype", "bf16"},
            {"order", "per_rank"},
            {"routing", "uniform"}}},
          {"dispatch", times(us)},
          {"combine", times(1.1 * us)},
          {"plan_us", 12.5},
          {"share_of_limit", {{"dispatch", 0.9}, {"combine", 0.8}}},
          {"verified", true}};
}

json document(bool gpu) {
  json d = {{"commit", "abc1234"}, {"date", "2026-01-01"}, {"machine", {{"cpu", "Any <CPU> & more"}, {"usable_cores", 2}}}};
  if (gpu) {
    d["gpus"] = {{"names", {"GPU A", "GPU A"}}};
  } else {
    d["copy_limit"] = {{"gb_per_s", 50.0}};
  }
  return d;
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(BenchHtml, OnePointPerMeasurementAndNothingIsFetched) {
  json d = document(false);
  for (const int tokens : {128, 512, 2048}) d["runs"].push_back(run("cpu", tokens, 0, tokens));
  const std::string page = bench_html(d);
  EXPECT_EQ(count(page, "<circle"), 3u * 2 * 2);  // two operations in two plots
  EXPECT_EQ(count(page, "<section"), 2u);
  EXPECT_EQ(count(page, "PASS"), 3u);
  EXPECT_NE(page.find("tokens per rank"), std::string::npos);
  EXPECT_NE(page.find("50.0 GB/s"), std::string::npos);
  EXPECT_NE(page.find("Any &lt;CPU> &amp; more"), std::string::npos);
  for (const char* wrong : {"http", "<script", "src=", "url(", "nan", "inf,"})
    EXPECT_EQ(page.find(wrong), std::string::npos) << wrong;
}

TEST(TuneHtml, APlotForEachKeyOfEachShape) {
  json d = document(false);
  d["what"] = "switchyard tune --backend <cpu>";
  const auto trial = [](const char* name, int value, double us, bool chosen, bool is_default) {
    return json{{"name", name}, {"value", value}, {"us", us}, {"chosen", chosen}, {"usual", is_default}, {"problem", ""}};
  };
  json shape = {{"entry", "device=cpu"},
                {"shape", "flat, 2 ranks, 128 tokens, hidden 7168"},
                {"values", "sms=64"},
                {"gains", {{{"of", "all_to_all"}, {"untuned_us", 30.0}, {"tuned_us", 29.0}}}}};
  shape["trials"] = {trial("sms", 64, 29, true, false), trial("warps", 8, 31, false, false), trial("sms", 132, 30, false, true),
                     trial("warps", 16, 29, true, true), trial("warps", 4, 0, false, false)};
  d["chosen"] = {shape, shape};
  d["stopped"] = "no <memory>";
  const std::string page = tune_html(d);
  EXPECT_EQ(count(page, "<section"), 3u);
  EXPECT_EQ(count(page, "<svg"), 4u);
  EXPECT_EQ(count(page, "<rect"), 2u * 4) << "what could not be measured has no bar";
  EXPECT_EQ(count(page, "fill:var(--good)"), 2u * 2);
  EXPECT_EQ(count(page, "fill:var(--muted)\">"), 2u);
  EXPECT_NE(page.find("Chosen: sms=64"), std::string::npos);
  for (const char* part :
       {"over sms<", "over warps<", "&lt;cpu>", "no &lt;memory>", "30.0 us", "<title>Switchyard tune</title>"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  for (const char* wrong : {"http", "<script", "src=", "url(", "nan", "inf,"})
    EXPECT_EQ(page.find(wrong), std::string::npos) << wrong;
}

TEST(BenchHtml, SweepsOfTwoQuantitiesGiveAPlotPairEach) {
  json d = document(true);
  for (const int tokens : {512, 4096})
    for (const int sms : {4, 8, 24}) {
      json r = run("cuda", tokens, sms, 1e4 / sms);
      r["push_limit"] = times(8e3 / sms);
      r["pull_limit"] = times(7e3 / sms);
      r["cached_dispatch"] = times(9e3 / sms);
      r["share_of_limit"]["cached_dispatch"] = 0.95;
      d["runs"].push_back(r);
    }
  d["swept"] = {"tokens", "sms"};
  d["runs"][0]["verified"] = false;
  d["runs"][1]["verified"] = nullptr;
  const std::string page = bench_html(d);
  EXPECT_EQ(count(page, "<section"), 3u);
  EXPECT_EQ(count(page, "<circle"), 2u * 3 * (5 + 3));
  EXPECT_LT(page.find("512 tokens per rank"), page.find("4096 tokens per rank"));  // in measurement order
  EXPECT_NE(page.find("2 x GPU A"), std::string::npos);
  EXPECT_EQ(count(page, "FAIL"), 1u);
  EXPECT_EQ(count(page, "PASS"), 4u);
}

TEST(BenchHtml, SaysWhatTheWarpsOfFusedLayersDid) {
  json d = document(true);
  for (const int tokens : {512, 4096}) {
    json r = run("cuda", tokens, 132, tokens);
    r["config"]["mode"] = "layer";
    r["fused"] = times(tokens);
    r["share_of_limit"]["fused"] = 0.9;
    r["fused_workers"] = json::array();
    for (const double hidden : {0.75, 0.5})
      r["fused_workers"].push_back({{"up_share", 0.4},
                                    {"down_share", 0.2},
                                    {"sum_share", 0.05},
                                    {"before_up_us", 20.0 + hidden},
                                    {"after_down_us", 30.0},
                                    {"communication_us", 1000.0},
                                    {"hidden_share", hidden}});
    d["runs"].push_back(r);
  }
  const std::string page = bench_html(d);
  EXPECT_EQ(count(page, "The fused layer"), 1u);
  EXPECT_EQ(count(page, "<td>50.0 %</td>"), 2u) << "the rank that hides least";
  EXPECT_EQ(count(page, "<td>75.0 %</td>"), 0u);
  EXPECT_EQ(count(page, "<td>20.8 us</td>"), 2u) << "the rank that waits longest";
  for (json& r : d["runs"]) r["fused_workers"] = json::array();  // lost records
  EXPECT_EQ(count(bench_html(d), "The fused layer"), 0u);
}

/// Returns the lead of a page, which contains the values shared by all runs.
std::string lead_of(const std::string& page) {
  const size_t begin = page.find("<p class=\"lead\">");
  return page.substr(begin, page.find("<br>", begin) - begin);
}

TEST(BenchHtml, PiecesAreAnAxisAndAColumn) {
  json d = document(false);
  d["swept"] = {"pieces"};
  for (const int pieces : {1, 2, 4}) {
    json r = run("cpu", 16, 0, 100.0 / pieces);
    for (const char* key : {"share_of_limit", "plan_us"}) r.erase(key);
    r["config"].update({{"mode", "low_latency"}, {"pieces", pieces}});
    d["runs"].push_back(r);
  }
  const std::string page = bench_html(d);
  EXPECT_EQ(count(page, "<section"), 2u);
  for (const char* point : {"at 1 pieces", "at 2 pieces", "at 4 pieces"}) EXPECT_EQ(count(page, point), 2u) << point;
  EXPECT_NE(page.find("<th>pieces</th>"), std::string::npos);
}

TEST(BenchHtml, TheLeadSaysWhatAllRunsShare) {
  json d = document(false);
  d["swept"] = {"hidden", "topk"};
  for (const int hidden : {256, 512})
    for (const int topk : {2, 4}) {
      d["runs"].push_back(run("cpu", 16, 0, hidden));
      d["runs"].back()["config"].update({{"hidden", hidden}, {"topk", topk}});
    }
  const std::string lead = lead_of(bench_html(d));
  for (const char* same : {"4 ranks", "rank_major", "bf16", "256 experts", "uniform routing", "per_rank combine"})
    EXPECT_NE(lead.find(same), std::string::npos) << lead;
  for (const char* differs : {"hidden", "top-"}) EXPECT_EQ(lead.find(differs), std::string::npos) << lead;
  d["runs"] = {run("cpu", 16, 0, 1)};
  for (const char* same : {"hidden 7168", "top-8"}) EXPECT_NE(lead_of(bench_html(d)).find(same), std::string::npos) << same;
}

TEST(BenchHtml, WhatFollowsASweptQuantityIsAColumnOnly) {
  json d = document(false);
  d["swept"] = {"ranks"};
  for (const int ranks : {1, 2, 4}) {
    d["runs"].push_back(run("cpu", 16, 0, ranks));
    d["runs"].back()["config"].update({{"ranks", ranks}, {"warps", 4 / ranks}});
  }
  const std::string page = bench_html(d);
  EXPECT_EQ(count(page, "<section"), 2u) << "one pair of plots, one table";
  EXPECT_EQ(count(page, "<circle"), 3u * 2 * 2);
  EXPECT_NE(page.find("<th>warps</th>"), std::string::npos);
}

TEST(BenchHtml, NotesAndAnEarlyEndAreSaid) {
  json d = document(false);
  d["runs"].push_back(run("cpu", 16, 0, 1));
  EXPECT_EQ(count(bench_html(d), "Not everything was measured"), 0u);
  d["notes"] = {"the <limit> moved"};
  d["stopped"] = "rank 0: no room";
  const std::string page = bench_html(d);
  EXPECT_NE(page.find("Note: the &lt;limit> moved"), std::string::npos);
  EXPECT_NE(page.find("Not everything was measured: rank 0: no room"), std::string::npos);
}

TEST(BenchHtml, OneRunIsEnough) {
  json d = document(true);
  d["runs"].push_back(run("cuda", 4096, 24, 500));
  const std::string page = bench_html(d);
  EXPECT_EQ(count(page, "<circle"), 2u * 2);
  EXPECT_EQ(page.find("nan"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::tool
