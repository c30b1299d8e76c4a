// SPDX-License-Identifier: Apache-2.0
// `switchyard plan`, in cases that can be worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "switchyard/status.hpp"
#include "tools/measure/primitives.hpp"
#include "tools/plan/model.hpp"
#include "tools/plan/replicas.hpp"
#include "tools/plan/topology.hpp"
#include "tools/plan/traffic.hpp"
#include "tools/report/plan_page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr int64_t kTokens = 1000;
constexpr double kRow = 14336;            // 7168 columns of bf16
constexpr double kRows = kTokens * kRow;  // 14.336 MB

/// Uses round numbers: 1000 GB/s for memory, 100 for links, 10 for a rail, and 10 us for an empty call.
json document() {
  return {{"format", "switchyard-topology"},
          {"version", 1},
          {"name", "by hand"},
          {"source", "nobody"},
          {"hosts", 4},
          {"host",
           {{"ranks", 2},
            {"copy", {{"read_gbs", 1000}, {"write_gbs", 1000}}},
            {"sum", {{"read_gbs", 1000}, {"write_gbs", 1000}}},
            {"quantize_gbs", 500},
            {"link_gbs", 100},
            {"link_us", 1},
            {"calls", {{"ranks", {1, 4}}, {"dispatch_us", {10, 30}}, {"combine_us", {5, 5}}}}}},
          {"network", {{"rails", 2}, {"gbs", 10}, {"us", 7}}}};
}
Topology topology() { return topology_from(document()); }

/// A topology in which `workers` threads do all the work of a host.
Topology cpu_topology(int workers) {
  json d = document();
  d["host"]["workers"] = workers;
  return topology_from(d);
}

PlanShape shape(int experts, int topk) {
  PlanShape s;
  s.tokens = kTokens;
  s.experts = experts;
  s.topk = topk;
  return s;
}

/// Each token on every rank goes to all of `experts`.
Traffic to_all(const std::vector<int>& hosts, int num_experts, const std::vector<int32_t>& experts) {
  Traffic traffic(HostsOfRanks(hosts), num_experts);
  Routing routing;
  routing.num_experts = num_experts;
  routing.topk = static_cast<int>(experts.size());
  routing.num_tokens = kTokens;
  for (int64_t t = 0; t < kTokens; ++t) routing.topk_ids.insert(routing.topk_ids.end(), experts.begin(), experts.end());
  for (int r = 0; r < traffic.where().world(); ++r) traffic.add(r, routing);
  return traffic;
}

double phase(const CallPrediction& call, const std::string& name) {
  for (const PlanPhase& p : call.phases)
    if (name == p.name) return p.us;
  return 0;
}

TEST(PlanHosts, RailsAndProxies) {
  const HostsOfRanks where({2, 3, 1});
  EXPECT_EQ(where.world(), 6);
  EXPECT_EQ(where.hosts(), 3);
  EXPECT_EQ(where.max_host_size(), 3);
  EXPECT_EQ(where.host_of(4), 1);
  EXPECT_EQ(where.rail(4), 2);
  EXPECT_EQ(where.proxy(4, 0), 0) << "rail 2 of two ranks is rail 0";
  EXPECT_EQ(where.proxy(3, 0), 1);
  EXPECT_EQ(where.proxy(0, 1), 2);
  EXPECT_EQ(where.proxy(4, 2), 5);
}

TEST(PlanTraffic, CountsPairsRoutesAndHosts) {
  Traffic traffic(HostsOfRanks({2, 2}), 8);  // two experts on each rank
  Routing r;
  r.num_experts = 8;
  r.topk = 3;
  r.num_tokens = 3;
  r.topk_ids = {0, 1, 7, 4, 6, 6, -1, -1, -1};
  traffic.add(0, r);
  EXPECT_EQ(traffic.pairs(0, 0), 1);
  EXPECT_EQ(traffic.routes(0, 0), 2);
  EXPECT_EQ(traffic.pairs(0, 2), 1);
  EXPECT_EQ(traffic.pairs(0, 3), 2);
  EXPECT_EQ(traffic.routes(0, 3), 3);
  EXPECT_EQ(traffic.tokens_to(0, 0), 1);
  EXPECT_EQ(traffic.tokens_to(0, 1), 2);
  EXPECT_EQ(traffic.tokens(0), 2);
  EXPECT_EQ(traffic.max_tokens(), 3);
  traffic.scale(3, 30);
  EXPECT_EQ(traffic.routes(0, 3), 30);
}

