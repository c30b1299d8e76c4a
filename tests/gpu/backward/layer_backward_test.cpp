// SPDX-License-Identifier: Apache-2.0
// Compares the forward and backward passes of a whole layer, made with library calls as in docs/layer.md, with float64: the
// gradients of tokens, routing weights and all expert weights. Two ranks, which may share a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/backward/backward_reference.hpp"
#include "gpu/backward/backward_rows.hpp"
#include "gpu/harness/object_rig.hpp"
#include "switchyard/gemm.hpp"
#include "switchyard/gemm_gradients.hpp"

namespace harness {
namespace {

using switchyard::Backend;
using switchyard::CombineOrder;
using switchyard::ConstRows;
using switchyard::Epilogue;
using switchyard::ExpertIds;
using switchyard::ExpertRows;
using switchyard::GroupedGemm;
using switchyard::GroupedGemmConfig;
using switchyard::GroupedGemmOptions;
using switchyard::Overflow;
using switchyard::RoutingGradient;
using switchyard::RowBuffer;
using switchyard::Rows;
using switchyard::SwigluGradient;
using switchyard::WeightGradient;
using switchyard::WeightOrder;

constexpr double kTolerance = 2e-2;  // several roundings to bf16 in sequence

/// Memory on a rank's GPU for data that does not fit into the test's arena. Allocated and freed while all ranks are idle.
class OwnMemory {
 public:
  explicit OwnMemory(size_t bytes) { must(cudaMalloc(&p_, bytes), "cudaMalloc"); }
  ~OwnMemory() { (void)cudaFree(p_); }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(p_);
  }

 private:
  void* p_ = nullptr;
};

size_t size_of(int64_t n) { return static_cast<size_t>(n); }

int experts_of(const BackwardCase& c, int rank) {
  return switchyard::first_expert(c.experts, c.world(), rank + 1) - switchyard::first_expert(c.experts, c.world(), rank);
}

NormalConfig exchange_config(const BackwardCase& c) {
  NormalConfig config;
  config.hidden = c.hidden;
  config.num_experts = c.experts;
  config.topk = c.topk;
  config.max_tokens = *std::max_element(c.tokens.begin(), c.tokens.end());
  config.layout = Layout::expert_major;
  // The rows and gradients of both passes are held at the same time, which takes twice the memory of an output and its expert
  // outputs.
  config.pool_bytes = 2 * NormalExchange::memory_required(config, c.world(), Backend::cuda).pool_bytes;
  return config;
}
/// Rows with one float32 value for each route of a token, padded to a multiple of 16 bytes.
NormalConfig routing_config(const BackwardCase& c) {
  NormalConfig config = exchange_config(c);
  config.hidden = (c.topk + 3) / 4 * 4;
  config.dtype = DType::f32;
  config.pool_bytes = 0;
  return config;
}
size_t heap_bytes(const BackwardCase& c) {
  return NormalExchange::heap_bytes(exchange_config(c), c.world(), Backend::cuda) +
         NormalExchange::heap_bytes(routing_config(c), c.world(), Backend::cuda);
}

GroupedGemmConfig product(int experts, int64_t n, int64_t k, WeightOrder order, Epilogue epilogue) {
  GroupedGemmConfig config;
  config.num_experts = experts;
  config.n = n;
  config.k = k;
  config.order = order;
  config.epilogue = epilogue;
  return config;
}

/// One rank of a layer in training: its weights, objects and memory, and the calls in both passes. Construction is collective.
class TrainedLayer {
 public:
  TrainedLayer(Station& me, const BackwardCase& c)
      : me_(me),
        c_(c),
        here_(experts_of(c, me.rank())),
        elements_(here_ * c.hidden * c.intermediate),
        tokens_(c.tokens[size_of(me.rank())]),
        w13_(size_of(4 * elements_)),
        w2_(size_of(2 * elements_)),
        dw13_(size_of(8 * elements_)),
        dw2_(size_of(4 * elements_)),
        exchange_(me.group, exchange_config(c)),
        to_owners_(me.group, routing_config(c)),
        up_(product(here_, 2 * c.intermediate, c.hidden, WeightOrder::nk, Epilogue::swiglu), w13_.as<void>()),
        sums_(product(here_, 2 * c.intermediate, c.hidden, WeightOrder::nk, Epilogue::none), w13_.as<void>()),
        down_(product(here_, c.hidden, c.intermediate, WeightOrder::nk, Epilogue::none), w2_.as<void>()),
        down_back_(product(here_, c.intermediate, c.hidden, WeightOrder::kn, Epilogue::none), w2_.as<void>()),
        up_back_(product(here_, c.hidden, 2 * c.intermediate, WeightOrder::kn, Epilogue::none), w13_.as<void>()),
        routing_({here_, c.hidden, DType::bf16}),
        swiglu_({here_, c.intermediate, DType::bf16, {}}),
        w13_gradient_({here_, 2 * c.intermediate, c.hidden, DType::bf16, DType::f32, false}),
        w2_gradient_({here_, c.hidden, c.intermediate, DType::bf16, DType::f32, false}) {
    upload_weights();
    const BackwardInput input(c, me.rank());
    const auto upload_rows = [&](const Doubles& rows) {
      const std::vector<uint16_t> bits = bf16_bits(rows);
      return me.upload(bits.data(), bits.size() * 2);
    };
    x_ = {upload_rows(input.x), tokens_, c.hidden, DType::bf16};
    dout_ = {upload_rows(input.dout), tokens_, c.hidden, DType::bf16};
    ids_ = ExpertIds::of(static_cast<const int32_t*>(me.upload(input.ids.data(), input.ids.size() * 4)), tokens_, c.topk);
    weights_ = static_cast<const float*>(me.upload(input.weights.data(), input.weights.size() * 4));
    out = me.allocate(input.x.size() * 2 + 16);
    dx = me.allocate(input.x.size() * 2 + 16);
    dweights = reinterpret_cast<float*>(me.allocate(size_of(tokens_ * columns()) * 4 + 16));
    const int64_t rows = switchyard::max_rows(exchange_config(c), c.world());
    h_ = {me.allocate(size_of(rows * 4 * c.intermediate)), rows, 2 * c.intermediate, DType::bf16};
    a_ = {me.allocate(size_of(rows * 2 * c.intermediate)), rows, c.intermediate, DType::bf16};
    da_ = {me.allocate(size_of(rows * 2 * c.intermediate)), rows, c.intermediate, DType::bf16};
    dweight_ = reinterpret_cast<float*>(me.allocate(size_of(rows) * 4));
    placed_ = {me.allocate(size_of(rows * columns()) * 4), rows, columns(), DType::f32};
  }

