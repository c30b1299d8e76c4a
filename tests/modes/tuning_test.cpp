// SPDX-License-Identifier: Apache-2.0
// Tuned values in exchange objects: their sources, precedence and effect, and ranks that disagree.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "exchange/group/impl.hpp"
#include "exchange/ledger/impl.hpp"
#include "harness/fleet.hpp"
#include "modes/ledger/ledger_rig.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "switchyard/trace.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::Group;
using switchyard::LowLatencyConfig;
using switchyard::LowLatencyExchange;
using switchyard::Trace;
using switchyard::Tuning;
using switchyard::TuningFile;

constexpr int64_t kHidden = 1024;

/// A tuning for CPU rows with kHidden columns.
std::shared_ptr<const Tuning> tuning_of(int pieces) {
  const std::string text =
      "switchyard-tuning 1\ndevice=cpu mode=low_latency ranks=2 hidden=1024 tokens=6 pieces=" + std::to_string(pieces);
  return std::make_shared<const Tuning>(std::vector<TuningFile>{TuningFile::parse(text, "test")});
}

LowLatencyConfig wide(int pieces = 0) {
  LowLatencyConfig c = LowLatencyRig::config();
  c.hidden = kHidden;
  c.pieces = pieces;
  return c;
}

/// Number of pieces into which a dispatch divides a row. The placement of each piece has a separate span.
int64_t pieces_received(Group& group, const LowLatencyConfig& config) {
  LowLatencyExchange exchange(group, config);
  auto output = exchange.make_output();
  switchyard::TraceOptions options;
  options.num_blocks = group.options().num_blocks;
  options.num_warps = group.options().num_warps;
  Trace trace(group.size(), options);
  const std::vector<uint16_t> rows(static_cast<size_t>(LowLatencyRig::kTokens * kHidden), 0x3F80);
  const std::vector<int32_t> ids(static_cast<size_t>(LowLatencyRig::kTokens * LowLatencyRig::kTopk),
                                 group.rank() == 0 ? 1 : config.num_experts - 1);  // one row to itself
  group.set_trace(&trace);
  exchange.dispatch({rows.data(), LowLatencyRig::kTokens, kHidden, switchyard::DType::bf16},
                    switchyard::ExpertIds::of(ids.data(), LowLatencyRig::kTokens, LowLatencyRig::kTopk), output);
  group.set_trace(nullptr);
  group.barrier();
  uint64_t received = 0;
  for (const auto& phase : trace.summary())
    if (phase.name == "place_rows") received += phase.count;
  const auto messages = static_cast<uint64_t>(LowLatencyRig::kTokens);
  EXPECT_EQ(received % messages, 0u);
  return static_cast<int64_t>(received / messages);
}

