// SPDX-License-Identifier: Apache-2.0
// The backward pass of an expert MLP, composed of library calls, is compared with finite differences of a float64 MLP that
// implements only the forward pass. Every element of every gradient is checked.
#include <string>
#include <utility>

#include "gpu/gemm/gradient_rig.hpp"
#include "gpu/gemm/host_rows.hpp"

namespace gemm_test {
namespace {

using switchyard::DType;
using switchyard::Epilogue;
using switchyard::ExpertRows;
using switchyard::GroupedGemm;
using switchyard::GroupedGemmConfig;
using switchyard::Rows;
using switchyard::WeightOrder;

constexpr int64_t kHidden = 32, kIntermediate = 24;

/// z[r, :] = w[r] * W2[e] swiglu(W13[e] x[r, :]), and the sum of dz * z.
struct Mlp {
  std::vector<int64_t> counts;
  SwigluNumbers swiglu;
  Numbers x, w13, w2, w, dz;

  int64_t rows() const { return static_cast<int64_t>(w.size()); }

  double loss_of_row(int64_t r, size_t expert) const {
    const double* in = x.data() + r * kHidden;
    const double* up = w13.data() + static_cast<int64_t>(expert) * 2 * kIntermediate * kHidden;
    const double* down = w2.data() + static_cast<int64_t>(expert) * kHidden * kIntermediate;
    double h[2 * kIntermediate] = {}, sum = 0;
    for (int64_t i = 0; i < 2 * kIntermediate; ++i)
      for (int64_t c = 0; c < kHidden; ++c) h[i] += up[i * kHidden + c] * in[c];
    for (int64_t c = 0; c < kHidden; ++c) {
      double y = 0;
      for (int64_t i = 0; i < kIntermediate; ++i) y += down[c * kIntermediate + i] * swiglu.out(h[i], h[kIntermediate + i]);
      sum += dz[static_cast<size_t>(r * kHidden + c)] * w[static_cast<size_t>(r)] * y;
    }
    return sum;
  }
  double loss() const {
    double sum = 0;
    int64_t r = 0;
    for (size_t e = 0; e < counts.size(); ++e)
      for (const int64_t end = r + counts[e]; r < end; ++r) sum += loss_of_row(r, e);
    return sum;
  }
  /// Returns the gradient of the loss with respect to every element of one member.
  Numbers differences(Numbers Mlp::*member) {
    constexpr double kStep = 1e-4;
    Numbers found;
    for (double& value : this->*member) {
      const double at = value;
      value = at + kStep;
      const double above = loss();
      value = at - kStep;
      found.push_back((above - loss()) / (2 * kStep));
      value = at;
    }
    return found;
  }
};

/// The same MLP on a GPU, with every array in the form that the library's calls expect.
class GpuMlp {
 public:
  GpuMlp(Mlp& mlp, bool f16) : mlp_(mlp), f16_(f16), rows_(mlp.rows()) {
    fill_all(mlp.x, x, 1, 1.F);
    fill_all(mlp.w13, w13, 2, 0.3F);
    fill_all(mlp.w2, w2, 3, 0.3F);
    fill_all(mlp.dz, dz, 4, 1.F);
    num_rows_.set(mlp.counts);
    std::vector<int64_t> first;
    for (int64_t at = 0; const int64_t c : mlp.counts) {
      first.push_back(at);
      at += c;
    }
    first_row_.set(first);
    ranges_.num_rows = num_rows_.as<int64_t>();
    ranges_.first_row = first_row_.as<int64_t>();
  }

  void forward() {
    multiply(Epilogue::none, WeightOrder::nk, w13, 2 * kIntermediate, kHidden, x, h);
    multiply(Epilogue::swiglu, WeightOrder::nk, w13, 2 * kIntermediate, kHidden, x, a);
    multiply(Epilogue::none, WeightOrder::nk, w2, kHidden, kIntermediate, a, y);
  }
  void backward() {
    // dy = w * dz, as computed by combine's backward pass.
    std::vector<uint16_t> bits;
    for (size_t i = 0; i < mlp_.dz.size(); ++i) bits.push_back(bits_of(mlp_.dz[i] * mlp_.w[i / kHidden], f16_));
    dy.set(bits);
    switchyard::RoutingGradient routing({experts(), kHidden, type()});
    routing.run(view(dz, kHidden), view(y, kHidden), ranges_, dw.as<float>());
    add_weights(kHidden, kIntermediate, dy, a, dw2);
    multiply(Epilogue::none, WeightOrder::kn, w2, kIntermediate, kHidden, dy, da);
    switchyard::SwigluGradientConfig c{experts(), kIntermediate, type(), {}};
    c.swiglu.alpha = static_cast<float>(mlp_.swiglu.alpha);
    c.swiglu.up_shift = static_cast<float>(mlp_.swiglu.shift);
    switchyard::SwigluGradient swiglu(c);
    swiglu.run(view(h, 2 * kIntermediate), view(da, kIntermediate), ranges_, view(dh, 2 * kIntermediate),
               view(again, kIntermediate));
    add_weights(2 * kIntermediate, kHidden, dh, x, dw13);
    multiply(Epilogue::none, WeightOrder::kn, w13, kHidden, 2 * kIntermediate, dh, dx);
    ok(cudaDeviceSynchronize());
  }

