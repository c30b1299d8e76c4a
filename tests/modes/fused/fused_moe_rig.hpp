// SPDX-License-Identifier: Apache-2.0
// FusedMoe on CPU groups with closed-form products of small integers, and small calls for fault tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "exchange/fused/fused_moe.hpp"
#include "harness/small_arguments.hpp"
#include "oracle/numbers.hpp"
#include "switchyard/normal.hpp"

namespace harness {

/// From a row x, expert e computes h[j] = x[j mod H] and y[c] = (h[c mod I] + h[I - 1]) * (e + 1).
class IntegerProducts final : public switchyard::detail::FusedProducts {
 public:
  /// `first`: global number of local expert 0. `tile`: rows per tile.
  IntegerProducts(int64_t hidden, int64_t intermediate, int first, int64_t tile)
      : hidden_(hidden), intermediate_(intermediate), first_(first), tile_(tile) {}

  int64_t tile_rows(int64_t left) const override { return left < tile_ ? left : tile_; }
  void up(int, int, const void* x, int64_t rows, void* h) override {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < intermediate_; ++j) put(h, r * intermediate_ + j, get(x, r * hidden_ + j % hidden_));
    if (on_tile) on_tile();
  }
  void down(int, int expert, const void* h, int64_t rows, void* y) override {
    for (int64_t r = 0; r < rows; ++r) {
      const float last = get(h, (r + 1) * intermediate_ - 1);
      for (int64_t c = 0; c < hidden_; ++c)
        put(y, r * hidden_ + c,
            (get(h, r * intermediate_ + c % intermediate_) + last) * static_cast<float>(first_ + expert + 1));
    }
  }

  std::function<void()> on_tile;  ///< the worker calls it for every tile of the up product

 private:
  static float get(const void* from, int64_t at) { return oracle::load(switchyard::DType::bf16, bytes(from), at); }
  static void put(void* to, int64_t at, float value) {
    oracle::store(switchyard::DType::bf16, static_cast<std::byte*>(to), at, value);
  }
  static const std::byte* bytes(const void* p) { return static_cast<const std::byte*>(p); }

  int64_t hidden_, intermediate_;
  int first_;
  int64_t tile_;
};

/// A layer with valid arguments for every call. Each test invalidates one of them.
struct FusedMoeRig : SmallArguments {
  static constexpr int64_t kIntermediate = 32;

  static switchyard::detail::FusedMoeConfig config() {
    auto c = sized(switchyard::detail::FusedMoeConfig());
    c.intermediate = kIntermediate;
    return c;
  }
  static std::shared_ptr<IntegerProducts> products_of(const switchyard::Group& group) {
    return std::make_shared<IntegerProducts>(kHidden, kIntermediate,
                                             switchyard::first_expert(kExperts, group.size(), group.rank()), 3);
  }

  explicit FusedMoeRig(switchyard::Group& group, const switchyard::detail::FusedMoeConfig& c = config())
      : SmallArguments(group.rank()), products(products_of(group)), layer(group, c, products) {}
  void round() { layer.forward(rows.data(), expert_ids(), weights.data(), out.data()); }

  std::shared_ptr<IntegerProducts> products;
  switchyard::detail::FusedMoe layer;
};

}  // namespace harness