/// The expected values are from docs/design/0055-several-hosts.md: 58.5, 155.5 and 234.9 MB per rank.
TEST(PlanTraffic, UniformRoutingIsAsExpected) {
  const std::vector<PlannedTraffic> all = count_traffic({HostsOfRanks({4, 4})}, 4096, 0, [](int world) {
    return RoutingSource("--routing", "uniform", {256, 8, world, 1});
  });
  EXPECT_NEAR(all[0].load.home, 1, 0.01);
  EXPECT_EQ(all[0].load.num_slots, 0);
  double hosts = 0, ranks = 0, routes = 0;
  for (int s = 0; s < 8; ++s) {
    hosts += all[0].traffic.tokens_to(s, s < 4 ? 1 : 0) * kRow / 8;
    for (int d = s < 4 ? 4 : 0; d < (s < 4 ? 8 : 4); ++d) {
      ranks += all[0].traffic.pairs(s, d) * kRow / 8;
      routes += all[0].traffic.routes(s, d) * kRow / 8;
    }
  }
  EXPECT_NEAR(hosts, 58.5e6, 0.01 * 58.5e6);
  EXPECT_NEAR(ranks, 155.5e6, 0.01 * 155.5e6);
  EXPECT_NEAR(routes, 234.9e6, 0.01 * 234.9e6);
}

TEST(PlanTraffic, GroupsThatNobodyCanForm) {
  const auto source = [](int world) { return RoutingSource("--routing", "uniform", {256, 8, world, 1}); };
  const std::vector<PlannedTraffic> all =
      count_traffic({HostsOfRanks(std::vector<int>(1, 64)), HostsOfRanks(std::vector<int>(3, 64))}, 32, 0, source);
  const Traffic &small = all[0].traffic, &large = all[1].traffic;
  EXPECT_EQ(large.where().world(), 192);
  for (const int s : {0, 63, 64, 191}) EXPECT_EQ(large.tokens(s), 32);
  double routes = 0;
  for (int d = 0; d < 192; ++d) routes += large.routes(130, d);
  EXPECT_EQ(routes, 32 * 8);
  for (int d = 0; d < 64; ++d) EXPECT_EQ(small.tokens(d), 32);
}

/// Two ranks with two experts each. Expert 0 gets 6 of 8 routes: with a replica on rank 1, both ranks get 4.
TEST(PlanTraffic, ReplicasLevelTheRanks) {
  const HostsOfRanks where({2});
  const auto routing = [](std::vector<int32_t> ids) {
    const auto tokens = static_cast<int64_t>(ids.size());
    return Routing{4, 1, tokens, std::move(ids), {}};
  };
  const std::vector<Routing> ranks{routing({0, 0, 0, 1}), routing({0, 0, 0, 3, -1})};
  const PlannedTraffic planned = plan_traffic(where, 4, ranks, 1);
  EXPECT_EQ(planned.load.home, 7.0 / 4);
  EXPECT_EQ(planned.load.planned, 1);
  EXPECT_EQ(planned.load.num_slots, 6);
  EXPECT_EQ(planned.load.moved, 1);
  // Rank 1 uses its own replica: nothing but expert 3's row was local to it before.
  EXPECT_EQ(planned.traffic.routes(0, 0), 4);
  EXPECT_EQ(planned.traffic.routes(1, 1), 4);
  EXPECT_EQ(planned.traffic.routes(0, 1) + planned.traffic.routes(1, 0), 0);
  EXPECT_EQ(planned.traffic.tokens(1), 4) << "a token without experts sends nothing";
}

