// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU group outside its calls: caller buffers that combine reads in place, and sleep and wake. With ranks as
// processes, acceptance case B10 also registers buffers.
#include <algorithm>
#include <optional>

#include "exchange/group/impl.hpp"
#include "gpu/harness/object_rig.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using switchyard::RegisteredMemory;

constexpr size_t kBallast = size_t{256} << 20;

/// Free bytes on this rank's GPU.
size_t free_memory() {
  size_t free = 0, total = 0;
  must(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

/// Makes a dispatch of `c` and a combine of its rows from `y`, and compares both. Returns the number of bytes copied by the
/// combine.
uint64_t round_from(Station& me, NormalExchange& exchange, const Case& c, std::byte* y, int repetition) {
  RankData data(c, me.rank(), repetition);
  const Inputs in = me.upload(c, data);
  me.meet();
  const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(c, me.stream()));
  const Shot shot = me.shoot(d, me.stream());
  launch_copy(y, d.x.data, static_cast<size_t>(d.x.rows * d.x.cols) * 2, me.stream());
  switchyard::ConstRows rows = d.x;
  rows.data = y;
  exchange.combine(rows, d.handle, in.out, me.combine_options(c, me.stream()));
  me.meet();
  me.check(c, data, shot, d.handle);
  me.check_combined(data, in);
  const uint64_t copied = exchange.last_call().copied_bytes;
  me.meet();
  return copied;
}

struct RanksOf {
  int world;
  Width width;
};
std::ostream& operator<<(std::ostream& out, const RanksOf& r) { return out << "W" << r.world << suffix_of(r.width); }
class GpuMemory : public testing::TestWithParam<RanksOf> {};

TEST_P(GpuMemory, RegisteredRowsAreReadWhereTheyLie) {
  const auto [world, width] = GetParam();
  const auto c = make_case(with_width(gpu_scenario("registered", world, Layout::rank_major, 20), width));
  const NormalConfig config = make_config(*c);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    const auto bytes = static_cast<size_t>(worst_rows(*c)) * row_bytes_of(*c);
    std::byte* const buffer = me.allocate(bytes + 1024);
    const uint64_t plain = round_from(me, exchange, *c, buffer, 0);
    me.f.check((plain > 0) == (me.world() > 1), "ordinary memory that others read is copied");
    {
      const RegisteredMemory registered = me.group.register_memory(buffer, bytes + 512);
      me.f.equal(uint64_t{0}, round_from(me, exchange, *c, buffer, 1), "copied bytes at the start");
      me.f.equal(uint64_t{0}, round_from(me, exchange, *c, buffer + 512, 2), "copied bytes at the end");
      me.f.equal(plain, round_from(me, exchange, *c, buffer + 528, 3), "copied bytes beyond the end");
      me.group.sleep();  // does not affect memory outside the heap
      me.group.wake();
      me.f.equal(uint64_t{0}, round_from(me, exchange, *c, buffer, 4), "copied bytes after a nap");
    }
    me.gather();
    me.f.equal(plain, round_from(me, exchange, *c, buffer, 5), "copied bytes when no longer registered");
    std::vector<float> host(16);
    const Outcome o = outcome_of([&] {
      (void)me.group.register_memory(me.rank() == 0 ? static_cast<void*>(host.data()) : static_cast<void*>(buffer), 64);
    });
    me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(o.code), "code, " + o.text);
    me.f.check(o.text.find("rank 0") != std::string::npos && o.text.find("malloc") != std::string::npos, "text: " + o.text);
    me.round(exchange, *c, 6);
  });
}

