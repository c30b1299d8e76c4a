// SPDX-License-Identifier: Apache-2.0
// Rig for streamed_calls.hpp on GPUs, based on a rank of object_rig.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "gpu/harness/object_rig.hpp"
#include "gpu/kernels/closed_form_kernels.hpp"
#include "modes/low_latency/streamed_calls.hpp"

namespace harness {

/// A GPU's memory and streams, with jobs that are kernels.
class StationRig {
 public:
  explicit StationRig(Station& station) : station_(station), sink_(reinterpret_cast<float*>(station.allocate(4))) {
    for (cudaEvent_t& event : events_) must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~StationRig() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  StationRig(const StationRig&) = delete;

  int rank() const { return station_.rank(); }
  void* allocate(size_t bytes) { return station_.allocate(std::max<size_t>(bytes, 4)); }
  void* stream(int lane) const { return station_.stream(lane); }
  template <class Job>
  void enqueue(const Job& job, void* stream) const {
    launch_job(job, static_cast<cudaStream_t>(stream));
  }
  void pause(uint64_t ns, void* stream) const { launch_busy(1, 32, ns, sink_, static_cast<cudaStream_t>(stream)); }
  /// Call after `launches` launches. The host runs ahead by at most 96 to 128 launches, because a launch into a full queue
  /// blocks launches by the other ranks of the process. A call, including its inputs and its judge, takes about four launches.
  void pace(void* stream, size_t launches = 4) {
    launched_ += launches;
    if (launched_ < kLaunches) return;
    launched_ = 0;
    must(cudaEventRecord(events_[turn_ % kEvents], static_cast<cudaStream_t>(stream)), "cudaEventRecord");
    if (++turn_ >= kEvents) must(cudaEventSynchronize(events_[turn_ % kEvents]), "cudaEventSynchronize");
  }

 private:
  static constexpr size_t kEvents = 4;
  static constexpr size_t kLaunches = 32;
  Station& station_;
  float* sink_;
  std::array<cudaEvent_t, kEvents> events_{};
  size_t launched_ = 0, turn_ = 0;
};

using Calls = StreamedCalls<StationRig>;

/// Expects the verdict so far, after `judged` judged calls. Must be called when no rank's kernels wait.
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
