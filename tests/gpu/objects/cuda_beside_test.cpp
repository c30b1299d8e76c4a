// SPDX-License-Identifier: Apache-2.0
// Calls on two objects at the same time, both without other load and concurrently with matrix products that occupy all
// multiprocessors.
#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include "gpu/harness/object_rig.hpp"
#include "gpu/kernels/gemm_kernel.hpp"

namespace harness {
namespace {

constexpr int kMaxGpus = 16;

/// State shared by the ranks of a test. One rank on each GPU runs the products.
struct SharedByRanks {
  GemmMarks* marks[kMaxGpus] = {};  ///< by GPU
  int launches[kMaxGpus] = {};      ///< total number
  std::atomic<int> done{0};         ///< ranks whose calls have ended, or that have left
};

/// Counts this rank when its calls have ended, successfully or not.
class DoneAtLast {
 public:
  explicit DoneAtLast(std::atomic<int>& done) : done_(done) {}
  ~DoneAtLast() { now(); }
  DoneAtLast(const DoneAtLast&) = delete;
  void now() {
    if (!said_) ++done_;
    said_ = true;
  }

 private:
  std::atomic<int>& done_;
  bool said_ = false;
};

/// Consecutive products on a separate stream. Several products are enqueued at any time.
class GemmLoad {
 public:
  /// Runs one product. Must be called while no rank waits for a call.
  GemmLoad(Station& me, cudaStream_t stream) : me_(me), stream_(stream) {
    gemm_.blocks = gemm_blocks();
    gemm_.a = me.allocate(size_t{2} * static_cast<size_t>(gemm_.blocks) * Gemm::kTile * Gemm::kDepth);
    gemm_.b = me.allocate(size_t{2} * Gemm::kTile * Gemm::kDepth);
    gemm_.c = reinterpret_cast<float*>(me.allocate(elements() * 4));
    gemm_.marks = reinterpret_cast<GemmMarks*>(me.allocate(sizeof(GemmMarks)));
    uint32_t* words = nullptr;  // freed only when the process ends, because freeing it waits for all kernels
    must(cudaHostAlloc(reinterpret_cast<void**>(&words), 256, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    words[0] = words[32] = 0;
    gemm_.begun = words, gemm_.ended = words + 32;
    must(cudaMemsetAsync(gemm_.marks, 0, sizeof(GemmMarks), stream), "cudaMemset");
    launch_gemm_inputs(gemm_, stream);
    launch_gemm(gemm_, launched_++, stream);
    launch_ticket(gemm_.marks, reinterpret_cast<uint32_t*>(me.allocate(4)), stream);
    must(cudaStreamSynchronize(stream), "the first product");
  }

  GemmMarks* marks() const { return gemm_.marks; }
  int launched() const { return launched_; }
  /// Enqueues more products if few are left.
  void keep() {
    while (launched_ - static_cast<int>(*gemm_.ended) < kQueued) launch_gemm(gemm_, launched_++, stream_);
  }
  /// Returns once another product has begun.
  void begin() {
    const auto before = *gemm_.begun;
    const auto limit = std::chrono::steady_clock::now() + 20s;
    keep();
    while (*gemm_.begun == before) {
      if (std::chrono::steady_clock::now() > limit) throw std::runtime_error("the product does not begin");
      std::this_thread::yield();
    }
  }
  /// Checks all elements. Must be called after all launches have ended. The values repeat after 7 rows and 5 columns.
  void check() {
    float want[7][5] = {};
    for (int row = 0; row < 7; ++row)
      for (int column = 0; column < 5; ++column)
        for (int k = 0; k < Gemm::kDepth; ++k)
          want[row][column] += static_cast<float>(Gemm::kRounds * Gemm::a_value(row, k) * Gemm::b_value(k, column));
    std::vector<float> got(elements());
    me_.read(got.data(), gemm_.c, got.size() * 4);
    for (size_t i = 0; i < got.size(); ++i)
      if (!me_.f.equal(want[i / Gemm::kTile % 7][i % Gemm::kTile % 5], got[i], "product, element " + std::to_string(i))) break;
  }

 private:
  static constexpr int kQueued = 8;
  size_t elements() const { return static_cast<size_t>(gemm_.blocks) * Gemm::kTile * Gemm::kTile; }

  Station& me_;
  cudaStream_t stream_;
  Gemm gemm_;
  int launched_ = 0;
};

/// Tickets drawn on a rank's streams immediately before and after each of its calls.
struct Tickets {
  uint32_t *before, *after;
  int calls;
};

/// Checks by ticket order, not by times, that the products were in flight from before the first call until after the last one,
/// and that some call overlapped some product: the product had begun when the call ended, and the call had begun when the
/// product ended.
void check_together(Station& me, const GemmMarks* marks, int launches, const Tickets& t) {
  const auto calls = static_cast<size_t>(t.calls);
  std::vector<uint32_t> before(calls), after(calls), begun(static_cast<size_t>(launches)), ended(begun.size());
  me.read(before.data(), t.before, calls * 4);
  me.read(after.data(), t.after, calls * 4);
  me.read(begun.data(), marks->begun, begun.size() * 4);
  me.read(ended.data(), marks->ended, ended.size() * 4);
  me.f.check(std::is_sorted(begun.begin(), begun.end()) && std::is_sorted(ended.begin(), ended.end()), "products in turn");
  me.f.check(begun[1] < *std::min_element(before.begin(), before.end()), "a call came before the first product");
  me.f.check(ended.back() > *std::max_element(after.begin(), after.end()), "a call ended behind the last product");
  int together = 0, inside = 0;
  for (size_t i = 0; i < calls; ++i) {
    me.f.check(before[i] < after[i], "tickets of call " + std::to_string(i));
    // The first product that ended after the call began, and the first that ended after the call ended.
    const auto k = static_cast<size_t>(std::upper_bound(ended.begin(), ended.end(), before[i]) - ended.begin());
    const auto last = static_cast<size_t>(std::upper_bound(ended.begin(), ended.end(), after[i]) - ended.begin());
    together += k < begun.size() && begun[k] < after[i] ? 1 : 0;
    inside += last < begun.size() && begun[last] < after[i] ? 1 : 0;
  }
  me.f.check(together > 0, "no call was in flight together with a product");
  me.f.check(inside > 0, "no call ended while a product was in flight");
}

struct Beside {
  const char* name;
  int world;
  bool products;
  bool fill_together = false;  ///< use as many multiprocessors as two objects may take, including plans
};
std::ostream& operator<<(std::ostream& out, const Beside& b) { return out << b.name; }
class TwoObjects : public testing::TestWithParam<Beside> {
 protected:
  static constexpr int kRounds = 20;
  std::vector<std::shared_ptr<const Case>> cases_;
  std::vector<NormalConfig> configs_;
  size_t heap_ = 0;

  void SetUp() override {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
      Scenario s = gpu_scenario("two objects", GetParam().world, layout, 40, layout == Layout::rank_major ? 11 : 12);
      s.num_sms = 6;  // 8 ranks on a GPU, 2 objects, 6 blocks: fits on 132 multiprocessors
      s.hidden = 512;
      cases_.push_back(make_case(s));
      configs_.push_back(config_with_large_pool(*cases_.back(), 3));
      heap_ += heap_for(configs_.back(), GetParam().world);
    }
  }

  /// Enqueues all rounds of both objects, in the opposite order on odd ranks. Calls between() after each round.
  template <class Between>
  void enqueue(Station& me, NormalExchange* objects, const std::vector<Inputs>* in, GemmMarks* marks, const Tickets& t,
               Between&& between) {
    constexpr int kPlanSms = 16;  // a plan may use them in addition to num_sms
    const int half = half_of_a_rank(GetParam().world) - kPlanSms;
    for (int i = 0; i < kRounds; ++i) {
      for (int step = 0; step < 2; ++step) {
        const int o = (step + me.rank()) % 2, call = 2 * i + step;
        const Case& c = *cases_[static_cast<size_t>(o)];
        const Inputs& given = in[o][static_cast<size_t>(i)];
        DispatchOptions dispatch = me.dispatch_options(c, me.stream(o));
        CombineOptions combine = me.combine_options(c, me.stream(o));
        if (GetParam().fill_together) dispatch.num_sms = combine.num_sms = half;
        if (marks) launch_ticket(marks, t.before + call, me.stream(o));
        const Dispatched d = objects[o].dispatch(given.x, given.ids, given.weights, dispatch);
        objects[o].combine(d.x, d.handle, given.out, combine);
        if (marks) launch_ticket(marks, t.after + call, me.stream(o));
      }
      between();
    }
  }
};

/// Calls on two streams, enqueued in the opposite order on odd ranks, where all blocks fit on the GPU together; without other
/// load, and while products on another stream fill the GPU.
TEST_P(TwoObjects, InOppositeOrder) {
  const Beside& beside = GetParam();
  SharedByRanks shared;
  on_gpus(beside.world, heap_, [&](Station& me) {
    NormalExchange objects[2] = {NormalExchange(me.group, configs_[0]), NormalExchange(me.group, configs_[1])};
    std::vector<std::unique_ptr<RankData>> data[2];
    std::vector<Inputs> in[2];
    for (size_t o = 0; o < 2; ++o) {
      for (int i = 0; i < kRounds; ++i) {
        data[o].push_back(std::make_unique<RankData>(*cases_[o], me.rank(), i));
        in[o].push_back(me.upload(*cases_[o], *data[o].back()));
      }
    }
    Tickets t{nullptr, nullptr, 2 * kRounds};
    for (uint32_t** list : {&t.before, &t.after}) *list = reinterpret_cast<uint32_t*>(me.allocate(2 * kRounds * 4));
    int devices = 0;
    must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    const auto gpu = static_cast<size_t>(me.device());
    std::optional<GemmLoad> load;
    if (beside.products && me.rank() < std::min(devices, kMaxGpus)) {
      load.emplace(me, me.stream(2));
      shared.marks[gpu] = load->marks();
    }
    me.meet();
    if (load) load->begin();
    me.gather();
    DoneAtLast done(shared.done);
    const auto keep = [&] {
      if (load) load->keep();
    };
    enqueue(me, objects, in, beside.products ? shared.marks[gpu] : nullptr, t, keep);
    while (cudaStreamQuery(me.stream(0)) == cudaErrorNotReady || cudaStreamQuery(me.stream(1)) == cudaErrorNotReady) {
      keep();
      std::this_thread::sleep_for(50us);
    }
    (void)cudaGetLastError();  // not ready
    done.now();
    while (load && shared.done < beside.world) keep();
    if (load) {
      load->begin();  // starts a product after all calls
      shared.launches[gpu] = load->launched();
    }
    me.meet();
    me.group.check();
    if (beside.products) check_together(me, shared.marks[gpu], shared.launches[gpu], t);
    if (load) load->check();
    for (size_t o = 0; o < 2; ++o) {
      for (size_t i = 0; i < kRounds; ++i) {
        me.f.set_context("object " + std::to_string(o) + " round " + std::to_string(i));
        me.check_combined(*data[o][i], in[o][i]);
      }
    }
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, TwoObjects,
                         testing::Values(Beside{"W2", 2, false}, Beside{"W4", 4, false}, Beside{"W2_full_gpu", 2, true},
                                         Beside{"W4_full_gpu", 4, true}, Beside{"W2_half_each", 2, false, true}),
                         [](const auto& beside) { return std::string(beside.param.name); });

}  // namespace
}  // namespace harness
