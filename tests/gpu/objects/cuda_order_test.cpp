// SPDX-License-Identifier: Apache-2.0
// Memory is reused in order: the next owner of released memory does not touch it until all work that used it is complete, on
// any stream, in any object, inside and outside graphs. Gates hold streams, so a new owner that does not wait is always too
// early.
#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

using switchyard::RowBuffer;

/// Writes the expert outputs for `d`, which are copies of its rows.
void compute(const ExchangeRig& f, const Dispatched& d, const RowBuffer& y, int stream) {
  launch_copy(y.rows().data, d.x.data, static_cast<size_t>(d.x.rows) * row_bytes_of(*f.c), f.me.stream(stream));
}
void spoil(const ExchangeRig& f, const RowBuffer& y, int stream) {
  const size_t bytes = static_cast<size_t>(y.rows().rows) * row_bytes_of(*f.c);
  must(cudaMemsetAsync(y.rows().data, 0xFF, bytes, f.me.stream(stream)), "cudaMemsetAsync");
}

class GpuOrder : public testing::TestWithParam<int> {
 protected:
  struct Shape {
    int times;  ///< number of outputs that fit into a pool
    Layout layout = Layout::rank_major;
    int objects = 1;  ///< number of objects that fit into the heap
  };
  /// Runs `body` on as many ranks as the test parameter specifies.
  static void on_ranks(const Shape& shape, const std::function<void(Station&, ExchangeRig&)>& body) {
    const auto c = make_case(gpu_scenario("order", GetParam(), shape.layout, 20));
    const NormalConfig config = config_with_large_pool(*c, shape.times);
    on_gpus(GetParam(), heap_for(config, GetParam(), shape.objects), [&](Station& me) {
      ExchangeRig f(me, c, config);
      body(me, f);
    });
  }
};

/// An enqueued combine still reads the rows when their owner releases them.
TEST_P(GpuOrder, RowsComeAfterTheCombineThatReadsTheirMemory) {
  on_ranks({4}, [](Station& me, ExchangeRig& f) {
    const Dispatched d = f.dispatch();
    std::vector<RowBuffer> others = f.fill_pool(d.handle, 1);
    RowBuffer y1 = f.exchange.allocate_rows(d.handle, DType::bf16, me.stream());
    void* const first = y1.rows().data;
    compute(f, d, y1, 0);
    me.gate().close(me.stream());
    f.combine(y1.rows(), d.handle);
    y1 = RowBuffer();
    const RowBuffer y2 = f.exchange.allocate_rows(d.handle, DType::bf16, me.stream(1));
    me.f.check(y2.rows().data == first, "the test needs the same memory");
    spoil(f, y2, 1);
    me.gather();
    me.gate().open();
    me.meet();
    me.check_combined(f.data, f.in);
    me.meet();
  });
}

/// The next owner of the memory waits only for work enqueued before the release.
TEST_P(GpuOrder, RowsDoNotComeAfterLaterWork) {
  on_ranks({4}, [](Station& me, ExchangeRig& f) {
    const Dispatched d = f.dispatch();
    std::vector<RowBuffer> others = f.fill_pool(d.handle, 1);
    (void)f.exchange.allocate_rows(d.handle, DType::bf16, me.stream(1));  // two streams are used from now on
    RowBuffer y1 = f.exchange.allocate_rows(d.handle, DType::bf16, me.stream());
    compute(f, d, y1, 0);
    f.combine(y1.rows(), d.handle);
    y1 = RowBuffer();
    me.gate().close(me.stream());
    const RowBuffer y2 = f.exchange.allocate_rows(d.handle, DType::bf16, me.stream(1));
    spoil(f, y2, 1);
    cudaError_t status = cudaErrorNotReady;
    for (int i = 0; i < 1500 && status == cudaErrorNotReady; ++i) {
      std::this_thread::sleep_for(1ms);
      status = cudaStreamQuery(me.stream(1));
    }
    me.f.check(status == cudaSuccess, "the taker waits for work that came later");
    me.gather();
    me.gate().open();
    me.meet();
    me.check_combined(f.data, f.in);
    me.meet();
  });
}

/// Without a stream, idle memory is used even if lower addresses are free.
TEST_P(GpuOrder, RowsForAnyStreamAreIdle) {
  on_ranks({4}, [](Station& me, ExchangeRig& f) {
    const Dispatched d = f.dispatch();
    me.meet();
    std::vector<RowBuffer> others = f.fill_pool(d.handle, 2);
    for (const bool has_memory : {true, false}) {
      me.f.set_context(has_memory ? "with room" : "without room");
      RowBuffer y1 = f.exchange.allocate_rows(d.handle, DType::bf16);
      void* const first = y1.rows().data;
      compute(f, d, y1, 0);
      me.gate().close(me.stream(), 300ms);
      f.combine(y1.rows(), d.handle);
      y1 = RowBuffer();
      std::optional<RowBuffer> taken;
      if (!has_memory) taken = f.exchange.allocate_rows(d.handle, DType::bf16);
      const RowBuffer y2 = f.exchange.allocate_rows(d.handle, DType::bf16);
      if (has_memory) me.f.check(y2.rows().data != first, "memory that is in use was handed out");
      spoil(f, y2, 1);
      me.meet();
      me.check_combined(f.data, f.in);
      me.meet();
    }
  });
}

