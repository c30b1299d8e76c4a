// SPDX-License-Identifier: Apache-2.0
// Low-latency mode on GPUs of several named hosts, with ranks as threads: the order of enqueued calls, graphs, and reports of
// silent ranks. No rows are sent: the suites in tests/modes/low_latency cover rows.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "gpu/hosts/gpu_hosts.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {
namespace {

using switchyard::Group;
using switchyard::GroupOptions;

void must(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// A stream on the rank's GPU.
class Stream {
 public:
  explicit Stream(const Group& group) {
    must(cudaSetDevice(group.rank() % count_gpus()));
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Calls without tokens execute all phases and rounds but use no caller memory except y.
class EmptyExchange {
 public:
  EmptyExchange(Group& group, cudaStream_t stream)
      : stream_(stream),
        exchange_(group, config()),
        output_(exchange_.make_output()),
        y_(exchange_.make_rows(switchyard::DType::bf16)) {}

  void dispatch() { exchange_.dispatch(x(), ids(), output_, send()); }
  switchyard::ReceiveHook dispatch_send() { return exchange_.dispatch_send(x(), ids(), output_, send()); }
  void combine() { exchange_.combine(y_, output_, nullptr, back()); }
  switchyard::ReceiveHook combine_send() { return exchange_.combine_send(y_, output_, nullptr, back()); }

 private:
  static switchyard::LowLatencyConfig config() {
    switchyard::LowLatencyConfig c;
    c.hidden = 128;
    c.num_experts = 8;
    c.topk = 2;
    c.max_tokens = 4;
    return c;
  }
  static switchyard::ConstRows x() { return {nullptr, 0, 128, switchyard::DType::bf16}; }
  static switchyard::ExpertIds ids() {
    switchyard::ExpertIds none;
    none.topk = 2;
    return none;
  }
  switchyard::LowLatencyDispatchOptions send() const {
    switchyard::LowLatencyDispatchOptions o;
    o.stream = stream_;
    o.num_sms = 2;
    return o;
  }
  switchyard::LowLatencyCombineOptions back() const {
    switchyard::LowLatencyCombineOptions o;
    o.stream = stream_;
    o.num_sms = 2;
    return o;
  }

  cudaStream_t stream_;
  switchyard::LowLatencyExchange exchange_;
  switchyard::LowLatencyOutput output_;
  switchyard::LowLatencyRows y_;
};

void finish(Group& group, cudaStream_t stream) {
  must(cudaStreamSynchronize(stream));
  group.barrier();
  group.check();
}

TEST(GpuHostsLowLatency, WholeCallsAndHalvesWithoutTokens) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  for (const int world : {2, 4}) {
    const auto all = outcomes(world, options_on_gpus("a,b"), [&](Group& group) {
      const Stream stream(group);
      EmptyExchange calls(group, stream);
      group.barrier();
      for (int i = 0; i < 20; ++i) {
        i % 2 == 0 ? calls.dispatch() : calls.dispatch_send()();
        i % 3 == 0 ? calls.combine_send()() : calls.combine();
      }
      finish(group, stream);
    });
    for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
  }
}

/// A rank that makes other calls between the halves does not prevent others from receiving.
TEST(GpuHostsLowLatency, HalvesAroundCallsOfAnotherObject) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  const auto all = outcomes(4, options_on_gpus("a,b"), [&](Group& group) {
    const Stream stream(group);
    EmptyExchange one(group, stream), two(group, stream);
    group.barrier();
    for (int i = 0; i < 10; ++i) {
      const bool at_once = (group.rank() / 2 + i) % 2 == 0;  // the ranks of a host differ
      const auto around = [&](const switchyard::ReceiveHook& receive) {
        if (at_once) receive();
        two.dispatch();
        two.combine();
        if (!at_once) receive();
      };
      around(one.dispatch_send());
      around(one.combine_send());
    }
    finish(group, stream);
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

TEST(GpuHostsLowLatency, AnObjectMayEndBetweenHalves) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  const auto all = outcomes(2, options_on_gpus("a,b"), [&](Group& group) {
    const Stream stream(group);
    {
      EmptyExchange calls(group, stream);
      group.barrier();
      (void)calls.dispatch_send();
    }
    EmptyExchange calls(group, stream);
    calls.dispatch();
    finish(group, stream);
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

GroupOptions soon(const char* host) {
  GroupOptions options = options_on_gpus(host);
  options.timeout = kSoon;
  return options;
}

/// Rank 1 does not take part in a round of rank 0 and receives the error that rank 0 gave up on it.
void expect_silence_named(const std::vector<Outcome>& all) {
  EXPECT_EQ(code_name(all[0].code), "peer_timeout") << all[0].text;
  EXPECT_EQ(all[0].report.awaited_rank, 1) << all[0].text;
  EXPECT_EQ(std::string(all[0].report.site), "network") << all[0].text;
  EXPECT_NE(code_name(all[1].code), "ok");
}

TEST(GpuHostsLowLatency, ARankThatDoesNotComeIsNamed) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  for (const bool split : {false, true}) {
    expect_silence_named(outcomes(2, soon("a,b"), [&](Group& group) {
      const Stream stream(group);
      EmptyExchange calls(group, stream);
      group.barrier();
      if (group.rank() == 0) split ? (void)calls.dispatch_send() : calls.dispatch();
      std::this_thread::sleep_for(3 * kSoon);
      group.check();
    }));
  }
}

/// A rank's calls as a graph.
class Graph {
 public:
  template <class Calls>
  Graph(cudaStream_t stream, const Calls& calls) : stream_(stream) {
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    calls();
    must(cudaStreamEndCapture(stream, &graph_));
    must(cudaGraphInstantiate(&exec_, graph_, 0));
    must(cudaGraphUpload(exec_, stream_));  // the first launch would allocate while another rank's kernel waits on this GPU
    must(cudaStreamSynchronize(stream_));
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  void replay() const { must(cudaGraphLaunch(exec_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

TEST(GpuHostsLowLatency, GraphsAreReplayedBetweenCalls) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  const auto all = outcomes(4, options_on_gpus("a,b"), [&](Group& group) {
    const Stream stream(group);
    EmptyExchange calls(group, stream);
    const Graph whole(stream, [&] {
      calls.dispatch();
      calls.combine();
    });
    const Graph halves(stream, [&] {
      calls.dispatch_send()();
      calls.combine_send()();
    });
    group.barrier();
    for (int i = 0; i < 30; ++i) {
      (i % 2 == 0 ? whole : halves).replay();
      if (i % 5 != 0) continue;
      calls.dispatch();
      calls.combine();
    }
    finish(group, stream);
  });
  for (const Outcome& o : all) EXPECT_EQ(shown(o), "ok: ");
}

TEST(GpuHostsLowLatency, ARankThatDoesNotReplayIsNamed) {
  if (count_gpus() < 2) GTEST_SKIP() << kTwoGpus;
  expect_silence_named(outcomes(2, soon("a,b"), [&](Group& group) {
    const Stream stream(group);
    EmptyExchange calls(group, stream);
    const Graph graph(stream, [&] {
      calls.dispatch();
      calls.combine();
    });
    group.barrier();
    graph.replay();
    finish(group, stream);
    if (group.rank() == 0) graph.replay();
    std::this_thread::sleep_for(3 * kSoon);
    group.check();
  }));
}

}  // namespace
}  // namespace harness
