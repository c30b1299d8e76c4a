// SPDX-License-Identifier: Apache-2.0
// NCCL as a carrier, without a GPU: the errors in a process for which NCCL is unavailable, and the calls to NCCL for rounds.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "bootstrap/host_map.hpp"
#include "carrier/nccl/carrier.hpp"
#include "switchyard/status.hpp"
#include "unit/carrier/nccl_fixture.hpp"

namespace switchyard::detail {
namespace {

using nccl_tests::Log;
using std::chrono::milliseconds;

std::string refusal_of(const char* file) {
  ::setenv("SWITCHYARD_NCCL", file, 1);
  try {
    (void)load_nccl();
    return "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    return error.what();
  }
}

TEST(NcclLoading, AMissingFileIsNamed) {
  const std::string text = refusal_of("/nowhere/libnccl.so");
  EXPECT_NE(text.find("NCCL: no library can be loaded"), std::string::npos) << text;
  EXPECT_NE(text.find("SWITCHYARD_NCCL may name the file. Tried: the process, then /nowhere/libnccl.so ("), std::string::npos)
      << text;
}

TEST(NcclLoading, AFileOfAnotherKindIsNamed) {
  EXPECT_EQ(refusal_of("libm.so.6"), "NCCL: libm.so.6 has no ncclGetVersion: it is no NCCL of version 2.19 or later");
}

TEST(NcclLoading, AVersionThatIsTooOldIsRefused) {
  const std::string old = std::getenv("FAKE_NCCL_OLD");
  EXPECT_EQ(refusal_of(old.c_str()), "NCCL: " + old +
                                         " is version 2.18.5: at least 2.19 is needed, before which a communicator could not "
                                         "be ended reliably");
}

TEST(NcclLoading, VersionsAsText) {
  EXPECT_EQ(nccl_version_text(22809), "2.28.9");
  EXPECT_EQ(nccl_version_text(21900), "2.19.0");
}

class NcclCarrierTest : public nccl_tests::FakeNcclTest {
 protected:
  NcclCarrierTest() : FakeNcclTest("FAKE_NCCL", 22809) {}
  std::unique_ptr<Carrier> make(NcclCarrierSpec spec) {
    return make_nccl_carrier(std::make_unique<NcclComms>(api_, std::move(spec)));
  }
};

TEST_F(NcclCarrierTest, ARoundIsOneGroupOnTheStream) {
  fake_->in_progress = 3;  // init waits
  const auto carrier = make(spec_of(1, {"a", "b", "c"}));
  EXPECT_EQ(fake_->take_log(), Log{"init c0: rank 1 of 3, id i, version 21900, blocking 0"});
  EXPECT_EQ(fake_->in_progress, 0);
  fake_->in_progress = 2;  // the end of the group waits, too
  const std::span<const std::byte> out = out_;
  const std::span<std::byte> in = in_;
  const std::array<PeerTransfer, 2> transfers{PeerTransfer{0, out.first(48), in.first(32)}, PeerTransfer{2, {}, in.last(16)}};
  carrier->post(1, transfers, stream_);
  EXPECT_EQ(fake_->take_log(), (Log{"group", "send 48 of type 1 to 0 of c0 on 9", "receive 32 of type 1 from 0 of c0 on 9",
                                    "receive 16 of type 1 from 2 of c0 on 9", "end"}));
  EXPECT_EQ(fake_->in_progress, 0);
  EXPECT_EQ(carrier->advance(1).state, RoundState::in_progress);
  EXPECT_EQ(carrier->advance(1).peer, -1);
  EXPECT_EQ(carrier->advance(0).state, RoundState::done);
  const std::array<PeerTransfer, 1> one{PeerTransfer{2, out, {}}};
  carrier->post(2, one, stream_);
  marks_->passed = 1;
  EXPECT_EQ(carrier->advance(1).state, RoundState::done);
  EXPECT_EQ(carrier->advance(2).state, RoundState::in_progress);
  EXPECT_EQ(carrier->advance(2).peer, 2);
  marks_->passed = 2;
  EXPECT_EQ(carrier->advance(2).state, RoundState::done);
}

TEST_F(NcclCarrierTest, ARoundOfACaptureIsEnqueuedAndNotWaitedFor) {
  const auto carrier = make(spec_of(0, {"a", "b"}));
  fake_->take_log();
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, std::span<const std::byte>(out_), {}}};
  carrier->post(1, transfers, stream_);
  marks_->captured = true;
  carrier->post(2, transfers, stream_);
  EXPECT_EQ(fake_->take_log(),
            (Log{"group", "send 64 of type 1 to 1 of c0 on 9", "end", "group", "send 64 of type 1 to 1 of c0 on 9", "end"}));
  EXPECT_EQ(carrier->advance(2).state, RoundState::in_progress) << "the first one is";
  marks_->passed = 1;
  EXPECT_EQ(carrier->advance(2).state, RoundState::done);
}

