// SPDX-License-Identifier: Apache-2.0
// The work enqueued by a call, as recorded by a capture.
#pragma once

#include <string>
#include <vector>

#include "gpu/harness/object_rig.hpp"

namespace harness {

/// Captures `call`, which enqueues on the station's first stream, and expects one kernel and nothing else: no memset, copy,
/// host function or event. The captured work is not run.
template <class Call>
void expect_launches(size_t launches, Station& me, const std::string& what, Call&& call) {
  cudaGraph_t graph = nullptr;
  must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  call();
  must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
  size_t count = 0;
  must(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) must(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  me.f.equal(launches, count, what + ": nodes of its graph");
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    must(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    me.f.equal(static_cast<int>(cudaGraphNodeTypeKernel), static_cast<int>(type), what + ": type of a node");
  }
  must(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

template <class Call>
void expect_one_launch(Station& me, const std::string& what, Call&& call) {
  expect_launches(1, me, what, call);
}

}  // namespace harness
