// SPDX-License-Identifier: Apache-2.0
// One rank's run of a scenario.
#include <algorithm>
#include <optional>
#include <span>

#include "harness/rank_steps.hpp"
#include "harness/run_cases.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/normal/compare_handle.hpp"
#include "modes/normal/scenario_rows.hpp"

namespace harness {

using switchyard::Dispatched;
using switchyard::NormalExchange;
using switchyard::Rows;
using switchyard::SizePolicy;

namespace {

/// A dispatch in host memory.
struct HostCopy {
  Dispatched d;
  std::vector<std::byte> rows, scales;
  std::vector<int32_t> topk_ids, source_token;
  std::vector<float> topk_weights, row_weights;
  std::vector<int64_t> row_source, expert_first_row, tokens_per_expert, aligned_per_expert, dropped_per_source;
  std::vector<uint8_t> dropped;
};

class Rank : RankSteps {
 public:
  Rank(switchyard::Group& group, NormalExchange& exchange, const Case& c, Failures& f)
      : RankSteps(group, f), exchange_(exchange), c_(c), options_(make_dispatch_options(c, group.rank())) {
    options_.stream = memory_.stream();
  }

  void run() {
    for (int repetition = 0; repetition < c_.scenario.repeats; ++repetition) {
      RankData data(c_, group_.rank(), repetition);
      at("dispatch", repetition);
      Dispatched d = exchange_.dispatch(rows_of(data), ids_of(data), weights_of(data), deliver_to(nullptr));
      check_delivered(d);
      check_dispatched(data, d);
      if (repetition == 0) check_handle(d.handle);
      const switchyard::Handle handle = d.handle;
      at("combine", repetition);
      combine(data, std::move(d), handle);
      if (!c_.scenario.cached) continue;
      RankData again(c_, group_.rank(), repetition + 1000);
      at("cached dispatch", repetition);
      Dispatched e = exchange_.dispatch(rows_of(again), handle, deliver_to(&handle));
      check_delivered(e);
      check_dispatched(again, e);
      at("combine after cached dispatch", repetition);
      combine(again, std::move(e), handle);
    }
  }

 private:
  // Inputs where the backend wants them.
  switchyard::ConstRows rows_of(RankData& data) {
    switchyard::ConstRows x = data.x();
    x.scales = memory_.give(x.scales, idx(x.rows) * switchyard::scale_row_bytes(x.cols, x.scale_kind));
    x.data = memory_.give(x.data, idx(x.rows * row_bytes(c_.scenario, x.dtype)));
    data.forget_rows();
    return x;
  }
  switchyard::ExpertIds ids_of(const RankData& data) {
    switchyard::ExpertIds ids = data.ids();
    ids.data = memory_.give(ids.data, idx(ids.tokens * ids.topk) * (ids.is_int64 ? 8 : 4));
    return ids;
  }
  const float* weights_of(const RankData& data) {
    const float none = 0;
    const int64_t count = c_.problem.tokens(group_.rank()) * c_.problem.topk;
    if (count == 0 && memory_.on_device() && !c_.problem.weights.empty()) return give(&none, 1);  // null: no weights
    return give(data.weights(), idx(count));
  }

