// SPDX-License-Identifier: Apache-2.0
// A rank's calls in a scenario, for suites that make them in a different order.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "harness/rank_steps.hpp"
#include "modes/normal/scenario.hpp"

namespace harness {

/// Makes the calls of a case on an exchange object whose config fits the case: inputs and results are in backend memory, and
/// all results are compared. Calls from several cases may alternate on one object. `c` must outlive this object. All functions
/// are collective.
class ScenarioCalls : RankSteps {
 public:
  ScenarioCalls(switchyard::Group& group, switchyard::NormalExchange& exchange, const Case& c, Failures& failures);

  /// Makes all repetitions of the scenario.
  void run();

  /// Must be called before each call: names the call in mismatches, meets the other ranks, and arrives late as specified by the
  /// scenario.
  void at(const std::string& step);
  /// Uses the ids of the case or, for a cached dispatch, `handle`. Frees the rows of `data`.
  switchyard::Dispatched dispatch(RankData& data, const switchyard::Handle* handle = nullptr);
  /// Outcome of a dispatch with a different capacity in this rank's options; on a GPU, after its kernels have completed.
  Outcome dispatch_at_capacity(RankData& data, int64_t capacity);
  /// Performs a dispatch and a combine, each preceded by at(). `of` is a suffix of their names. \returns the handle
  switchyard::Handle round(RankData& data, const std::string& of = "", const switchyard::Handle* handle = nullptr);
  /// Combines the expert outputs of `d`, which has the handle `handle` or an equal one.
  void combine(RankData& data, switchyard::Dispatched d, const switchyard::Handle& handle);

 private:
  switchyard::ConstRows rows_of(RankData& data);
  switchyard::ExpertIds ids_of(const RankData& data);
  const float* weights_of(const RankData& data);
  const switchyard::DispatchOptions& deliver_to(const switchyard::Handle* handle);
  int64_t own_rows(const switchyard::Handle& handle) const;
  void check_delivered(const switchyard::Dispatched& d);
  void check_dispatched(const RankData& data, const switchyard::Dispatched& d, bool cached);
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
  switchyard::Rows out_;          ///< options_.out, with its address if it is set
  switchyard::RowBuffer buffer_;  ///< memory of out_, if in_buffer_
  bool in_buffer_ = false;
};

}  // namespace harness