TEST(PlanModel, OneRankCopiesAndSums) {
  const Prediction p = predict(topology(), shape(4, 1), to_all({1}, 4, {0}), Variant::per_host);
  EXPECT_NEAR(p.dispatch.us, 10 + 2 * kRows / 1e6, 1e-9);  // read and written at 1e6 bytes per microsecond
  EXPECT_NEAR(p.combine.us, 5 + 2 * kRows / 1e6, 1e-9);
  EXPECT_EQ(p.dispatch.bottleneck, "memory");
  EXPECT_EQ(p.dispatch.bytes.memory, 2 * kRows);
  EXPECT_EQ(p.dispatch.bytes.link_out, 0);
}

TEST(PlanModel, TwoRanksOfAHostAreBoundByTheirLinks) {
  // A token's routes to experts 0 and 1, which both belong to rank 0, have separate rows or share one.
  const Traffic traffic = to_all({2}, 4, {0, 1, 2});
  const Prediction p = predict(topology(), shape(4, 3), traffic, Variant::flat_per_rank);
  EXPECT_NEAR(p.dispatch.us, 20 + kRows / 1e5, 1e-9) << "an empty call of 2 ranks is half way from 1 to 4";
  EXPECT_EQ(p.dispatch.bottleneck, "links");
  EXPECT_NEAR(phase(p.dispatch, "memory"), 3 * kRows / 1e6, 1e-9);
  EXPECT_EQ(p.dispatch.bytes.link_out, kRows);
  EXPECT_NEAR(p.combine.us, 5 + kRows / 1e5, 1e-9);
  const Prediction routes = predict(topology(), shape(4, 3), traffic, Variant::flat_per_route);
  EXPECT_NEAR(routes.dispatch.us, 20 + 2 * kRows / 1e5, 1e-9);
  EXPECT_EQ(routes.dispatch.bytes.link_out, 2 * kRows);
  for (const Variant same : {Variant::hierarchical, Variant::per_host})
    EXPECT_EQ(predict(topology(), shape(4, 3), traffic, same).us(), p.us());
}

/// Two hosts with two ranks each, and one expert per rank. Tokens go to all experts, so a row crosses once and is forwarded
/// once.
TEST(PlanModel, HostsAreBoundByTheirRails) {
  const Traffic traffic = to_all({2, 2}, 4, {0, 1, 2, 3});
  const PlanShape s = shape(4, 4);
  const double slot = 128 + kRow;  // 16 + 12 * 2 + 8 * 4 bytes, padded
  EXPECT_EQ(s.slot(2), slot);
  const Prediction p = predict(topology(), s, traffic, Variant::per_host);
  EXPECT_EQ(p.dispatch.bytes.network_out, kTokens * slot);
  EXPECT_EQ(p.dispatch.bytes.network_all, 4 * kTokens * slot);
  EXPECT_EQ(p.dispatch.bytes.network_host, 2 * kTokens * slot);
  EXPECT_EQ(p.dispatch.bytes.link_out, 2 * kRows) << "its own tokens to its neighbour, and a proxy's to the same";
  EXPECT_NEAR(phase(p.dispatch, "network"), kTokens * slot / 1e4, 1e-9);
  EXPECT_NEAR(phase(p.dispatch, "links"), 2 * kRows / 1e5, 1e-9);
  // Local and forwarded rows take one read and two writes; packed rows take one read and one write.
  EXPECT_NEAR(phase(p.dispatch, "memory"), (6 * kRows + 2 * kTokens * slot) / 1e6, 1e-9);
  const double counts = 2 * 7 + (32 + 4.0 * (4 + 4 + 2)) * (1 / 1e4 + 2 / 1e5) + 1;
  EXPECT_NEAR(phase(p.dispatch, "counts"), counts, 1e-9);
  const double chunk = 4 << 20;
  EXPECT_NEAR(phase(p.dispatch, "fill"), 7 + chunk * (1 / 1e5 + 2 / 1e6), 1e-9);
  EXPECT_NEAR(p.dispatch.us, 20 + counts + kTokens * slot / 1e4 + phase(p.dispatch, "fill"), 1e-9);
  EXPECT_EQ(p.dispatch.bottleneck, "network");
  EXPECT_EQ(p.combine.bytes.network_out, kRows) << "a sum for each token";
  // Two rows on the local host are summed, a proxy computes another sum of two rows, and both sums are read for the result.
  EXPECT_NEAR(phase(p.combine, "memory"), 9 * kRows / 1e6, 1e-9);

  const Prediction exact = predict(topology(), s, traffic, Variant::hierarchical);
  EXPECT_EQ(exact.dispatch.us, p.dispatch.us);
  EXPECT_EQ(exact.combine.bytes.network_out, 2 * kRows) << "a row of each rank of the host";
  const Prediction flat = predict(topology(), s, traffic, Variant::flat_per_rank);
  EXPECT_EQ(flat.dispatch.bytes.network_out, 2 * kRows);
  EXPECT_EQ(flat.dispatch.bytes.link_out, kRows);
}