  Numbers numbers(const DeviceBytes& of, int64_t columns) const { return read_numbers(of.as(), rows_ * columns, f16_); }

 private:
  static constexpr int64_t kMaxRows = 64, kMaxExperts = 4, kWeights = kMaxExperts * 2 * kIntermediate * kHidden;

  int experts() const { return static_cast<int>(mlp_.counts.size()); }
  DType type() const { return f16_ ? DType::f16 : DType::bf16; }
  Rows view(const DeviceBytes& bytes, int64_t columns) const { return {bytes.as(), rows_, columns, type()}; }
  /// Rounds the host's numbers to the type.
  void fill_all(Numbers& host, const DeviceBytes& device, uint64_t seed, float scale) const {
    fill(device.as(), static_cast<int64_t>(host.size()), f16_, Fill::normal, seed, scale);
    host = read_numbers(device.as(), static_cast<int64_t>(host.size()), f16_);
  }
  void multiply(Epilogue epilogue, WeightOrder order, const DeviceBytes& weights, int64_t n, int64_t k, const DeviceBytes& in,
                const DeviceBytes& out) const {
    GroupedGemmConfig c;
    c.num_experts = experts();
    c.n = n;
    c.k = k;
    c.dtype = type();
    c.order = order;
    c.epilogue = epilogue;
    c.swiglu.alpha = static_cast<float>(mlp_.swiglu.alpha);
    c.swiglu.up_shift = static_cast<float>(mlp_.swiglu.shift);
    GroupedGemm(c, weights.as()).run(view(in, k), ranges_, view(out, c.columns()));
    ok(cudaDeviceSynchronize());  // the object is destroyed next
  }
  void add_weights(int64_t n, int64_t k, const DeviceBytes& gradient, const DeviceBytes& in, const DeviceBytes& to) const {
    ok(cudaMemset(to.as(), 0, kWeights * 4));
    switchyard::WeightGradient weights({experts(), n, k, type(), DType::f32, true});
    weights.run(view(gradient, n), view(in, k), ranges_, to.as());
    ok(cudaDeviceSynchronize());
  }

  Mlp& mlp_;
  bool f16_;
  int64_t rows_;
  DeviceBytes num_rows_{kMaxExperts * 8}, first_row_{kMaxExperts * 8};
  ExpertRows ranges_;

 public:
  DeviceBytes x{kMaxRows * kHidden * 2}, w13{kWeights * 2}, w2{kWeights * 2}, dz{kMaxRows * kHidden * 2};
  DeviceBytes h{kMaxRows * 2 * kIntermediate * 2}, a{kMaxRows * kIntermediate * 2}, y{kMaxRows * kHidden * 2};
  DeviceBytes dy{kMaxRows * kHidden * 2}, da{kMaxRows * kIntermediate * 2}, dh{kMaxRows * 2 * kIntermediate * 2};
  DeviceBytes again{kMaxRows * kIntermediate * 2}, dx{kMaxRows * kHidden * 2};
  DeviceBytes dw{kMaxRows * 4}, dw2{kWeights * 4}, dw13{kWeights * 4};
};

class MlpGradients : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(MlpGradients, MlpGradients, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& i) { return std::string(i.param ? "f16" : "bf16"); });

TEST_P(MlpGradients, AreFiniteDifferences) {
  const bool f16 = GetParam();
  const double tolerance = f16 ? 2e-3 : 1.2e-2;  // several roundings to the type in sequence
  for (const SwigluNumbers& swiglu : {SwigluNumbers{}, SwigluNumbers{INFINITY, 1.702, 1}}) {
    Mlp mlp;
    mlp.counts = {5, 0, 9};
    mlp.swiglu = swiglu;
    for (int r = 0; r < 14; ++r) mlp.w.push_back(0.5 + 0.125 * (r % 7));
    mlp.x.resize(14 * kHidden);
    mlp.dz.resize(14 * kHidden);
    mlp.w13.resize(3 * 2 * kIntermediate * kHidden);
    mlp.w2.resize(3 * kHidden * kIntermediate);
    GpuMlp gpu(mlp, f16);
    gpu.forward();
    gpu.backward();
    const std::string with = ", alpha " + std::to_string(swiglu.alpha);
    EXPECT_LE(relative(gpu.numbers(gpu.dx, kHidden), mlp.differences(&Mlp::x)), tolerance) << "x" << with;
    const auto weights = [](const DeviceBytes& of, const Numbers& like) {
      return read_floats(of.as(), static_cast<int64_t>(like.size()));
    };
    EXPECT_LE(relative(weights(gpu.dw13, mlp.w13), mlp.differences(&Mlp::w13)), tolerance) << "w13" << with;
    EXPECT_LE(relative(weights(gpu.dw2, mlp.w2), mlp.differences(&Mlp::w2)), tolerance) << "w2" << with;
    EXPECT_LE(relative(weights(gpu.dw, mlp.w), mlp.differences(&Mlp::w)), tolerance) << "w" << with;
    EXPECT_LE(relative(gpu.numbers(gpu.again, kIntermediate), gpu.numbers(gpu.a, kIntermediate)), tolerance) << "a" << with;
  }
}

}  // namespace
}  // namespace gemm_test
