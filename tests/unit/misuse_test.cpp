// SPDX-License-Identifier: Apache-2.0
// Misuse that must cause an Error rather than a crash: empty and moved-from objects, and free functions with arguments outside
// their domain.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/expert.hpp"
#include "switchyard/group.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/routing.hpp"
#include "switchyard/trace.hpp"

namespace switchyard {
namespace {

/// Expects `call` to throw an Error(invalid_argument) whose text contains `part`.
template <class Call>
void expect_invalid(const std::string& part, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown; expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

NormalConfig normal_config() {
  NormalConfig c;
  c.hidden = 64;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 4;
  return c;
}
LowLatencyConfig low_latency_config() {
  LowLatencyConfig c;
  c.hidden = 64;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 4;
  return c;
}
LedgerConfig ledger_config() {
  LedgerConfig c;
  c.hidden = 64;
  c.num_experts = 4;
  c.topk = 2;
  c.max_tokens = 4;
  return c;
}

class Misuse : public testing::Test {
 protected:
  std::vector<Group> groups_ = Group::in_process(1);
  Group& group_ = groups_[0];
  uint16_t rows_[4 * 64] = {};
  int32_t ids_[8] = {0, 1, 2, 3, 0, 1, 2, 3};
  const ConstRows x_{rows_, 4, 64, DType::bf16};
  const ExpertIds routes_ = ExpertIds::of(ids_, 4, 2);
};

TEST_F(Misuse, EmptyHandle) {
  const Handle none;
  const std::string empty = "handle is empty";
  expect_invalid(empty, [&] { none.num_tokens(); });
  expect_invalid(empty, [&] { none.rows(); });
  expect_invalid(empty, [&] { none.counts(); });
  expect_invalid(empty, [&] { none.matrices(1); });
  expect_invalid(empty, [&] { none.ledger(); });
  expect_invalid(empty, [&] { none.serialize(); });
  expect_invalid(empty, [&] { none.data(); });
  NormalExchange exchange(group_, normal_config());
  expect_invalid(empty, [&] { exchange.allocate_rows(none, DType::bf16); });
  Handle handle = exchange.dispatch(x_, routes_).handle;
  for (const int channels : {0, -1, std::numeric_limits<int>::max()})
    expect_invalid("num_channels is " + std::to_string(channels), [&] { handle.matrices(channels); });
  const Handle taken = std::move(handle);
  EXPECT_EQ(taken.num_tokens(), 4);
  expect_invalid(empty, [&] { handle.rows(); });  // NOLINT(bugprone-use-after-move): the subject of this test
  expect_invalid(empty, [&] { exchange.dispatch(x_, handle); });
}

TEST_F(Misuse, EmptyHandleInACombine) {
  NormalExchange exchange(group_, normal_config());
  expect_invalid("handle is empty", [&] { exchange.combine(x_, Handle(), rows_); });
}

TEST_F(Misuse, NormalExchangeThatWasMovedFrom) {
  NormalExchange exchange(group_, normal_config());
  const Dispatched received = exchange.dispatch(x_, routes_);
  NormalExchange other = std::move(exchange);
  const std::string empty = "NormalExchange is empty";
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_invalid(empty, [&] { exchange.dispatch(x_, routes_); });
  expect_invalid(empty, [&] { exchange.dispatch(x_, received.handle); });
  expect_invalid(empty, [&] { exchange.allocate_rows(received.handle, DType::bf16); });
  expect_invalid(empty, [&] { exchange.combine(x_, received.handle, rows_); });
  expect_invalid(empty, [&] { exchange.config(); });
  expect_invalid(empty, [&] { exchange.last_call(); });
  // NOLINTEND(bugprone-use-after-move)
  other.combine(received.x, received.handle, rows_);  // the group is still usable
}

TEST_F(Misuse, LowLatencyExchangeThatWasMovedFrom) {
  LowLatencyExchange exchange(group_, low_latency_config());
  LowLatencyOutput output = exchange.make_output(), nothing;
  LowLatencyExchange other = std::move(exchange);
  const std::string empty = "LowLatencyExchange is empty";
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_invalid(empty, [&] { exchange.make_output(); });
  expect_invalid(empty, [&] { exchange.make_rows(); });
  expect_invalid(empty, [&] { exchange.dispatch(x_, routes_, output); });
  expect_invalid(empty, [&] { exchange.dispatch_send(x_, routes_, output); });
  expect_invalid(empty, [&] { exchange.combine(x_, output, rows_); });
  expect_invalid(empty, [&] { exchange.combine_send(x_, output, rows_); });
  expect_invalid(empty, [&] { exchange.moe_all_to_all(x_, routes_, rows_); });
  expect_invalid(empty, [&] { exchange.config(); });
  expect_invalid(empty, [&] { exchange.last_call(); });
  // NOLINTEND(bugprone-use-after-move)
  other.dispatch(x_, routes_, output);
  expect_invalid("output", [&] { other.dispatch(x_, routes_, nothing); });
}

TEST_F(Misuse, EmptyOutputInACombine) {
  LowLatencyExchange exchange(group_, low_latency_config());
  expect_invalid("output", [&] { exchange.combine(x_, LowLatencyOutput(), rows_); });
}

TEST_F(Misuse, LedgerCombineThatWasMovedFrom) {
  NormalExchange dispatcher(group_, normal_config());
  const LedgerTables tables = dispatcher.dispatch(x_, routes_).handle.ledger();
  LedgerConfig config = ledger_config();
  config.dtype = DType::bf16;
  LedgerCombine combine(group_, config);
  PreparedLedger prepared = combine.prepare(tables);
  const PreparedLedger taken = std::move(prepared);
  EXPECT_EQ(taken.num_tokens(), 4);
  const std::string no_ledger = "ledger is empty", empty = "LedgerCombine is empty";
  for (const PreparedLedger& ledger : {PreparedLedger(), prepared}) {  // NOLINT(bugprone-use-after-move)
    expect_invalid(no_ledger, [&] { ledger.num_tokens(); });
    expect_invalid(no_ledger, [&] { ledger.rows(); });
    expect_invalid(no_ledger, [&] { ledger.returned_rows(); });
  }
  LedgerCombine other = std::move(combine);
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_invalid(empty, [&] { combine.prepare(tables); });
  expect_invalid(empty, [&] { combine.combine(x_, nullptr, taken, rows_); });
  expect_invalid(empty, [&] { combine.combine(x_, nullptr, tables, rows_); });
  expect_invalid(empty, [&] { combine_by_ledger(x_, nullptr, {}, combine, 0, rows_); });
  expect_invalid(empty, [&] { combine.returned(); });
  expect_invalid(empty, [&] { combine.config(); });
  expect_invalid(empty, [&] { combine.last_call(); });
  // NOLINTEND(bugprone-use-after-move)
  expect_invalid(no_ledger, [&] { other.combine(x_, nullptr, PreparedLedger(), rows_); });
}

TEST_F(Misuse, GroupThatWasMovedFrom) {
  Group group = std::move(group_);
  Group& gone = group_;  // NOLINT(bugprone-use-after-move)
  const std::string empty = "Group is empty";
  char byte = 0;
  Trace trace(1);
  expect_invalid(empty, [&] { gone.rank(); });
  expect_invalid(empty, [&] { gone.size(); });
  expect_invalid(empty, [&] { gone.options(); });
  expect_invalid(empty, [&] { gone.barrier(); });
  expect_invalid(empty, [&] { gone.all_gather(&byte, 1, &byte); });
  expect_invalid(empty, [&] { gone.check(); });
  expect_invalid(empty, [&] { gone.wait_statistics(); });
  expect_invalid(empty, [&] { gone.register_memory(&byte, 1); });
  expect_invalid(empty, [&] { gone.sleep(); });
  expect_invalid(empty, [&] { gone.wake(); });
  expect_invalid(empty, [&] { gone.asleep(); });
  expect_invalid(empty, [&] { gone.heap_used(); });
  expect_invalid(empty, [&] { gone.heap_size(); });
  expect_invalid(empty, [&] { gone.set_trace(&trace); });
  expect_invalid(empty, [&] { gone.set_trace(nullptr); });
  expect_invalid(empty, [&] { NormalExchange(gone, normal_config()); });
  expect_invalid(empty, [&] { LowLatencyExchange(gone, low_latency_config()); });
  expect_invalid(empty, [&] { LedgerCombine(gone, ledger_config()); });
  gone.abort(1);  // no effect
  group.barrier();
}

TEST_F(Misuse, NullInAllGather) {
  char byte = 0;
  group_.all_gather(nullptr, 0, nullptr);
  expect_invalid("all_gather: all is null, with bytes = 1", [&] { group_.all_gather(&byte, 1, nullptr); });
  std::vector<Group> others = Group::in_process(1);
  expect_invalid("all_gather: mine is null, with bytes = 8", [&] { others[0].all_gather(nullptr, 8, nullptr); });
}

TEST_F(Misuse, SmallThings) {
  RowBuffer rows;
  rows.used_by(nullptr);
  EXPECT_EQ(rows.rows().data, nullptr);
  Dispatched received;
  received.used_by(nullptr);
  EXPECT_FALSE(RegisteredMemory());
  EXPECT_FALSE(RowFunction());
}

TEST(MisusedTrace, EmptyOrOutOfRange) {
  Trace trace(2), other = std::move(trace);
  const std::string empty = "Trace is empty";
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_invalid(empty, [&] { trace.world(); });
  expect_invalid(empty, [&] { trace.options(); });
  expect_invalid(empty, [&] { trace.event("mine"); });
  expect_invalid(empty, [&] { trace.clear(); });
  expect_invalid(empty, [&] { trace.lost(); });
  expect_invalid(empty, [&] { trace.clock_error_ns(); });
  expect_invalid(empty, [&] { trace.write_chrome_json("/dev/null"); });
  expect_invalid(empty, [&] { trace.chrome_json(); });
  expect_invalid(empty, [&] { trace.summary(); });
  expect_invalid(empty, [&] { trace.slices(); });
  expect_invalid(empty, [&] { trace.serialize(0); });
  expect_invalid(empty, [&] { trace.merge({}); });
  { const Trace::Span span(&trace, 0, 0); }
  // NOLINTEND(bugprone-use-after-move)
  for (const int rank : {-1, 2}) {
    const Trace::Span span(&other, rank, 0);
    expect_invalid("rank is " + std::to_string(rank), [&] { other.serialize(rank); });
  }
  EXPECT_TRUE(other.slices().empty());
}

TEST(MisusedMoeLayer, MovedFrom) {
  std::vector<Group> groups = Group::in_process(1);
  MoeLayerConfig config;
  config.hidden = config.intermediate = 8;
  config.num_experts = config.topk = 1;
  const std::vector<uint16_t> weights(2 * 8 * 8);
  MoeLayer layer(groups[0], config, weights.data(), weights.data()), other = std::move(layer);
  const std::string empty = "MoeLayer is empty";
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_invalid(empty, [&] { layer.forward(nullptr, {}, nullptr, nullptr); });
  expect_invalid(empty, [&] { (void)layer.dropped(); });
  expect_invalid(empty, [&] { layer.config(); });
  expect_invalid(empty, [&] { layer.implementation(); });
  // NOLINTEND(bugprone-use-after-move)
}

TEST(MisusedExpertMlp, MovedFrom) {
  ExpertMlp mlp({8, 8, 0}, static_cast<const uint16_t*>(nullptr), nullptr), other = std::move(mlp);
  const std::string empty = "ExpertMlp is empty";
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_invalid(empty, [&] { mlp.forward(nullptr, {}, {}, nullptr); });
  expect_invalid(empty, [&] { mlp.forward(ConstRows(), ExpertRows(), Rows()); });
  expect_invalid(empty, [&] { mlp.forward_rank_major(nullptr, {}, nullptr, nullptr); });
  expect_invalid(empty, [&] { mlp.shape(); });
  expect_invalid(empty, [&] { mlp.memory(); });
  expect_invalid(empty, [&] { mlp.implementation(); });
  // NOLINTEND(bugprone-use-after-move)
}

TEST(MisusedRoutingFile, MovedFromIsStillThere) {
  const std::string image = std::string("\x93NUMPY\x01\x00", 8) + std::string("\x40\x00", 2) +
                            "{'descr':'<i4','fortran_order':False,'shape':(1,1)}             " + std::string(4, '\0');
  RoutingFile file = RoutingFile::parse(std::as_bytes(std::span(image)), "image");
  const RoutingFile other = std::move(file);
  EXPECT_EQ(file.topk(kNoLayer), 1);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(other.num_tokens(kNoLayer, 0), 1);
}

TEST(MisusedFunctions, OutsideTheirDomain) {
  const int max = std::numeric_limits<int>::max(), min = std::numeric_limits<int>::min();
  EXPECT_EQ(first_expert(10, 4, 0), 0);
  EXPECT_EQ(first_expert(10, 4, 4), 10);
  for (const int world : {0, -1, min, kMaxRanks + 1, max}) {
    const std::string named = "world = " + std::to_string(world);
    expect_invalid(named, [&] { first_expert(8, world, 0); });
    expect_invalid(named, [&] { routing_layout(ExpertIds(), 8, world); });
    expect_invalid(named, [&] { default_ring(normal_config(), world); });
    expect_invalid(named, [&] { max_rows(normal_config(), world); });
    expect_invalid(named, [&] { default_pieces(low_latency_config(), world); });
    expect_invalid(named, [&] { NormalExchange::memory_required(normal_config(), world); });
    expect_invalid(named, [&] { NormalExchange::heap_bytes(normal_config(), world); });
    expect_invalid(named, [&] { LowLatencyExchange::memory_required(low_latency_config(), world); });
    expect_invalid(named, [&] { LowLatencyExchange::heap_bytes(low_latency_config(), world); });
    expect_invalid(named, [&] { LedgerCombine::memory_required(ledger_config(), world); });
    expect_invalid(named, [&] { LedgerCombine::heap_bytes(ledger_config(), world); });
    expect_invalid(named, [&] { ledger_format_bytes(ledger_config(), world, 1); });
    expect_invalid(named, [&] { route_meta_layout(ledger_config(), world, 0, 0); });
    expect_invalid(named, [&] { check_ledger(LedgerTables(), ledger_config(), world, 0); });
    expect_invalid(named, [&] { pack_route_meta(LedgerTables(), ledger_config(), world, 0); });
    expect_invalid(named, [&] { unpack_route_meta({}, ledger_config(), world, 0, 0); });
    expect_invalid("world", [&] { mean_ranks_per_token(Routing{8, 1, 1, {0}, {}}, world); });
    expect_invalid("world", [&] { Trace trace(world); });
    expect_invalid(named, [&] { Group::in_process(world); });
  }
  for (const int rank : {-1, 5, min, max}) {
    expect_invalid("rank = " + std::to_string(rank), [&] { first_expert(8, 4, rank); });
    expect_invalid("rank = " + std::to_string(rank), [&] { route_meta_layout(ledger_config(), 4, rank, 0); });
    expect_invalid("rank = " + std::to_string(rank), [&] { check_ledger(LedgerTables(), ledger_config(), 4, rank); });
  }
  for (const int experts : {0, -1, min}) {
    expect_invalid("num_experts = " + std::to_string(experts), [&] { first_expert(experts, 4, 0); });
    expect_invalid("num_experts = " + std::to_string(experts), [&] { routing_layout(ExpertIds(), experts, 4); });
  }
  for (const int blocks : {0, -1, max})
    expect_invalid("blocks = " + std::to_string(blocks), [&] { ledger_format_bytes(ledger_config(), 2, blocks); });
  for (const int64_t tokens : {int64_t{-1}, int64_t{5}, std::numeric_limits<int64_t>::max()})
    expect_invalid("tokens = " + std::to_string(tokens), [&] { route_meta_layout(ledger_config(), 4, 0, tokens); });
  EXPECT_EQ(num_scales(7168, 0), 0);
  EXPECT_EQ(scale_row_bytes(7168, ScaleKind::f32, -1), 0u);
}

/// Tests only the configs, with 0, -1 and the extremes in every field that is a divisor or a factor.
TEST(MisusedFunctions, ConfigsOutsideTheirDomain) {
  for (const int64_t bad :
       {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    NormalConfig normal = normal_config();
    normal.hidden = bad;
    expect_invalid("hidden", [&] { NormalExchange::memory_required(normal, 2); });
    LowLatencyConfig low_latency = low_latency_config();
    low_latency.hidden = bad;
    expect_invalid("hidden", [&] { default_pieces(low_latency, 2); });
    low_latency = low_latency_config();
    low_latency.max_tokens = bad;
    expect_invalid("max_tokens", [&] { default_pieces(low_latency, 2); });
    LedgerConfig ledger = ledger_config();
    ledger.hidden = bad;
    expect_invalid("hidden", [&] { LedgerCombine::memory_required(ledger, 2); });
  }
  for (const int bad : {0, -1, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    NormalConfig normal = normal_config();
    normal.topk = bad;
    expect_invalid("topk", [&] { default_ring(normal, 2); });
    normal = normal_config();
    normal.expert_alignment = bad;
    expect_invalid("expert_alignment", [&] { NormalExchange::memory_required(normal, 2); });
    normal = normal_config();
    normal.ring.send_chunk = bad;
    expect_invalid("send_chunk", [&] { default_ring(normal, 2); });
    LowLatencyConfig low_latency = low_latency_config();
    low_latency.topk = bad;
    expect_invalid("topk", [&] { default_pieces(low_latency, 2); });
    low_latency = low_latency_config();
    low_latency.scale_group = bad;
    expect_invalid("scale_group", [&] { LowLatencyExchange::memory_required(low_latency, 2); });
    LedgerConfig ledger = ledger_config();
    ledger.topk = bad;
    expect_invalid("topk", [&] { ledger_format_bytes(ledger, 2, 1); });
  }
}

}  // namespace
}  // namespace switchyard