TEST_F(NcclCarrierTest, ARoundWithNoBytesIsDone) {
  const auto carrier = make(spec_of(0, {"a", "b"}));
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, {}, {}}};
  carrier->post(1, transfers, stream_);
  EXPECT_EQ(carrier->advance(1).state, RoundState::done);
  EXPECT_EQ(marks_->made, 0);
}

TEST_F(NcclCarrierTest, RanksOfUnequalHostsHaveACommunicatorForEachRail) {
  // Host a has ranks 0, 1 and 2; host b has ranks 3 and 4. Rank 3 is the proxy for ranks 0 and 2.
  const auto carrier = make(spec_of(3, {"a", "a", "a", "b", "b"}));
  EXPECT_EQ(fake_->take_log(), (Log{"init c0: rank 1 of 2, id i, version 21900, blocking 0",
                                    "init c1: rank 1 of 2, id i, version 21900, blocking 0"}));
  const std::array<PeerTransfer, 2> transfers{PeerTransfer{0, out_, {}}, PeerTransfer{2, out_, {}}};
  carrier->post(1, transfers, stream_);
  EXPECT_EQ(fake_->take_log(), (Log{"group", "send 64 of type 1 to 0 of c0 on 9", "send 64 of type 1 to 0 of c1 on 9", "end"}));
  const std::array<PeerTransfer, 1> stranger{PeerTransfer{1, out_, {}}};
  carrier->post(2, stranger, stream_);
  EXPECT_EQ(carrier->advance(2).state, RoundState::broken);
  EXPECT_EQ(carrier->advance(2).peer, 1);
}

TEST_F(NcclCarrierTest, AnErrorOfNcclBreaksAllRounds) {
  const auto carrier = make(spec_of(0, {"a", "b"}));
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  carrier->post(1, transfers, stream_);
  fake_->state = 6;  // a remote error
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  fake_->state = 0;
  marks_->passed = 1;
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  fake_->take_log();
  carrier->post(2, transfers, stream_);
  EXPECT_EQ(fake_->take_log(), Log{});
}

TEST_F(NcclCarrierTest, ASendThatIsRefusedEndsItsGroup) {
  const auto carrier = make(spec_of(0, {"a", "b"}));
  fake_->take_log();
  fake_->send_result = 5;
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  carrier->post(1, transfers, stream_);
  EXPECT_EQ(fake_->take_log(), (Log{"group", "send 64 of type 1 to 1 of c0 on 9", "end"}));
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  EXPECT_EQ(carrier->advance(1).peer, 1);
}

TEST_F(NcclCarrierTest, AGroupThatDoesNotEndIsGivenUpAtTheDeadline) {
  NcclCarrierSpec spec = spec_of(0, {"a", "b"});
  spec.deadline = milliseconds(20);
  const auto carrier = make(std::move(spec));
  fake_->in_progress = 1 << 30;
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  carrier->post(1, transfers, stream_);
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  EXPECT_EQ(marks_->made, 0);
}

TEST_F(NcclCarrierTest, AnAbortOfAnotherThreadEndsAPostThatWaits) {
  NcclCarrierSpec spec = spec_of(0, {"a", "b"});
  spec.deadline = std::chrono::hours(1);
  const auto carrier = make(std::move(spec));
  fake_->take_log();
  fake_->in_progress = 1 << 30;
  std::thread other([&] {
    const auto asked = [&] {
      const std::lock_guard lock(fake_->mutex);
      return fake_->in_progress < 1 << 30;
    };
    while (!asked()) std::this_thread::yield();  // post() waits
    carrier->abort();
  });
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, {}, in_}};
  carrier->post(1, transfers, stream_);
  other.join();
  EXPECT_EQ(wait_for_log("abort c0"), (Log{"group", "receive 64 of type 1 from 1 of c0 on 9", "end", "abort c0"}));
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  carrier->abort();  // nothing is left to end
  EXPECT_EQ(fake_->take_log(), Log{});
}

TEST_F(NcclCarrierTest, ACarrierThatEndsFlushes) {
  make(spec_of(0, {"a", "b"})).reset();
  EXPECT_EQ(fake_->take_log(), (Log{"init c0: rank 0 of 2, id i, version 21900, blocking 0", "finalize c0", "destroy c0"}));
}

