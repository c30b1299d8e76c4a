// SPDX-License-Identifier: Apache-2.0
// Device-initiated networking without a GPU and without NCCL: the calls made to both, their order, and the handling of the
// results.
#include "carrier/nccl/gin.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "switchyard/status.hpp"
#include "unit/carrier/nccl_fixture.hpp"

namespace switchyard::detail {
namespace {

using nccl_tests::Log;
constexpr size_t kSlot = 4096;

/// Sets SWITCHYARD_NCCL_GIN during its lifetime.
class Chosen {
 public:
  explicit Chosen(const char* text) { ::setenv("SWITCHYARD_NCCL_GIN", text, 1); }
  ~Chosen() { ::unsetenv("SWITCHYARD_NCCL_GIN"); }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;
};

TEST(GinChoices, AreReadFromTheEnvironment) {
  EXPECT_EQ(gin_choice(), GinChoice::automatic);
  const std::vector<std::pair<const char*, GinChoice>> allowed{
      {"", GinChoice::automatic}, {"auto", GinChoice::automatic}, {"0", GinChoice::off}, {"1", GinChoice::on}};
  for (const auto& [text, choice] : allowed) {
    const Chosen chosen(text);
    EXPECT_EQ(gin_choice(), choice) << text;
  }
  const Chosen chosen("yes");
  try {
    (void)gin_choice();
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "SWITCHYARD_NCCL_GIN is 'yes'; allowed: auto, 0, 1");
  }
}

TEST(GinChoices, AllRanksHaveItOrNone) {
  const auto agreed = [](GinChoice choice, std::vector<std::string> why_not) -> std::string {
    std::vector<GinProposal> proposals;
    for (const std::string& text : why_not) proposals.push_back(make_gin_proposal(choice, text));
    try {
      return agree_on_gin(proposals) ? "kernels" : "rounds of NCCL";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_EQ(agreed(GinChoice::automatic, {"", "", ""}), "kernels");
  EXPECT_EQ(agreed(GinChoice::automatic, {"", "", "no network"}), "rounds of NCCL");
  EXPECT_EQ(agreed(GinChoice::off, {"", "", ""}), "rounds of NCCL");
  EXPECT_EQ(agreed(GinChoice::on, {"", "", ""}), "kernels");
  EXPECT_EQ(agreed(GinChoice::on, {"", "no network", "no GPU"}),
            "SWITCHYARD_NCCL_GIN=1, but rank 1 cannot have device-initiated networking: no network");
  EXPECT_EQ(agreed(GinChoice::on, {std::string(1000, 'x')}).size(),
            std::string("SWITCHYARD_NCCL_GIN=1, but rank 0 cannot have device-initiated networking: ").size() + 299);
  try {
    (void)agree_on_gin(std::vector{make_gin_proposal(GinChoice::on, ""), make_gin_proposal(GinChoice::on, ""),
                                   make_gin_proposal(GinChoice::automatic, "")});
    FAIL() << "agreed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_STREQ(error.what(), "SWITCHYARD_NCCL_GIN is not the same on ranks 0 and 2");
  }
}

/// Records the calls to this device together with those to NCCL.
class RecordingDevice final : public GinDevice {
 public:
  explicit RecordingDevice(nccl_tests::FakeNccl* to) : to_(to) {}

  int header_version() const override { return version; }
  size_t device_comm_bytes() const override { return 8; }
  void reset(const GinRail& rail) override {
    window = static_cast<std::byte*>(rail.window);
    window_bytes = 2 * kSlot * static_cast<size_t>(rail.ranks - 1);
    to_->record("reset " + comm_of(rail) + " of " + std::to_string(rail.ranks));
  }
  void copy(std::byte* to, const std::byte* from, size_t bytes, void* stream) override {
    to_->record("copy " + std::to_string(bytes) + " " + place_of(from) + " -> " + place_of(to) + " on " +
                std::to_string(reinterpret_cast<uintptr_t>(stream)));
  }
  void exchange(const GinRail& rail, uint64_t round, std::span<const GinPart> parts, void* stream) override {
    if (refuses) throw Error(ErrorCode::system, "no launch");
    std::string text = "exchange " + std::to_string(round) + " by " + comm_of(rail) + " on " +
                       std::to_string(reinterpret_cast<uintptr_t>(stream));
    for (const GinPart& part : parts)
      text += "; rank " + std::to_string(part.peer) + " = " + std::to_string(part.place) + ": " +
              std::to_string(part.send_bytes) + " after " + std::to_string(part.sent) + " from " + std::to_string(part.from) +
              " to " + std::to_string(part.to) + ", gets " + std::to_string(part.receive_bytes) + " after " +
              std::to_string(part.received);
    to_->record(text);
  }
  void end() noexcept override { to_->record("end of exchanges"); }

  int version = kMinGinVersion;
  bool refuses = false;
  std::byte* window = nullptr;
  size_t window_bytes = 0;

 private:
  static std::string comm_of(const GinRail& rail) {
    uint64_t comm = 0;
    std::memcpy(&comm, rail.device_comm, sizeof comm);
    return "c" + std::to_string(comm - 1);
  }
  std::string place_of(const std::byte* at) const {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(window);
    return offset < window_bytes ? "w+" + std::to_string(offset) : "leg";
  }

  nccl_tests::FakeNccl* const to_;
};

class GinCarrierTest : public nccl_tests::FakeNcclTest {
 protected:
  GinCarrierTest() : FakeNcclTest("FAKE_NCCL_GIN", kMinGinVersion) {}
  void SetUp() override {
    FakeNcclTest::SetUp();
    device_ = std::make_shared<RecordingDevice>(fake_);
  }
  void TearDown() override {
    FakeNcclTest::TearDown();
    for (int i = 0; i < 20000 && allocated() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(allocated(), 0);
  }
  int allocated() {
    const std::lock_guard lock(fake_->mutex);
    return fake_->allocated - still_allocated_;
  }

  std::unique_ptr<NcclComms> comms(int rank, const std::vector<std::string>& places) {
    return std::make_unique<NcclComms>(api_, spec_of(rank, places));
  }
  std::unique_ptr<Carrier> make(int rank, const std::vector<std::string>& places) {
    return make_gin_carrier(comms(rank, places), device_, kSlot);
  }
  /// Returns the error from the failed construction.
  Error refusal() {
    try {
      (void)make(0, {"a", "b"});
    } catch (const Error& error) {
      return error;
    }
    return Error(ErrorCode::ok, "made");
  }

  std::shared_ptr<RecordingDevice> device_;
  int still_allocated_ = 0;  ///< memory blocks that were not released
};

TEST_F(GinCarrierTest, NothingIsAgainstIt) {
  EXPECT_EQ(api_.no_gin, "");
  EXPECT_EQ(why_no_gin(api_, device_.get(), 1), "");
  const auto made = comms(0, {"a", "b"});
  EXPECT_EQ(why_no_gin(*made), "");
  EXPECT_EQ(fake_->take_log(),
            (Log{"init c0: rank 0 of 2, id i, version 21900, blocking 0", "properties of c0, version 23007"}));
}

TEST_F(GinCarrierTest, WhatABuildOrAMachineLacksIsSaid) {
  EXPECT_EQ(why_no_gin(api_, nullptr, 1),
            "this build has no kernels for it (CMake found no nccl_device.h of version 2.30.7 or later)");
  EXPECT_EQ(why_no_gin(api_, device_.get(), 2), "2 ranks of the group share its GPU");
  device_->version = 23203;
  EXPECT_EQ(why_no_gin(api_, device_.get(), 1), "NCCL 2.30.7 is older than 2.32.3, with whose headers this build was compiled");
}

TEST_F(GinCarrierTest, AnNcclWithoutTheDeviceApiIsSaid) {
  const auto load = [](const char* variable) {
    ::setenv("SWITCHYARD_NCCL", std::getenv(variable), 1);
    return load_nccl();
  };
  const NcclApi old = load("FAKE_NCCL");
  EXPECT_EQ(why_no_gin(old, device_.get(), 1), "NCCL 2.28.9 is older than 2.30.7");
  EXPECT_EQ(old.gin.allocate, nullptr);
  const NcclApi part = load("FAKE_NCCL_PART");
  EXPECT_EQ(why_no_gin(part, device_.get(), 1), std::string(std::getenv("FAKE_NCCL_PART")) + " has no ncclMemAlloc");
}

TEST_F(GinCarrierTest, NetworksThatKernelsCannotDriveAreSaid) {
  const auto why = [&] { return why_no_gin(*comms(1, {"a", "b"})); };
  fake_->gin_type = 0;
  EXPECT_EQ(why(), "");  // one network card can reach both
  fake_->lsa_teams = 1;
  EXPECT_EQ(why(), "NCCL finds no network that kernels can drive between ranks 0, 1");
  fake_->lsa_teams = 2;
  fake_->railed_gin_type = 0;
  EXPECT_EQ(why(), "NCCL finds no network that kernels can drive between ranks 0, 1");
  fake_->gin_type = 2;
  EXPECT_EQ(why(), "");
  fake_->device_api = false;
  EXPECT_EQ(why(), "NCCL offers no device API for ranks 0, 1");
}

TEST_F(GinCarrierTest, WindowsAreMadeOnceAndEndInOrder) {
  fake_->in_progress = 7;
  auto carrier = make(1, {"a", "b", "c"});
  EXPECT_EQ(fake_->in_progress, 0);
  EXPECT_EQ(fake_->take_log(), (Log{"init c0: rank 1 of 3, id i, version 21900, blocking 0", "window of c0: 16384, flags 0",
                                    "properties of c0, version 23007",
                                    "device comm of c0: version 23007, 6 signals, 3 counters, connection 1", "reset c0 of 3"}));
  carrier.reset();
  EXPECT_EQ(fake_->take_log(), (Log{"destroy device comm of c0", "destroy window of c0", "finalize c0", "destroy c0"}));
  EXPECT_EQ(allocated(), 0);
}

TEST_F(GinCarrierTest, OneNetworkCardIsAskedForWhereNoMoreIsThere) {
  fake_->gin_type = 0;
  const auto carrier = make(0, {"a", "b"});
  EXPECT_EQ(fake_->take_log()[3], "device comm of c0: version 23007, 4 signals, 2 counters, connection 2");
}

TEST_F(GinCarrierTest, ARoundIsCopiesAroundOneExchange) {
  const auto carrier = make(1, {"a", "b", "c"});
  fake_->take_log();
  const std::span<const std::byte> out = out_;
  const std::span<std::byte> in = in_;
  const std::array<PeerTransfer, 2> transfers{PeerTransfer{0, out.first(48), in.first(32)}, PeerTransfer{2, {}, in.last(16)}};
  carrier->post(7, transfers, stream_);
  // Rank 1 has slots to and from rank 0 and to and from rank 2. Its data for rank 0 arrives in the second slot of rank 0.
  EXPECT_EQ(fake_->take_log(),
            (Log{"copy 48 leg -> w+0 on 9",
                 "exchange 1 by c0 on 9; rank 0 = 0: 48 after 0 from 0 to 4096, gets 32 after 0; rank 2 = 2: 0 after 0 from "
                 "8192 to 12288, gets 16 after 0",
                 "copy 32 w+4096 -> leg on 9", "copy 16 w+12288 -> leg on 9"}));
  EXPECT_EQ(carrier->advance(7).state, RoundState::in_progress);
  EXPECT_EQ(carrier->advance(7).peer, -1);
  const std::array<PeerTransfer, 1> one{PeerTransfer{2, out, in}};
  carrier->post(8, one, stream_);
  EXPECT_EQ(fake_->take_log()[1], "exchange 2 by c0 on 9; rank 2 = 2: 64 after 0 from 8192 to 12288, gets 64 after 1");
  EXPECT_EQ(carrier->advance(8).peer, -1);  // round 7 is the round in flight
  marks_->passed = 1;
  EXPECT_EQ(carrier->advance(7).state, RoundState::done);
  EXPECT_EQ(carrier->advance(8).peer, 2);
  marks_->passed = 2;
  EXPECT_EQ(carrier->advance(8).state, RoundState::done);
}

TEST_F(GinCarrierTest, ARoundOnAnotherStreamComesBehindTheLastOne) {
  const auto carrier = make(0, {"a", "b"});
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  carrier->post(1, transfers, stream_);
  EXPECT_EQ(marks_->ordered, Log{});
  marks_->passed = 1;
  EXPECT_EQ(carrier->advance(1).state, RoundState::done);
  carrier->post(2, transfers, reinterpret_cast<void*>(uintptr_t{12}));
  EXPECT_EQ(marks_->ordered, Log{"12 after 1"});
  marks_->passed = 2;
}

TEST_F(GinCarrierTest, LegsLongerThanASlotTravelInPieces) {
  const auto carrier = make(0, {"a", "b", "c"});
  fake_->take_log();
  std::vector<std::byte> out(2 * kSlot + 100), in(10);
  const std::array<PeerTransfer, 2> transfers{PeerTransfer{1, out, in}, PeerTransfer{2, {}, in_}};
  carrier->post(1, transfers, stream_);
  EXPECT_EQ(fake_->take_log(),
            (Log{"copy 4096 leg -> w+0 on 9",
                 "exchange 1 by c0 on 9; rank 1 = 1: 4096 after 0 from 0 to 4096, gets 10 after 0; rank 2 = 2: 0 after 0 from "
                 "8192 to 4096, gets 64 after 0",
                 "copy 10 w+4096 -> leg on 9", "copy 64 w+12288 -> leg on 9", "copy 4096 leg -> w+0 on 9",
                 "exchange 1 by c0 on 9; rank 1 = 1: 4096 after 1 from 0 to 4096, gets 0 after 1", "copy 100 leg -> w+0 on 9",
                 "exchange 1 by c0 on 9; rank 1 = 1: 100 after 2 from 0 to 4096, gets 0 after 1"}));
  marks_->passed = 1;
}

TEST_F(GinCarrierTest, AnAbortEndsExchangesAndThenCommunicators) {
  const auto carrier = make(0, {"a", "b"});
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  carrier->post(1, transfers, stream_);
  fake_->take_log();
  carrier->abort();
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  EXPECT_EQ(fake_->take_log(), Log{"end of exchanges"});  // its kernel may still run
  marks_->passed = 1;
  EXPECT_EQ(wait_for_log("abort c0"), Log{"abort c0"});
  carrier->abort();  // nothing is left to end
  carrier->post(2, transfers, stream_);
  EXPECT_EQ(fake_->take_log(), Log{});
}

TEST_F(GinCarrierTest, CommunicatorsWhoseRoundsDoNotEndAreLeftBehind) {
  auto carrier = make(0, {"a", "b"});
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  carrier->post(1, transfers, stream_);
  fake_->take_log();
  carrier.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_EQ(fake_->take_log(), Log{"end of exchanges"});
  const std::lock_guard lock(fake_->mutex);
  fake_->comms = fake_->ended = 0;  // no further calls follow
  still_allocated_ = 1;
}

TEST_F(GinCarrierTest, AnErrorOfNcclBreaksAllRounds) {
  auto carrier = make(0, {"a", "b"});
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  carrier->post(1, transfers, stream_);
  fake_->state = 6;
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  fake_->state = 0;
  marks_->passed = 1;
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  fake_->take_log();
  carrier.reset();
  EXPECT_EQ(wait_for_log("abort c0"), (Log{"end of exchanges", "abort c0"}));
}

TEST_F(GinCarrierTest, ALaunchThatFailsIsAnErrorAndTheEnd) {
  const auto carrier = make(0, {"a", "b"});
  device_->refuses = true;
  const std::array<PeerTransfer, 1> transfers{PeerTransfer{1, out_, in_}};
  EXPECT_THROW(carrier->post(1, transfers, stream_), Error);
  EXPECT_EQ(carrier->advance(1).state, RoundState::broken);
  EXPECT_EQ(carrier->advance(1).peer, 1);
  const std::lock_guard lock(fake_->mutex);
  fake_->ended = fake_->comms;  // a copy without a mark was enqueued, so nothing is released
  still_allocated_ = 1;
}

TEST_F(GinCarrierTest, WhatNcclRefusesIsToldInItsWords) {
  fake_->device_comm_result = 5;
  EXPECT_STREQ(refusal().what(),
               "NCCL: the device communicator of ranks 0, 1 cannot be made: a fake error; and its reason (NCCL_DEBUG=WARN says "
               "more)");
  EXPECT_EQ(wait_for_log("abort c0").back(), "abort c0");
  fake_->window_result = 5;
  EXPECT_STREQ(refusal().what(),
               "NCCL: the window of ranks 0, 1 cannot be made: a fake error; and its reason (NCCL_DEBUG=WARN says more)");
  EXPECT_EQ(wait_for_log("abort c1").back(), "abort c1");
  fake_->window_result = 7;
  fake_->has_window = false;
  EXPECT_STREQ(refusal().what(), "NCCL: a communicator with the device API registers no memory");
  EXPECT_EQ(wait_for_log("abort c2").back(), "abort c2");
}

TEST_F(GinCarrierTest, AWindowThatIsNotMadeInTimeIsGivenUp) {
  NcclCarrierSpec spec = spec_of(0, {"a", "b"});
  spec.deadline = std::chrono::milliseconds(20);
  auto made = std::make_unique<NcclComms>(api_, std::move(spec));
  fake_->in_progress = 1 << 30;
  try {
    (void)make_gin_carrier(std::move(made), device_, kSlot);
    FAIL() << "made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::rendezvous);
    EXPECT_NE(std::string(error.what()).find("the window of ranks 0, 1 was not made within 20 ms"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(wait_for_log("abort c0").back(), "abort c0");
}

}  // namespace
}  // namespace switchyard::detail
