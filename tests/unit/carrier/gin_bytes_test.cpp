// SPDX-License-Identifier: Apache-2.0
// Bytes between ranks over device-initiated networking, without a GPU and without NCCL: a simulated device performs the
// kernel's operations on windows and signals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "carrier/nccl/gin.hpp"
#include "unit/carrier/carrier_rounds.hpp"
#include "unit/carrier/nccl_fixture.hpp"

namespace switchyard::detail {
namespace {

/// Networks and streams of several ranks. A rank's operations run in order, in the thread that queries their progress; puts and
/// signals arrive immediately. A put that does not wait for the peer therefore overwrites data that the peer has not copied
/// yet.
class Net {
 public:
  struct Operation {
    std::function<bool()> run;  ///< returns false if it cannot run yet
  };

  void add(int rank, std::function<bool()> run) {
    const std::lock_guard lock(mutex_);
    queues_[rank].push_back({std::move(run)});
    ++enqueued_[rank];
  }
  int64_t enqueued(int rank) {
    const std::lock_guard lock(mutex_);
    return enqueued_[rank];
  }
  /// Runs every operation that can run, then returns whether the first `count` operations of `rank` have run.
  bool have_run(int rank, int64_t count) {
    const std::lock_guard lock(mutex_);
    for (auto& [r, queue] : queues_)
      while (!queue.empty() && queue.front().run()) {
        queue.pop_front();
        ++ran_[r];
      }
    return ran_[rank] >= count;
  }

  /// The signals and counters, by number, of a rank's window in a communicator; windows are identified by their memory.
  struct End {
    std::map<uint32_t, uint64_t> signals, counters;
  };
  std::map<std::byte*, End> ends;
  /// The windows of a communicator, in the order of the rail's ranks.
  std::map<std::byte*, std::vector<std::byte*>*> peers_of;

 private:
  std::mutex mutex_;
  std::map<int, std::deque<Operation>> queues_;
  std::map<int, int64_t> enqueued_, ran_;
};

struct NetMarks final : StreamMarks {
  NetMarks(Net& n, int r) : net(n), rank(r) {}
  std::shared_ptr<const void> mark(void*) override { return std::make_shared<int64_t>(net.enqueued(rank)); }
  bool reached(const void* mark) noexcept override { return net.have_run(rank, *static_cast<const int64_t*>(mark)); }
  void order(void*, const void*) override {}  // a rank has one stream
  Net& net;
  const int rank;
};

/// Performs the operations of the kernel.
class NetDevice final : public GinDevice {
 public:
  NetDevice(Net& net, int rank) : net_(net), rank_(rank) {}
  int header_version() const override { return kMinGinVersion; }
  size_t device_comm_bytes() const override { return 8; }
  void reset(const GinRail& rail) override { windows.push_back(static_cast<std::byte*>(rail.window)); }
  void copy(std::byte* to, const std::byte* from, size_t bytes, void*) override {
    net_.add(rank_, [=] {
      std::memcpy(to, from, bytes);
      return true;
    });
  }
  void exchange(const GinRail& rail, uint64_t, std::span<const GinPart> given, void*) override {
    auto* const window = static_cast<std::byte*>(rail.window);
    struct Part : GinPart {
      bool put = false;
    };
    std::vector<Part> parts;
    for (const GinPart& part : given) parts.push_back({part});
    net_.add(rank_, [this, window, parts, begun = false]() mutable {
      const std::vector<std::byte*>& all = *net_.peers_of.at(window);
      const int self = static_cast<int>(std::find(all.begin(), all.end(), window) - all.begin());
      Net::End& own = net_.ends[window];
      bool done = true;
      for (Part& part : parts) {
        std::byte* const theirs = all[static_cast<size_t>(part.place)];
        if (!begun && part.receive_bytes != 0) ++net_.ends[theirs].signals[gin_ready(self)];
        if (part.send_bytes != 0 && !part.put && own.signals[gin_ready(part.place)] > part.sent) {
          std::memcpy(theirs + part.to, window + part.from, part.send_bytes);
          ++net_.ends[theirs].signals[gin_arrived(self)];
          ++own.counters[static_cast<uint32_t>(part.place)];
          part.put = true;
        }
        done = done && (part.send_bytes == 0 || own.counters[static_cast<uint32_t>(part.place)] > part.sent) &&
               (part.receive_bytes == 0 || own.signals[gin_arrived(part.place)] > part.received);
      }
      begun = true;
      return done;
    });
  }
  void end() noexcept override {}

  std::vector<std::byte*> windows;  ///< by rail of this rank

 private:
  Net& net_;
  const int rank_;
};

/// Every rank exchanges rounds of different sizes with every rank that shares a rail with it.
class GinBytes : public nccl_tests::FakeNcclTest {
 protected:
  GinBytes() : FakeNcclTest("FAKE_NCCL_GIN", kMinGinVersion) {}
  void run(const std::vector<std::string>& places, uint64_t rounds, size_t slot) {
    const HostMap map{std::span<const std::string>(places)};
    Net net;
    std::vector<std::shared_ptr<NetDevice>> devices;
    std::vector<std::unique_ptr<Carrier>> carriers;
    std::vector<std::vector<std::byte*>> windows(static_cast<size_t>(map.rails()));
    for (int rank = 0; rank < map.world(); ++rank) {
      NcclCarrierSpec spec = spec_of(rank, places);
      spec.marks = std::make_shared<NetMarks>(net, rank);
      devices.push_back(std::make_shared<NetDevice>(net, rank));
      carriers.push_back(make_gin_carrier(std::make_unique<NcclComms>(api_, std::move(spec)), devices.back(), slot));
    }
    std::vector<size_t> next(static_cast<size_t>(map.world()));
    for (int rail = 0; rail < map.rails(); ++rail)
      for (const int rank : map.rail_ranks(rail)) {
        const auto r = static_cast<size_t>(rank);
        windows[static_cast<size_t>(rail)].push_back(devices[r]->windows[next[r]++]);
      }
    for (auto& of_rail : windows)
      for (std::byte* const window : of_rail) net.peers_of[window] = &of_rail;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < map.world(); ++rank)
      threads.emplace_back([&, rank] {
        carrier_rounds::exchange_with(*carriers[static_cast<size_t>(rank)], rank, map.rail_peers(rank), rounds);
      });
    for (std::thread& thread : threads) thread.join();
    for (const auto& [window, end] : net.ends)
      for (const auto& [number, count] : end.signals) EXPECT_GT(count, 0U) << number;
    carriers.clear();
    EXPECT_EQ(fake_->allocated, 0);
  }
};

TEST_F(GinBytes, OfThreeHostsOfOneRank) { run({"a", "b", "c"}, 14, size_t{1} << 20); }
TEST_F(GinBytes, InManyPieces) { run({"a", "b"}, 12, 4096); }
TEST_F(GinBytes, OfUnequalHosts) { run({"a", "a", "a", "b", "b", "c"}, 8, size_t{64} << 10); }

}  // namespace
}  // namespace switchyard::detail