/// A rank that has ended its registration cannot read other ranks' rows: it reports a mismatch and makes no invalid read.
TEST_P(GpuMemory, RegistrationEndedByOneRankOnly) {
  const auto [world, width] = GetParam();
  if (world == 1) return;
  const auto c = make_case(with_width(gpu_scenario("ended", world, Layout::rank_major, 20), width));
  const NormalConfig config = make_config(*c);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    const auto bytes = static_cast<size_t>(worst_rows(*c)) * row_bytes_of(*c);
    std::byte* const buffer = me.allocate(bytes);
    std::optional<RegisteredMemory> registered(me.group.register_memory(buffer, bytes));
    if (me.rank() == 1) registered.reset();
    me.meet();
    Outcome o = outcome_of([&] {
      const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
      switchyard::ConstRows rows = d.x;
      rows.data = buffer;
      exchange.combine(rows, d.handle, in.out, me.combine_options(*c, me.stream()));
    });
    me.meet();
    if (me.rank() != 1) me.gather();  // its host has reported the error to the others
    if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
    if (me.rank() == 1) me.gather();
    me.f.equal(static_cast<int>(ErrorCode::mismatch), static_cast<int>(o.code), "code, " + o.text);
    me.f.check(cudaDeviceSynchronize() == cudaSuccess, "the context failed");
    me.gather();
  });
}

/// Must be called while the group sleeps.
void refuse_calls(Station& me, NormalExchange& exchange, const Case& c, const Inputs& in, const Dispatched& d) {
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { (void)exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(c, me.stream())); },
           [&] { (void)exchange.allocate_rows(d.handle, DType::bf16); },
           [&] { exchange.combine(d.x, d.handle, in.out, me.combine_options(c, me.stream())); }, [&] { me.group.sleep(); }}) {
    const Outcome o = outcome_of(call);
    me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(o.code), "asleep: " + o.text);
  }
}

/// While the group sleeps, the heap's memory is free on the GPU; handles, the object and a graph stay usable.
TEST_P(GpuMemory, SleepGivesMemoryBackAndEverythingGoesOn) {
  const auto [world, width] = GetParam();
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    const auto c = make_case(with_width(gpu_scenario("sleep", world, layout, 20), width));
    NormalConfig config = config_with_large_pool(*c, 3);
    on_gpus(world, heap_for(config, world) + kBallast, [&](Station& me) {
      switchyard::detail::number_calls_from(me.group, (uint64_t{1} << 40) - 4);
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0), again(*c, me.rank(), 1);
      const Inputs in = me.upload(*c, data), more = me.upload(*c, again);
      std::byte* const captured_out = me.allocate(in.out_bytes);
      me.meet();
      const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
      me.meet();
      const auto counts = d.handle.counts();
      // A graph with a cached dispatch and a combine, created before the sleep.
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      {
        const Dispatched e = exchange.dispatch(more.x, d.handle, me.dispatch_options(*c, me.stream()));
        exchange.combine(e.x, d.handle, captured_out, me.combine_options(*c, me.stream()));
      }
      must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
      must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
      for (int nap = 0; nap < 2; ++nap) {
        me.f.set_context("nap " + std::to_string(nap));
        me.meet();
        const size_t awake = free_memory();
        me.gather();
        me.group.sleep();
        const size_t asleep = free_memory();
        me.f.check(asleep >= awake + kBallast / 2,
                   std::to_string(awake) + " bytes are free awake, " + std::to_string(asleep) + " asleep");
        refuse_calls(me, exchange, *c, in, d);
        me.gather();
        me.group.wake();
        me.f.equal_range(counts.tokens_per_expert, d.handle.counts().tokens_per_expert, "tokens_per_expert");
        me.meet();
        const Dispatched e = exchange.dispatch(more.x, d.handle, me.dispatch_options(*c, me.stream()));
        exchange.combine(e.x, d.handle, more.out, me.combine_options(*c, me.stream()));
        must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
        me.meet();
        me.check_combined(again, more);
        me.check_combined(again, more, captured_out);
        me.round(exchange, *c, 5 + nap);
      }
      must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
      must(cudaGraphDestroy(graph), "cudaGraphDestroy");
      me.meet();
      me.group.sleep();  // objects and group are destroyed while asleep
    });
  }
}