  /// Options of the next dispatch, which is a cached one if there is a handle.
  const switchyard::DispatchOptions& deliver_to(const switchyard::Handle* handle) {
    const Scenario& s = c_.scenario;
    options_.out = nullptr;
    buffer_ = {};
    if (s.delivery == Delivery::pool || (s.delivery == Delivery::by_rank && group_.rank() % 2 != 0)) return options_;
    const int64_t rows = switchyard::most_rows(exchange_.config(), group_.size()) + 3;
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
  /// Rank-major rows of this rank's own tokens.
  int64_t own_rows(const switchyard::Handle& handle) const {
    const auto world = idx(group_.size()), rank = idx(group_.rank());
    const std::vector<int32_t> of_sources = handle.matrices(1).rank_prefix_matrix;
    return of_sources[rank * world + rank] - (rank > 0 ? of_sources[(rank - 1) * world + rank] : 0);
  }
  /// Rows are where the caller wanted them, and came there without a copy if they could.
  void check_delivered(const Dispatched& d) {
    if (!options_.out) return;
    f_.check(d.x.data == out_.data && d.x.scales == out_.scales && !d.block, "rows are in memory of the caller");
    const auto bytes =
        row_bytes(c_.scenario, d.x.dtype) + static_cast<int64_t>(switchyard::scale_row_bytes(d.x.cols, d.x.scale_kind));
    const auto rows = static_cast<uint64_t>(d.handle.rows() * bytes), copied = exchange_.last_call().copied_bytes;
    const bool copies = !in_buffer_ || c_.scenario.staging == Staging::ring;
    // Repeated routes and rings copy rows as well, and over several hosts all rows are copied when they have come.
    const bool own_placed = copies && memory_.on_device() && !spans_hosts(c_.problem.world) &&
                            c_.scenario.staging == Staging::direct && !d.x.scales && c_.problem.layout == Layout::rank_major;
    if (own_placed)
      f_.equal(rows - idx(own_rows(d.handle) * bytes), copied, "bytes copied of other ranks' rows");
    else
      f_.check(copies ? copied >= rows : copied < rows || rows == 0, "bytes copied");
  }

  template <class T>
  void fetch_span(std::span<const T>& span, std::vector<T>& to) {
    to = fetch(span.data(), static_cast<int64_t>(span.size()));
    span = to;
  }
  /// What a GPU delivered. Weights that no rank gave are left out: a rank without tokens gets room for them.
  HostCopy host_copy(const Dispatched& d) {
    HostCopy h;
    h.d = d;
    const int64_t rows = d.handle.rows();
    f_.check(d.rows == rows || (d.rows == -1 && options_.size != SizePolicy::exact), "rows");
    h.d.rows = rows;
    h.rows = fetch(static_cast<const std::byte*>(d.x.data), rows * row_bytes(c_.scenario, d.x.dtype));
    const auto scales = static_cast<int64_t>(switchyard::scale_row_bytes(d.x.cols, d.x.scale_kind));
    h.scales = fetch(static_cast<const std::byte*>(d.x.scales), d.x.scales ? rows * scales : 0);
    h.rows.push_back({});  // never null
    h.scales.push_back({});
    h.d.x.data = h.rows.data();
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
    if (c_.problem.weights.empty()) h.d.topk_weights = h.d.row_weights = {};
    return h;
  }

  void at(const char* step, int repetition) {
    f_.set_context(c_.scenario.name + ", " + step + " " + std::to_string(repetition));
    meet();
    come_late(c_.scenario.max_delay_us, c_.scenario.seed);
  }

  void check_dispatched(const RankData& data, const Dispatched& d) {
    memory_.release();
    data.check_dispatched(memory_.on_device() ? host_copy(d).d : d, f_);
    const Scenario& s = c_.scenario;
    oracle::Traffic rows;  // one per kept (token, rank)
    for (const auto& sends : c_.expected.ranks[rank_].sends) {
      for (const auto& send : sends) (send.rank == group_.rank() ? rows.local : rows.remote) += send.row >= 0 ? 1 : 0;
    }
    f_.equal(bytes_over_network(c_, group_.rank(), false), exchange_.last_call().network_bytes, "bytes over the network");
    check_traffic(exchange_.last_call(), rows,
                  static_cast<uint64_t>(row_bytes(s, sent_type(s))) + switchyard::scale_row_bytes(s.hidden, sent_scales(s)));
  }

  void check_handle(const switchyard::Handle& handle) {
    const int rank = group_.rank();
    const auto& data = switchyard::detail::host_data(handle.data());
    compare_handle(c_.problem, c_.expected, rank, data, f_);
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

  /// After a combine of registered rows: they were read where they lie.
  void check_nothing_copied() {
    const bool sums = c_.problem.layout == Layout::expert_major && c_.scenario.order == CombineOrder::per_rank;
    if (c_.scenario.staging == Staging::direct && !sums)
      f_.equal(uint64_t{0}, exchange_.last_call().copied_bytes, "bytes copied of registered rows");
    group_.barrier();  // all ranks have made the call, and may end the registration
  }

  /// What the experts make of the delivered rows, in y; on a GPU by way of host memory.
  void make_outputs(const RankData& data, const Dispatched& d, const Rows& y) {
    const size_t bytes = idx(y.rows * row_bytes(c_.scenario, y.dtype));
    if (bytes == 0) return;
    std::vector<std::byte> staged(memory_.on_device() ? bytes : 0);
    const Rows host{memory_.on_device() ? staged.data() : y.data, y.rows, y.cols, y.dtype};
    c_.scenario.identity ? memory_.read(host.data, d.x.data, bytes) : data.fill_outputs(host);
    memory_.write(y.data, host.data, bytes);
  }

  /// Weights of `rows` rows, or of the tokens; those of rows that are allocated and do not count are 0.
  const float* give_weights(const float* weights, int64_t rows, int64_t counted) {
    if (!weights) return nullptr;
    const bool of_rows = c_.problem.layout == Layout::rank_major;
    const int64_t topk = c_.problem.topk, tokens = c_.problem.tokens(group_.rank());
    std::vector<float> all(idx((of_rows ? rows : tokens) * topk) + 1);  // never empty: null would mean no weights
    std::copy_n(weights, (of_rows ? counted : tokens) * topk, all.begin());
    return give(all);
  }

  void combine(RankData& data, Dispatched d, const switchyard::Handle& handle) {
    const Scenario& s = c_.scenario;
    // On a GPU as many as are allocated: the host need not know how many of them count.
    const int64_t rows = memory_.on_device() ? d.x.rows : handle.rows(), bytes = row_bytes(s, s.y_type);
    std::optional<switchyard::RowBuffer> buffer;
    switchyard::RegisteredMemory registered;
    std::vector<std::byte> own;
    Rows y{nullptr, rows, s.hidden, s.y_type};
    OutputMemory memory = s.output_memory;
    if (memory == OutputMemory::by_rank) memory = group_.rank() % 2 == 0 ? OutputMemory::ordinary : OutputMemory::row_buffer;
    switch (memory) {
      case OutputMemory::by_rank:  // no longer
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
    o.weights = give_weights(o.weights, rows, handle.rows());
    for (const void*& bias : o.bias)
      if (bias) bias = memory_.give(bias, idx(tokens * bytes));
    void* const out = tokens > 0 ? memory_.lend(data.out(), idx(tokens * bytes)) : nullptr;
    float* const host_weights = data.out_weights();
    auto* const out_weights =
        host_weights ? static_cast<float*>(memory_.lend(host_weights, idx(tokens * topk + 1) * 4)) : nullptr;
    meet();
    exchange_.combine(y, handle, out, o, out_weights);
    f_.equal(bytes_over_network(c_, group_.rank(), true), exchange_.last_call().network_bytes, "bytes back over the network");
    memory_.fill(y.data, 0xEE, idx(rows * bytes));  // the caller's again
    memory_.read(data.out(), out, idx(tokens * bytes));
    if (out_weights) memory_.read(host_weights, out_weights, idx(tokens * topk) * 4);
    if (registered) check_nothing_copied();
    registered = {};
    memory_.release();
    data.check_combined(f_);
  }

  NormalExchange& exchange_;
  const Case& c_;
  switchyard::DispatchOptions options_;
  Rows out_;                      ///< options_.out, and where it is if it is
  switchyard::RowBuffer buffer_;  ///< there
  bool in_buffer_ = false;
};

}  // namespace

void run_on(switchyard::Group& group, NormalExchange& exchange, const Case& c, Failures& failures) {
  Rank(group, exchange, c, failures).run();
}

void run_object(switchyard::Group& group, const Case& c, Failures& failures) {
  NormalExchange exchange(group, make_config(c));
  run_on(group, exchange, c, failures);
}

CaseInfo info_of(const Case& c) {
  return {c.scenario.name, c.problem.world, c.scenario.first_epoch,
          NormalExchange::heap_bytes_for(make_config(c), c.problem.world, kBackend)};
}

size_t heap_bytes(const std::vector<std::shared_ptr<const Case>>& cases) { return heap_of_largest(cases); }

std::string run_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const Case>>& cases) {
  return run_each(ranks, workers, cases);
}

}  // namespace harness
