// SPDX-License-Identifier: Apache-2.0
// Multi-host groups whose ranks are threads of one process: the memory and ranks that are accessible, and the operations that
// are rejected.
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>

#include "bootstrap/bootstrap.hpp"
#include "exchange/group/impl.hpp"
#include "harness/outcome.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/normal.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::GroupOptions;

GroupOptions options_of(const std::string& host) {
  GroupOptions options = options_with(20s);
  options.host = host;
  return options;
}

struct Hosts {
  const char* name;
  int world;
  const char* host;
  int hosts;
};
const Hosts kHosts[] = {{"OneEach", 2, "a,b", 2},
                        {"Three", 3, "a,b,c", 3},
                        {"Unequal", 5, "a,a,a,b,b", 2},
                        {"Interleaved", 8, "a,b,c,d", 4},
                        {"One", 4, "a", 1}};

class ThreadHosts : public testing::TestWithParam<Hosts> {};

TEST_P(ThreadHosts, MapTheirOwnRanksOnly) {
  auto groups = Group::in_process(GetParam().world, options_of(GetParam().host));
  for (Group& group : groups) {
    EXPECT_EQ(group.hosts(), GetParam().hosts);
    EXPECT_EQ(group.host(), group.host_of(group.rank()));
    const auto& view = group.impl().heap->view();
    for (int r = 0; r < group.size(); ++r) {
      EXPECT_EQ(view.base[r] != nullptr, group.host_of(r) == group.host()) << group.rank() << " " << r;
      EXPECT_NE(group.impl().header(r), nullptr);
    }
  }
  EXPECT_EQ(outcome_of([&] { (void)groups[0].host_of(GetParam().world); }).code, ErrorCode::invalid_argument);
}

