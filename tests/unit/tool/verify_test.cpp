// SPDX-License-Identifier: Apache-2.0
// What `switchyard verify` requires of the machine before it runs a case.
#include <gtest/gtest.h>

#include <string>

#include "tools/cli/outputs.hpp"
#include "tools/cli/verb.hpp"
#include "tools/layer/layer_rank.hpp"
#include "tools/verify/ledger.hpp"
#include "tools/verify/setup.hpp"

namespace switchyard::tool {
namespace {

VerifyCase case_of(const std::string& mode, int64_t tokens) {
  VerifyCase c;
  c.mode = mode;
  c.layout = "expert_major";
  c.dtype = "bf16";
  c.quantize = "none";
  c.staging = "direct";
  c.routing = "uniform";
  c.ranks = 2;
  c.tokens = tokens;
  c.hidden = 256;
  c.intermediate = 64;
  c.orders = {"per_rank"};
  return c;
}

TEST(VerifyMemory, CoversHeapsAndRows) {
  for (const char* mode : {"normal", "low_latency", "flat", "layer"}) {
    for (const char* staging : {"direct", "ring"}) {
      VerifyCase c = case_of(mode, 64);
      c.staging = staging;
      const VerifyOptions options;
      const Scenario s = scenario_of(c, options);
      const double needed = host_bytes(c, options);
      // Each rank needs the heap, source rows, received rows (for any routing, 64 * 2 tokens with 8 routes) and results.
      const double rows = 256 * 2 * (64 + 64 + (std::string(mode) == "normal" ? 64 * 2 * 8 : 32 * 2 * 64));
      EXPECT_GT(needed, 2 * (static_cast<double>(heap_bytes(c, s)) + rows)) << mode;
      c.tokens = 128;
      EXPECT_GT(host_bytes(c, options), 1.3 * needed) << mode;
    }
  }
}

std::vector<std::string> quantised_layers(const std::string& backend, int64_t hidden, std::vector<std::string> quantize) {
  VerifyOptions o;
  o.backend = backend;
  o.modes = {"layer"};
  o.routings = {"uniform"};
  o.ranks = {2};
  o.hidden = {hidden};
  o.quantize = std::move(quantize);
  std::vector<std::string> found;
  for (const VerifyCase& c : verify_cases(o)) found.push_back(c.quantize);
  return found;
}

TEST(VerifyCases, LayersOnGpusAreAlsoInFp8) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(quantised_layers("cpu", 256, {}), (Words{"none"}));
  EXPECT_EQ(quantised_layers("cuda", 256, {}), (Words{"none", "f32", "ue8m0"}));
  EXPECT_EQ(quantised_layers("cuda", 264, {}), (Words{"none"})) << "fp8 has no such rows";
  EXPECT_EQ(quantised_layers("cuda", 256, {"ue8m0"}), (Words{"ue8m0"}));
  EXPECT_TRUE(quantised_layers("cpu", 256, {"f32"}).empty());
  VerifyOptions o;
  for (const VerifyCase& c : verify_cases(o)) EXPECT_EQ(c.quantize, "none") << c.mode;
}

TEST(VerifyMemory, ALayerInFp8HasRoomForItsScales) {
  LayerSpec spec;
  spec.scenario = scenario_of(case_of("layer", 64), {});
  spec.intermediate = 64;
  spec.backend = Backend::cuda;
  const size_t plain = layer_device_bytes(spec);
  spec.arithmetic.quantize = ScaleKind::f32;
  EXPECT_LT(layer_device_bytes(spec), plain) << "weights are half as large";
  EXPECT_GT(layer_device_bytes(spec), plain / 2);
  VerifyCase c = case_of("layer", 64);
  c.gpus = 2;
  EXPECT_GT(device_bytes(c, {}), layer_device_bytes(spec)) << "the maximum of all layers";
}

TEST(VerifyMemory, CountsRoutingAndLogits) {
  VerifyCase c = case_of("normal", 4096);
  c.hidden = 8;
  VerifyOptions options;
  options.experts = 4096;
  EXPECT_GT(host_bytes(c, options), 4096.0 * 4096 * 4);
}

TEST(VerifyMemory, ACaseThatCannotFitIsRefusedByItsFlags) {
  const VerifyOptions options;
  constexpr size_t kMachine = size_t{24} << 30;
  for (const char* mode : {"normal", "low_latency", "flat", "layer"})
    EXPECT_NO_THROW(check_verify_case(case_of(mode, 64), options, kMachine)) << mode;
  try {
    check_verify_case(case_of("normal", 1 << 20), options, kMachine);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& e) {
    const std::string text = e.what();
    EXPECT_EQ(text.rfind("--tokens 1048576 --hidden 256 --ranks 2 (normal, expert_major rows, direct staging) need about", 0),
              0u)
        << text;
    EXPECT_NE(text.find("24.0 GiB are available"), std::string::npos) << text;
  }
  VerifyCase c = case_of("low_latency", 65535);
  c.hidden = 1024;
  EXPECT_THROW(check_verify_case(c, options, kMachine), UsageError);
}

TEST(VerifyMemory, LedgerCountsWhatRanksReceiveNotTheWorstCase) {
  LedgerVerifyOptions o;
  o.ranks = 64;
  const double row = 2.0 * static_cast<double>(o.hidden), routes = static_cast<double>(o.tokens * o.topk);
  EXPECT_GT(host_bytes(o, 0), 64 * 4 * routes * row);
  EXPECT_LT(host_bytes(o, 0), 64 * 16 * routes * row);
  EXPECT_LT(host_bytes(o, 1), host_bytes(o, 0)) << "the heaps are on the GPU";
  o.tokens = 65535;
  o.hidden = 131072;
  EXPECT_THROW(require_memory("--tokens", host_bytes(o, 0), size_t{1} << 40), UsageError);
}

}  // namespace
}  // namespace switchyard::tool
