// SPDX-License-Identifier: Apache-2.0
#include "layer/quantise_tokens.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "arch/gpu_order.hpp"
#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/gpu_memory.hpp"
#include "gemm/gpu/quantise_rows.hpp"

namespace switchyard::detail {
namespace {

constexpr const char* kClass = "MoeLayer";

class GpuTokenQuantiser final : public TokenQuantiser {
 public:
  explicit GpuTokenQuantiser(const LayerSetup& setup)
      : max_tokens_(setup.config.max_tokens),
        hidden_(setup.config.hidden),
        scale_bytes_(setup.token_scale_bytes()),
        memory_(kClass, std::max<size_t>(setup.token_bytes(), 16)) {
    int device = 0;
    gpu::DeviceTraits traits;
    gemm::check_gpu(gpu::current_device(&device), kClass, "current GPU");
    gemm::check_gpu(gpu::traits_of(&traits, device), kClass, "properties of the GPU");
    device_ = device;
    multiprocessors_ = traits.multiprocessors;
    gemm::check_gpu(gemm::load_quantise_rows(), kClass, "kernel that quantizes tokens");
  }

  ConstRows quantise(const ConstRows& x, const FormCall& call, int num_sms) override {
    auto* const scales = static_cast<std::byte*>(memory_.data());
    ConstRows to{
        scales + static_cast<size_t>(max_tokens_) * scale_bytes_, x.rows, hidden_, DType::fp8_e4m3, scales, ScaleKind::f32};
    const auto stream = static_cast<gpu::Stream>(call.stream);
    if (x.rows <= 0 || x.rows > max_tokens_ || !accepts(stream)) return to;
    if (call.device_tokens != nullptr && !reads(call.device_tokens, 4, call.known_memory)) return to;
    if (!reads(x.data, 16, call.known_memory)) {
      to.data = x.data;
      return to;
    }
    gemm::RowQuantising of;
    of.from = x.data;
    of.rows = x.rows;
    of.columns = hidden_;
    of.to = scales + static_cast<size_t>(max_tokens_) * scale_bytes_;
    of.scales = static_cast<float*>(memory_.data());
    of.scale_words = static_cast<int64_t>(scale_bytes_ / sizeof(float));
    of.copies = static_cast<int>(num_scales(hidden_));
    const int blocks = num_sms > 0 ? std::min(num_sms, multiprocessors_) : multiprocessors_;
    memory_.used_on(stream);
    gemm::check_gpu(gemm::quantise_rows(of, call.device_tokens, blocks, stream), kClass,
                    "launch of the kernel that quantizes tokens");
    return to;
  }

 private:
  /// False if a dispatch rejects the stream because it belongs to another GPU. A dispatch does not check streams in capture.
  bool accepts(gpu::Stream stream) {
    if (gpu::is_legacy(stream) || gpu::is_per_thread(stream) || capture_of(stream).active) return true;
    unsigned long long id = kNoStream;
    int on = -1;
    if (gpu::id_of(stream, &id) == gpu::kOk) {
      if (id == checked_stream_) return true;
      if (gpu::device_of(stream, &on) == gpu::kOk) {
        if (on == device_) checked_stream_ = id;
        return on == device_;
      }
    }
    gpu::forget_error();
    return false;
  }
  /// True if kernels of this GPU can read the memory. `known`: the caller guarantees its place (layer/known_memory.hpp).
  bool reads(const void* p, size_t alignment, bool known) const {
    if (p == nullptr || reinterpret_cast<uintptr_t>(p) % alignment != 0) return false;
    if (known) return true;
    gpu::MemoryPlace place;
    if (gpu::look_up(&place, p) != gpu::kOk) {
      gpu::forget_error();
      return false;
    }
    return place.kind == gpu::MemoryKind::managed || (place.kind == gpu::MemoryKind::device && place.device == device_);
  }

  static constexpr unsigned long long kNoStream = ~0ull;

  int64_t max_tokens_, hidden_;
  size_t scale_bytes_;
  unsigned long long checked_stream_ = kNoStream;  ///< the last stream that was verified to belong to this GPU
  int multiprocessors_ = 0, device_ = -1;
  gemm::GpuMemory memory_;
};

}  // namespace

std::unique_ptr<TokenQuantiser> make_gpu_token_quantiser(const LayerSetup& setup) {
  return std::make_unique<GpuTokenQuantiser>(setup);
}

}  // namespace switchyard::detail
