// SPDX-License-Identifier: Apache-2.0
// One rank of a low-latency exchange with closed-form data: its inputs, its calls, and the checks of their results. The same
// code is used on the CPU and on GPUs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check/exchange_check.hpp"
#include "device/rank_device.hpp"
#include "oracle/low_latency.hpp"
#include "switchyard/low_latency.hpp"

namespace switchyard::tool {

/// Config for an exchange of `s` with source rows of `type` (if fp8, quantized by the caller with `scales`).
LowLatencyConfig low_latency_config(const Scenario& s, DType type, ScaleKind scales);

/// Number of multiprocessors used by calls on a GPU; 0 leaves the choice to the library.
struct CallSms {
  int dispatch = 0;  ///< also for the whole exchange in one call
  int combine = 0;
};

class LowLatencyRank {
 public:
  /// Collective. `type`: type of the source rows. The layout of `s` must be expert_major with alignment 1.
  LowLatencyRank(const Scenario& s, const LowLatencyConfig& config, DType type, Group& group, RankDevice& device, CallSms sms);
  /// Device memory that one object needs.
  static size_t device_bytes(const Scenario& s, const LowLatencyConfig& config);

  /// Uploads the inputs of data set `set`. With Experts::compute, also uploads the experts' outputs. With Experts::scale, also
  /// uploads the factors: an expert scales its rows by 1 + rank + index on the rank / 8.
  enum class Experts { compute, scale };
  void prepare(uint64_t set, Experts experts = Experts::compute);
  void dispatch(bool split = false);
  void combine(CombineOrder order, bool split = false);
  /// Calls in two halves; `between` is called between them.
  void dispatch_in_halves(const std::function<void()>& between);
  void combine_in_halves(CombineOrder order, const std::function<void()>& between);
  /// After prepare(set, Experts::scale): combines the dispatched rows in place; all_to_all() runs the whole exchange in a
  /// single call.
  void combine_scaled();
  void all_to_all();

  /// Checks of the last dispatch and the last combine.
  CheckResult check_dispatched(const std::string& name) const;
  CheckResult check_combined(const std::string& name, CombineOrder order) const;
  CheckResult check_scaled(const std::string& name) const;

  LowLatencyExchange& exchange() { return exchange_; }

 private:
  struct HostOutput;
  HostOutput host_output() const;
  void compare_rows(Comparison& c, const HostOutput& got) const;
  void compare_row(Comparison& c, const HostOutput& got, int64_t at, const oracle::Arrival& origin) const;
  LowLatencyDispatchOptions dispatch_options() const;
  LowLatencyCombineOptions combine_options(CombineOrder order) const;
  void meet();
  std::vector<std::byte> host_out() const;

  const Scenario& s_;
  LowLatencyConfig config_;
  DType type_;
  Group& group_;
  RankDevice& device_;
  int rank_;
  CallSms sms_;
  uint64_t set_ = 0;
  const oracle::LowLatencyView expected_;
  LowLatencyExchange exchange_;
  LowLatencyOutput output_;
  ConstRows x_, y_;
  ExpertIds ids_;
  const float* weights_ = nullptr;
  std::vector<float> scale_;            ///< by expert
  const float* given_scale_ = nullptr;  ///< factors of this rank's experts
  void* out_ = nullptr;
};

}  // namespace switchyard::tool
