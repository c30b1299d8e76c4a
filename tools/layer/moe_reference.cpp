// SPDX-License-Identifier: Apache-2.0
#include "layer/moe_reference.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "layer/fp8_operands.hpp"
#include "oracle/numbers.hpp"
#include "run/index.hpp"

// The loops below are compiled for several instruction sets if the compiler supports selection at run time, which sanitizers
// cannot instrument.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define SWITCHYARD_MULTIVERSION __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define SWITCHYARD_MULTIVERSION
#endif

namespace switchyard::tool {
namespace {

struct Route {
  int rank;
  int64_t token;
  float weight;
};

constexpr int64_t kBlock = 64;  // number of columns whose sums stay in registers or the L1 cache

/// Products of kRows rows of a [.., depth] and kBlock columns of b [depth, cols], written to out.
template <int kRows>
inline __attribute__((always_inline)) void multiply_block(const float* a, const float* b, float* out, int64_t depth,
                                                          int64_t cols) {
  float sum[kRows][kBlock] = {};
  for (int64_t k = 0; k < depth; ++k) {
    for (int m = 0; m < kRows; ++m) {
      const float x = a[m * depth + k];
      for (int64_t n = 0; n < kBlock; ++n) sum[m][n] += x * b[k * cols + n];
    }
  }
  for (int m = 0; m < kRows; ++m) std::copy_n(sum[m], kBlock, out + m * cols);
}

/// out [rows, cols] = a [rows, depth] * b [depth, cols], where cols is a multiple of kBlock.
SWITCHYARD_MULTIVERSION void multiply(const float* a, const float* b, float* out, int64_t rows, int64_t depth, int64_t cols) {
  for (int64_t n = 0; n < cols; n += kBlock) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) multiply_block<4>(a + m * depth, b + n, out + m * cols + n, depth, cols);
    for (; m < rows; ++m) multiply_block<1>(a + m * depth, b + n, out + m * cols + n, depth, cols);
  }
}

float widened(uint16_t bf16) {
  const uint32_t word = static_cast<uint32_t>(bf16) << 16;
  float value = 0;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

int64_t padded(int64_t cols) { return (cols + kBlock - 1) / kBlock * kBlock; }

constexpr int64_t kTile = 32;

/// float32 transpose [cols, padded(rows)] of a bf16 matrix [rows, cols]; padding is zero. Works in tiles so that both sides
/// stay in the cache. `values_of(row, col)` returns the values represented by the elements from (row, col) up to the next
/// multiple of kTile columns.
template <class ValuesOf>
void transpose(const std::vector<uint16_t>& from, int64_t rows, int64_t cols, std::vector<float>& to,
               const ValuesOf& values_of) {
  const int64_t stride = padded(rows);
  to.assign(at(cols * stride), 0.0f);
  for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      for (int64_t r = r0; r < std::min(rows, r0 + kTile); ++r) {
        const auto value = values_of(r, c0);
        for (int64_t c = c0; c < std::min(cols, c0 + kTile); ++c) to[at(c * stride + r)] = value(from[at(r * cols + c)]);
      }
    }
  }
}

/// Memory of one thread, reused for all its experts. With `fp8`, the operands of a layer are quantized.
class ExpertWorker {
 public:
  ExpertWorker(const ExpertWeights& weights, const Fp8Experts* fp8, const LayerArithmetic& numbers, int64_t hidden,
               int64_t intermediate)
      : weights_(weights),
        fp8_(fp8),
        numbers_(numbers),
        sum_moves_(numbers.long_sums_up() ? fast_sum_error(hidden) : kSumMoves),
        hidden_(hidden),
        intermediate_(intermediate),
        w13_(at(2 * intermediate * hidden)),
        w2_(at(hidden * intermediate)) {}

  /// The expert's outputs for these rows of `input`, float32 [routes, padded(H)].
  const std::vector<float>& run(int64_t expert, const std::vector<Route>& routes, const ReferenceInput& input) {
    const auto rows = static_cast<int64_t>(routes.size());
    make_weights(expert);
    x_.resize(at(rows * hidden_));
    for (int64_t i = 0; i < rows; ++i) {
      const uint16_t* row = input.rows[at(routes[at(i)].rank)] + routes[at(i)].token * hidden_;
      operand(row, &x_[at(i * hidden_)]);
    }
    const int64_t up_cols = padded(2 * intermediate_);
    up_.resize(at(rows * up_cols));
    multiply(x_.data(), w13_t_.data(), up_.data(), rows, hidden_, up_cols);
    h_.resize(at(rows * intermediate_));
    for (int64_t i = 0; i < rows; ++i) {
      const float* row = &up_[at(i * up_cols)];
      for (int64_t j = 0; j < intermediate_; ++j) h_[at(i * intermediate_ + j)] = silu(row[j]) * row[intermediate_ + j];
    }
    ambiguity_.assign(at(rows), 0);
    for (int64_t i = 0; fp8_ && i < rows; ++i)
      ambiguity_[at(i)] = quantise_between(&up_[at(i * up_cols)], &h_[at(i * intermediate_)]);
    y_.resize(at(rows * padded(hidden_)));
    multiply(h_.data(), w2_t_.data(), y_.data(), rows, intermediate_, padded(hidden_));
    return y_;
  }