TEST_P(ThreadHosts, MeetAndGather) {
  const auto all = outcomes(GetParam().world, options_of(GetParam().host), [&](Group& group) {
    for (int round = 0; round < 20; ++round) {
      group.barrier();
      const int mine = group.rank() * 1000 + round;
      std::vector<int> every(static_cast<size_t>(group.size()));
      group.all_gather(&mine, sizeof mine, every.data());
      for (int r = 0; r < group.size(); ++r) EXPECT_EQ(every[static_cast<size_t>(r)], r * 1000 + round);
    }
    group.sleep();
    group.wake();
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

/// Every rail socket leads to its rank, transfers bytes in both directions and does not block.
TEST_P(ThreadHosts, AreConnectedByRails) {
  const auto all = outcomes(GetParam().world, options_of(GetParam().host), [&](Group& group) {
    auto& link = *group.impl().bootstrap;
    const auto rails = link.connect_rails(20s);
    ASSERT_EQ(rails.size(), static_cast<size_t>(group.size()));
    for (int r = 0; r < group.size(); ++r) {
      const auto& rail = rails[static_cast<size_t>(r)];
      ASSERT_EQ(static_cast<bool>(rail), link.host_map().exchange_rows(group.rank(), r));
      char byte = 0;
      if (!rail) continue;
      EXPECT_EQ(::read(rail.get(), &byte, 1), -1);
      EXPECT_EQ(errno, EAGAIN);
    }
    link.barrier(20s);
    for (int r = 0; r < group.size(); ++r) {
      const int words[] = {group.rank(), r};
      const auto& rail = rails[static_cast<size_t>(r)];
      if (rail) {
        EXPECT_EQ(::write(rail.get(), words, sizeof words), 8);
      }
    }
    for (int r = 0; r < group.size(); ++r) {
      const auto& rail = rails[static_cast<size_t>(r)];
      if (!rail) continue;
      pollfd entry = {rail.get(), POLLIN, 0};
      ASSERT_EQ(::poll(&entry, 1, 20000), 1);
      int words[2] = {-1, -1};
      EXPECT_EQ(::read(rail.get(), words, sizeof words), 8);
      EXPECT_EQ(words[0], r);
      EXPECT_EQ(words[1], group.rank());
    }
    link.barrier(20s);
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

INSTANTIATE_TEST_SUITE_P(Groups, ThreadHosts, testing::ValuesIn(kHosts),
                         [](const auto& d) { return std::string(d.param.name); });

TEST(ThreadHostsFaults, AnAbortReachesOtherHosts) {
  const auto all = outcomes(4, options_of("a,b"), [&](Group& group) {
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

TEST(ThreadHostsFaults, DifferentCallsAreNamedAcrossHosts) {
  const auto all = outcomes(4, options_of("a,b"), [&](Group& group) {
    group.barrier();
    char every[4];
    if (group.rank() == 1)
      group.all_gather("x", 1, every);
    else
      group.barrier();
  });
  for (const Outcome& o : all) {
    expect_text(o, ErrorCode::mismatch, "all_gather");
    expect_text(o, ErrorCode::mismatch, "barrier");
  }
}

/// All ranks reject the call in the same way, and the group stays usable.
TEST(ThreadHostsRefusals, NameTheHostsAndWhatToUse) {
  const auto all = outcomes(3, options_of("a,a,b"), [&](Group& group) {
    switchyard::NormalConfig rings;
    rings.staging = switchyard::Staging::ring;
    rings.hidden = 64;
    rings.num_experts = 4;
    rings.topk = 2;
    rings.max_tokens = 8;
    switchyard::LedgerConfig ledger;
    ledger.hidden = 64;
    ledger.num_experts = 6;
    ledger.topk = 2;
    ledger.max_tokens = 4;
    char memory[64];
    const std::function<void()> refused[] = {[&] { switchyard::NormalExchange(group, rings); },
                                             [&] { switchyard::LedgerCombine(group, ledger); },
                                             [&] { (void)group.register_memory(memory, sizeof memory); }};
    for (const auto& make : refused) {
      const Outcome o = outcome_of(make);
      expect_text(o, ErrorCode::unsupported, "2 hosts (host 0: ranks 0, 1; host 1: rank 2): ");
      group.barrier();
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

TEST(ThreadHostsSettings, NcclIsForGpus) {
  GroupOptions options = options_of("a,b");
  options.network = switchyard::HostNetwork::nccl;
  const Outcome o = outcome_of([&] { (void)Group::in_process(2, options); });
  expect_text(
      o, ErrorCode::unsupported,
      "GroupOptions::network = nccl on rank 0: nccl moves the memory of GPUs; between hosts, ranks on CPUs have sockets "
      "or mpi");
  options.host = "a";
  EXPECT_EQ(Group::in_process(2, options)[0].options().network, switchyard::HostNetwork::nccl) << "one host needs no network";
}

TEST(ThreadHostsSettings, TheEnvironmentNamesNetworks) {
  ::setenv("SWITCHYARD_NETWORK", "nccl", 1);
  const Outcome refused = outcome_of([&] { (void)Group::in_process(2, options_of("a,b")); });
  ::setenv("SWITCHYARD_NETWORK", "pigeons", 1);
  const Outcome unknown = outcome_of([&] { (void)Group::in_process(2, options_of("a,b")); });
  ::unsetenv("SWITCHYARD_NETWORK");
  expect_text(refused, ErrorCode::unsupported, "GroupOptions::network = nccl");
  expect_text(unknown, ErrorCode::invalid_argument, "SWITCHYARD_NETWORK = \"pigeons\": must be sockets, mpi or nccl");
}

TEST(ThreadHostsSettings, TheEnvironmentNamesHosts) {
  ::setenv("SWITCHYARD_HOST", "x,y", 1);
  const auto named = Group::in_process(4, options_with(20s));
  const auto own = Group::in_process(4, options_of("z"));
  ::unsetenv("SWITCHYARD_HOST");
  EXPECT_EQ(named[0].hosts(), 2);
  EXPECT_EQ(named[3].host(), 1);
  EXPECT_EQ(own[0].hosts(), 1) << "what the program says counts";
}

}  // namespace
}  // namespace harness
