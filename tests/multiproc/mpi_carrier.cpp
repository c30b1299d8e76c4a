// SPDX-License-Identifier: Apache-2.0
// The contract of carriers over MPI. Run by mpirun; each process is two ranks, as threads. Exit status 0 if all was as awaited.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "carrier/mpi.hpp"
#include "switchyard/status.hpp"
#include "unit/carrier/carrier_rounds.hpp"

namespace switchyard::detail {
namespace {

using carrier_rounds::Bytes, carrier_rounds::exchange, carrier_rounds::finish;

constexpr int kRanksHere = 2;
constexpr uint64_t kNonce = 0x5eed;

int processes_of_run() { return std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE")); }

/// On each rank of this process.
template <class Body>
void on_ranks(uint64_t nonce, size_t most_bytes, const Body& body) {
  const int process = mpi_process(std::chrono::seconds(20)), world = kRanksHere * processes_of_run();
  std::vector<std::thread> threads;
  for (int here = 0; here < kRanksHere; ++here)
    threads.emplace_back([&, here] {
      MpiCarrierSpec spec{process * kRanksHere + here, {}, nonce, most_bytes};
      for (int r = 0; r < world; ++r) spec.processes.push_back(r / kRanksHere);
      const std::unique_ptr<Carrier> carrier = make_mpi_carrier(spec);
      body(*carrier, spec.rank, world);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(MpiCarrier, RoundsComeWholeAndInOrder) {
  for (const size_t most : {size_t{1} << 30, size_t{100000}})
    on_ranks(kNonce + most, most, [](Carrier& carrier, int rank, int world) { exchange(carrier, rank, world, 25); });
}

// Rank 0 sends a byte more than its peers await.
TEST(MpiCarrier, OtherSizesAreUnlike) {
  on_ranks(kNonce + 1, 64, [](Carrier& carrier, int rank, int world) {
    const Bytes out(100);
    Bytes in(99);
    std::vector<Leg> legs;
    if (rank == 0)
      for (int peer = 1; peer < world; ++peer) legs.push_back({peer, out, {}});
    else
      legs.push_back({0, {}, in});
    carrier.post(1, legs, nullptr);
    const RoundLook look = finish(carrier, 1);
    EXPECT_EQ(look.state, rank == 0 ? RoundState::done : RoundState::unlike);
    EXPECT_EQ(look.peer, rank == 0 ? -1 : 0);
  });
}

// Nobody sends: the round stays under way, names whom it waits for, and ends by an abort from another thread.
TEST(MpiCarrier, AbortEndsRounds) {
  on_ranks(kNonce + 2, 64, [](Carrier& carrier, int rank, int world) {
    Bytes in(5000);
    const int peer = (rank + 1) % world;
    const Leg leg[] = {{peer, {}, in}};
    carrier.post(1, leg, nullptr);
    EXPECT_EQ(carrier.advance(0).state, RoundState::done) << "an earlier round has no legs";
    EXPECT_EQ(carrier.advance(1).state, RoundState::under_way);
    EXPECT_EQ(carrier.advance(1).peer, peer);
    std::thread aborting([&] { carrier.abort(); });
    EXPECT_EQ(finish(carrier, 1).state, RoundState::broken);
    aborting.join();
  });
}

// What a group left behind is not taken for another's: its tags, or its heads, are others.
TEST(MpiCarrier, GroupsAreToldApart) {
  on_ranks(kNonce + 3, 100000, [](Carrier& carrier, int rank, int world) {
    const Bytes out(30, std::byte{1});
    const Leg leg[] = {{(rank + 1) % world, out, {}}};
    carrier.post(1, leg, nullptr);
  });
  on_ranks(kNonce + 4, 100000, [](Carrier& carrier, int rank, int world) { exchange(carrier, rank, world, 5); });
}

TEST(MpiCarrier, ARankThatIsNotThereIsRefused) {
  on_ranks(kNonce + 5, 64, [](Carrier& carrier, int, int world) {
    const Bytes out(3);
    const Leg leg[] = {{world, out, {}}};
    carrier.post(1, leg, nullptr);
    EXPECT_EQ(carrier.advance(1).state, RoundState::broken);
    EXPECT_EQ(carrier.advance(1).peer, world);
  });
}

}  // namespace
}  // namespace switchyard::detail