/// used_by delays reuse of row buffers. Calls on other streams are ordered after reads of the rows on the delivering stream.
TEST_P(GpuOrder, ReadersOnOtherStreams) {
  on_ranks({5}, [](Station& me, ExchangeRig& f) {
    for (const int reader : {0, 1}) {
      me.f.set_context("read on stream " + std::to_string(reader));
      std::optional<Dispatched> d = f.dispatch();
      const Handle handle = d->handle;
      me.meet();
      std::vector<RowBuffer> others = f.fill_pool(handle, 0);
      me.gate().close(me.stream(reader), 300ms);
      const Shot shot = me.shoot(*d, me.stream(reader));
      if (reader != 0) d->used_by(me.stream(reader));
      Dispatched addresses = *d;
      addresses.block.reset();
      d.reset();
      const RowBuffer y = f.exchange.allocate_rows(handle, DType::bf16, me.stream(2));
      spoil(f, y, 2);
      me.meet();
      Shot read = shot;
      read.d.block.reset();
      me.check(*f.c, f.data, read, handle);
      me.meet();
    }
  });
}

/// A call on one object, on another stream, uses handles and rows of a different object.
TEST_P(GpuOrder, CallsOfOtherObjects) {
  on_ranks({.times = 2, .objects = 2}, [](Station& me, ExchangeRig& f) {
    NormalExchange other(me.group, f.exchange.config());
    for (int i = 0; i < 3; ++i) {
      me.f.set_context("round " + std::to_string(i));
      std::optional<Dispatched> d = f.dispatch(0);
      me.meet();
      me.gate().close(me.stream(1), 200ms);
      other.combine(d->x, d->handle, f.in.out, me.combine_options(*f.c, me.stream(1)));
      d.reset();
      RankData next(*f.c, me.rank(), 1 + i);
      const Inputs more = me.upload(*f.c, next);
      std::vector<Dispatched> after;  // takes the memory of the rows and tables
      for (int k = 0; k < 2; ++k)
        after.push_back(f.exchange.dispatch(more.x, more.ids, more.weights, me.dispatch_options(*f.c, me.stream(0))));
      me.meet();
      me.check_combined(f.data, f.in);
      me.meet();
    }
  });
}

// ---- graphs ----

/// A graph with `layers` dispatches and combines through row buffers. Each layer releases its memory; layer l reads in[l] and
/// writes out[l].
class Layers {
 public:
  Layers(ExchangeRig& rig, int layers, int64_t tokens) : f_(rig), tokens_(tokens) {
    for (int l = 0; l < layers; ++l) {
      data_.push_back(std::make_unique<RankData>(*f_.c, f_.me.rank(), 10 + l));
      in_.push_back(f_.me.upload(*f_.c, *data_.back()));
      if (tokens_ >= 0) in_.back().ids.num_tokens = in_.back().x.rows = std::min(tokens_, in_.back().ids.num_tokens);
    }
  }
  ~Layers() {
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
  }
  Layers(const Layers&) = delete;

  void enqueue() {
    Station& me = f_.me;
    const cudaStream_t stream = me.stream();
    for (const Inputs& in : in_) {
      const Dispatched d = f_.exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*f_.c, stream));
      const RowBuffer y = f_.exchange.allocate_rows(d.handle, DType::bf16, stream);
      compute(f_, d, y, 0);
      f_.exchange.combine(y.rows(), d.handle, in.out, me.combine_options(*f_.c, stream));
    }
  }
  void capture() {
    const cudaStream_t stream = f_.me.stream();
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const Outcome o = outcome_of([&] { enqueue(); });
    must(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    f_.me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(o.code), "capture: " + o.text);
    must(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec_, stream), "cudaGraphUpload");
  }
  void launch() {
    for (const Inputs& in : in_) must(cudaMemsetAsync(in.out, 0xA5, in.out_bytes, f_.me.stream()), "cudaMemsetAsync");
    must(cudaGraphLaunch(exec_, f_.me.stream()), "cudaGraphLaunch");
  }
  /// Must be called while all ranks are idle.
  void check() {
    for (size_t l = 0; l < in_.size(); ++l) {
      f_.me.f.set_context("layer " + std::to_string(l));
      f_.me.check_combined(*data_[l], in_[l]);
    }
  }

 private:
  ExchangeRig& f_;
  int64_t tokens_;
  std::vector<std::unique_ptr<RankData>> data_;
  std::vector<Inputs> in_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

/// Twelve layers run in memory for three.
TEST_P(GpuOrder, LayersOfACaptureShareMemory) {
  const auto body = [](Station& me, ExchangeRig& f) {
    Layers layers(f, 12, -1);
    layers.capture();
    for (int i = 0; i < 3; ++i) {
      me.meet();
      layers.launch();
      me.meet();
      layers.check();
    }
    me.meet();
  };
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) on_ranks({2, layout}, body);
}