TEST(PlanModel, RailsAndTheMiddleOfTheNetworkAreShared) {
  const Traffic traffic = to_all({2, 2}, 4, {0, 1, 2, 3});
  const double slots = kTokens * (128 + kRow);
  Topology t = topology();
  t.network.rails = 1;
  const auto network = [&] { return phase(predict(t, shape(4, 4), traffic, Variant::per_host).dispatch, "network"); };
  EXPECT_NEAR(network(), 2 * slots / 1e4, 1e-9) << "two ranks on one rail";
  t.network.rails = 2;
  t.network.host_gbs = 5;
  EXPECT_NEAR(network(), 2 * slots / 5e3, 1e-9);
  t.network.host_gbs = 0;
  t.network.bisection = 0.25;  // all rows cross the middle: 2 slots of each host in each direction, at a quarter of 20 GB/s
  EXPECT_NEAR(network(), 2 * slots / 5e3, 1e-9);
  t.network.bisection = 1;
  t.network.post_us = 300;  // three rounds are in flight
  const double chunk = 4 << 20;
  EXPECT_NEAR(network(), slots / (chunk / (chunk / 1e4 + 100)), 1e-6);
}

TEST(PlanModel, ThreadsOfAHostDoAllTheWork) {
  const Traffic one = to_all({1}, 4, {0}), two = to_all({2}, 4, {0, 2}), apart = to_all({1, 1}, 4, {0, 2});
  const double copies = 2 * kRows / 1e6;
  EXPECT_NEAR(predict(cpu_topology(1), shape(4, 1), one, Variant::per_host).dispatch.us, 10 + copies, 1e-9);
  EXPECT_NEAR(predict(cpu_topology(4), shape(4, 1), one, Variant::per_host).dispatch.us, 10 + copies / 4, 1e-9);
  Topology sleepy = cpu_topology(4);
  sleepy.host.wake_us = 50;
  EXPECT_NEAR(predict(sleepy, shape(4, 1), one, Variant::per_host).dispatch.us, 60 + copies / 4, 1e-9);
  sleepy.host.workers = 1;
  EXPECT_NEAR(predict(sleepy, shape(4, 1), one, Variant::per_host).dispatch.us, 10 + copies, 1e-9) << "nobody to wake";
  // Each of two ranks accesses three rows in memory; the links are too fast to be a limit.
  Topology t = cpu_topology(2);
  t.host.link_gbs = t.host.link_read_gbs = 1e9;
  EXPECT_NEAR(predict(t, shape(4, 2), two, Variant::per_host).dispatch.us, 20 + 3 * kRows / 1e6, 1e-9);
  t.host.workers = 1;
  EXPECT_NEAR(predict(t, shape(4, 2), two, Variant::per_host).dispatch.us, 20 + 6 * kRows / 1e6, 1e-9);
  t.host.workers = 2;
  t.host.copy.host_read_gbs = t.host.copy.host_write_gbs = 1500;  // workers slow each other down
  EXPECT_NEAR(predict(t, shape(4, 2), two, Variant::per_host).dispatch.us, 20 + 6 * kRows / 1.5e6, 1e-9);
  t.host.route_ns = 10;
  t.host.record_read_ns = 20;
  t.host.record_write_ns = 30;
  const Prediction planned = predict(t, shape(4, 2), two, Variant::per_host);  // two routes per token, two records each way
  EXPECT_NEAR(phase(planned.dispatch, "plan"), 2 * kTokens * 0.01 + 2 * 2 * kTokens * 0.02, 1e-9);
  EXPECT_NEAR(phase(planned.dispatch, "records"), 2 * 2 * kTokens * 0.03, 1e-9);
  EXPECT_EQ(phase(planned.combine, "records"), 0);
  // On a CPU, nothing overlaps, and two hosts in a test bed share its threads and its network.
  const Prediction beds = [&] {
    Topology bed = cpu_topology(2);
    bed.one_machine = true;
    bed.network.host_gbs = 10;
    return predict(bed, shape(4, 2), apart, Variant::per_host);
  }();
  double sum = 0;
  for (const PlanPhase& p : beds.dispatch.phases) sum += p.us;
  EXPECT_NEAR(beds.dispatch.us, sum, 1e-9);
  EXPECT_NEAR(phase(beds.dispatch, "call"), 20, 1e-9) << "two ranks on the machine";
  EXPECT_NEAR(phase(beds.dispatch, "network"), 2 * kTokens * (128 + kRow) / 1e4, 1e-9) << "host_gbs is of both";
}