  void forward() {
    DispatchOptions send = {.stream = me_.stream()};
    if (c_.capacity > 0) {
      send.size = SizePolicy::capacity;
      send.capacity = c_.capacity;
      send.overflow = Overflow::drop_and_report;
    }
    d_ = exchange_.dispatch(x_, ids_, weights_, send);
    const ExpertRows rows = ExpertRows::of(d_);
    up_.run(d_.x, rows, of_rows(a_), experts_);
    y_ = exchange_.allocate_rows(d_.handle, DType::bf16, me_.stream());
    down_.run(of_rows(a_), rows, y_.rows(), experts_);
    exchange_.combine(y_.rows(), d_.handle, out, back());
  }

  /// The calls listed in docs/layer.md.
  void backward() {
    const Dispatched e = exchange_.dispatch(dout_, d_.handle, {.stream = me_.stream()});  // dz: the rows of x, cached
    const ExpertRows rows = ExpertRows::of(d_);
    routing_.run(e.x, y_.rows(), rows, dweight_, experts_);                                                 // dw = dot(dz, y)
    weigh_rows(e.x.data, d_.x.rows, c_.hidden, d_.row_weights.data(), d_.row_source.data(), me_.stream());  // dy = w dz
    sums_.run(d_.x, rows, of_rows(h_), experts_);                                                           // h again
    down_back_.run(e.x, rows, of_rows(da_), experts_);                                                      // da = W2^T dy
    swiglu_.run(of_rows(h_), of_rows(da_), rows, of_rows(h_), of_rows(a_), experts_);  // dh in h's memory; a again
    w2_gradient_.run(e.x, of_rows(a_), rows, dw2_.as<void>(), experts_);
    w13_gradient_.run(of_rows(h_), d_.x, rows, dw13_.as<void>(), experts_);
    const RowBuffer dx_rows = exchange_.allocate_rows(d_.handle, DType::bf16, me_.stream());
    up_back_.run(of_rows(h_), rows, dx_rows.rows(), experts_);  // W13^T dh
    CombineOptions plain = back();
    plain.apply_weights = false;  // dy already contains them
    exchange_.combine(dx_rows.rows(), d_.handle, dx, plain);
    place_in_columns(static_cast<float*>(placed_.data), d_.x.rows, columns(), dweight_, d_.row_source.data(), me_.stream());
    to_owners_.combine(of_rows(placed_), d_.handle, dweights, plain);
  }

