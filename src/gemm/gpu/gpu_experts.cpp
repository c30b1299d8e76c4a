// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "gemm/checks.hpp"
#include "gemm/experts.hpp"
#include "gemm/gpu/gpu_memory.hpp"

namespace switchyard::detail {
namespace {

constexpr const char* kForward = "ExpertMlp::forward";

/// Two grouped GEMMs, and the rows between them.
class GpuExperts final : public ExpertMlp::Impl {
 public:
  GpuExperts(const ExpertShape& shape_in, const uint16_t* w13, const uint16_t* w2, const ExpertOptions& options)
      : Impl(shape_in, options.type), max_rows_(options.max_rows), bytes_(intermediate_bytes(shape_in, options)) {
    if (shape.num_local_experts == 0) return;
    GroupedGemmConfig up;
    up.num_experts = shape.num_local_experts;
    up.n = 2 * shape.intermediate;
    up.k = shape.hidden;
    up.type = type;
    up.epilogue = Epilogue::swiglu;
    gate_up_.emplace(up, w13);
    GroupedGemmConfig down = up;
    down.n = shape.hidden;
    down.k = shape.intermediate;
    down.epilogue = Epilogue::none;
    down_.emplace(down, w2);
    if (bytes_ > 0) intermediate_.emplace("ExpertMlp", bytes_);
  }

  void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall& call) override {
    require(
        x.rows <= max_rows_, kForward,
        "x has " + std::to_string(x.rows) + " rows; allowed: at most ExpertOptions::max_rows, " + std::to_string(max_rows_));
    check_aligned(kForward, "x", x.data);
    check_aligned(kForward, "y", y.data);
    const Rows between{intermediate_->data(), x.rows, shape.intermediate, type};
    const GroupedGemmOptions options{call.stream, call.num_sms};
    gate_up_->run(x, rows, between, options);
    down_->run(between, rows, y, options);
  }

  ExpertMemory memory() const override { return {0, bytes_}; }
  std::string implementation() const override { return std::string(to_string(type)) + " wgmma:sm_90a"; }

 private:
  int64_t max_rows_;
  size_t bytes_;
  std::optional<GroupedGemm> gate_up_, down_;
  std::optional<gemm::GpuMemory> intermediate_;  // [max_rows, I]
};

}  // namespace

ExpertImpl make_gpu_experts(const ExpertShape& shape, const uint16_t* w13, const uint16_t* w2, const ExpertOptions& options) {
  return std::make_unique<GpuExperts>(shape, w13, w2, options);
}

}  // namespace switchyard::detail
