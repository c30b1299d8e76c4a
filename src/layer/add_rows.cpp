// SPDX-License-Identifier: Apache-2.0
#include "layer/add_rows.hpp"

#include <algorithm>
#include <cstdint>

#include "base/number_formats.hpp"

namespace switchyard::detail {
namespace {

class HostRowAdder final : public RowAdder {
 public:
  explicit HostRowAdder(const LayerSetup& setup)
      : hidden_(setup.config.hidden), type_(setup.config.token_dtype()), sums_(new std::byte[setup.sum_bytes()]) {}

  void* sums() override { return sums_.get(); }
  bool takes(const void* out) const override {
    return out != nullptr && reinterpret_cast<uintptr_t>(out) % dtype_bytes(type_, 1) == 0;
  }
  void add(void* out, int64_t tokens, const MoeLayerCall&, int) override {
    constexpr int64_t kAtOnce = 256;
    float a[kAtOnce], b[kAtOnce];
    const int64_t elements = tokens * hidden_;
    for (int64_t at = 0; at < elements; at += kAtOnce) {
      const int64_t n = std::min(kAtOnce, elements - at);
      load_elements(out, type_, at, n, a);
      load_elements(sums_.get(), type_, at, n, b);
      for (int64_t i = 0; i < n; ++i) a[i] += b[i];
      store_elements(out, type_, at, n, a);
    }
  }

 private:
  int64_t hidden_;
  DType type_;
  std::unique_ptr<std::byte[]> sums_;
};

}  // namespace

std::unique_ptr<RowAdder> make_row_adder(const LayerSetup& setup) {
  if (setup.backend == Backend::cuda) return make_gpu_row_adder(setup);
  return std::make_unique<HostRowAdder>(setup);
}

}  // namespace switchyard::detail