void expect_pieces(const std::shared_ptr<const Tuning>& tuning, int asked, int64_t expected) {
  for (const Outcome& o : outcomes(2, options_with(60s), [&](Group& group) {
         if (tuning) group.impl().tuning = tuning;
         EXPECT_EQ(pieces_received(group, wide(asked)), expected);
       }))
    EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(Tuned, PiecesAreTakenUnlessTheCallerSaysHowMany) {
  expect_pieces(nullptr, 0, 2);  // of kMinPieceColumns
  for (const int pieces : {1, 2, 4, 8}) {
    expect_pieces(tuning_of(pieces), 0, pieces);
    expect_pieces(tuning_of(pieces), 4, 4);
  }
}

TEST(Tuned, OtherDevicesAndModesAreNotMeant) {
  const auto other = [](const std::string& key) {
    const std::string text = "switchyard-tuning 1\n" + key + " ranks=2 hidden=1024 tokens=6";
    return std::make_shared<const Tuning>(std::vector<TuningFile>{TuningFile::parse(text, "test")});
  };
  expect_pieces(other("device=\"NVIDIA H200\" pieces=8 mode=low_latency"), 0, 2);
  expect_pieces(other("device=cpu mode=flat sms=3"), 0, 2);
}

/// The reported memory suffices for every number of pieces and equals the allocated memory.
TEST(Tuned, MemoryDoesNotDependOnTheTuning) {
  const size_t need = LowLatencyExchange::memory_required(wide(), 2).total();
  for (int pieces = 1; pieces <= 16; ++pieces) {
    EXPECT_LE(LowLatencyExchange::memory_required(wide(pieces), 2).total(), need) << pieces;
    for (const Outcome& o : outcomes(2, options_with(60s, LowLatencyExchange::heap_bytes(wide(), 2)), [&](Group& group) {
           group.impl().tuning = tuning_of(pieces);
           const size_t before = group.heap_used();
           const LowLatencyExchange exchange(group, wide());
           EXPECT_EQ(group.heap_used() - before, need);
         }))
      EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

TEST(Tuned, RanksThatCutRowsOtherwiseEndWithMismatch) {
  const auto construct = [](int pieces_of_rank_1) {
    return outcomes(3, options_with(60s), [=](Group& group) {
      group.impl().tuning = tuning_of(group.rank() == 1 ? pieces_of_rank_1 : 4);
      const LowLatencyExchange exchange(group, wide());
    });
  };
  for (const Outcome& o : construct(8)) {
    EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
    EXPECT_NE(o.text.find("LowLatencyConfig::pieces as tuned"), std::string::npos) << o.text;
  }
  for (const Outcome& o : construct(4)) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// 12 rows of 1024 bytes for one expert. Without tuning, up to 64 such rows are sent together in a chunk of 64 KiB.
TEST(Tuned, ChunksOfALedger) {
  for (const auto& [kib, chunks] : {std::pair(0, 1), {1, 12}, {3, 4}, {5, 3}, {1024, 1}}) {
    const std::string value = kib > 0 ? " chunk_kib=" + std::to_string(kib) : "";
    const auto tuning = std::make_shared<const Tuning>(std::vector<TuningFile>{
        TuningFile::parse("switchyard-tuning 1\ndevice=cpu mode=ledger ranks=1 hidden=512 tokens=12" + value, "test")});
    LedgerScenario s;
    s.problem.world = s.problem.experts = s.problem.topk = 1;
    s.tokens = {12};
    s.hidden = 512;
    const auto c = make_ledger_case(s);
    for (const Outcome& o : outcomes(1, options_with(60s), [&, wanted = static_cast<size_t>(chunks)](Group& group) {
           group.impl().tuning = tuning;
           switchyard::LedgerCombine ledger(group, make_config(*c));
           LedgerRankData data(*c, 0, 0);
           const auto prepared = ledger.prepare(data.tables());
           EXPECT_EQ(prepared.data().work.chunks.size(), wanted) << value;
           ledger.combine(data.y(), data.probs(), prepared, data.out().data());
           Failures f;
           data.check_out(f);
           EXPECT_FALSE(f.any()) << joined(f.take());
         }))
      EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

/// The file is read only once, when the group is formed.
TEST(Tuned, FromTheFileThatTheEnvironmentNames) {
  const auto path = std::filesystem::temp_directory_path() / ("sy_tuned_" + std::to_string(getpid()));
  const auto write = [&](const std::string& values) {
    std::ofstream(path) << "switchyard-tuning 1\ndevice=cpu mode=low_latency ranks=2 hidden=1024 tokens=6 " << values << "\n";
  };
  setenv("SWITCHYARD_TUNING", path.c_str(), 1);
  write("pieces=8");
  expect_pieces(nullptr, 0, 8);
  for (const Outcome& o : outcomes(2, options_with(60s), [&](Group& group) {
         if (group.rank() == 0) std::filesystem::remove(path);
         group.barrier();
         EXPECT_EQ(pieces_received(group, wide()), 8);
       }))
    EXPECT_EQ(code_name(o.code), "ok") << o.text;
  write("pieces=many");
  const Outcome broken = outcome_of([] { (void)Group::in_process(2); });
  EXPECT_EQ(code_name(broken.code), "invalid_argument");
  EXPECT_EQ(broken.text, "SWITCHYARD_TUNING: " + path.string() + ", line 2: pieces = 'many': must be an integer in [1, 16]");
  const Outcome joining = outcome_of([] { (void)Group::connect(0, 2, "unix:/nonexistent/store", "token"); });
  EXPECT_EQ(joining.text, broken.text);
  std::filesystem::remove(path);
  unsetenv("SWITCHYARD_TUNING");
}

}  // namespace
}  // namespace harness