TEST(PlanModel, RanksOfATestBedGoRoundItsGpus) {
  Topology bed = topology();  // two GPUs, each shared by two of the four ranks
  bed.one_machine = true;
  const Traffic traffic = to_all({2, 2}, 4, {0, 1, 2, 3});
  const Prediction apart = predict(topology(), shape(4, 4), traffic, Variant::per_host),
                   together = predict(bed, shape(4, 4), traffic, Variant::per_host);
  for (const char* name : {"memory", "links"})
    EXPECT_NEAR(phase(together.dispatch, name), 2 * phase(apart.dispatch, name), 1e-9) << name;
  EXPECT_NEAR(phase(together.dispatch, "call"), 30, 1e-9) << "of four ranks";
}

TEST(PlanModel, QuantisedRowsAreShorter) {
  PlanShape s = shape(4, 1);
  s.quantize = ScaleKind::f32;
  EXPECT_EQ(s.sent_row(), 7168 + 56 * 4);
  EXPECT_EQ(s.slot(2), 128 + 7168 + 256);
  const Prediction p = predict(cpu_topology(1), s, to_all({1}, 4, {0}), Variant::per_host);
  EXPECT_NEAR(phase(p.dispatch, "quantise"), kRows / 5e5, 1e-9);
  EXPECT_NEAR(phase(p.dispatch, "memory"), kTokens * s.sent_row() / 1e6, 1e-9) << "what was quantised is in a cache";
  EXPECT_NEAR(phase(p.combine, "memory"), 2 * kRows / 1e6, 1e-9) << "sums are bf16";
}

/// A row that crosses hosts is quantized in its slot, and the same token is quantized once more for the ranks on its own host.
TEST(PlanModel, RowsThatCrossAreQuantisedAgain) {
  PlanShape s = shape(4, 4);
  s.quantize = ScaleKind::f32;
  const auto quantise = [&](const std::vector<int>& hosts, const std::vector<int32_t>& experts, Variant variant) {
    return phase(predict(cpu_topology(1), s, to_all(hosts, 4, experts), variant).dispatch, "quantise") / (kRows / 5e5);
  };
  // One worker does the work of all ranks on a host.
  for (const Variant variant : {Variant::hierarchical, Variant::per_host}) {
    EXPECT_NEAR(quantise({1}, {0, 1, 2, 3}, variant), 1, 1e-9);
    EXPECT_NEAR(quantise({2}, {0, 1, 2, 3}, variant), 2, 1e-9) << "two ranks, and no row crosses";
    EXPECT_NEAR(quantise({1, 1}, {0, 1, 2, 3}, variant), 2, 1e-9);
    EXPECT_NEAR(quantise({1, 1, 1, 1}, {0, 1, 2, 3}, variant), 4, 1e-9);
    EXPECT_NEAR(quantise({1, 1}, {0}, variant), 1, 1e-9) << "rank 1 has no row on its own host";
  }
  EXPECT_NEAR(quantise({1, 1, 1, 1}, {0, 1, 2, 3}, Variant::flat_per_rank), 2, 1e-9) << "once for all other hosts";
}