TEST_F(NcclCarrierTest, ACommunicatorThatDoesNotFlushIsLeftBehind) {
  auto carrier = make(spec_of(0, {"a", "b"}));
  fake_->take_log();
  fake_->in_progress = 1 << 30;
  carrier.reset();
  EXPECT_EQ(wait_for_log("abort c0"), (Log{"finalize c0", "abort c0"}));
}

TEST_F(NcclCarrierTest, ANewOneWaitsForThoseThatEnd) {
  auto carrier = make(spec_of(0, {"a", "b"}));
  fake_->take_log();
  fake_->holds_aborts = true;
  carrier->abort();
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));
    fake_->holds_aborts = false;
  });
  NcclCarrierSpec patient = spec_of(0, {"a", "b"});
  patient.deadline = std::chrono::hours(1);
  carrier = make(std::move(patient));
  other.join();
  EXPECT_EQ(fake_->take_log(), (Log{"abort c0", "init c1: rank 0 of 2, id i, version 21900, blocking 0"}));
}

TEST_F(NcclCarrierTest, ANewOneWaitsForAQuarterOfItsDeadline) {
  auto carrier = make(spec_of(0, {"a", "b"}));
  fake_->take_log();
  fake_->holds_aborts = true;
  carrier->abort();
  carrier = make(spec_of(0, {"a", "b"}));
  EXPECT_EQ(fake_->take_log(), Log{"init c1: rank 0 of 2, id i, version 21900, blocking 0"});
  fake_->holds_aborts = false;
}

TEST_F(NcclCarrierTest, ANewOneThatIsInterruptedWaitsForNobody) {
  auto carrier = make(spec_of(0, {"a", "b"}));
  fake_->take_log();
  fake_->holds_aborts = true;
  carrier->abort();
  NcclCarrierSpec spec = spec_of(0, {"a", "b"});
  spec.deadline = std::chrono::hours(1);
  int asked = 0;
  spec.interrupted = [&] { return ++asked > 1; };
  fake_->init_result = 0;
  carrier = make(std::move(spec));
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(fake_->take_log(), Log{"init c1: rank 0 of 2, id i, version 21900, blocking 0"});
  fake_->holds_aborts = false;
}

TEST_F(NcclCarrierTest, ACommunicatorThatIsNotMadeSaysWhy) {
  fake_->init_result = 5;
  try {
    (void)make(spec_of(0, {"a", "b"}));
    FAIL() << "made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::system);
    EXPECT_STREQ(
        error.what(),
        "NCCL: the communicator of ranks 0, 1 cannot be made: a fake error; and its reason (NCCL_DEBUG=WARN says more)");
  }
  EXPECT_EQ(wait_for_log("abort c0").back(), "abort c0");
}

TEST_F(NcclCarrierTest, ACommunicatorThatIsNotMadeInTimeIsEnded) {
  fake_->in_progress = 1 << 30;
  NcclCarrierSpec spec = spec_of(0, {"a", "b"});
  spec.deadline = milliseconds(20);
  try {
    (void)make(std::move(spec));
    FAIL() << "made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::rendezvous);
    EXPECT_NE(std::string(error.what()).find("was not made within 20 ms"), std::string::npos) << error.what();
  }
  EXPECT_EQ(wait_for_log("abort c0").back(), "abort c0");
}

TEST(Rails, HaveOneRankOfEachHost) {
  const std::vector<std::string> places{"a", "a", "a", "b", "b", "c"};
  const HostMap map{std::span<const std::string>(places)};
  ASSERT_EQ(map.rails(), 3);
  EXPECT_EQ(map.rail_ranks(0), (std::vector<int>{0, 3, 5}));
  EXPECT_EQ(map.rail_ranks(1), (std::vector<int>{1, 4, 5}));
  EXPECT_EQ(map.rail_ranks(2), (std::vector<int>{2, 3, 5}));
  for (int a = 0; a < map.world(); ++a) {
    for (int b = 0; b < map.world(); ++b) {
      const int rail = map.rail_between(a, b);
      EXPECT_EQ(rail >= 0, map.exchange_rows(a, b)) << a << ", " << b;
      if (rail < 0) continue;
      const std::vector<int> ranks = map.rail_ranks(rail);
      EXPECT_EQ(ranks[static_cast<size_t>(map.host_of(a))], a) << a << ", " << b;
      EXPECT_EQ(ranks[static_cast<size_t>(map.host_of(b))], b) << a << ", " << b;
    }
  }
}

}  // namespace
}  // namespace switchyard::detail