/// The memory before and after an object in this rank's heap.
class Neighbours {
 public:
  static constexpr size_t kBytes = size_t{256} << 10;

  explicit Neighbours(Station& me) : me_(me), heap_(*me.group.impl().heap), before_(fill(heap_.allocate(kBytes, 4096))) {}
  /// Allocates the memory after the object. Must be called directly after the object is created.
  void enclose() { behind_ = fill(heap_.allocate(kBytes, switchyard::detail::OffsetAllocator::kGranule)); }
  size_t between() const { return behind_ - before_ - kBytes; }
  /// Must be called while all ranks are idle.
  void check() {
    std::vector<std::byte> got(kBytes);
    for (const size_t at : {before_, behind_}) {
      me_.read(got.data(), heap_.view().base[me_.rank()] + at, kBytes);
      const auto changed = std::find_if(got.begin(), got.end(), [](std::byte b) { return b != kFilled; }) - got.begin();
      me_.f.equal(kBytes, static_cast<size_t>(changed), "first byte that was changed of what lies beside an object");
    }
  }
  void release() {
    heap_.release(before_);
    heap_.release(behind_);
  }

 private:
  static constexpr std::byte kFilled{0x5A};
  size_t fill(size_t offset) {
    must(cudaMemsetAsync(heap_.view().base[me_.rank()] + offset, 0x5A, kBytes, me_.stream()), "cudaMemset");
    me_.meet();
    return offset;
  }

  Station& me_;
  switchyard::detail::SymmetricHeap& heap_;
  size_t before_, behind_ = 0;
};

/// An object uses exactly memory_required from the heap, and no call uses more or writes outside this memory.
TEST_P(GpuMemory, ObjectsKeepToWhatTheyNeed) {
  const auto [world, width] = GetParam();
  isolated([&] {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
      for (const Staging staging : {Staging::direct, Staging::ring}) {
        Scenario s = with_width(gpu_scenario("heap use", world, layout, 20), width);
        s.staging = staging;
        s.ring = {3, 2, 4};
        const auto c = make_case(s);
        if (layout == Layout::expert_major) s.order = CombineOrder::per_route;
        const auto routes = make_case(s);
        NormalConfig config = make_config(*c);
        const size_t need = NormalExchange::memory_required(config, world, kBackend).total();
        on_gpus(world, heap_for(config, world) + 2 * Neighbours::kBytes, [&](Station& me) {
          me.f.set_context(s.name + (staging == Staging::ring ? ", ring" : ""));
          const size_t unused = me.group.heap_used();
          Neighbours neighbours(me);
          {
            switchyard::detail::number_calls_from(me.group, (uint64_t{1} << 40) - 3);
            NormalExchange exchange(me.group, config);
            const size_t used = me.group.heap_used() - unused - Neighbours::kBytes;
            me.f.equal(need, used, "bytes of the heap");
            neighbours.enclose();
            me.f.equal(used, neighbours.between(), "bytes between the neighbours");
            for (int i = 0; i < 3; ++i) {
              me.round(exchange, *c, i);
              me.round(exchange, *routes, i);
            }
            me.f.equal(unused + used + 2 * Neighbours::kBytes, me.group.heap_used(), "heap in use after calls");
          }
          me.meet();
          neighbours.check();
          neighbours.release();
          me.f.equal(unused, switchyard::detail::heap_used_after_work(me.group), "heap in use at the end");
          me.meet();
        });
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuMemory,
                         testing::Values(RanksOf{1, Width::narrow}, RanksOf{2, Width::narrow}, RanksOf{4, Width::narrow},
                                         RanksOf{2, Width::wide}, RanksOf{4, Width::wide}),
                         [](const auto& ranks) { return testing::PrintToString(ranks.param); });

}  // namespace
}  // namespace harness
