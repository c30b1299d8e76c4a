// SPDX-License-Identifier: Apache-2.0
// Groups on GPUs whose ranks are threads on several named hosts: mappings, rejected calls, the propagation of an abort, and the
// report of a rank that does not take part in a round. The suites in tests/modes/normal cover rows.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <vector>

#include "exchange/fused/fused_moe.hpp"
#include "exchange/group/impl.hpp"
#include "gpu/hosts/gpu_hosts.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/normal.hpp"

namespace harness {
namespace {

using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::GroupOptions;

struct Hosts {
  const char* name;
  int world;
  const char* host;
  int hosts;
};
const Hosts kHosts[] = {{"OneEach", 2, "a,b", 2}, {"TwoEach", 4, "a,a,b,b", 2}, {"Unequal", 3, "a,a,b", 2}, {"One", 2, "a", 1}};

class GpuHosts : public testing::TestWithParam<Hosts> {};

TEST_P(GpuHosts, MapTheirOwnRanksOnly) {
  auto groups = Group::in_process(GetParam().world, options_on_gpus(GetParam().host));
  for (Group& group : groups) {
    EXPECT_EQ(group.hosts(), GetParam().hosts);
    EXPECT_EQ(group.options().network, switchyard::HostNetwork::nccl);
    const auto& view = group.impl().heap->view();
    for (int r = 0; r < group.size(); ++r) {
      EXPECT_EQ(view.base[r] != nullptr, group.host_of(r) == group.host()) << group.rank() << " " << r;
      EXPECT_NE(group.impl().header(r), nullptr);
    }
  }
}

TEST_P(GpuHosts, MeetSleepAndWake) {
  const auto all = outcomes(GetParam().world, options_on_gpus(GetParam().host), [&](Group& group) {
    for (int round = 0; round < 3; ++round) {
      group.barrier();
      group.sleep();
      group.wake();
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

INSTANTIATE_TEST_SUITE_P(Groups, GpuHosts, testing::ValuesIn(kHosts), [](const auto& d) { return std::string(d.param.name); });

TEST(GpuHostsFaults, AnAbortReachesOtherHosts) {
  const auto all = outcomes(4, options_on_gpus("a,a,b,b"), [&](Group& group) {
    group.barrier();
    if (group.rank() == 2) group.abort(77);
    group.barrier();
  });
  for (const Outcome& o : all) {
    EXPECT_EQ(code_name(o.code), "peer_failed") << o.text;
    EXPECT_EQ(o.failed_rank, 2);
    EXPECT_EQ(static_cast<int>(o.reason), 77);
  }
}

/// All ranks reject the call in the same way, and the group stays usable.
TEST(GpuHostsRefusals, NameTheHosts) {
  const auto all = outcomes(3, options_on_gpus("a,a,b"), [&](Group& group) {
    switchyard::NormalConfig rings;
    rings.staging = switchyard::Staging::ring;
    rings.hidden = 64;
    rings.num_experts = 6;
    rings.topk = 2;
    rings.max_tokens = 8;
    switchyard::LedgerConfig ledger;
    ledger.hidden = 64;
    ledger.num_experts = 6;
    ledger.topk = 2;
    ledger.max_tokens = 4;
    char memory[64];
    const std::function<void()> refused[] = {
        [&] { switchyard::NormalExchange(group, rings); }, [&] { switchyard::LedgerCombine(group, ledger); },
        [&] { switchyard::detail::FusedMoe(group, switchyard::detail::FusedMoeConfig(), nullptr, nullptr); },
        [&] { (void)group.register_memory(memory, sizeof memory); }};
    for (const auto& make : refused) {
      expect_text(outcome_of(make), ErrorCode::unsupported, "2 hosts (host 0: ranks 0, 1; host 1: rank 2): ");
      group.barrier();
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

switchyard::NormalConfig small_config() {
  switchyard::NormalConfig config;
  config.hidden = 64;
  config.num_experts = 4;
  config.topk = 2;
  config.max_tokens = 8;
  return config;
}

/// Calls without tokens execute all phases and all control rounds but use no caller memory.
class EmptyCalls {
 public:
  explicit EmptyCalls(Group& group) : exchange_(group, small_config()) {
    cudaSetDevice(group.rank() % count_gpus());
    cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  }
  switchyard::Dispatched dispatch() {
    switchyard::DispatchOptions options;
    options.stream = stream_;
    const switchyard::ConstRows x{nullptr, 0, 64, switchyard::DType::bf16};
    switchyard::ExpertIds ids;
    ids.topk = 2;
    return exchange_.dispatch(x, ids, nullptr, options);
  }
  void combine(const switchyard::Dispatched& d) {
    switchyard::CombineOptions options;
    options.stream = stream_;
    exchange_.combine({nullptr, 0, 64, switchyard::DType::bf16}, d.handle, nullptr, options);
  }

 private:
  switchyard::NormalExchange exchange_;
  cudaStream_t stream_ = nullptr;
};

TEST(GpuHostsCalls, WithoutTokens) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  const auto all = outcomes(2, options_on_gpus("a,b"), [&](Group& group) {
    EmptyCalls calls(group);
    for (int i = 0; i < 5; ++i) {
      const auto d = calls.dispatch();
      EXPECT_EQ(d.rows, 0);
      calls.combine(d);
    }
    group.barrier();
    group.check();
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

TEST(GpuHostsCalls, ARankThatDoesNotComeIsNamed) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  GroupOptions options = options_on_gpus("a,b");
  options.timeout = kSoon;
  const auto all = outcomes(2, options, [&](Group& group) {
    EmptyCalls calls(group);
    group.barrier();
    if (group.rank() == 0) (void)calls.dispatch();
    std::this_thread::sleep_for(3 * kSoon);
    group.check();
  });
  EXPECT_EQ(code_name(all[0].code), "peer_timeout") << all[0].text;
  EXPECT_EQ(all[0].report.awaited_rank, 1) << all[0].text;
  EXPECT_EQ(std::string(all[0].report.site), "network") << all[0].text;
  EXPECT_NE(code_name(all[1].code), "ok") << "it hears that rank 0 gave it up";
}

TEST(GpuHostsRefusals, NetworksOfCpus) {
  GroupOptions options = options_on_gpus("a,b");
  options.network = switchyard::HostNetwork::mpi;
  expect_text(outcome_of([&] { (void)Group::in_process(2, options); }), ErrorCode::unsupported,
              "GroupOptions::network = mpi on rank 0: between hosts, rows on GPUs travel by nccl");
}

}  // namespace
}  // namespace harness
