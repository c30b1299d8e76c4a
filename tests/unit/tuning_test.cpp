// SPDX-License-Identifier: Apache-2.0
// The tuning file: accepted and rejected contents, selection of entries, file locations, and the conditions under which an
// entry's warps take effect.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "exchange/normal/launch_shape.hpp"
#include "switchyard/status.hpp"
#include "switchyard/tuning.hpp"

namespace {

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::Tuning;
using switchyard::TuningEntry;
using switchyard::TuningFile;
using switchyard::TuningKey;
using switchyard::TuningMode;
using switchyard::TuningValues;

const std::string kHeader = "switchyard-tuning 1\n";
const std::string kShape = " ranks=2 hidden=7168 tokens=128";

TuningFile parse(const std::string& lines) { return TuningFile::parse(kHeader + lines, "my.tuning"); }

/// The text of the error, or "" if there is none.
std::string error_of(const std::string& text) {
  try {
    (void)TuningFile::parse(text, "my.tuning");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "";
}

class File {
 public:
  explicit File(const std::string& text)
      : path_(std::filesystem::temp_directory_path() / ("sy_tuning_" + std::to_string(getpid()))) {
    std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  std::string path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class Variable {
 public:
  explicit Variable(const std::string& value) { setenv("SWITCHYARD_TUNING", value.c_str(), 1); }
  ~Variable() { unsetenv("SWITCHYARD_TUNING"); }
};

TEST(TuningParse, EveryValueAndBack) {
  const std::string lines[] = {
      "device=\"H200\" mode=normal ranks=4 hidden=7168 tokens=4096 dispatch_sms=48 combine_sms=32 dispatch_stages=2",
      "device=\"cpu\" mode=low_latency ranks=2 hidden=7168 tokens=128 combine_sms=1024 combine_warps=1 pieces=16",
      "device=\"NVIDIA H200\" mode=flat ranks=64 hidden=16777216 tokens=67108864 sms=132 warps=16",
      "device=\"NVIDIA H200\" mode=ledger ranks=2 hidden=7168 tokens=64 sms=128 warps=8 chunk_kib=1024",
      "device=\"x = # y\" mode=ledger ranks=1 hidden=1 tokens=1",
      "device=\"H200\" mode=normal_expert_major ranks=4 hidden=7168 tokens=4096 dispatch_warps=14 combine_warps=20",
      "device=\"cpu\" mode=low_latency ranks=2 hidden=7168 tokens=128 dispatch_sms=1 dispatch_warps=16",
      "device=\"H200\" mode=normal ranks=2 hidden=7168 tokens=4096 dispatch_sms=16 quantized_dispatch_sms=1024",
      "device=\"H200\" mode=normal_expert_major ranks=2 hidden=7168 tokens=4096 quantized_dispatch_sms=1",
  };
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  const TuningFile file = parse(text);
  ASSERT_EQ(file.entries.size(), std::size(lines));
  for (size_t i = 0; i < std::size(lines); ++i) {
    EXPECT_EQ(file.entries[i].text(), lines[i]);
    EXPECT_EQ(file.entries[i].line, static_cast<int>(i) + 2);
  }
  EXPECT_EQ(file.entries[0].key, (TuningKey{"H200", TuningMode::normal, 4, 7168, 4096}));
  EXPECT_EQ(file.entries[0].values, (TuningValues{48, 32, 0, 0, 2}));
  EXPECT_EQ(file.entries[1].values, (TuningValues{0, 1024, 0, 0, 0, 1, 16}));
  EXPECT_EQ(file.entries[2].values, (TuningValues{0, 0, 132, 0, 0, 0, 0, 16}));
  EXPECT_EQ(file.entries[3].values, (TuningValues{0, 0, 128, 0, 0, 0, 0, 8, 1024}));
  EXPECT_EQ(file.entries[4].values, TuningValues{});
  EXPECT_EQ(file.entries[5].values, (TuningValues{0, 0, 0, 14, 0, 20}));
  EXPECT_EQ(file.entries[6].values, (TuningValues{1, 0, 0, 16}));
  EXPECT_EQ(file.entries[7].values, (TuningValues{16, 0, 0, 0, 0, 0, 0, 0, 0, 1024}));
  EXPECT_EQ(file.entries[8].values, (TuningValues{0, 0, 0, 0, 0, 0, 0, 0, 0, 1}));
}

TEST(TuningParse, SpacesCommentsAndOrderDoNotMatter) {
  const TuningFile file = TuningFile::parse(
      "switchyard-tuning 1  \r\n\n  # a comment = anything\r\n\ttokens=3 pieces=2\tmode=low_latency "
      "hidden=64   ranks=1 device=cpu \r\n#last",
      "f");
  ASSERT_EQ(file.entries.size(), 1u);
  EXPECT_EQ(file.entries[0].line, 4);
  EXPECT_EQ(file.entries[0].key, (TuningKey{"cpu", TuningMode::low_latency, 1, 64, 3}));
  EXPECT_EQ(file.entries[0].values.pieces, 2);
  EXPECT_TRUE(TuningFile::parse("switchyard-tuning 1", "f").entries.empty());
}

TEST(TuningParse, EveryErrorNamesFileLineKeyGivenAndAllowed) {
  const std::string cpu = "device=cpu mode=low_latency" + kShape;
  const struct {
    std::string text, in_text;
  } cases[] = {
      {"", "line 1: '' given: must be 'switchyard-tuning 1'"},
      {"switchyard-tuning 2\n", "line 1: 'switchyard-tuning 2' given: must be 'switchyard-tuning 1'"},
      {kHeader + "\n" + cpu + " piece=3",
       "line 3: unknown key 'piece': mode low_latency has device, mode, ranks, hidden, tokens, dispatch_sms, combine_sms, "
       "dispatch_warps, combine_warps, pieces"},
      {kHeader + cpu + " dispatch_stages=2", "line 2: unknown key 'dispatch_stages': mode low_latency has"},
      {kHeader + "device=g mode=normal pieces=3" + kShape,
       "unknown key 'pieces': mode normal has device, mode, ranks, hidden, tokens, dispatch_sms, combine_sms, "
       "quantized_dispatch_sms, dispatch_warps"},
      {kHeader + cpu + " quantized_dispatch_sms=3", "unknown key 'quantized_dispatch_sms': mode low_latency has"},
      {kHeader + "device=g mode=normal quantized_dispatch_sms=1025" + kShape,
       "quantized_dispatch_sms = '1025': must be an integer in [1, 1024]"},
      {kHeader + "device=g mode=flat dispatch_sms=3" + kShape,
       "unknown key 'dispatch_sms': mode flat has device, mode, ranks, hidden, tokens, sms, warps"},
      {kHeader + "device=g mode=ledger combine_warps=3" + kShape,
       "mode ledger has device, mode, ranks, hidden, tokens, sms, warps, "
       "chunk_kib"},
      {kHeader + "device=g mode=ledger chunk_kib=1025" + kShape, "chunk_kib = '1025': must be an integer in [1, 1024]"},
      {kHeader + "device=g mode=flat warps=17" + kShape, "warps = '17': must be an integer in [1, 16]"},
      {kHeader + cpu + " combine_warps=17", "combine_warps = '17': must be an integer in [1, 16]"},
      {kHeader + cpu + " pieces=17", "pieces = '17': must be an integer in [1, 16]"},
      {kHeader + cpu + " pieces=0", "pieces = '0': must be an integer in [1, 16]"},
      {kHeader + cpu + " pieces=4x", "pieces = '4x'"},
      {kHeader + cpu + " pieces=", "pieces = ''"},
      {kHeader + cpu + " pieces=99999999999999999999", "pieces = '99999999999999999999'"},
      {kHeader + cpu + " pieces=\"3", "pieces: the closing quote is missing"},
      {kHeader + cpu + " pieces=3 pieces=3", "'pieces' given twice: allowed once"},
      {kHeader + cpu + " fast", "'fast' given: must be KEY=VALUE"},
      {kHeader + cpu + " =3", "must be KEY=VALUE"},
      {kHeader + cpu + " pieces =3", "'pieces' given: must be KEY=VALUE"},
      {kHeader + "device=g mode=normal dispatch_sms=1025" + kShape, "dispatch_sms = '1025': must be an integer in [1, 1024]"},
      {kHeader + "device=g mode=normal dispatch_warps=15" + kShape, "dispatch_warps = '15': must be an integer in [1, 14]"},
      {kHeader + "device=g mode=normal dispatch_stages=3" + kShape, "dispatch_stages = '3': must be an integer in [1, 2]"},
      {kHeader + "device=g mode=normal combine_warps=21" + kShape, "combine_warps = '21': must be an integer in [1, 20]"},
      {kHeader + "device=g mode=fast" + kShape,
       "mode = 'fast': must be normal, low_latency, flat, ledger or normal_expert_major"},
      {kHeader + "device=\"\" mode=normal" + kShape, "device = '': must be cpu, cuda or the name of a GPU"},
      {kHeader + "device=cpu mode=normal ranks=65 hidden=1 tokens=1", "ranks = '65': must be an integer in [1, 64]"},
      {kHeader + "device=cpu mode=normal ranks=1 hidden=0 tokens=1", "hidden = '0': must be an integer in [1, 16777216]"},
      {kHeader + "device=cpu mode=normal ranks=1 hidden=1 tokens=-1", "tokens = '-1': must be an integer in [1, 67108864]"},
      {kHeader + "mode=normal" + kShape, "device is missing"},
      {kHeader + "device=cpu" + kShape, "mode is missing"},
      {kHeader + "device=cpu mode=normal ranks=1 hidden=1",
       "tokens is missing: every entry needs device, mode, ranks, hidden, tokens"},
  };
  for (const auto& c : cases) {
    const std::string error = error_of(c.text);
    EXPECT_EQ(error.rfind("my.tuning, line ", 0), 0u) << c.text << "\n" << error;
    EXPECT_NE(error.find(c.in_text), std::string::npos) << c.text << "\n" << error;
  }
}

int pieces_at(const TuningFile& file, int ranks, int64_t hidden, int64_t tokens) {
  const TuningEntry* entry = file.nearest({"cpu", TuningMode::low_latency, ranks, hidden, tokens});
  return entry ? entry->values.pieces : 0;
}

TEST(TuningLookup, NearestByOctavesRanksTwice) {
  const TuningFile file = parse(
      "device=cpu mode=low_latency ranks=2 hidden=1024 tokens=16 pieces=1\n"
      "device=cpu mode=low_latency ranks=2 hidden=1024 tokens=256 pieces=2\n"
      "device=cpu mode=low_latency ranks=2 hidden=4096 tokens=16 pieces=3\n"
      "device=cpu mode=low_latency ranks=8 hidden=1024 tokens=16 pieces=4\n");
  EXPECT_EQ(pieces_at(file, 2, 1024, 16), 1);
  EXPECT_EQ(pieces_at(file, 2, 1024, 63), 1);
  EXPECT_EQ(pieces_at(file, 2, 1024, 64), 1);  // halfway: the earlier line applies
  EXPECT_EQ(pieces_at(file, 2, 1024, 65), 2);
  EXPECT_EQ(pieces_at(file, 2, 1024, 1), 1);
  EXPECT_EQ(pieces_at(file, 2, 1024, 0), 1);  // like 1
  EXPECT_EQ(pieces_at(file, 2, 1024, 1 << 20), 2);
  EXPECT_EQ(pieces_at(file, 2, 2047, 16), 1);
  EXPECT_EQ(pieces_at(file, 2, 2049, 16), 3);
  EXPECT_EQ(pieces_at(file, 3, 1024, 16), 1);
  EXPECT_EQ(pieces_at(file, 5, 1024, 16), 4);
  // Two octaves of ranks count as much as four octaves of tokens.
  EXPECT_EQ(pieces_at(file, 8, 1024, 255), 4);
}

TEST(TuningLookup, DeviceAndModeMustMatch) {
  const TuningFile file =
      parse("device=\"NVIDIA H200\" mode=low_latency" + kShape + " pieces=3\ndevice=cpu mode=flat" + kShape + " sms=3");
  EXPECT_EQ(file.nearest({"cpu", TuningMode::low_latency, 2, 7168, 128}), nullptr);
  EXPECT_EQ(file.nearest({"NVIDIA H200", TuningMode::normal, 2, 7168, 128}), nullptr);
  EXPECT_EQ(file.nearest({"NVIDIA H20", TuningMode::low_latency, 2, 7168, 128}), nullptr);
  EXPECT_EQ(file.nearest({"NVIDIA H200", TuningMode::low_latency, 2, 7168, 128})->values.pieces, 3);
  EXPECT_EQ(file.nearest({"cpu", TuningMode::flat, 2, 7168, 128})->line, 3);
}

TEST(TuningLookup, EntriesOfAnyGpuCountWhereAGpuHasNone) {
  const TuningFile file = parse(
      "device=cuda mode=flat ranks=2 hidden=7168 tokens=128 sms=1\n"
      "device=cuda mode=flat ranks=2 hidden=7168 tokens=512 sms=2\n"
      "device=\"NVIDIA H200\" mode=flat ranks=8 hidden=64 tokens=1 sms=3\n"
      "device=cuda mode=ledger ranks=2 hidden=7168 tokens=128 sms=4");
  const auto sms = [&](const char* device, TuningMode mode, int64_t tokens) {
    const TuningEntry* const entry = file.nearest({device, mode, 2, 7168, tokens});
    return entry ? entry->values.sms : 0;
  };
  EXPECT_EQ(sms("NVIDIA H200", TuningMode::flat, 128), 3);  // the device's own entry, however distant
  EXPECT_EQ(sms("NVIDIA H200", TuningMode::ledger, 128), 4);
  EXPECT_EQ(sms("NVIDIA H100", TuningMode::flat, 128), 1);
  EXPECT_EQ(sms("NVIDIA H100", TuningMode::flat, 512), 2);
  EXPECT_EQ(sms("cpu", TuningMode::flat, 128), 0);
  // A file with any entry for the mode takes precedence over the next file.
  const TuningFile next = parse("device=\"NVIDIA H100\" mode=flat ranks=2 hidden=7168 tokens=128 sms=5");
  EXPECT_EQ(Tuning({file, next}).find({"NVIDIA H100", TuningMode::flat, 2, 7168, 128}).sms, 1);
  EXPECT_EQ(Tuning({next, file}).find({"NVIDIA H100", TuningMode::flat, 2, 7168, 128}).sms, 5);
}

/// Blocks, warps and stages of a call in normal mode.
struct Launch {
  int blocks, warps, stages;
  bool operator==(const Launch&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Launch& l) {
  return out << l.blocks << " blocks, " << l.warps << " warps, " << l.stages << " stages";
}
Launch launch_of(switchyard::detail::NormalCall call, const TuningValues& tuned, int asked, int max) {
  const auto launch = switchyard::detail::normal_launch(tuned, call, asked, max);
  return {launch.blocks, launch.warps, launch.stages};
}
Launch dispatch_of(const TuningValues& tuned, int asked, int max = 132) {
  return launch_of(switchyard::detail::NormalCall::dispatch, tuned, asked, max);
}
Launch quantising_dispatch_of(const TuningValues& tuned, int asked, int max = 132) {
  return launch_of(switchyard::detail::NormalCall::quantising_dispatch, tuned, asked, max);
}
Launch combine_of(const TuningValues& tuned, int asked, int max = 132) {
  return launch_of(switchyard::detail::NormalCall::combine, tuned, asked, max);
}
TuningValues normal_values(int dispatch_sms, int combine_sms) {
  TuningValues v;
  v.dispatch_sms = dispatch_sms;
  v.combine_sms = combine_sms;
  v.dispatch_warps = 8;
  v.dispatch_stages = 1;
  v.combine_warps = 12;
  return v;
}

TEST(TuningLaunch, WarpsAndStagesGoWithTheMultiprocessorsThatAreInForce) {
  const TuningValues tuned = normal_values(48, 40);
  for (const int asked : {0, 48}) EXPECT_EQ(dispatch_of(tuned, asked), (Launch{48, 8, 1})) << asked;
  for (const int asked : {0, 40}) EXPECT_EQ(combine_of(tuned, asked), (Launch{40, 12, 0})) << asked;
  for (const int asked : {1, 24, 40, 132}) EXPECT_EQ(dispatch_of(tuned, asked), (Launch{asked, 14, 0})) << asked;
  for (const int asked : {1, 24, 48, 132}) EXPECT_EQ(combine_of(tuned, asked), (Launch{asked, 20, 0})) << asked;
}

/// The launch is as measured by `tune`: bench reports the number in effect, even if the entry leaves it to the default.
TEST(TuningLaunch, AnEntryThatLeavesTheMultiprocessorsToTheDefaultHasItsWarpsThere) {
  const TuningValues tuned = normal_values(0, 0);
  for (const int asked : {0, 24}) {
    EXPECT_EQ(dispatch_of(tuned, asked), (Launch{24, 8, 1})) << asked;
    EXPECT_EQ(combine_of(tuned, asked), (Launch{24, 12, 0})) << asked;
  }
  EXPECT_EQ(dispatch_of(tuned, 23), (Launch{23, 14, 0}));
  EXPECT_EQ(combine_of(tuned, 25), (Launch{25, 20, 0}));
}

/// Eight ranks on a GPU with 132 multiprocessors have 16 each, regardless of the entry.
TEST(TuningLaunch, WhereARankHasFewerAllOfItsOwnAreAsTuned) {
  for (const TuningValues& tuned : {normal_values(48, 40), normal_values(0, 0)}) {
    for (const int asked : {0, 16}) {
      EXPECT_EQ(dispatch_of(tuned, asked, 16), (Launch{16, 8, 1})) << asked;
      EXPECT_EQ(combine_of(tuned, asked, 16), (Launch{16, 12, 0})) << asked;
    }
    EXPECT_EQ(dispatch_of(tuned, 15, 16), (Launch{15, 14, 0}));
    EXPECT_EQ(combine_of(tuned, 15, 16), (Launch{15, 20, 0}));
  }
}

TEST(TuningLaunch, WithoutATuningNothingChanges) {
  for (const int asked : {0, 24}) {
    EXPECT_EQ(dispatch_of({}, asked), (Launch{24, 14, 0})) << asked;
    EXPECT_EQ(combine_of({}, asked), (Launch{24, 20, 0})) << asked;
  }
  TuningValues sms;  // an entry that sets only multiprocessors
  sms.dispatch_sms = sms.combine_sms = 64;
  EXPECT_EQ(dispatch_of(sms, 0), (Launch{64, 14, 0}));
  EXPECT_EQ(combine_of(sms, 64), (Launch{64, 20, 0}));
}

/// The tuned values for combine were determined with rows that are read in place.
TEST(TuningLaunch, CombinesThatCopyTakeTheirDefaultUnlessTunedToMore) {
  const auto copying_combine_of = [](const TuningValues& tuned, int asked, int max) {
    return launch_of(switchyard::detail::NormalCall::copying_combine, tuned, asked, max);
  };
  for (const auto& [max, blocks] : {std::pair(132, 64), std::pair(66, 64), std::pair(16, 16), std::pair(1, 1)}) {
    EXPECT_EQ(copying_combine_of({}, 0, max), (Launch{blocks, 20, 0}));
    EXPECT_EQ(copying_combine_of(normal_values(48, 40), 0, max), (Launch{blocks, 20, 0}));
  }
  EXPECT_EQ(copying_combine_of(normal_values(48, 100), 0, 132), (Launch{100, 20, 0}));
  EXPECT_EQ(copying_combine_of(normal_values(48, 100), 24, 132), (Launch{24, 20, 0}));
}

/// Files older than this key have no value for such dispatches, which then use their default.
TEST(TuningLaunch, DispatchesThatQuantiseHaveTheirOwnValueOrTheirOwnDefault) {
  TuningValues tuned = normal_values(48, 40);
  for (const auto& [max, blocks] : {std::pair(132, 64), std::pair(66, 64), std::pair(16, 16), std::pair(1, 1)}) {
    EXPECT_EQ(quantising_dispatch_of({}, 0, max), (Launch{blocks, 14, 0}));
    EXPECT_EQ(quantising_dispatch_of(tuned, 0, max), (Launch{blocks, 14, 0})) << "warps and stages are of other dispatches";
  }
  EXPECT_EQ(quantising_dispatch_of(tuned, 48), (Launch{48, 14, 0}));
  EXPECT_EQ(quantising_dispatch_of(tuned, 132), (Launch{132, 14, 0})) << "the default is no limit";
  tuned.quantized_dispatch_sms = 96;
  EXPECT_EQ(quantising_dispatch_of(tuned, 0), (Launch{96, 14, 0}));
  EXPECT_EQ(quantising_dispatch_of(tuned, 0, 66), (Launch{66, 14, 0}));
  EXPECT_EQ(quantising_dispatch_of(tuned, 24), (Launch{24, 14, 0})) << "what the call says wins";
  EXPECT_EQ(dispatch_of(tuned, 0), (Launch{48, 8, 1})) << "other calls are as before";
  EXPECT_EQ(combine_of(tuned, 0), (Launch{40, 12, 0}));
}

/// The layouts of normal mode have separate entries with the same keys.
TEST(TuningLookup, LayoutsAreApart) {
  const TuningFile file = parse("device=g mode=normal_expert_major" + kShape + " dispatch_sms=96 combine_warps=16\n" +
                                "device=g mode=normal" + kShape + " dispatch_sms=16");
  EXPECT_EQ(file.nearest({"g", TuningMode::normal, 2, 7168, 128})->values.dispatch_sms, 16);
  const TuningEntry& by_expert = *file.nearest({"g", TuningMode::normal_expert_major, 4, 7168, 4096});
  EXPECT_EQ(by_expert.values.dispatch_sms, 96);
  EXPECT_EQ(by_expert.values.combine_warps, 16);
  EXPECT_EQ(parse(by_expert.text()).entries.at(0).key, by_expert.key);
}

TEST(TuningSources, TheFirstFileWithDeviceAndModeDecides) {
  const Tuning tuning({parse("device=cpu mode=low_latency ranks=1 hidden=8 tokens=1"),
                       parse("device=cpu mode=low_latency" + kShape + " pieces=5\ndevice=cpu mode=flat" + kShape + " sms=7")});
  EXPECT_EQ(tuning.find({"cpu", TuningMode::low_latency, 2, 7168, 128}), TuningValues{}) << "an entry without values counts";
  EXPECT_EQ(tuning.find({"cpu", TuningMode::flat, 2, 7168, 128}).sms, 7);
  EXPECT_EQ(tuning.find({"cpu", TuningMode::ledger, 2, 7168, 128}), TuningValues{});
}

TEST(TuningSources, FromTheEnvironment) {
  unsetenv("SWITCHYARD_TUNING");
  ASSERT_EQ(Tuning::from_environment().files().size(), 1u);  // the built-in file, which is well-formed
  EXPECT_EQ(Tuning::from_environment().files()[0].name, "built-in values");
  for (const char* device : {"NVIDIA H200", "NVIDIA H100 80GB HBM3"})
    for (const TuningMode mode : {TuningMode::normal, TuningMode::normal_expert_major})
      EXPECT_GT(Tuning::from_environment().find({device, mode, 4, 7168, 4096}).dispatch_sms, 0) << device << to_string(mode);
  const File good(kHeader + "device=cpu mode=low_latency" + kShape + " pieces=5");
  {
    const Variable variable(good.path());
    const Tuning tuning = Tuning::from_environment();
    ASSERT_EQ(tuning.files().size(), 2u);
    EXPECT_EQ(tuning.files()[0].name, good.path());
    EXPECT_EQ(tuning.find({"cpu", TuningMode::low_latency, 2, 7168, 128}).pieces, 5);
  }
  {
    const Variable variable("");
    EXPECT_EQ(Tuning::from_environment().files().size(), 1u);
  }
  for (const std::string& path : {std::string("/nonexistent/my.tuning"), std::string("/tmp"), std::string("/dev/zero")}) {
    const Variable variable(path);
    try {
      (void)Tuning::from_environment();
      ADD_FAILURE() << path << " was read";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()).rfind("SWITCHYARD_TUNING: " + path + ": cannot be read: ", 0), 0u) << error.what();
    }
  }
}

}  // namespace