TEST(PlanModel, EmptyCallsBetweenMeasuredNumbersOfRanks) {
  const HostTopology host = topology().host;
  const double expected[] = {10, 20, 30, 30};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(call_us(host, host.dispatch_us, 1 << i), expected[i], 1e-9);
}

TEST(PlanMemory, IsTheLibrarysAndContinues) {
  NormalConfig c;
  c.hidden = 7168;
  c.num_experts = 256;
  c.topk = 8;
  c.max_tokens = 512;
  for (const Backend backend : {Backend::cpu, Backend::cuda}) {
    EXPECT_EQ(memory_for(c, 48, backend).total(), NormalExchange::memory_required(c, 48, backend).total());
    // The parabola through 16, 32 and 64 also passes through the values in between, except for rounding to pages.
    const auto at = [&](int world) { return static_cast<double>(NormalExchange::memory_required(c, world, backend).total()); };
    const double between = at(32) + (at(64) - at(16)) / 3;
    EXPECT_NEAR(between, at(48), 6 * 4096);
    EXPECT_GT(memory_for(c, 128, backend).total(), 1.9 * at(64));
    EXPECT_LT(static_cast<double>(memory_for(c, 128, backend).total()), 2.3 * at(64));
  }
  const Prediction p = predict(topology(), shape(4, 4), to_all({2, 2}, 4, {0, 1, 2, 3}), Variant::per_host);
  const double slot = 128 + kRow, rows = std::floor((4 << 20) / slot);
  EXPECT_EQ(p.memory.network, 6 * rows * slot + kRows) << "three chunks each way, and one sum of each token";
  EXPECT_FALSE(p.memory.continued);
}

TEST(PlanRates, LineThroughThreeTimes) {
  const measure::RowRate copy = measure::rate_of_line({0.75, 1.25, 2.25}, false);  // 0.25 + 0.5 places
  EXPECT_NEAR(copy.read_gbs, 4, 1e-9);
  EXPECT_NEAR(copy.write_gbs, 2, 1e-9);
  const measure::RowRate sum = measure::rate_of_line({0.75, 1.25, 2.25}, true);
  EXPECT_NEAR(sum.read_gbs, 2, 1e-9);
  EXPECT_NEAR(sum.write_gbs, 4, 1e-9);
  const measure::RowRate noise = measure::rate_of_line({1, 0.9, 0.8}, false);
  EXPECT_GT(noise.read_gbs, 0);
  EXPECT_GT(noise.write_gbs, 0);
}

