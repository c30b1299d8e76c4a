// SPDX-License-Identifier: Apache-2.0
// One rank's calls of a scenario, for suites that make them in an order of their own.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "harness/rank_steps.hpp"
#include "modes/normal/scenario.hpp"

namespace harness {

/// Calls of a case on an exchange object whose config fits it: inputs and results are where the backend wants them, and
/// everything that comes back is compared. Those of several cases may take turns on one object. `c` outlives this. All
/// functions are collective.
class ScenarioCalls : RankSteps {
 public:
  ScenarioCalls(switchyard::Group& group, switchyard::NormalExchange& exchange, const Case& c, Failures& failures);

  /// All repetitions of the scenario.
  void run();

  /// Before a call: names it in mismatches, meets the other ranks and comes late as the scenario says.
  void at(const std::string& step);
  /// By the ids of the case, or, cached, by `handle`. Frees the rows of `data`.
  switchyard::Dispatched dispatch(RankData& data, const switchyard::Handle* handle = nullptr);
  /// How a dispatch ends for which this rank's options say another capacity, on a GPU once its kernels are done.
  Outcome dispatch_at_capacity(RankData& data, int64_t capacity);
  /// A dispatch and a combine, each with at(); `of` ends its names. \returns the handle
  switchyard::Handle round(RankData& data, const std::string& of = "", const switchyard::Handle* handle = nullptr);
  /// What the experts make of `d`, whose handle is `handle` or equal to it.
  void combine(RankData& data, switchyard::Dispatched d, const switchyard::Handle& handle);

 private:
  switchyard::ConstRows rows_of(RankData& data);
  switchyard::ExpertIds ids_of(const RankData& data);
  const float* weights_of(const RankData& data);
  const switchyard::DispatchOptions& deliver_to(const switchyard::Handle* handle);
  int64_t own_rows(const switchyard::Handle& handle) const;
  void check_delivered(const switchyard::Dispatched& d);
  void check_dispatched(const RankData& data, const switchyard::Dispatched& d);
  void check_handle(const switchyard::Handle& handle);
  void check_nothing_copied();
  void make_outputs(const RankData& data, const switchyard::Dispatched& d, const switchyard::Rows& y);
  const float* give_weights(const float* weights, int64_t rows, int64_t counted);
  template <class Each>
  void each_run_of_rows(int64_t bytes, const Each& each) const;
  struct HostCopy;
  HostCopy host_copy(const switchyard::Dispatched& d);
  template <class T>
  void fetch_span(std::span<const T>& span, std::vector<T>& to);

  switchyard::NormalExchange& exchange_;
  const Case& c_;
  switchyard::DispatchOptions options_;
  switchyard::Rows out_;          ///< options_.out, and where it is if it is
  switchyard::RowBuffer buffer_;  ///< there
  bool in_buffer_ = false;
};

}  // namespace harness
