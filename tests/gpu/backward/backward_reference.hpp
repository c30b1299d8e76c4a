// SPDX-License-Identifier: Apache-2.0
// The forward and backward passes of a whole layer in float64, computed from the definition. Shares no code with the library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace harness {

/// A bf16 layer on several ranks. Every rank can compute the arguments of all ranks.
struct BackwardCase {
  std::string name;
  std::vector<int64_t> tokens;  ///< of each rank
  int64_t capacity = 0;         ///< maximum number of rows of a rank; 0: unlimited
  int experts = 64, topk = 8;
  int64_t hidden = 1536, intermediate = 480;

  int world() const { return static_cast<int>(tokens.size()); }
};

using Doubles = std::vector<double>;

/// Element `index` of an array of multiples of `scale` / 128 in [-scale, scale), which are exact in bf16. `scale` is a power of
/// two.
inline uint64_t mixed(uint64_t array, uint64_t index) {
  uint64_t key = index * 2 + 1 + (array << 40);
  key = (key ^ key >> 33) * 0xff51afd7ed558ccdULL;
  key = (key ^ key >> 33) * 0xc4ceb9fe1a85ec53ULL;
  return key >> 33;
}
inline Doubles numbers_of(uint64_t array, int64_t count, double scale) {
  Doubles to(static_cast<size_t>(count));
  for (size_t i = 0; i < to.size(); ++i) to[i] = (static_cast<double>(mixed(array, i) & 255) - 128) * (scale / 128);
  return to;
}
/// Converts numbers that are exact in bf16.
inline std::vector<uint16_t> bf16_bits(const Doubles& numbers) {
  std::vector<uint16_t> to;
  to.reserve(numbers.size());
  for (const double n : numbers) {
    const auto f = static_cast<float>(n);
    uint32_t bits = 0;
    std::memcpy(&bits, &f, 4);
    to.push_back(static_cast<uint16_t>(bits >> 16));
  }
  return to;
}
inline double number_of_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float f = 0;
  std::memcpy(&f, &wide, 4);
  return static_cast<double>(f);
}

/// Inputs of one rank. One id in sixteen is invalid (-1 or E).
struct BackwardInput {
  Doubles x, dout;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  BackwardInput(const BackwardCase& c, int rank) {
    const int64_t tokens = c.tokens[static_cast<size_t>(rank)];
    const auto seed = static_cast<uint64_t>(rank) * 4 + 1000;
    x = numbers_of(seed, tokens * c.hidden, 1);
    dout = numbers_of(seed + 1, tokens * c.hidden, 1);
    for (int64_t f = 0; f < tokens * c.topk; ++f) {
      const uint64_t drawn = mixed(seed + 2, static_cast<uint64_t>(f));
      const auto id = static_cast<int32_t>(drawn % static_cast<uint64_t>(c.experts));
      ids.push_back(drawn >> 20 & 15 ? id : drawn >> 24 & 1 ? -1 : c.experts);
      weights.push_back(0.25f + static_cast<float>(mixed(seed + 3, static_cast<uint64_t>(f)) & 255) / 256);
    }
  }
};

/// Weights of one expert: w13 [2 I, H], w2 [H, I].
struct BackwardWeights {
  Doubles w13, w2;
  BackwardWeights(const BackwardCase& c, int expert)
      : w13(numbers_of(2 * static_cast<uint64_t>(expert), 2 * c.intermediate * c.hidden, 1. / 16)),
        w2(numbers_of(2 * static_cast<uint64_t>(expert) + 1, c.hidden * c.intermediate, 1. / 8)) {}
};

/// |got - exact| relative to |exact|, accumulated over many elements.
struct Distance {
  double error = 0, norm = 0;
  void add(double got, double exact) {
    const double d = got - exact;
    error += d * d;
    norm += exact * exact;
  }
  /// If all exact elements are 0, only zeros are accepted. A NaN never is.
  bool within(double tolerance) const { return norm > 0 ? std::sqrt(error / norm) <= tolerance : error == 0; }
  std::string text() const {
    return "off by " + std::to_string(std::sqrt(error)) + ", the reference has a norm of " + std::to_string(std::sqrt(norm));
  }
};

namespace backward {

/// n is a multiple of 8.
inline double dot(const double* a, const double* b, size_t n) {
  double sums[8] = {};
  for (size_t i = 0; i < n; i += 8)
    for (size_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
/// to += factor * v
inline void add(double* to, double factor, const double* v, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] += factor * v[i];
}

}  // namespace backward

/// All ranks' arguments and the results for every route. Each expert's rank fills in its part of `routes`.
class BackwardReference {
 public:
  /// Results for route f of a rank's tokens.
  struct Route {
    Doubles y, dx;  ///< w * y; empty: the route has no expert
    double dweight = 0;
  };