  /// Fills memory with NaNs to reveal unwritten elements.
  void forget() {
    must(cudaMemsetAsync(dw13_.as<void>(), 0xff, size_of(8 * elements_), me_.stream()), "cudaMemset");
    must(cudaMemsetAsync(dw2_.as<void>(), 0xff, size_of(4 * elements_), me_.stream()), "cudaMemset");
  }
  /// Call while idle. This rank's dropped routes, [T, K]; empty if nothing can be dropped.
  std::vector<uint8_t> dropped() {
    std::vector<uint8_t> to(d_.dropped.size());
    if (to.empty()) return to;
    const std::byte* const copy = me_.keep(d_.dropped.data(), to.size(), me_.stream());
    me_.synchronize();
    me_.read(to.data(), copy, to.size());
    return to;
  }
  /// Must be called before the objects are destroyed.
  void release() {
    d_ = {};
    y_ = {};
  }

  int columns() const { return static_cast<int>(routing_config(c_).hidden); }
  const float* dw13() const { return dw13_.as<float>(); }
  const float* dw2() const { return dw2_.as<float>(); }

  void *out = nullptr, *dx = nullptr;  ///< [T, H]
  float* dweights = nullptr;           ///< [T, columns()]; only the first K columns are used

 private:
  /// Rows in private memory, as many as the dispatch allocated.
  Rows of_rows(const Rows& all) const { return {all.data, d_.x.rows, all.cols, all.dtype}; }
  CombineOptions back() const {
    CombineOptions options;
    options.order = CombineOrder::per_route;
    options.stream = me_.stream();
    return options;
  }
  void upload_weights() {
    const int first = switchyard::first_expert(c_.experts, c_.world(), me_.rank());
    const int64_t one = c_.hidden * c_.intermediate;
    for (int e = 0; e < here_; ++e) {
      const BackwardWeights of(c_, first + e);
      const std::vector<uint16_t> w13 = bf16_bits(of.w13), w2 = bf16_bits(of.w2);
      must(cudaMemcpyAsync(w13_.as<uint16_t>() + e * 2 * one, w13.data(), w13.size() * 2, cudaMemcpyHostToDevice, me_.stream()),
           "weights");
      must(cudaMemcpyAsync(w2_.as<uint16_t>() + e * one, w2.data(), w2.size() * 2, cudaMemcpyHostToDevice, me_.stream()),
           "weights");
      must(cudaStreamSynchronize(me_.stream()), "weights");
    }
  }

