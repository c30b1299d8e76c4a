// SPDX-License-Identifier: Apache-2.0
// doctor's finding about expert computation on GPUs: a small product on each GPU, compared with the host's result.
#include <fmt/core.h>

#include <cmath>
#include <cstring>
#include <exception>
#include <span>

#include "device/rank_device.hpp"
#include "doctor/doctor.hpp"
#include "run/rows.hpp"
#include "switchyard/expert.hpp"

namespace switchyard::tool {
namespace {

constexpr ExpertShape kShape{128, 64, 3};
constexpr int64_t kRows = 60, kRowsPerExpert = 20;
constexpr int32_t kCounts[] = {20, 0, 7};
constexpr size_t kRowBytes = static_cast<size_t>(kRows * kShape.hidden) * 2;

double widened(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<double>(value);
}

/// Euclidean norm of the difference, divided by that of `expected`.
double relative_distance(const std::vector<uint16_t>& got, const std::vector<uint16_t>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double e = widened(expected[i]), d = widened(got[i]) - e;
    error += d * d;
    norm += e * e;
  }
  return std::sqrt(error / norm);
}

/// Outputs of the experts for the same rows on any `device`. Rows without an expert remain 0.
std::vector<uint16_t> outputs_on(RankDevice& device) {
  const ExpertWeights weights(1, kShape.hidden, kShape.intermediate);
  const auto size = static_cast<size_t>(kShape.hidden * kShape.intermediate);
  std::vector<uint16_t> w13(3 * 2 * size), w2(3 * size), y(kRowBytes / 2);
  for (size_t e = 0; e < 3; ++e)
    weights.fill(static_cast<int64_t>(e), std::span(w13).subspan(e * 2 * size, 2 * size),
                 std::span(w2).subspan(e * size, size));
  ExpertOptions options;
  options.backend = device.on_host() ? Backend::cpu : Backend::cuda;
  options.storage = WeightStorage::view;
  options.max_rows = kRows;
  ExpertMlp mlp(kShape, device.upload(w13.data(), w13.size() * 2), device.upload(w2.data(), w2.size() * 2), options);
  const RowArray x = token_rows(1, 0, 0, kRows, kShape.hidden, DType::bf16, ScaleKind::none);
  ConstRows rows = x.view();
  rows.data = device.upload(rows.data, kRowBytes);
  void* const made = device.allocate(kRowBytes);
  device.write(made, y.data(), kRowBytes);
  mlp.forward(rows, {.num_rows_32 = device.upload(kCounts, sizeof kCounts), .rows_per_expert = kRowsPerExpert},
              {made, kRows, kShape.hidden, DType::bf16}, {.stream = device.stream()});
  device.read(y.data(), made, kRowBytes);
  return y;
}

}  // namespace

std::vector<std::string> try_experts(int gpus) {
  constexpr size_t kArena = size_t{1} << 20;
  if (!built_with_cuda()) return {};
  const std::vector<uint16_t> expected = outputs_on(*rank_device(0, 0, kArena));
  std::vector<std::string> problems;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    try {
      const double distance = relative_distance(outputs_on(*rank_device(gpu, gpus, kArena)), expected);
      problems.push_back(distance <= 1e-2 ? "" : fmt::format("results differ from the host's by {:.1e}", distance));
    } catch (const std::exception& e) {
      problems.emplace_back(e.what());
    }
  }
  return problems;
}

Finding experts_finding(const std::vector<std::string>& problems) {
  Finding f{"GPU", "grouped GEMM", Verdict::ok, "computes experts on every GPU, with the host's results", "", ""};
  std::string wrong;
  for (size_t g = 0; g < problems.size(); ++g)
    if (!problems[g].empty()) wrong += fmt::format("{}GPU {}: {}", wrong.empty() ? "" : "; ", g, problems[g]);
  if (wrong.empty()) return f;
  f.verdict = Verdict::limited;
  f.value = wrong;
  f.reason = "the exchange needs none, but ExpertMlp and GroupedGemm do not work there, nor does demo --backend cuda";
  f.action = "H100 or H200 and driver 580 or later; or experts of your own";
  return f;
}

}  // namespace switchyard::tool
