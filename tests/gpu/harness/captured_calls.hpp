// SPDX-License-Identifier: Apache-2.0
// A rank's low-latency calls as a graph.
#pragma once

#include <algorithm>
#include <vector>

#include "gpu/harness/station_rig.hpp"

namespace harness {

/// A rank's calls as a graph that counts its replays.
class CapturedCalls {
 public:
  /// `enqueue(replays)` enqueues the calls on the station's first stream.
  template <class Enqueue>
  CapturedCalls(Station& me, StationRig& rig, Enqueue&& enqueue) : rig_(rig), stream_(me.stream()) {
    auto* const replays = static_cast<uint64_t*>(rig.allocate(8));
    rig.enqueue(Spoil{reinterpret_cast<uint32_t*>(replays), 2, 0}, stream_);
    me.meet();
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue(replays);
    rig.enqueue(CountReplay{replays}, stream_);
    must(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    must(cudaGraphGetNodes(graph_, nullptr, &nodes_), "cudaGraphGetNodes");
    must(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec_, stream_), "cudaGraphUpload");
    me.meet();
  }
  CapturedCalls(const CapturedCalls&) = delete;
  ~CapturedCalls() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }

  /// Launches the graph, paced by the rig; every node counts as a launch.
  void launch() const {
    must(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch");
    rig_.pace(stream_, nodes_);
  }
  cudaGraph_t graph() const { return graph_; }

 private:
  StationRig& rig_;
  cudaStream_t stream_;
  size_t nodes_ = 0;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

/// Number of edges in a captured graph that allow a kernel to begin before the previous one ends.
inline size_t dependent_launches(cudaGraph_t graph) {
  size_t count = 0;
#if CUDART_VERSION >= 13000
  must(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &count), "cudaGraphGetEdges");
#else
  must(cudaGraphGetEdges_v2(graph, nullptr, nullptr, nullptr, &count), "cudaGraphGetEdges");
#endif
  std::vector<cudaGraphNode_t> from(count), to(count);
  std::vector<cudaGraphEdgeData> edges(count);
#if CUDART_VERSION >= 13000
  must(cudaGraphGetEdges(graph, from.data(), to.data(), edges.data(), &count), "cudaGraphGetEdges");
#else
  must(cudaGraphGetEdges_v2(graph, from.data(), to.data(), edges.data(), &count), "cudaGraphGetEdges");
#endif
  return static_cast<size_t>(std::count_if(
      edges.begin(), edges.end(), [](const cudaGraphEdgeData& e) { return e.type == cudaGraphDependencyTypeProgrammatic; }));
}

}  // namespace harness
