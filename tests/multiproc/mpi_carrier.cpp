// SPDX-License-Identifier: Apache-2.0
// Tests the contract of carriers over MPI. Run it with mpirun; each process holds two ranks, which are threads. The exit status
// is 0 if all checks pass.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <span>
#include <thread>
#include <vector>

#include "carrier/mpi.hpp"
#include "switchyard/status.hpp"
#include "unit/carrier/carrier_rounds.hpp"

namespace switchyard::detail {
namespace {

using carrier_rounds::Bytes, carrier_rounds::exchange, carrier_rounds::finish;

constexpr int kRanksPerProcess = 2;
constexpr uint64_t kNonce = 0x5eed;

int processes_of_run() { return std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE")); }

std::unique_ptr<Carrier> make_carrier(int rank, uint64_t nonce, size_t max_bytes) {
  MpiCarrierSpec spec{rank, {}, nonce, max_bytes};
  for (int r = 0; r < kRanksPerProcess * processes_of_run(); ++r) spec.processes.push_back(r / kRanksPerProcess);
  return make_mpi_carrier(spec);
}

/// Calls body(rank, world) on each rank of this process.
template <class Body>
void on_bare_ranks(const Body& body) {
  const int process = mpi_process(std::chrono::seconds(20)), world = kRanksPerProcess * processes_of_run();
  std::vector<std::thread> threads;
  for (int here = 0; here < kRanksPerProcess; ++here)
    threads.emplace_back([&, here] { body(process * kRanksPerProcess + here, world); });
  for (std::thread& thread : threads) thread.join();
}
/// Like on_bare_ranks, with a carrier for each rank.
template <class Body>
void on_ranks(uint64_t nonce, size_t max_bytes, const Body& body) {
  on_bare_ranks([&](int rank, int world) {
    const std::unique_ptr<Carrier> carrier = make_carrier(rank, nonce, max_bytes);
    body(*carrier, rank, world);
  });
}

TEST(MpiCarrier, RoundsComeWholeAndInOrder) {
  for (const size_t max : {size_t{1} << 30, size_t{100000}})
    on_ranks(kNonce + max, max, [](Carrier& carrier, int rank, int world) { exchange(carrier, rank, world, 25); });
}

// Rank 0 sends sizes that differ from what its peers expect. None of its bytes may be written, neither to the peers' buffers
// nor past them.
TEST(MpiCarrier, OtherSizesAreUnlike) {
  struct Sizes {
    size_t sent, awaited, max;
  };
  constexpr std::byte kUntouched{0x5a};
  uint64_t nonce = kNonce + 100;
  for (const Sizes& sizes : {Sizes{100, 99, 64},
                             {99, 100, 64},
                             {131072, 65536, size_t{1} << 30},
                             {131072, 65536, 50000},
                             {65536, 131072, size_t{1} << 30},
                             {8 << 20, 65536, size_t{1} << 30}}) {
    on_ranks(++nonce, sizes.max, [&](Carrier& carrier, int rank, int world) {
      if (rank == 0) {
        const auto out = std::make_shared<const Bytes>(sizes.sent);
        carrier.share(out);
        std::vector<PeerTransfer> transfers;
        for (int peer = 1; peer < world; ++peer) transfers.push_back({peer, *out, {}});
        carrier.post(1, transfers, nullptr);  // the round may never finish: no rank receives its bytes
        return;
      }
      Bytes in(std::max(sizes.sent, sizes.awaited) * 2, kUntouched);
      const PeerTransfer transfer[] = {{0, {}, std::span(in).first(sizes.awaited)}};
      carrier.post(1, transfer, nullptr);
      const RoundStatus status = finish(carrier, 1);
      EXPECT_EQ(status.state, RoundState::unlike);
      EXPECT_EQ(status.peer, 0);
      EXPECT_EQ(std::count(in.begin(), in.end(), kUntouched), static_cast<ptrdiff_t>(in.size()))
          << sizes.sent << " bytes for " << sizes.awaited;
    });
  }
}

// No rank sends: the round stays in flight, reports which ranks are missing, and ends when another thread aborts it.
TEST(MpiCarrier, AbortEndsRounds) {
  on_ranks(kNonce + 2, 64, [](Carrier& carrier, int rank, int world) {
    Bytes in(5000);
    const int peer = (rank + 1) % world;
    const PeerTransfer transfer[] = {{peer, {}, in}};
    carrier.post(1, transfer, nullptr);
    EXPECT_EQ(carrier.advance(0).state, RoundState::done) << "an earlier round has no legs";
    EXPECT_EQ(carrier.advance(1).state, RoundState::in_progress);
    EXPECT_EQ(carrier.advance(1).peer, peer);
    std::thread aborting([&] { carrier.abort(); });
    EXPECT_EQ(finish(carrier, 1).state, RoundState::broken);
    aborting.join();
  });
}

// Leftovers from one group are not mistaken for data from another group, because their tags or headers differ.
TEST(MpiCarrier, GroupsAreToldApart) {
  on_ranks(kNonce + 3, 100000, [](Carrier& carrier, int rank, int world) {
    const Bytes out(30, std::byte{1});
    const PeerTransfer transfer[] = {{(rank + 1) % world, out, {}}};
    carrier.post(1, transfer, nullptr);
  });
  on_ranks(kNonce + 4, 100000, [](Carrier& carrier, int rank, int world) { exchange(carrier, rank, world, 5); });
}

/// Memory that causes a crash if it is used after being freed.
std::shared_ptr<std::byte> mapped(size_t bytes) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<std::byte*>(at), [bytes](std::byte* given) { ::munmap(given, bytes); }};
}

/// Sends single bytes between two ranks over a separate carrier.
class Signals {
 public:
  Signals(int rank, uint64_t nonce) : carrier_(make_carrier(rank, nonce, 64)) {}
  void send(int peer) { run({peer, byte_, {}}); }
  void await(int peer) { run({peer, {}, byte_}); }