std::string refusal(const json& d) {
  try {
    (void)topology_from(d);
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

TEST(PlanTopology, SaysWhatIsWrong) {
  EXPECT_EQ(refusal(document()), "");
  const auto with = [](const char* at, const json& value) {
    json d = document();
    d[json::json_pointer(at)] = value;
    return refusal(d);
  };
  EXPECT_EQ(refusal(json::array()), "the document is not an object");
  EXPECT_EQ(with("/format", "other"), "format is \"other\"; allowed: \"switchyard-topology\"");
  EXPECT_EQ(with("/version", 2), "version is 2; allowed: 1 to 1");
  EXPECT_EQ(with("/host/copy/read_gbs", 0), "host.copy.read_gbs is 0; allowed: a number above 0");
  EXPECT_EQ(with("/host/copy/read_gbs", "1"), "host.copy.read_gbs is \"1\"; allowed: a number above 0");
  EXPECT_EQ(with("/host/link_us", -1), "host.link_us is -1; allowed: a number of at least 0");
  EXPECT_EQ(with("/host/ranks", 65), "host.ranks is 65; allowed: 1 to 64");
  EXPECT_EQ(with("/host/copy/host_read_gbs", 3), "host.copy has one of host_read_gbs and host_write_gbs");
  EXPECT_EQ(with("/host/calls/ranks", {4, 1}), "host.calls.ranks is 1; allowed: 5 to 64");
  EXPECT_EQ(with("/host/calls/combine_us", {4}), "host.calls.combine_us has 1 times; allowed: 2, one for each number of ranks");
  EXPECT_EQ(with("/network/bisection", 2), "network.bisection is 2; allowed: above 0, at most 1");
  EXPECT_EQ(with("/network", nullptr), "network is missing, and there are 4 hosts");
  EXPECT_EQ(with("/hosts", json::array({2, 3})), "hosts is 3; allowed: 1 to 2");
  EXPECT_EQ(with("/one_machine", 1), "one_machine is 1; allowed: true or false");
  EXPECT_NE(with("/host/link_gb", 1).find("host.link_gb is not known; allowed: ranks, "), std::string::npos);
  EXPECT_NE(with("/host/link_gb", 1).find("Did you mean 'link_gbs'?"), std::string::npos);
  json d = document();
  d["host"].erase("sum");
  EXPECT_EQ(refusal(d), "host.sum is missing");
}

TEST(PlanTopology, IsWrittenAsItIsRead) {
  json d = document();
  d["hosts"] = {2, 1, 2};
  d["one_machine"] = true;
  d["host"]["workers"] = 3;
  d["host"]["copy"]["host_read_gbs"] = d["host"]["copy"]["host_write_gbs"] = 5;
  d["network"]["host_gbs"] = 11;
  const Topology t = topology_from(d);
  EXPECT_EQ(t.max_ranks(), 5);
  EXPECT_EQ(t.host.link_read_gbs, t.host.link_gbs);
  const json again = to_json(topology_from(to_json(t)));
  EXPECT_EQ(again, to_json(t));
  EXPECT_EQ(again.at("hosts"), json({2, 1, 2}));
  EXPECT_EQ(again.at("host").at("copy").at("host_write_gbs"), 5);
}

json plan_document() {
  const auto call = [](double us) {
    return json{
        {"us", us},
        {"bottleneck", "links"},
        {"phases",
         {{{"name", "links"}, {"us", us - 1}, {"overlaps", true}}, {{"name", "call"}, {"us", 1.0}, {"overlaps", false}}}},
        {"bytes", {{"network_out", 0.0}, {"link_out", 5e6}}}};
  };
  json d = {{"what", "a <topology>"},
            {"commit", "abc"},
            {"date", "2026"},
            {"topology", {{"source", "by hand"}}},
            {"notes", {"one thing"}}};
  for (const int ranks : {1, 128})
    d["points"].push_back({{"ranks", ranks},
                           {"hosts", 1},
                           {"variants",
                            {{{"variant", "per_host"},
                              {"dispatch", call(100)},
                              {"combine", call(200)},
                              {"memory", {{"total_bytes", 1 << 30}, {"continued", ranks > 64}}}}}}});
  return d;
}

TEST(PlanPage, ShowsCurvesPhasesAndNotes) {
  const std::string page = plan_html(plan_document());
  for (const char* text :
       {"<title>Switchyard plan", "a &lt;topology>", "hierarchical, a sum per host returns", ">300.0 us<", "1.00 GiB *",
        "links: 99 at 128 ranks", "Note: one thing.", "source is: by hand", "There is nothing to draw."})
    EXPECT_NE(page.find(text), std::string::npos) << text;
  EXPECT_EQ(page.find("flat, a row per route"), std::string::npos) << "it was not asked for";
  json wrong = plan_document();
  wrong["points"][0]["variants"][0]["variant"] = "other";
  EXPECT_THROW((void)plan_html(wrong), json::exception);
}

}  // namespace
}  // namespace switchyard::tool