  /// Ambiguity of the rows of the last run; see moe_reference().
  const std::vector<double>& ambiguity() const { return ambiguity_; }

 private:
  static float silu(float v) { return v / (1.0f + std::exp(-v)); }
  void make_weights(int64_t expert) {
    weights_.fill(expert, w13_, w2_);
    make_matrix(w13_, 2 * intermediate_, hidden_, intermediate_, fp8_ ? &fp8_->gate_up : nullptr, expert, w13_t_);
    make_matrix(w2_, hidden_, intermediate_, hidden_, fp8_ ? &fp8_->down : nullptr, expert, w2_t_);
    if (!fp8_) return;
    w2_norms_.assign(at(intermediate_), 0);
    for (int64_t j = 0; j < intermediate_; ++j)
      for (int64_t c = 0; c < hidden_; ++c) w2_norms_[at(j)] += square(w2_t_[at(j * padded(hidden_) + c)]);
  }
  void make_matrix(const std::vector<uint16_t>& from, int64_t rows, int64_t cols, int64_t half_rows, const Fp8Values* fp8,
                   int64_t expert, std::vector<float>& to) const {
    if (!fp8) return transpose(from, rows, cols, to, [](int64_t, int64_t) { return widened; });
    static_assert(measure::Fp8WeightForm::kBlock % kTile == 0);
    const measure::Fp8WeightSize size{1, rows, cols, half_rows, numbers_.scaling != ScaleGranularity::block};
    transpose(from, rows, cols, to, [&](int64_t row, int64_t col) {
      const float* values = fp8->of(expert, size.block_row(row), size.block_col(col));
      return [values](uint16_t bf16) { return values[bf16]; };
    });
  }
  void operand(const uint16_t* row, float* out) const {
    if (fp8_) return quantised(row, hidden_, token_scales(numbers_, hidden_), out);
    std::transform(row, row + hidden_, out, widened);
  }
  /// Quantizes the intermediate row computed from the sums `up`. \returns the row's ambiguity
  double quantise_between(const float* up, float* row) {
    const RowScales scales = between_scales(numbers_, intermediate_);
    double squares = 0;
    for (int64_t j = 0; j < 2 * intermediate_; ++j) squares += square(up[j]);
    const auto sum_moves = static_cast<float>(sum_moves_ * std::sqrt(squares / static_cast<double>(2 * intermediate_)));
    by_.resize(at(intermediate_));
    for (int64_t j = 0; j < intermediate_; ++j)
      by_[at(j)] = sum_moves * (std::fabs(silu(up[j])) + 1.1f * std::fabs(up[intermediate_ + j]));  // silu' is below 1.1
    range_.resize(at(intermediate_));
    quantised_range(row, by_.data(), intermediate_, scales, range_.data());
    double moved = 0;
    for (int64_t j = 0; j < intermediate_; ++j) moved += square(range_[at(j)]) * w2_norms_[at(j)];
    rounded_.resize(at(intermediate_));
    oracle::store_row(DType::bf16, row, intermediate_, rounded_.data());
    quantised(rounded_.data(), intermediate_, scales, row);
    return std::sqrt(moved);
  }
  static double square(float v) { return static_cast<double>(v) * static_cast<double>(v); }
  /// Maximum deviation of an exact sum in the first product from the reference, relative to the magnitude of these sums; the
  /// tensor cores add 128 fp8 products at a time with 14 bits.
  static constexpr double kSumMoves = 1.0 / 2048;

  const ExpertWeights& weights_;
  const Fp8Experts* fp8_;
  LayerArithmetic numbers_;
  double sum_moves_;
  int64_t hidden_, intermediate_;
  std::vector<uint16_t> w13_, w2_, rounded_;
  std::vector<float> w13_t_, w2_t_, x_, up_, h_, y_, by_, range_;
  std::vector<double> w2_norms_, ambiguity_;  ///< w2_norms_: squared, of columns
};

/// The weight of route `i` for its token, among the routes to an expert in token order. If a token names an expert several
/// times, its first route carries the sum of their weights.
double weight_of_run(const std::vector<Route>& routes, size_t i) {
  const auto same = [&](size_t a, size_t b) { return routes[a].rank == routes[b].rank && routes[a].token == routes[b].token; };
  if (i > 0 && same(i - 1, i)) return 0;
  double weight = 0;
  for (size_t k = i; k < routes.size() && same(i, k); ++k) weight += std::fabs(static_cast<double>(routes[k].weight));
  return weight;
}