 private:
  void run(const PeerTransfer& transfer) {
    carrier_->post(++round_, {&transfer, 1}, nullptr);
    ASSERT_EQ(finish(*carrier_, round_).state, RoundState::done);
  }
  std::unique_ptr<Carrier> carrier_;
  Bytes byte_ = Bytes(1);
  uint64_t round_ = 0;
};

constexpr size_t kLong = size_t{8} << 20;                 // longer than any message that MPI sends before the receive is posted
constexpr int kSender = 0, kReceiver = kRanksPerProcess;  // in two different processes

// A carrier is destroyed before its peer receives. The shared memory stays alive until MPI has sent it, and no longer.
TEST(MpiCarrier, WhatIsNotSentYetKeepsItsMemory) {
  on_bare_ranks([](int rank, int) {
    if (rank != kSender && rank != kReceiver) return;
    Signals signals(rank, kNonce + 200);
    std::unique_ptr<Carrier> carrier = make_carrier(rank, kNonce + 201, size_t{3} << 20);
    const auto value = [](size_t i) { return static_cast<std::byte>(i % 251); };
    if (rank == kReceiver) {
      signals.await(kSender);
      Bytes in(kLong);
      const PeerTransfer transfer[] = {{kSender, {}, in}};
      carrier->post(1, transfer, nullptr);
      EXPECT_EQ(finish(*carrier, 1).state, RoundState::done);
      for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(in[i], value(i)) << i;
      return signals.send(kSender);
    }
    std::shared_ptr<std::byte> memory = mapped(kLong);
    for (size_t i = 0; i < kLong; ++i) memory.get()[i] = value(i);
    carrier->share(memory);
    const PeerTransfer transfer[] = {{kReceiver, {memory.get(), kLong}, {}}};
    carrier->post(1, transfer, nullptr);
    const std::weak_ptr<std::byte> kept = memory;
    memory.reset();
    carrier.reset();
    EXPECT_FALSE(kept.expired());
    signals.send(kReceiver);
    signals.await(kReceiver);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!kept.expired() && std::chrono::steady_clock::now() < deadline) (void)make_carrier(rank, kNonce + 202, 64);
    EXPECT_TRUE(kept.expired());
  });
}

// A carrier is destroyed, sooner or later, while it receives from a peer that is not inside MPI at that time. The memory must
// still exist for later writes by MPI.
TEST(MpiCarrier, WhatIsBeingReceivedKeepsItsMemory) {
  uint64_t nonce = kNonce + 300;
  for (const int looks : {0, 1, 3, 20}) {
    nonce += 2;
    on_bare_ranks([&](int rank, int) {
      if (rank != kSender && rank != kReceiver) return;
      Signals signals(rank, nonce);
      std::unique_ptr<Carrier> carrier = make_carrier(rank, nonce + 1, size_t{3} << 20);
      std::shared_ptr<std::byte> memory = mapped(kLong);
      carrier->share(memory);
      const std::span<std::byte> bytes(memory.get(), kLong);
      if (rank == kSender) {
        const PeerTransfer transfer[] = {{kReceiver, bytes, {}}};
        carrier->post(1, transfer, nullptr);
        signals.send(kReceiver);
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        for (int i = 0; i < 1000; ++i) (void)carrier->advance(1);
        return signals.send(kReceiver);
      }
      signals.await(kSender);
      const PeerTransfer transfer[] = {{kSender, {}, bytes}};
      carrier->post(1, transfer, nullptr);
      for (int i = 0; i < looks; ++i) (void)carrier->advance(1);
      memory.reset();
      carrier.reset();
      signals.await(kSender);
    });
  }
}

TEST(MpiCarrier, ARankThatIsNotThereIsRefused) {
  on_ranks(kNonce + 5, 64, [](Carrier& carrier, int, int world) {
    const Bytes out(3);
    const PeerTransfer transfer[] = {{world, out, {}}};
    carrier.post(1, transfer, nullptr);
    EXPECT_EQ(carrier.advance(1).state, RoundState::broken);
    EXPECT_EQ(carrier.advance(1).peer, world);
  });
}

}  // namespace
}  // namespace switchyard::detail