  Station& me_;
  BackwardCase c_;
  int here_;
  int64_t elements_, tokens_;
  OwnMemory w13_, w2_, dw13_, dw2_;
  NormalExchange exchange_, to_owners_;
  GroupedGemm up_, sums_, down_, down_back_, up_back_;
  RoutingGradient routing_;
  SwigluGradient swiglu_;
  WeightGradient w13_gradient_, w2_gradient_;
  const GroupedGemmOptions experts_{me_.stream(), 32};  // ranks may share a GPU
  ConstRows x_, dout_;
  ExpertIds ids_;
  const float* weights_ = nullptr;
  Rows h_, a_, da_, placed_;
  float* dweight_ = nullptr;
  Dispatched d_;
  RowBuffer y_;
};

/// Processes this rank's experts in several threads: compares their gradients and fills in the results of their routes.
void judge_experts(Station& me, const TrainedLayer& layer, BackwardReference& exact) {
  const BackwardCase& c = exact.c;
  const int first = switchyard::first_expert(c.experts, c.world(), me.rank()), here = experts_of(c, me.rank());
  const auto one = size_of(c.hidden * c.intermediate);
  std::vector<float> dw13(size_of(here) * 2 * one), dw2(size_of(here) * one);
  me.read(dw13.data(), layer.dw13(), dw13.size() * 4);
  me.read(dw2.data(), layer.dw2(), dw2.size() * 4);
  std::atomic<int> next{0};
  std::mutex mutex;
  Distance all13, all2;
  const auto work = [&] {
    for (int e = next++; e < here; e = next++) {
      Distance of13, of2;
      const auto compare = [&](Distance& to, const float* got, const Doubles& row) {
        for (size_t i = 0; i < row.size(); ++i) to.add(static_cast<double>(got[i]), row[i]);
      };
      exact.expert(
          first + e, [&](size_t at, const Doubles& row) { compare(of13, &dw13[size_of(e) * 2 * one + at], row); },
          [&](size_t at, const Doubles& row) { compare(of2, &dw2[size_of(e) * one + at], row); });
      const std::lock_guard lock(mutex);
      me.f.check(of13.within(kTolerance), "gradient of w13 of expert " + std::to_string(first + e) + ": " + of13.text());
      me.f.check(of2.within(kTolerance), "gradient of w2 of expert " + std::to_string(first + e) + ": " + of2.text());
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& t : threads) t.join();
}

void judge_rows(Station& me, const void* device, const Doubles& exact, const std::string& what) {
  std::vector<uint16_t> bits(exact.size());
  me.read(bits.data(), device, bits.size() * 2);
  Distance d;
  for (size_t i = 0; i < bits.size(); ++i) d.add(number_of_bf16(bits[i]), exact[i]);
  me.f.check(d.within(kTolerance), what + ": " + d.text());
}

/// Checks gradients of routing weights, which must be 0 for routes without an expert. \returns the number of those routes
int64_t judge_weights(Station& me, const TrainedLayer& layer, const BackwardReference& exact) {
  const std::vector<BackwardReference::Route>& routes = exact.routes[size_of(me.rank())];
  const auto topk = size_of(exact.c.topk), columns = size_of(layer.columns());
  std::vector<float> got(routes.size() / topk * columns);
  me.read(got.data(), layer.dweights, got.size() * 4);
  Distance d;
  int64_t nowhere = 0, not_zero = 0;
  for (size_t f = 0; f < routes.size(); ++f) {
    const float value = got[f / topk * columns + f % topk];
    d.add(static_cast<double>(value), routes[f].dweight);
    if (!routes[f].y.empty()) continue;
    ++nowhere;
    if (value != 0) ++not_zero;
  }
  me.f.check(d.within(kTolerance), "gradients of routing weights: " + d.text());
  me.f.equal(int64_t{0}, not_zero, "gradients of routes that lead nowhere and are not 0");
  return nowhere;
}

std::vector<BackwardCase> backward_cases() {
  return {{.name = "all", .tokens = {128, 128}},
          {.name = "no_tokens", .tokens = {0, 128}},
          {.name = "drops", .tokens = {128, 128}, .capacity = 700}};
}

class LayerBackward : public testing::TestWithParam<BackwardCase> {};

TEST_P(LayerBackward, IsTheGradient) {
  BackwardReference exact(GetParam());
  const BackwardCase& c = exact.c;
  on_gpus(c.world(), heap_bytes(c), [&](Station& me) {
    TrainedLayer layer(me, c);
    layer.forget();
    me.meet();
    layer.forward();
    layer.backward();
    me.meet();
    me.group.check();
    std::vector<uint8_t>& dropped = exact.dropped[size_of(me.rank())];
    dropped = layer.dropped();
    me.f.check((c.capacity > 0) == (std::count(dropped.begin(), dropped.end(), 1) > 0), "which routes were dropped");
    me.meet();
    judge_experts(me, layer, exact);
    me.meet();
    judge_rows(me, layer.out, exact.sum(me.rank(), &BackwardReference::Route::y), "outputs");
    judge_rows(me, layer.dx, exact.sum(me.rank(), &BackwardReference::Route::dx), "gradients of tokens");
    const int64_t nowhere = judge_weights(me, layer, exact);
    const int64_t routes = c.tokens[size_of(me.rank())] * c.topk;
    me.f.check(nowhere < routes / 2 || routes == 0, "most routes lead nowhere");
    me.f.check(nowhere > 0 || routes == 0, "every route leads somewhere");
    me.meet();
    layer.release();
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, LayerBackward, testing::ValuesIn(backward_cases()), [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace harness
