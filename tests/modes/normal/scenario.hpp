// SPDX-License-Identifier: Apache-2.0
// One dispatch and combine: their description, their execution on every rank, and the bitwise comparison of every element with
// the oracle.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "harness/routings.hpp"
#include "harness/run_cases.hpp"
#include "oracle/routing.hpp"
#include "oracle/rows.hpp"
#include "switchyard/normal.hpp"

namespace harness {

using oracle::Pattern;
using switchyard::CombineOrder;
using switchyard::DType;
using switchyard::Layout;
using switchyard::ScaleKind;
using switchyard::Staging;

/// Location of the rows passed to combine.
enum class OutputMemory {
  row_buffer,  ///< allocate_rows: read in place
  ordinary,    ///< the caller's own memory
  in_place,    ///< Dispatched::x, overwritten
  registered,  ///< the caller's own memory, registered for the call (not with CPU ranks as processes)
  by_rank,     ///< ordinary on even ranks, row_buffer on the others
};

/// Destination of a dispatch.
enum class Delivery {
  pool,        ///< memory of the object
  caller,      ///< DispatchOptions::out: the caller's own memory, larger than needed
  by_rank,     ///< caller on even ranks, pool on the others
  row_buffer,  ///< like caller for dispatches without a handle; allocate_rows for cached ones, if rows have no scales
};

struct Scenario {
  std::string name;  ///< appears in every mismatch

  // Routing: `problem` without ids; make_case fills them in.
  oracle::Problem problem;
  Routing routing = Routing::uniform;
  std::vector<int64_t> tokens;  ///< per rank
  int drop_percent = 0;
  bool weights = true;
  bool int64_ids = true;
  uint64_t seed = 1;
  int capacity_percent = 0;  ///< not 0: SizePolicy::capacity with this percentage of the rows that each rank needs

  // Rows.
  int64_t hidden = 64;
  DType x_type = DType::bf16;
  ScaleKind x_scales = ScaleKind::none;  ///< of fp8 rows
  ScaleKind quantize = ScaleKind::none;
  Pattern x_pattern = Pattern::raw_bits;
  DType y_type = DType::bf16;
  Pattern y_pattern = Pattern::random_values;
  OutputMemory output_memory = OutputMemory::row_buffer;
  bool identity = false;  ///< the experts return their rows: y is Dispatched::x (or a copy of it), of x's type
  switchyard::Padding padding = switchyard::Padding::zero;
  Delivery delivery = Delivery::pool;

  // Object.
  Staging staging = Staging::direct;
  switchyard::RingSettings ring{3, 6, 32};
  uint64_t first_epoch = 1;  ///< number of the first call, set by run_case

  // Combine.
  CombineOrder order = CombineOrder::per_rank;
  int num_bias = 0;
  bool apply_weights = true;
  bool replace_weights = false;  ///< expert-major per_route: CombineOptions::topk_weights; rank-major: return weight sums

  int repeats = 3;  ///< dispatch, cached dispatch, combine: on one object with different rows each time
  bool cached = true;
  int num_sms = 2;       ///< CUDA: of every call
  int max_delay_us = 0;  ///< each rank sleeps a random time before each call
  bool check_views = true;
};

/// A scenario and its expected results, computed once and shared by all ranks.
struct Case {
  Scenario scenario;
  oracle::Problem problem;
  oracle::Expected expected;
};
std::shared_ptr<const Case> make_case(const Scenario& scenario);

/// Config for the object of `c`, except for its first epoch. The pool has room for two dispatches and their outputs at the same
/// time.
switchyard::NormalConfig make_config(const Case& c);
switchyard::DispatchOptions make_dispatch_options(const Case& c, int rank);

/// This rank's inputs and expected results for one repetition. Everything is a function of (scenario, rank, repetition).
class RankData {
 public:
  RankData(const Case& c, int rank, int repetition);

  switchyard::ConstRows x() const;
  switchyard::ExpertIds ids() const;
  const float* weights() const;  ///< null if the scenario has none
  /// Fills y for this rank's rows: every row that combine may read, with NaN in all others.
  void fill_outputs(const switchyard::Rows& y) const;
  /// Frees x and its scales. Results that depend on them are recomputed.
  void forget_rows();
  switchyard::CombineOptions combine_options();
  /// Poisoned memory for results: [T, H] of the combined type, and [T, K] weights.
  void* out() { return out_.data(); }
  float* out_weights() { return out_weights_.empty() ? nullptr : out_weights_.data(); }

  void check_dispatched(const switchyard::Dispatched& d, Failures& failures) const;
  void check_combined(Failures& failures) const;

 private:
  void check_rows(const switchyard::Dispatched& d, Failures& failures) const;
  void check_metadata(const switchyard::Dispatched& d, Failures& failures) const;
  void check_out_weights(Failures& failures) const;
  void sent_row(int source, int64_t token, std::vector<std::byte>& row, std::vector<std::byte>& scales) const;
  std::vector<std::byte> output_row(int at_rank, const oracle::Origin& origin) const;
  float returned_weight(int at_rank, int source, int64_t token, int k) const;
  uint64_t row_seed(uint64_t stream) const;

  const Case& c_;
  const Scenario& s_;
  int rank_, repetition_;
  int64_t tokens_;
  std::vector<std::byte> x_, x_scales_, bias_[2], out_;
  std::vector<int32_t> ids32_;
  std::vector<float> replaced_weights_, rank_major_weights_, out_weights_;
};

/// Bytes of the rows that must cross between hosts for rank `rank`, by definition. A dispatch sends each token once to each
/// other host that the token touches, regardless of capacity drops; unless it uses a handle, a header precedes the row. A
/// combine receives, from other hosts, one row for each rank (per_rank), route (per_route) or host (per_host) that keeps a
/// route.
enum class Crossing { dispatch, cached_dispatch, combine };
uint64_t bytes_over_network(const Case& c, int rank, Crossing call, const std::vector<int>& host_of);

/// The body of one rank: makes all repetitions on `exchange` and checks all results. Collective.
void run_on(switchyard::Group& group, switchyard::NormalExchange& exchange, const Case& c, Failures& failures);
CaseInfo info_of(const Case& c);
/// Like run_on, on an object created from make_config.
void run_object(switchyard::Group& group, const Case& c, Failures& failures);
/// Heap size for a group that runs these cases one after the other.
size_t heap_bytes(const std::vector<std::shared_ptr<const Case>>& cases);

/// Forms a group, runs all cases on it, and returns the mismatches as one string.
std::string run_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const Case>>& cases);

}  // namespace harness