/// Graphs that are never in flight together share the memory of one graph; other graphs each use separate memory.
TEST_P(GpuOrder, GraphsShareMemoryIfTold) {
  on_ranks({2}, [](Station& me, ExchangeRig& f) {
    std::vector<std::unique_ptr<Layers>> graphs;
    {
      const switchyard::GraphMemory memory = f.exchange.make_graph_memory();
      f.exchange.use_graph_memory(memory);
      for (int g = 0; g < 5; ++g) {
        graphs.push_back(std::make_unique<Layers>(f, 2, -1));
        graphs.back()->capture();
      }
      f.exchange.use_graph_memory({});
    }
    for (int i = 0; i < 8; ++i) {
      Layers& graph = *graphs[static_cast<size_t>(i) * 3 % graphs.size()];
      me.meet();
      graph.launch();
      me.meet();
      graph.check();
    }
    me.meet();
  });
}

/// A stream that has read rows is being captured when the next call reuses the rows' memory; the capture stays valid.
TEST_P(GpuOrder, UsersThatAreCapturedNow) {
  on_ranks({4}, [](Station& me, ExchangeRig& f) {
    f.dispatch().used_by(me.stream(1));
    {
      Dispatched held = f.dispatch();
      held.used_by(me.stream(1));
      me.meet();
      cudaGraph_t graph = nullptr;
      cudaEvent_t fork = nullptr, join = nullptr;
      must(cudaEventCreate(&fork), "cudaEventCreate");
      must(cudaEventCreate(&join), "cudaEventCreate");
      must(cudaStreamBeginCapture(me.stream(1), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      held = Dispatched();  // while the stream that used it is captured
      must(cudaEventRecord(fork, me.stream(1)), "cudaEventRecord");
      must(cudaStreamWaitEvent(me.stream(), fork), "cudaStreamWaitEvent");
      const Outcome o = outcome_of([&] {
        Dispatched d = f.dispatch();
        d.used_by(me.stream(1));
        f.combine(d.x, d.handle);
      });
      me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(o.code), "capture: " + o.text);
      must(cudaEventRecord(join, me.stream()), "cudaEventRecord");
      must(cudaStreamWaitEvent(me.stream(1), join), "cudaStreamWaitEvent");
      must(cudaStreamEndCapture(me.stream(1), &graph), "cudaStreamEndCapture");
      cudaGraphExec_t exec = nullptr;
      must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
      me.meet();
      must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
      me.meet();
      me.check_combined(f.data, f.in);
      must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
      must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    me.meet();
    for (int i = 0; i < 4; ++i) me.round(f.exchange, *f.c, i);  // there must be no leak
  });
}

/// Ranks replay graphs whose sizes differ from those of their peers, and one rank captures one graph more than the others: the
/// device assigns the identities of dispatches.
TEST_P(GpuOrder, RanksReplayGraphsOfOtherSizes) {
  on_ranks({8}, [](Station& me, ExchangeRig& f) {
    std::vector<std::unique_ptr<Layers>> graphs;
    for (const int64_t tokens : {-1, 3, 9}) {
      graphs.push_back(std::make_unique<Layers>(f, 2, tokens));
      graphs.back()->capture();
      if (me.rank() == 0) Layers(f, 1, 5).capture();  // the graph is discarded
    }
    for (int i = 0; i < 6; ++i) {
      me.f.set_context("turn " + std::to_string(i));
      me.meet();
      if (i == 3 && me.rank() == 0)
        graphs[0]->enqueue();  // not a replayed call
      else
        graphs[static_cast<size_t>(me.rank() + i) % graphs.size()]->launch();
      me.meet();
      const Outcome o = outcome_of([&] { me.group.check(); });
      me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(o.code), o.text);
      if (o.code != ErrorCode::ok) return;
    }
    for (auto& graph : graphs) graph.reset();
    me.meet();
    me.round(f.exchange, *f.c, 1);
    me.meet();
    Layers all(f, 2, -1);
    all.capture();
    me.meet();
    all.launch();
    me.meet();
    all.check();
    me.meet();
  });
}

/// An object is destroyed without waiting while its calls are enqueued. The next object reuses the same heap block, but only
/// after the calls of all ranks are complete.
TEST_P(GpuOrder, AnObjectEndsBeforeItsCallsRun) {
  const auto c = make_case(gpu_scenario("ends", GetParam(), Layout::rank_major, 20));
  const NormalConfig config = config_with_large_pool(*c, 3);
  on_gpus(GetParam(), heap_for(config, GetParam()), [&](Station& me) {
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    me.meet();
    {
      NormalExchange exchange(me.group, config);
      me.gate().close(me.stream(), 500ms);
      const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
      exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
    }
    me.f.check(cudaStreamQuery(me.stream()) == cudaErrorNotReady, "the object waited for its calls");
    NormalExchange next(me.group, config);
    me.f.check(cudaStreamQuery(me.stream()) == cudaSuccess, "the next object has memory that calls still use");
    me.meet();
    me.check_combined(data, in);
    me.round(next, *c, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuOrder, testing::Values(1, 2, 3));

}  // namespace
}  // namespace harness
