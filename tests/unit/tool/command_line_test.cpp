// SPDX-License-Identifier: Apache-2.0
// How the command line tool processes its arguments, and how it reports the library's errors about them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "switchyard/normal.hpp"
#include "switchyard/status.hpp"
#include "tools/cli/flags.hpp"
#include "tools/cli/options.hpp"
#include "tools/cli/outputs.hpp"
#include "tools/cli/progress.hpp"
#include "tools/cli/verb.hpp"
#include "tools/cli/words.hpp"
#include "tools/run/ranks.hpp"
#include "tools/run/routing_source.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

TEST(CommandLine, Suggestions) {
  const std::vector<std::string> names = {"--ranks", "--routing", "--tokens", "--no-verify"};
  EXPECT_EQ(closest("--rank", names), "--ranks");
  EXPECT_EQ(closest("--tokesn", names), "--tokens");
  EXPECT_EQ(closest("--routign", names), "--routing");
  EXPECT_EQ(closest("--no_verify", names), "--no-verify");
  EXPECT_EQ(closest("--colour", names), "");
  EXPECT_EQ(closest("dmeo", {"demo", "doctor"}), "demo");
}

TEST(CommandLine, Integers) {
  EXPECT_EQ(parse_integer("--x", "4ki", 0, 1 << 20), 4096);
  EXPECT_EQ(parse_integer("--x", "3k", 0, 1 << 20), 3000);
  EXPECT_EQ(parse_integer("--x", "-5", -10, 10), -5);
  EXPECT_EQ(parse_integers("--x", "1,4-6,2,5,1", 0, 10), (std::vector<int64_t>{1, 4, 5, 6, 2}));
  for (const char* bad : {"", "x", "5x", "11", "-1", "99999999999999999999", "9223372036854775807k", "1.5", "0x10", " 1"}) {
    try {
      parse_integer("--x", bad, 0, 10);
      ADD_FAILURE() << "'" << bad << "' was accepted";
    } catch (const UsageError& e) {
      const std::string text = e.what();
      EXPECT_NE(text.find("--x"), std::string::npos) << text;
      EXPECT_NE(text.find("'" + std::string(bad) + "'"), std::string::npos) << text;
      EXPECT_NE(text.find("0 to 10"), std::string::npos) << text;
    }
  }
  for (const char* bad : {"", ",", "1,", "6-4", "1-", "-", "1-x"})
    EXPECT_THROW(parse_integers("--x", bad, 0, 10), UsageError) << bad;
  for (const std::string bad : {"1-", "1,,2", ",1", "2,", ""}) {  // only the whole text can be quoted
    try {
      parse_integers("--x", bad, 0, 10);
    } catch (const UsageError& e) {
      EXPECT_EQ(std::string(e.what()).rfind("--x: '" + bad + "' given; allowed: values and ranges", 0), 0u) << e.what();
    }
  }
}

TEST(CommandLine, ErrorsOfTheLibraryNameFlags) {
  const std::vector<std::string> verify = {"--tokens", "--hidden", "--ranks", "--topk"};
  const auto text = [](const std::string& what, const std::string& field, const std::vector<std::string>& flags) {
    return text_with_flags(Error(ErrorCode::invalid_argument, what, field), flags);
  };
  EXPECT_EQ(text("LowLatencyConfig::max_tokens = 70000: must be in [1, 65535]", "LowLatencyConfig::max_tokens", verify),
            "--tokens = 70000: must be in [1, 65535]");
  EXPECT_EQ(text("LedgerConfig::max_tokens = -1: must be", "LedgerConfig::max_tokens", verify), "--tokens = -1: must be");
  EXPECT_EQ(text("max_tokens * topk * world (received rows) = 9: must", "max_tokens * topk * world", verify),
            "--tokens * --topk * --ranks (received rows) = 9: must");
  EXPECT_EQ(text("num_blocks x num_warps: 64 x 256 given", "num_blocks x num_warps", {"--blocks", "--warps"}),
            "--blocks x --warps: 64 x 256 given");
  EXPECT_EQ(text("rank 1: DispatchOptions::num_sms = 200: must be", "DispatchOptions::num_sms", {"--sms"}),
            "rank 1: --sms = 200: must be");
  for (const auto& [same, field] : {std::pair("RingSettings::slots = 1: must", "RingSettings::slots"),
                                    {"hiddens", ""},
                                    {"", ""},
                                    {"x.rows = 3: must", "x.rows"},
                                    {"hidden = 3", "no part of it"}})
    EXPECT_EQ(text(same, field, verify), same);
}

TEST(CommandLine, ChecksOfTheLibraryNameTheirFields) {
  NormalConfig config;
  config.num_experts = 4;
  config.topk = 2;
  config.max_tokens = 1;
  config.hidden = 3;
  try {
    (void)NormalExchange::heap_bytes(config, 2);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.field(), "NormalConfig::hidden");
    EXPECT_EQ(e.field().data(), e.what() + std::string(e.what()).find("NormalConfig::hidden"));
  }
  config.hidden = 64;
  config.topk = 1000;
  RankJob job;  // each rank rejects the call, and all report the error of the lowest rank
  job.world = 2;
  job.group.heap_bytes = size_t{1} << 20;
  for (const bool processes : {false, true}) {
    job.processes = processes;
    try {
      run_ranks(job, [&](Group& group, RankLink&) -> json { return NormalExchange(group, config).config().topk; });
      ADD_FAILURE() << "no error";
    } catch (const RankError& e) {
      EXPECT_EQ(e.field(), "NormalConfig::topk") << e.what();
    }
  }
}

