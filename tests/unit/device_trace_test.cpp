// SPDX-License-Identifier: Apache-2.0
// What kernels record becomes a timeline of the host's clock: anchors, multiprocessors with clocks of their own, full tracks.
//
// Executable: device_trace_test. Source: device_trace_test.cpp. Label: none.
#include "trace/device_trace.hpp"

#include <gtest/gtest.h>

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
    append_device_records(tracer, trace, sizes, records, kHostMinusTimer);
    return tracer;
  }
};

TEST(DeviceTrace, CyclesBecomeHostTimeByMultiprocessor) {
  Buffers b;
  // Multiprocessor 7 counts 2 cycles a nanosecond from 1000, 9 counts 1 from a million.
  b.anchor(0, 7, 1000, 100);
  b.span(0, 7, Event::send_rows, 1200, 1400, 3, 14336);
  b.anchor(0, 7, 3000, 1100);
  b.anchor(2, 9, 1'000'000, 100);
  b.span(2, 9, Event::wait_message, 1'000'100, 1'000'300, 1);
  b.anchor(2, 9, 1'001'000, 1100);
  b.span(3, 9, Event::place_rows, 1'000'500, 1'000'600, 2);  // another warp of that block: no anchors of its own
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
  kernel(Event::dispatch, launch(1, 1, 7), 550, 700, 2);  // another object, whose counts came in a dispatch before
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
  expect(1, Event::dispatch, 100, 450, 64);  // from the begin of its plan
  expect(2, Event::combine, 500, 600, 64);
  expect(3, Event::dispatch, 550, 700, 7);
}

}  // namespace
}  // namespace switchyard::detail