  explicit BackwardReference(const BackwardCase& given) : c(given), dropped(given.tokens.size()) {
    for (int r = 0; r < c.world(); ++r) {
      inputs.emplace_back(c, r);
      routes.emplace_back(inputs.back().ids.size());
    }
  }

  /// Calls `visit(first element, row)` for every row of the gradients of w13, then of w2. Several threads may process experts.
  /// `dropped` must be complete.
  template <class Visit13, class Visit2>
  void expert(int e, const Visit13& visit_w13, const Visit2& visit_w2) {
    const std::vector<Work> work = work_of(e);
    const BackwardWeights w(c, e);
    const auto h = static_cast<size_t>(c.hidden), width = static_cast<size_t>(c.intermediate);
    std::vector<Doubles> sums(work.size(), Doubles(2 * width)), a(work.size(), Doubles(width)), da = a;
    for (size_t i = 0; i < 2 * width; ++i)
      for (size_t r = 0; r < work.size(); ++r) sums[r][i] = backward::dot(&w.w13[i * h], work[r].x, h);
    for (size_t r = 0; r < work.size(); ++r) {
      for (size_t i = 0; i < width; ++i) a[r][i] = sums[r][i] / (1 + std::exp(-sums[r][i])) * sums[r][width + i];
      work[r].to->y.assign(h, 0);
      work[r].to->dx.assign(h, 0);
    }
    for (size_t i = 0; i < h; ++i) {
      Doubles row(width);
      for (size_t r = 0; r < work.size(); ++r) {
        const double y = backward::dot(&w.w2[i * width], a[r].data(), width), dz = work[r].dout[i];
        work[r].to->y[i] = work[r].weight * y;
        work[r].to->dweight += dz * y;
        backward::add(da[r].data(), work[r].weight * dz, &w.w2[i * width], width);
        backward::add(row.data(), work[r].weight * dz, a[r].data(), width);
      }
      visit_w2(i * width, row);
    }
    for (size_t r = 0; r < work.size(); ++r) to_sums(sums[r], da[r]);
    for (size_t i = 0; i < 2 * width; ++i) {
      Doubles row(h);
      for (size_t r = 0; r < work.size(); ++r) {
        backward::add(row.data(), sums[r][i], work[r].x, h);
        backward::add(work[r].to->dx.data(), sums[r][i], &w.w13[i * h], h);
      }
      visit_w13(i * h, row);
    }
  }

  /// [T, H]: the sum of a token's routes. All experts must have been processed.
  Doubles sum(int rank, Doubles Route::*of) const {
    const auto h = static_cast<size_t>(c.hidden);
    Doubles to(inputs[static_cast<size_t>(rank)].x.size());
    const std::vector<Route>& mine = routes[static_cast<size_t>(rank)];
    for (size_t f = 0; f < mine.size(); ++f)
      if (const Doubles& row = mine[f].*of; !row.empty())
        backward::add(&to[f / static_cast<size_t>(c.topk) * h], 1, row.data(), h);
    return to;
  }

  const BackwardCase c;
  std::vector<BackwardInput> inputs;
  std::vector<std::vector<Route>> routes;
  std::vector<std::vector<uint8_t>> dropped;  ///< of each rank, [T, K]; set by that rank

 private:
  struct Work {
    const double *x, *dout;
    double weight;
    Route* to;
  };
  std::vector<Work> work_of(int e) {
    std::vector<Work> work;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      const BackwardInput& in = inputs[rank];
      for (size_t f = 0; f < in.ids.size(); ++f) {
        if (in.ids[f] != e || (!dropped[rank].empty() && dropped[rank][f] != 0)) continue;
        const size_t row = f / static_cast<size_t>(c.topk) * static_cast<size_t>(c.hidden);
        work.push_back({&in.x[row], &in.dout[row], static_cast<double>(in.weights[f]), &routes[rank][f]});
      }
    }
    return work;
  }
  /// Computes the gradient of SwiGLU's inputs in place from the gradient of its outputs.
  static void to_sums(Doubles& sums, const Doubles& da) {
    for (size_t i = 0; i < da.size(); ++i) {
      const double gate = sums[i], up = sums[da.size() + i], s = 1 / (1 + std::exp(-gate));
      sums[i] = da[i] * up * s * (1 + gate * (1 - s));
      sums[da.size() + i] = da[i] * gate * s;
    }
  }
};

}  // namespace harness