TEST(CommandLine, MemoryIsAskedForBeforeItIsTaken) {
  EXPECT_NO_THROW(require_memory("--tokens 3", 0.9 * (1 << 20), 1 << 20));
  try {
    require_memory("--tokens 3", 1 << 20, 1 << 20);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(), "--tokens 3 need about 1.00 MiB, 1.00 MiB are available; make one of them smaller");
  }
}

TEST(CommandLine, Choices) {
  const std::vector<std::string> allowed = {"rank_major", "expert_major"};
  EXPECT_EQ(parse_choice("--layout", "Rank-Major", allowed), "rank_major");
  EXPECT_EQ(parse_choices("--layout", "all", allowed), allowed);
  EXPECT_EQ(parse_choices("--layout", "expert_major,expert_major", allowed), std::vector<std::string>{"expert_major"});
  for (const char* bad : {"", "rank", "rank_major,", "all,rank_major", "everything"}) {
    EXPECT_THROW(parse_choices("--layout", bad, allowed), UsageError) << bad;
  }
}

TEST(CommandLine, RoutingSources) {
  for (const std::string& word : RoutingSource::words()) {
    if (word == "recorded") continue;
    const RoutingSource source("--routing", word, {64, 4, 2, 1});
    const std::vector<Routing> batches = source.batches(1, 5, 3);
    ASSERT_EQ(batches.size(), 3u) << word;
    for (const Routing& r : batches) {
      EXPECT_EQ(r.topk_ids.size(), 20u) << word;
      EXPECT_EQ(r.num_experts, 64) << word;
      EXPECT_NO_THROW(check_routing(r)) << word;
    }
    EXPECT_EQ(source.batches(1, 15, 1)[0].topk_ids, [&] {  // batches are consecutive parts of one stream
      std::vector<int32_t> all;
      for (const Routing& r : batches) all.insert(all.end(), r.topk_ids.begin(), r.topk_ids.end());
      return all;
    }()) << word;
  }
  EXPECT_EQ(RoutingSource("--routing", "zipf:2", {}).description(), "zipf, exponent 2");
  for (const char* bad : {"", "unifrm", "uniform:3", "zipf:x", "zipf:", "all_to_one:99", "drops:2"}) {
    EXPECT_THROW(RoutingSource("--routing", bad, {64, 4, 2, 1}), UsageError) << bad;
  }
}

std::string refusal(const std::string& spec) {
  try {
    const RoutingSource source("--routing", spec, {64, 4, 2, 1});
    return "taken as " + source.description();
  } catch (const UsageError& e) {
    return e.what();
  }
}

TEST(CommandLine, RoutingSourcesThatAreRefusedAreQuoted) {
  for (const char* word : {"all_to_one", "one_expert", "group_limited"})
    for (const char* bad : {"1.5", "1e30", "-1", "99999999999"})
      EXPECT_NE(refusal(std::string(word) + ":" + bad).find("'" + std::string(bad) + "' given; allowed: an integer from 0"),
                std::string::npos)
          << refusal(std::string(word) + ":" + bad);
  EXPECT_EQ(refusal("/nonexistent/a.npy"), "--routing: cannot read '/nonexistent/a.npy': No such file or directory");
  EXPECT_EQ(refusal("recorded:x"), "--routing: 'recorded:x' given; allowed: 'recorded' or 'recorded:layer=N'");
}

TEST(CommandLine, RoutingFilesWinOverWords) {
  const auto folder = std::filesystem::temp_directory_path() / ("sy_routing_" + std::to_string(getpid()));
  const auto before = std::filesystem::current_path();
  std::filesystem::create_directories(folder / "zipf:dir");
  std::filesystem::current_path(folder);
  const Routing routing{64, 4, 2, {0, 1, 2, 3, 4, 5, 6, 7}, {}};
  write_safetensors("zipf:dir/a.safetensors", std::vector<RecordedRouting>{{3, 0, routing}, {3, 1, routing}});
  for (const char* spec : {"zipf:dir/a.safetensors", "zipf:dir/a.safetensors:layer=3", "./zipf:dir/a.safetensors"})
    EXPECT_EQ(refusal(spec), "taken as recorded on 2 ranks (a.safetensors, layer 3)");
  EXPECT_EQ(refusal("zipf:dir/a.safetensors:layer=4"), "--routing: layer 4 given; zipf:dir/a.safetensors has layers: 3");
  EXPECT_EQ(refusal("other:dir/a.npy"), "--routing: cannot read 'other:dir/a.npy': No such file or directory");
  std::filesystem::current_path(before);
  std::filesystem::remove_all(folder);
}

TEST(CommandLine, ProgressFitsTheTerminal) {
  const std::string title = "making weights, then the layer";
  const std::string line = progress_line(title, 3, 40, 12.3, "step 3 of 40", 80);
  EXPECT_LT(line.size(), 80u);
  EXPECT_EQ(line, "  " + title + " [" + "#" + std::string(15, '.') + "]   7 %  12.3 s  step 3 of 40") << line.size();
  EXPECT_NE(progress_line(title, 40, 40, 1, "step 40 of 40", 200).find("[" + std::string(24, '#') + "] 100 %"),
            std::string::npos);
  const std::string cut = progress_line(title, 1, 2, 1, std::string(200, 'x'), 80);
  EXPECT_EQ(cut.size(), 79u);
  EXPECT_NE(cut.find("[#####.....]  50 %  1.0 s  xxx"), std::string::npos) << cut;
  EXPECT_EQ(progress_line("t", 5, 0, 1, "note", 80), "  t" + std::string(29, ' ') + "  1.0 s  note");
  EXPECT_EQ(progress_line("t", 5, 0, 1, "note", 80, 40), "  t" + std::string(39, ' ') + "  1.0 s  note");
}

}  // namespace
}  // namespace switchyard::tool