/// One lock per group of tokens, because experts on different threads may add to the same token.
class TokenLocks {
 public:
  std::mutex& of(const Route& r) { return locks_[(static_cast<size_t>(r.token) * 31 + static_cast<size_t>(r.rank)) % kLocks]; }

 private:
  static constexpr size_t kLocks = 251;
  std::mutex locks_[kLocks];
};

}  // namespace

std::vector<std::vector<float>> moe_reference(const ReferenceInput& input, const ExpertWeights& weights, int64_t hidden,
                                              int64_t intermediate, int threads,
                                              const std::function<void(int64_t)>& on_progress,
                                              std::vector<std::vector<double>>* ambiguity) {
  const int experts = input.routing.front().num_experts;
  std::vector<std::vector<Route>> routes(at(experts));
  std::vector<std::vector<float>> out;
  std::vector<std::vector<double>> moved;  // squared norms
  for (size_t r = 0; r < input.routing.size(); ++r) {
    const Routing& routing = input.routing[r];
    out.emplace_back(at(routing.num_tokens * hidden), 0.0f);
    moved.emplace_back(at(routing.num_tokens), 0.0);
    for (int64_t f = 0; f < routing.num_tokens * routing.topk; ++f) {
      const int32_t id = routing.topk_ids[at(f)];
      if (id < 0 || id >= experts) continue;
      routes[at(id)].push_back(
          {static_cast<int>(r), f / routing.topk, routing.topk_weights.empty() ? 1.0f : routing.topk_weights[at(f)]});
    }
  }
  std::optional<Fp8Experts> fp8;
  if (input.arithmetic.fp8()) fp8.emplace(hidden, intermediate);
  std::atomic<int> next{0};
  std::atomic<int64_t> done{0};
  TokenLocks locks;
  const auto work = [&] {
    ExpertWorker worker(weights, fp8 ? &*fp8 : nullptr, input.arithmetic, hidden, intermediate);
    for (int e = next.fetch_add(1); e < experts; e = next.fetch_add(1)) {
      const std::vector<Route>& mine = routes[at(e)];
      if (!mine.empty()) {
        const std::vector<float>& y = worker.run(e, mine, input);
        for (size_t i = 0; i < mine.size(); ++i) {
          const std::lock_guard lock(locks.of(mine[i]));
          float* row = &out[at(mine[i].rank)][at(mine[i].token * hidden)];
          for (int64_t c = 0; c < hidden; ++c) row[c] += mine[i].weight * y[i * at(padded(hidden)) + at(c)];
          const double row_moved = weight_of_run(mine, i) * worker.ambiguity()[i];
          moved[at(mine[i].rank)][at(mine[i].token)] += row_moved * row_moved;
        }
      }
      const int64_t count = done.fetch_add(1) + 1;
      if (on_progress) on_progress(count);
    }
  };
  std::vector<std::thread> pool;
  for (int i = 1; i < threads; ++i) pool.emplace_back(work);
  work();
  for (std::thread& t : pool) t.join();
  for (std::vector<double>& of_rank : moved)
    for (double& square : of_rank) square = std::sqrt(square);
  if (ambiguity) *ambiguity = std::move(moved);
  return out;
}

double norm_of(const float* row, int64_t hidden) {
  double squares = 0;
  for (int64_t c = 0; c < hidden; ++c) squares += static_cast<double>(row[c]) * static_cast<double>(row[c]);
  return std::sqrt(squares);
}

double layer_tolerance(const ReferenceInput& input, int64_t hidden, int64_t intermediate, double norm, double ambiguity) {
  const LayerArithmetic& numbers = input.arithmetic;
  if (!numbers.fp8()) return kLayerTolerance;
  const double first = numbers.long_sums_up() ? fast_sum_error(hidden) : 0;
  const double second = numbers.long_sums_down() ? fast_sum_error(intermediate) : 0;
  const double largest = numbers.intermediate_scaling == OutputScaling::per_row ? first + 1.0 / 256 : 0;
  const double squares = (first + largest) / 8 + second * second;
  const double tolerance = squares == 0 ? kFp8LayerTolerance : std::sqrt(kFp8LayerTolerance * kFp8LayerTolerance + squares);
  if (intermediate >= kFewElements || norm == 0) return tolerance;
  return std::max(tolerance, 1.0 / 256 + ambiguity / norm);
}

double row_error(const uint16_t* got, const float* expected, int64_t hidden) {
  double difference = 0;
  double norm = 0;
  for (int64_t c = 0; c < hidden; ++c) {
    const double e = static_cast<double>(expected[c]);
    const double d = static_cast<double>(oracle::load(DType::bf16, got, c)) - e;
    difference += d * d;
    norm += e * e;
  }
  if (norm == 0) return difference == 0 ? 0 : 1;
  return std::isfinite(difference) ? std::sqrt(difference / norm) : 1e9;
}

}  // namespace switchyard::tool
