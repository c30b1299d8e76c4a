// SPDX-License-Identifier: Apache-2.0
// Conversion of kernel records to a timeline on the host clock: anchors, multiprocessors with separate clocks, full tracks,
// calls, and clocks that drift apart.
#include "trace/device_trace.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace switchyard::detail {
namespace {

constexpr int64_t kHostMinusTimer = 5'000'000;

struct Buffers {
  DeviceTrace trace{nullptr, nullptr, 2, 2, 8};
  std::vector<uint32_t> sizes = std::vector<uint32_t>(4);
  std::vector<DeviceRecord> records = std::vector<DeviceRecord>(4 * 8);
  void add(int track, const DeviceRecord& record) {
    uint32_t& n = sizes[static_cast<size_t>(track)];
    records[static_cast<size_t>(track) * trace.capacity + n++ % trace.capacity] = record;
  }
  void anchor(int track, uint16_t multiprocessor, uint64_t cycles, uint64_t timer_ns, Event kernel = Event::dispatch,
              int64_t launch = 0) {
    add(track, {cycles, timer_ns, launch, DeviceRecord::kAnchor, multiprocessor, static_cast<uint32_t>(kernel)});
  }
  void span(int track, uint16_t multiprocessor, Event event, uint64_t begin, uint64_t end, int64_t arg, uint32_t bytes = 0) {
    add(track, {begin, end, arg, static_cast<uint16_t>(event), multiprocessor, bytes});
  }
  Tracer converted() const {
    Tracer tracer(0, 2, 2, 64);
    append_device_records(tracer, trace, sizes, records, HostTime({0, kHostMinusTimer, 0}));
    return tracer;
  }
};

TEST(DeviceTrace, CyclesBecomeHostTimeByMultiprocessor) {
  Buffers b;
  // Multiprocessor 7 counts 2 cycles per nanosecond, starting at 1000; multiprocessor 9 counts 1 cycle per nanosecond, starting
  // at 1,000,000.
  b.anchor(0, 7, 1000, 100);
  b.span(0, 7, Event::send_rows, 1200, 1400, 3, 14336);
  b.anchor(0, 7, 3000, 1100);
  b.anchor(2, 9, 1'000'000, 100);
  b.span(2, 9, Event::wait_message, 1'000'100, 1'000'300, 1);
  b.anchor(2, 9, 1'001'000, 1100);
  b.span(3, 9, Event::place_rows, 1'000'500, 1'000'600, 2);  // another warp of the same block, without its own anchors
  const Tracer t = b.converted();
  ASSERT_EQ(t.size(0), 1u);
  EXPECT_EQ(t.record(0, 0).begin_ns, 200u + kHostMinusTimer);
  EXPECT_EQ(t.record(0, 0).end_ns, 300u + kHostMinusTimer);
  EXPECT_EQ(t.record(0, 0).arg, 3);
  EXPECT_EQ(t.record(0, 0).bytes, 14336u);
  EXPECT_EQ(t.record(0, 0).event, static_cast<uint16_t>(Event::send_rows));
  ASSERT_EQ(t.size(2), 1u);
  EXPECT_EQ(t.record(2, 0).begin_ns, 200u + kHostMinusTimer);
  EXPECT_EQ(t.record(2, 0).end_ns, 400u + kHostMinusTimer);
  ASSERT_EQ(t.size(3), 1u);
  EXPECT_EQ(t.record(3, 0).begin_ns, 600u + kHostMinusTimer);
  EXPECT_EQ(t.size(1), 0u);
  for (int track = 0; track < 4; ++track) EXPECT_EQ(t.lost(track), 0u) << track;
}

TEST(DeviceTrace, AClockThatChangesItsRateIsFollowed) {
  Buffers b;
  b.anchor(0, 0, 0, 0);
  b.anchor(0, 0, 1000, 1000);
  b.anchor(0, 0, 3000, 2000);
  b.span(0, 0, Event::send_rows, 500, 2000, 0);
  const Tracer t = b.converted();
  EXPECT_EQ(t.record(0, 0).begin_ns, 500u + kHostMinusTimer);
  EXPECT_EQ(t.record(0, 0).end_ns, 1500u + kHostMinusTimer);
}

TEST(DeviceTrace, OutsideItsAnchorsASpanIsExtrapolated) {
  Buffers b;
  b.anchor(0, 0, 1000, 1000);
  b.anchor(0, 0, 2000, 2000);
  b.span(0, 0, Event::send_rows, 900, 2100, 0);
  const Tracer t = b.converted();
  EXPECT_EQ(t.record(0, 0).begin_ns, 900u + kHostMinusTimer);
  EXPECT_EQ(t.record(0, 0).end_ns, 2100u + kHostMinusTimer);
}

TEST(DeviceTrace, ATimerThatTicksCoarselyNeverRunsBackwards) {
  Buffers b;
  b.anchor(0, 0, 0, 1000);
  b.anchor(0, 0, 10, 1000);
  b.anchor(0, 0, 20, 2000);
  b.span(0, 0, Event::send_rows, 5, 15, 0);
  const Tracer t = b.converted();
  EXPECT_EQ(t.record(0, 0).begin_ns, 1000u + kHostMinusTimer);
  EXPECT_EQ(t.record(0, 0).end_ns, 1500u + kHostMinusTimer);
}

TEST(DeviceTrace, AFullRingKeepsTheNewestInOrder) {
  Buffers b;
  for (uint64_t i = 0; i < 20; ++i) b.span(1, 0, Event::send_rows, i, i + 1, static_cast<int64_t>(i));
  b.anchor(1, 0, 0, 0);
  b.anchor(1, 0, 100, 100);
  b.span(0, 5, Event::send_rows, 1, 2, 0);  // a multiprocessor without anchors
  const Tracer t = b.converted();
  ASSERT_EQ(t.size(1), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(t.record(1, i).arg, static_cast<int64_t>(14 + i));
  EXPECT_EQ(t.lost(1), 14u);
  EXPECT_EQ(t.size(0), 0u);
  EXPECT_EQ(t.lost(0), 1u);
}

TEST(DeviceTrace, ALaunchIsACallFromItsFirstAnchorToItsLast) {
  char objects[2][512];
  const auto launch = [&](int object, uint64_t epoch, int64_t tokens) { return pack_launch(epoch, objects[object], tokens); };
  Buffers b;
  const auto kernel = [&](Event event, int64_t which, uint64_t begin, uint64_t end, int track) {
    b.anchor(track, static_cast<uint16_t>(track), begin, begin, event, which);
    b.anchor(track, static_cast<uint16_t>(track), end, end, event, which);
  };
  kernel(Event::plan, launch(0, 1, 64 * 8), 100, 200, 0);
  kernel(Event::dispatch, launch(0, 1, 64), 190, 400, 0);
  kernel(Event::dispatch, launch(0, 1, 64), 180, 450, 2);  // another block
  kernel(Event::combine, launch(0, 1, 64), 500, 600, 0);
  kernel(Event::dispatch, launch(1, 1, 7), 550, 700, 2);  // another object; its counts arrived in an earlier dispatch
  const Tracer t = b.converted();
  const auto expect = [&](size_t i, Event event, uint64_t begin, uint64_t end, int64_t arg) {
    const TraceRecord& r = t.record(kHostTrack, i);
    EXPECT_EQ(r.event, static_cast<uint16_t>(event)) << i;
    EXPECT_EQ(r.begin_ns, begin + kHostMinusTimer) << i;
    EXPECT_EQ(r.end_ns, end + kHostMinusTimer) << i;
    EXPECT_EQ(r.arg, arg) << i;
  };
  ASSERT_EQ(t.size(kHostTrack), 4u);
  expect(0, Event::plan, 100, 200, 512);
  expect(1, Event::dispatch, 100, 450, 64);  // starting at the begin of its plan
  expect(2, Event::combine, 500, 600, 64);
  expect(3, Event::dispatch, 550, 700, 7);
}

/// Marks are in a track of their own, in nanoseconds, and in any order.
TEST(DeviceTrace, TwoMarksAreASpanOfTheHost) {
  Buffers b;
  b.sizes.resize(5);
  b.records.resize(5 * 8);
  const auto begin = [&](uint64_t round, int peer, uint64_t ns) {
    b.anchor(4, DeviceRecord::kMarkBegin, ns, ns, Event::wait_network, pack_launch(round, nullptr, peer));
  };
  const auto end = [&](uint64_t round, int peer, uint64_t ns) {
    b.anchor(4, DeviceRecord::kMarkEnd, ns, ns, Event::wait_network, pack_launch(round, nullptr, peer));
  };
  end(1, 3, 50);  // of a round that began before the recording
  begin(1, 3, 100);
  begin(2, 5, 250);  // on another stream
  end(1, 3, 300);
  end(2, 5, 400);
  const Tracer t = b.converted();
  ASSERT_EQ(t.size(kHostTrack), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const TraceRecord& r = t.record(kHostTrack, i);
    EXPECT_EQ(r.event, static_cast<uint16_t>(Event::wait_network));
    EXPECT_EQ(r.begin_ns, (i == 0 ? 100u : 250u) + kHostMinusTimer);
    EXPECT_EQ(r.end_ns, (i == 0 ? 300u : 400u) + kHostMinusTimer);
    EXPECT_EQ(r.arg, i == 0 ? 3 : 5);
  }
  for (uint64_t i = 0; i < 6; ++i) begin(10 + i, 0, 500 + i);  // overwrites the first three marks
  const Tracer full = b.converted();
  EXPECT_EQ(full.lost(kHostTrack), 3u);
  EXPECT_EQ(full.size(kHostTrack), 0u) << "of marks whose partners are missing";
}

TEST(DeviceTrace, EachReplayOfTwoMarksIsASpan) {
  Buffers b;
  b.sizes.resize(5);
  b.records.resize(5 * 8);
  for (const uint64_t replay : {0, 1, 2})
    for (const uint64_t ns : {100, 130})
      b.anchor(4, ns == 100 ? DeviceRecord::kMarkBegin : DeviceRecord::kMarkEnd, 1000 * replay + ns, 1000 * replay + ns,
               Event::expert_up, pack_launch(7, nullptr, 12));
  const Tracer t = b.converted();
  ASSERT_EQ(t.size(kHostTrack), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(t.record(kHostTrack, i).begin_ns, 1000 * i + 100 + kHostMinusTimer);
    EXPECT_EQ(t.record(kHostTrack, i).end_ns, 1000 * i + 130 + kHostMinusTimer);
    EXPECT_EQ(t.record(kHostTrack, i).arg, 12);
  }
}

/// The first warp of a block records its last anchor when it has no more work; other warps continue.
TEST(DeviceTrace, ACallEndsWithTheLastSpanOfAnyWarp) {
  Buffers b;
  const auto kernel = [&](Event event, int64_t call, uint16_t multiprocessor, uint64_t begin, uint64_t end, int track) {
    b.anchor(track, multiprocessor, begin, begin, event, pack_launch(static_cast<uint64_t>(call), nullptr, 5));
    b.anchor(track, multiprocessor, end, end, event, pack_launch(static_cast<uint64_t>(call), nullptr, 5));
  };
  kernel(Event::dispatch, 1, 3, 1000, 1100, 0);
  kernel(Event::dispatch, 1, 4, 1010, 1120, 2);
  b.span(1, 3, Event::send_rows, 1005, 1170, 0);
  b.span(3, 4, Event::wait_message, 1015, 1300, 0);  // the last span of the first call; the second begins next
  kernel(Event::combine, 1, 4, 1320, 1400, 0);       // blocks are on other multiprocessors
  kernel(Event::combine, 1, 3, 1330, 1410, 2);
  b.span(1, 4, Event::return_rows, 1318, 1500, 0);  // begins before the first warp has recorded its anchor
  b.span(3, 3, Event::return_rows, 1340, 1405, 0);
  kernel(Event::combine, 2, 3, 1600, 1700, 0);  // only anchors
  const Tracer t = b.converted();
  ASSERT_EQ(t.size(kHostTrack), 3u);
  const uint64_t wanted[3][2] = {{1000, 1300}, {1320, 1500}, {1600, 1700}};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(t.record(kHostTrack, i).begin_ns, wanted[i][0] + kHostMinusTimer) << i;
    EXPECT_EQ(t.record(kHostTrack, i).end_ns, wanted[i][1] + kHostMinusTimer) << i;
  }
}

TEST(DeviceTrace, SpansWhoseAnchorsWereReplacedAreOfNoCall) {
  Buffers b;
  for (uint64_t call = 0; call < 6; ++call)
    for (const uint64_t at : {1000 * call, 1000 * call + 500})
      b.anchor(0, 0, at, at, Event::dispatch, pack_launch(call, nullptr, 5));
  b.span(1, 0, Event::send_rows, 1100, 1700, 0);  // part of call 1, whose anchors were replaced first
  b.span(1, 0, Event::send_rows, 2100, 2700, 0);
  const Tracer t = b.converted();
  ASSERT_EQ(t.size(kHostTrack), 4u);
  EXPECT_EQ(t.record(kHostTrack, 0).end_ns, 2700u + kHostMinusTimer);
  EXPECT_EQ(t.record(kHostTrack, 1).end_ns, 3500u + kHostMinusTimer);
  EXPECT_EQ(t.lost(0), 4u);
}

/// A GPU timer that runs `ppm` parts per million faster than the host clock; at() returns its value at a given host time.
struct DriftingTimer {
  double ppm;
  uint64_t at(uint64_t host_ns) const {
    return 1'700'000'000'000'000'000 + static_cast<uint64_t>(static_cast<double>(host_ns) * (1 + ppm * 1e-6));
  }
  /// Returns a reading at a given time, with an error of less than half of the round trip.
  TimerReading read(uint64_t host_ns, uint64_t round_trip_ns, int64_t error_ns) const {
    return {at(host_ns), static_cast<int64_t>(host_ns - at(host_ns)) + error_ns, round_trip_ns};
  }
};

TEST(HostTime, FollowsATimerThatDrifts) {
  for (const double ppm : {-50.0, 0.0, 20.0}) {
    for (const uint64_t length : {200'000'000ull, 10'000'000'000ull, 3'600'000'000'000ull}) {
      SCOPED_TRACE(testing::Message() << ppm << " ppm in " << length << " ns");
      const DriftingTimer timer{ppm};
      const uint64_t begin = 5'000'000'000;
      const HostTime host(timer.read(begin, 2000, 900), timer.read(begin + length, 2400, -1100));
      EXPECT_EQ(host.error_ns(), 1200u);
      uint64_t before = 0;
      for (int i = 0; i <= 10; ++i) {
        const uint64_t now = begin + length / 10 * static_cast<uint64_t>(i), said = host.ns(timer.at(now));
        EXPECT_LE(std::abs(static_cast<double>(static_cast<int64_t>(said - now))), 1200.0 + 2) << i;
        EXPECT_GT(said, before);
        before = said;
      }
    }
  }
}

TEST(HostTime, ShortRecordingsAreNotStretchedByWhatReadingsAreWrongBy) {
  const DriftingTimer timer{20};
  for (const uint64_t length : {0ull, 50'000ull, 90'000'000ull}) {
    SCOPED_TRACE(length);
    const HostTime host(timer.read(1'000'000, 2000, 900), timer.read(1'000'000 + length, 1800, -800));
    const uint64_t from = timer.at(1'000'000);
    EXPECT_EQ(host.ns(from + 40'000) - host.ns(from), 40'000u);
    for (const uint64_t now : {uint64_t{1'000'000}, 1'000'000 + length}) {
      const auto off = static_cast<double>(static_cast<int64_t>(host.ns(timer.at(now)) - now));
      EXPECT_LE(std::abs(off), static_cast<double>(host.error_ns())) << now;
    }
    EXPECT_LE(host.error_ns(), 1000u + 1700u + 1800u);
  }
  const TimerReading only{5000, -1000, 301};
  EXPECT_EQ(HostTime(only).ns(7000), 6000u);
  EXPECT_EQ(HostTime(only).error_ns(), 151u);
  const TimerReading earlier{4000, -900, 200};  // a timer that was set back
  EXPECT_EQ(HostTime(only, earlier).ns(7000), 6100u);
}

}  // namespace
}  // namespace switchyard::detail
