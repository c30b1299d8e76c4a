// SPDX-License-Identifier: Apache-2.0
// Runs a scenario on one rank.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>

#include "harness/rank_steps.hpp"
#include "harness/run_cases.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/normal/compare_handle.hpp"
#include "modes/normal/scenario_calls.hpp"
#include "modes/normal/scenario_rows.hpp"

namespace harness {

using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::NormalExchange;
using switchyard::Rows;
using switchyard::SizePolicy;

/// A dispatch, copied to host memory.
struct ScenarioCalls::HostCopy {
  Dispatched d;
  std::unique_ptr<std::byte[]> rows;
  std::vector<std::byte> scales;
  std::vector<int32_t> topk_ids, source_token;
  std::vector<float> topk_weights, row_weights;
  std::vector<int64_t> row_source, expert_first_row, tokens_per_expert, aligned_per_expert, dropped_per_source, invalid_ids;
  std::vector<uint8_t> dropped;
};

ScenarioCalls::ScenarioCalls(switchyard::Group& group, NormalExchange& exchange, const Case& c, Failures& f)
    : RankSteps(group, f), exchange_(exchange), c_(c), options_(make_dispatch_options(c, group.rank())) {
  options_.stream = memory_.stream();
}

void ScenarioCalls::run() {
  const int64_t before = exchange_.invalid_ids(), of_each = oracle::invalid_ids(c_.problem, group_.rank());
  for (int repetition = 0; repetition < c_.scenario.repeats; ++repetition) {
    const std::string number = " " + std::to_string(repetition);
    RankData data(c_, group_.rank(), repetition);
    const switchyard::Handle handle = round(data, number);
    if (repetition == 0) check_handle(handle);
    if (!c_.scenario.cached) continue;
    RankData again(c_, group_.rank(), repetition + 1000);
    (void)round(again, " by a handle" + number, &handle);
  }
  f_.equal(before + of_each * c_.scenario.repeats, exchange_.invalid_ids(), "invalid ids of the exchange");
}

switchyard::Handle ScenarioCalls::round(RankData& data, const std::string& of, const switchyard::Handle* handle) {
  at("dispatch" + of);
  Dispatched d = dispatch(data, handle);
  const switchyard::Handle made = d.handle;
  at("combine" + of);
  combine(data, std::move(d), made);
  return made;
}

void ScenarioCalls::at(const std::string& step) {
  f_.set_context(c_.scenario.name + ", " + step);
  meet();
  arrive_late(c_.scenario.max_delay_us, c_.scenario.seed);
}

Dispatched ScenarioCalls::dispatch(RankData& data, const switchyard::Handle* handle) {
  Dispatched d = handle ? exchange_.dispatch(rows_of(data), *handle, deliver_to(handle))
                        : exchange_.dispatch(rows_of(data), ids_of(data), weights_of(data), deliver_to(nullptr));
  check_delivered(d);
  check_dispatched(data, d, handle != nullptr);
  return d;
}

Outcome ScenarioCalls::dispatch_at_capacity(RankData& data, int64_t capacity) {
  DispatchOptions options = options_;
  options.capacity = capacity;
  const Outcome outcome = outcome_of([&] {
    (void)exchange_.dispatch(rows_of(data), ids_of(data), weights_of(data), options);
    meet();
    memory_.read(nullptr, nullptr, 0);
    group_.check();
  });
  memory_.release();
  return outcome;
}

/// Calls `each` with the byte offset and size of each run of rows from local routes. A row has `bytes` bytes.
template <class Each>
void ScenarioCalls::each_run_of_rows(int64_t bytes, const Each& each) const {
  const auto& origin = c_.expected.ranks[rank_].origin;
  size_t from = 0;
  for (size_t row = 0; row <= origin.size(); ++row) {
    if (row < origin.size() && origin[row].source >= 0) continue;
    if (row > from) each(from * idx(bytes), (row - from) * idx(bytes));
    from = row + 1;
  }
}

// Places inputs in backend memory.
switchyard::ConstRows ScenarioCalls::rows_of(RankData& data) {
  switchyard::ConstRows x = data.x();
  x.scales = memory_.give(x.scales, idx(x.rows) * switchyard::scale_row_bytes(x.cols, x.scale_kind));
  x.data = memory_.give(x.data, idx(x.rows * row_bytes(c_.scenario, x.dtype)));
  data.forget_rows();
  return x;
}

switchyard::ExpertIds ScenarioCalls::ids_of(const RankData& data) {
  switchyard::ExpertIds ids = data.ids();
  ids.data = memory_.give(ids.data, idx(ids.num_tokens * ids.topk) * (ids.is_int64 ? 8 : 4));
  return ids;
}

const float* ScenarioCalls::weights_of(const RankData& data) {
  const float none = 0;
  const int64_t count = c_.problem.tokens(group_.rank()) * c_.problem.topk;
  if (count == 0 && memory_.on_device() && !c_.problem.weights.empty()) return give(&none, 1);  // null: no weights
  return give(data.weights(), idx(count));
}

/// Options for the next dispatch, which is a cached dispatch if `handle` is not null.
const DispatchOptions& ScenarioCalls::deliver_to(const switchyard::Handle* handle) {
  const Scenario& s = c_.scenario;
  options_.out = nullptr;
  buffer_ = {};
  if (s.delivery == Delivery::pool || (s.delivery == Delivery::by_rank && group_.rank() % 2 != 0)) return options_;
  const int64_t rows = switchyard::max_rows(exchange_.config(), group_.size()) + 3;
  const int64_t bytes = row_bytes(s, sent_type(s)), scales = switchyard::scale_row_bytes(s.hidden, sent_scales(s));
  in_buffer_ = handle && s.delivery == Delivery::row_buffer && scales == 0;
  if (in_buffer_) {
    buffer_ = exchange_.allocate_rows(*handle, sent_type(s));
    out_ = buffer_.rows();
  } else {
    auto* const at = static_cast<std::byte*>(memory_.keep(idx(rows * (bytes + scales)) + 256));
    out_ = Rows{at, rows, s.hidden, sent_type(s), scales ? at + (rows * bytes + 255) / 256 * 256 : nullptr, sent_scales(s)};
  }
  options_.out = &out_;
  return options_;
}

/// Number of rank-major rows for this rank's own tokens.
int64_t ScenarioCalls::own_rows(const switchyard::Handle& handle) const {
  const auto world = idx(group_.size()), rank = idx(group_.rank());
  const std::vector<int32_t> of_sources = handle.matrices(1).rank_prefix_matrix;
  return of_sources[rank * world + rank] - (rank > 0 ? of_sources[(rank - 1) * world + rank] : 0);
}

/// Checks that rows are in the caller's memory and, if possible, arrived there without a copy.
void ScenarioCalls::check_delivered(const Dispatched& d) {
  if (!options_.out) return;
  f_.check(d.x.data == out_.data && d.x.scales == out_.scales && !d.block, "rows are in memory of the caller");
  const auto bytes =
      row_bytes(c_.scenario, d.x.dtype) + static_cast<int64_t>(switchyard::scale_row_bytes(d.x.cols, d.x.scale_kind));
  const auto rows = static_cast<uint64_t>(d.handle.rows() * bytes), copied = exchange_.last_call().copied_bytes;
  const bool copies = !in_buffer_ || c_.scenario.staging == Staging::ring;
  // Repeated routes and rings also copy rows; with several hosts, all rows are copied after they arrive.
  const bool own_placed = copies && memory_.on_device() && !spans_hosts(c_.problem.world) &&
                          c_.scenario.staging == Staging::direct && !d.x.scales && c_.problem.layout == Layout::rank_major;
  if (own_placed)
    f_.equal(rows - idx(own_rows(d.handle) * bytes), copied, "bytes copied of other ranks' rows");
  else
    f_.check(copies ? copied >= rows : copied < rows || rows == 0, "bytes copied");
}

template <class T>
void ScenarioCalls::fetch_span(std::span<const T>& span, std::vector<T>& to) {
  to = fetch(span.data(), static_cast<int64_t>(span.size()));
  span = to;
}

/// Copies a GPU's output. Weights that no rank passed are omitted, because memory for them is allocated on ranks without
/// tokens.
ScenarioCalls::HostCopy ScenarioCalls::host_copy(const Dispatched& d) {
  HostCopy h;
  h.d = d;
  const int64_t rows = d.handle.rows();
  f_.check(d.rows == rows || (d.rows == -1 && options_.size != SizePolicy::exact), "rows");
  h.d.rows = rows;
  const int64_t row = row_bytes(c_.scenario, d.x.dtype);
  const auto* const from = static_cast<const std::byte*>(d.x.data);
  h.rows = std::make_unique_for_overwrite<std::byte[]>(idx(rows * row) + 1);  // never null
  auto read = [&](size_t at, size_t bytes) { memory_.read(h.rows.get() + at, from + at, bytes); };
  c_.scenario.padding == switchyard::Padding::zero ? read(0, idx(rows * row)) : each_run_of_rows(row, read);
  const auto scales = static_cast<int64_t>(switchyard::scale_row_bytes(d.x.cols, d.x.scale_kind));
  h.scales = fetch(static_cast<const std::byte*>(d.x.scales), d.x.scales ? rows * scales : 0);
  h.scales.push_back({});
  h.d.x.data = h.rows.get();
  h.d.x.scales = h.scales.data();
  fetch_span(h.d.topk_ids, h.topk_ids);
  fetch_span(h.d.topk_weights, h.topk_weights);
  fetch_span(h.d.source_token, h.source_token);
  fetch_span(h.d.row_source, h.row_source);
  fetch_span(h.d.row_weights, h.row_weights);
  fetch_span(h.d.expert_first_row, h.expert_first_row);
  fetch_span(h.d.tokens_per_expert, h.tokens_per_expert);
  fetch_span(h.d.aligned_per_expert, h.aligned_per_expert);
  fetch_span(h.d.dropped, h.dropped);
  fetch_span(h.d.dropped_per_source, h.dropped_per_source);
  fetch_span(h.d.invalid_ids, h.invalid_ids);
  if (c_.problem.weights.empty()) h.d.topk_weights = h.d.row_weights = {};
  return h;
}

void ScenarioCalls::check_dispatched(const RankData& data, const Dispatched& d, bool cached) {
  memory_.release();
  data.check_dispatched(memory_.on_device() ? host_copy(d).d : d, f_);
  const Scenario& s = c_.scenario;
  oracle::Traffic rows;  // one per kept (token, rank)
  for (const auto& sends : c_.expected.ranks[rank_].sends) {
    for (const auto& send : sends) (send.rank == group_.rank() ? rows.local : rows.remote) += send.row >= 0 ? 1 : 0;
  }
  const Crossing call = cached ? Crossing::cached_dispatch : Crossing::dispatch;
  f_.equal(bytes_over_network(c_, group_.rank(), call, hosts_of_suite(group_.size())), exchange_.last_call().network_bytes,
           "bytes over the network");
  check_traffic(exchange_.last_call(), rows,
                static_cast<uint64_t>(row_bytes(s, sent_type(s))) + switchyard::scale_row_bytes(s.hidden, sent_scales(s)));
}

void ScenarioCalls::check_handle(const switchyard::Handle& handle) {
  const int rank = group_.rank();
  const auto& data = switchyard::detail::host_data(handle.data());
  compare_handle(c_.problem, c_.expected, rank, data, f_);
  f_.equal(oracle::invalid_ids(c_.problem, rank), handle.invalid_ids(), "handle.invalid_ids");
  if (!c_.scenario.check_views) return;
  for (const int channels : {1, 3, 10}) {
    if (c_.expected.any_dropped && c_.problem.layout == Layout::expert_major) continue;
    compare_matrices(c_.problem, c_.expected, rank, channels, handle.matrices(channels), f_);
  }
  if (!c_.expected.any_dropped) compare_ledger(c_.problem, rank, handle.ledger(), f_);
  const auto bytes = handle.serialize();
  const auto back = switchyard::Handle::deserialize(bytes);
  compare_handles(data, back.data(), f_);
}

/// Checks, after a combine of registered rows, that they were read in place.
void ScenarioCalls::check_nothing_copied() {
  const bool sums = c_.problem.layout == Layout::expert_major && c_.scenario.order == CombineOrder::per_rank;
  if (c_.scenario.staging == Staging::direct && !sums)
    f_.equal(uint64_t{0}, exchange_.last_call().copied_bytes, "bytes copied of registered rows");
  group_.barrier();  // all ranks have made the call, so the registration may end
}

/// Writes the expert outputs of the delivered rows to y; on a GPU, through host memory.
void ScenarioCalls::make_outputs(const RankData& data, const Dispatched& d, const Rows& y) {
  const int64_t row = row_bytes(c_.scenario, y.dtype);
  if (y.rows == 0 || (c_.scenario.identity && y.data == d.x.data)) return;
  auto* const to = static_cast<std::byte*>(y.data);
  const auto staged = std::make_unique_for_overwrite<std::byte[]>(memory_.on_device() ? idx(y.rows * row) : 0);
  std::byte* const host = memory_.on_device() ? staged.get() : to;
  if (!c_.scenario.identity) {
    data.fill_outputs({host, y.rows, y.cols, y.dtype});
    memory_.write(to, host, idx(y.rows * row));
    return;
  }
  each_run_of_rows(row, [&](size_t at, size_t bytes) {
    memory_.read(host + at, static_cast<const std::byte*>(d.x.data) + at, bytes);
    memory_.write(to + at, host + at, bytes);
  });
}

/// Weights of `rows` rows, or of the tokens. The weights of allocated but invalid rows are 0.
const float* ScenarioCalls::give_weights(const float* weights, int64_t rows, int64_t counted) {
  if (!weights) return nullptr;
  const bool of_rows = c_.problem.layout == Layout::rank_major;
  const int64_t topk = c_.problem.topk, tokens = c_.problem.tokens(group_.rank());
  std::vector<float> all(idx((of_rows ? rows : tokens) * topk) + 1);  // never empty: null would mean no weights
  std::copy_n(weights, (of_rows ? counted : tokens) * topk, all.begin());
  return give(all);
}

void ScenarioCalls::combine(RankData& data, Dispatched d, const switchyard::Handle& handle) {
  const Scenario& s = c_.scenario;
  // On a GPU, this is the number of allocated rows, because the host need not know the number of valid rows.
  const int64_t rows = memory_.on_device() ? d.x.rows : handle.rows(), bytes = row_bytes(s, s.y_type);
  std::optional<switchyard::RowBuffer> buffer;
  switchyard::RegisteredMemory registered;
  std::vector<std::byte> own;
  Rows y{nullptr, rows, s.hidden, s.y_type};
  OutputMemory memory = s.output_memory;
  if (memory == OutputMemory::by_rank) memory = group_.rank() % 2 == 0 ? OutputMemory::ordinary : OutputMemory::row_buffer;
  switch (memory) {
    case OutputMemory::by_rank:  // excluded above
    case OutputMemory::row_buffer:
      buffer = exchange_.allocate_rows(handle, s.y_type);
      y = buffer->rows();
      break;
    case OutputMemory::in_place: y = d.x; break;
    case OutputMemory::ordinary:
    case OutputMemory::registered:
      own.resize(idx(rows * bytes) + 1);
      y.data = memory_.lend(own.data(), own.size());
      if (s.output_memory == OutputMemory::registered) registered = group_.register_memory(y.data, own.size());
  }
  make_outputs(data, d, {y.data, rows, s.hidden, s.y_type});
  const int64_t tokens = c_.problem.tokens(group_.rank()), topk = c_.problem.topk;
  switchyard::CombineOptions o = data.combine_options();
  o.num_sms = options_.num_sms;
  o.stream = options_.stream;
  o.topk_weights = give_weights(o.topk_weights, rows, handle.rows());
  for (const void*& bias : o.bias)
    if (bias) bias = memory_.give(bias, idx(tokens * bytes));
  if (tokens > 0) std::memset(data.out(), 0xA5, idx(tokens * bytes));  // discards the results of an earlier combine
  void* const out = tokens > 0 ? memory_.lend(data.out(), idx(tokens * bytes)) : nullptr;
  float* const host_weights = data.out_weights();
  auto* const out_weights =
      host_weights ? static_cast<float*>(memory_.lend(host_weights, idx(tokens * topk + 1) * 4)) : nullptr;
  meet();
  exchange_.combine(y, handle, out, o, out_weights);
  f_.equal(bytes_over_network(c_, group_.rank(), Crossing::combine, hosts_of_suite(group_.size())),
           exchange_.last_call().network_bytes, "bytes back over the network");
  each_run_of_rows(bytes, [&](size_t at, size_t run) {  // the caller may reuse the rows
    memory_.fill(static_cast<std::byte*>(y.data) + at, 0xEE, run);
  });
  memory_.read(data.out(), out, idx(tokens * bytes));
  if (out_weights) memory_.read(host_weights, out_weights, idx(tokens * topk) * 4);
  if (registered) check_nothing_copied();
  registered = {};
  memory_.release();
  data.check_combined(f_);
}

void run_on(switchyard::Group& group, NormalExchange& exchange, const Case& c, Failures& failures) {
  ScenarioCalls(group, exchange, c, failures).run();
}

void run_object(switchyard::Group& group, const Case& c, Failures& failures) {
  NormalExchange exchange(group, make_config(c));
  run_on(group, exchange, c, failures);
}

CaseInfo info_of(const Case& c) {
  return {c.scenario.name, c.problem.world, c.scenario.first_epoch,
          NormalExchange::heap_bytes(make_config(c), c.problem.world, kBackend)};
}

size_t heap_bytes(const std::vector<std::shared_ptr<const Case>>& cases) { return heap_of_largest(cases); }

std::string run_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const Case>>& cases) {
  return run_each(ranks, workers, cases);
}

}  // namespace harness
