// SPDX-License-Identifier: Apache-2.0
// Where streamed_calls.hpp runs on GPUs: a rank of object_rig.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "gpu/harness/object_rig.hpp"
#include "gpu/kernels/closed_form_kernels.hpp"
#include "modes/low_latency/streamed_calls.hpp"

namespace harness {

/// A GPU's memory and streams; jobs are kernels.
class StationRig {
 public:
  explicit StationRig(Station& station) : station_(station), sink_(reinterpret_cast<float*>(station.room(4))) {
    for (cudaEvent_t& event : events_) must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~StationRig() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  StationRig(const StationRig&) = delete;

  int rank() const { return station_.rank(); }
  void* room(size_t bytes) { return station_.room(std::max<size_t>(bytes, 4)); }
  void* stream(int lane) const { return station_.stream(lane); }
  template <class Job>
  void enqueue(const Job& job, void* stream) const {
    launch_job(job, static_cast<cudaStream_t>(stream));
  }
  void pause(uint64_t ns, void* stream) const { launch_busy(1, 32, ns, sink_, static_cast<cudaStream_t>(stream)); }
  /// The host runs ahead by 32 to 64 calls: a launch into a full queue could keep other ranks of the process from launching.
  void pace(void* stream) {
    constexpr uint64_t kCalls = 64 / kEvents;
    if (++calls_ % kCalls != 0) return;
    const uint64_t turn = calls_ / kCalls;
    must(cudaEventRecord(events_[turn % kEvents], static_cast<cudaStream_t>(stream)), "cudaEventRecord");
    if (turn >= kEvents) must(cudaEventSynchronize(events_[(turn + 1) % kEvents]), "cudaEventSynchronize");
  }

 private:
  static constexpr uint64_t kEvents = 4;
  Station& station_;
  float* sink_;
  std::array<cudaEvent_t, kEvents> events_{};
  uint64_t calls_ = 0;
};

using Calls = StreamedCalls<StationRig>;

/// The verdict so far, of so many judged calls; when no rank's kernels wait for anything.
inline void expect_verdict(Station& me, const Calls& calls, uint64_t judged, bool any_rows) {
  me.meet();
  Verdict verdict{};
  me.read(&verdict, calls.verdict(), sizeof verdict);
  me.f.equal(std::string(), describe(verdict, judged), "verdict");
  me.f.check(!any_rows || verdict.rows > 0, "no row was judged");
  me.group.check();
  me.meet();
}

}  // namespace harness
