// SPDX-License-Identifier: Apache-2.0
// One rank's run of a scenario, in host memory or through device memory.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <thread>

#include "exchange/group/impl.hpp"
#include "modes/normal/compare_handle.hpp"
#include "harness/device_memory.hpp"
#include "modes/normal/harness_rows.hpp"
#include "testing/test_access.hpp"

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

class Rank {
 public:
  Rank(switchyard::Group& group, NormalExchange& exchange, const Case& c, Failures& f)
      : group_(group), exchange_(exchange), c_(c), f_(f), options_(make_dispatch_options(c, group.rank())) {
#if defined(SWITCHYARD_TEST_CUDA)
    memory_ = &device_memory(group.rank(), group.options().device);
    options_.stream = memory_->stream();
#endif
  }

  void run() {
    for (int repetition = 0; repetition < c_.scenario.repeats; ++repetition) {
      RankData data(c_, group_.rank(), repetition);
      at("dispatch", repetition);
      Dispatched d = exchange_.dispatch(rows_of(data), ids_of(data), weights_of(data), options_);
      scribble(data);
      data.check_dispatched(host_copy(d).d, f_);
      check_bytes();
      if (repetition == 0) check_handle(d.handle);
      const switchyard::Handle handle = d.handle;
      at("combine", repetition);
      combine(data, std::move(d), handle);
      if (!c_.scenario.cached) continue;
      RankData again(c_, group_.rank(), repetition + 1000);
      at("cached dispatch", repetition);
      Dispatched e = exchange_.dispatch(rows_of(again), handle, options_);
      scribble(again);
      again.check_dispatched(host_copy(e).d, f_);
      check_bytes();
      at("combine after cached dispatch", repetition);
      combine(again, std::move(e), handle);
    }
  }

 private:
  // Inputs where the backend wants them.
  switchyard::ConstRows rows_of(const RankData& data) {
    switchyard::ConstRows x = data.x();
    if (!memory_) return x;
    x.scales = memory_->upload(x.scales, idx(x.rows) * switchyard::scale_row_bytes(x.cols, x.scale_kind));
    x.data = memory_->upload(x.data, idx(x.rows * row_bytes(c_.scenario, x.dtype)));
    return x;
  }
  switchyard::ExpertIds ids_of(const RankData& data) {
    switchyard::ExpertIds ids = data.ids();
    if (memory_) ids.data = memory_->upload(ids.data, idx(ids.tokens * ids.topk) * (ids.is_int64 ? 8 : 4));
    return ids;
  }
  const float* weights_of(const RankData& data) {
    return floats_of(data.weights(), c_.problem.tokens(group_.rank()) * c_.problem.topk);
  }
  const float* floats_of(const float* host, int64_t count) {
    if (!memory_ || !host) return host;
    const float none = 0;  // a rank without tokens gives weights too
    return static_cast<const float*>(count > 0 ? memory_->upload(host, idx(count) * 4) : memory_->upload(&none, 4));
  }
  void scribble(RankData& data) {
    data.scribble_inputs();
    if (memory_) memory_->release();  // overwrites, in order
  }

  /// Ranks of one process that share a GPU: a copy from or to the heap by the host may wait for other ranks' kernels, which
  /// then must not wait for this rank.
  void meet() {
    if (memory_ && group_.impl().bootstrap->same_process()) {
      memory_->read(nullptr, nullptr, 0);
      group_.barrier();
    }
  }

  template <class T>
  void fetch(std::span<const T>& span, std::vector<T>& to) {
    to.resize(span.size());
    if (!span.empty()) memory_->read(to.data(), span.data(), span.size_bytes());
    span = to;
  }
  /// What the backend delivered, in host memory. Weights that no rank gave are left out: a rank without tokens gets room for
  /// them on GPUs.
  HostCopy host_copy(const Dispatched& d) {
    HostCopy h;
    h.d = d;
    if (!memory_) return h;
    const int64_t rows = d.handle.rows(), bytes = row_bytes(c_.scenario, d.x.dtype);
    f_.check(d.rows == rows || (d.rows == -1 && options_.size != SizePolicy::exact), "rows");
    h.d.rows = rows;
    h.rows.resize(idx(rows * bytes) + 1);
    h.scales.resize(idx(rows) * switchyard::scale_row_bytes(d.x.cols, d.x.scale_kind) + 1);
    if (rows > 0) memory_->read(h.rows.data(), d.x.data, idx(rows * bytes));
    if (d.x.scales && rows > 0) memory_->read(h.scales.data(), d.x.scales, h.scales.size() - 1);
    h.d.x.data = h.rows.data();
    h.d.x.scales = h.scales.data();
    fetch(h.d.topk_ids, h.topk_ids);
    fetch(h.d.topk_weights, h.topk_weights);
    fetch(h.d.source_token, h.source_token);
    fetch(h.d.row_source, h.row_source);
    fetch(h.d.row_weights, h.row_weights);
    fetch(h.d.expert_first_row, h.expert_first_row);
    fetch(h.d.tokens_per_expert, h.tokens_per_expert);
    fetch(h.d.aligned_per_expert, h.aligned_per_expert);
    fetch(h.d.dropped, h.dropped);
    fetch(h.d.dropped_per_source, h.dropped_per_source);
    if (c_.problem.weights.empty()) h.d.topk_weights = h.d.row_weights = {};
    return h;
  }

  void at(const char* step, int repetition) {
    f_.set_context(c_.scenario.name + ", " + step + " " + std::to_string(repetition));
    meet();
    if (c_.scenario.max_delay_us <= 0) return;
    const uint64_t bits = oracle::mix(c_.scenario.seed ^ kDelay, static_cast<uint64_t>(group_.rank()),
                                      static_cast<uint64_t>(repetition), static_cast<uint64_t>(step[0]) + (calls_++ << 8));
    if (bits % 3 == 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(bits / 3 % static_cast<uint64_t>(c_.scenario.max_delay_us)));
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

  /// Payload of the dispatch before: one row per kept (token, rank).
  void check_bytes() {
    const Scenario& s = c_.scenario;
    const auto row = static_cast<uint64_t>(row_bytes(s, sent_type(s))) + switchyard::scale_row_bytes(s.hidden, sent_scales(s));
    uint64_t local = 0, remote = 0;
    for (const auto& sends : c_.expected.ranks[idx(group_.rank())].sends) {
      for (const auto& send : sends) (send.rank == group_.rank() ? local : remote) += send.row >= 0 ? 1 : 0;
    }
    const switchyard::CallStatistics stats = exchange_.last_call();
    f_.equal(remote * row, stats.remote_bytes, "remote_bytes");
    f_.equal(local * row, stats.local_bytes, "local_bytes");
    f_.equal(local + remote, stats.payload_rows, "payload_rows");
  }

  /// After a combine of registered rows: they were read where they lie.
  void check_nothing_copied() {
    const bool sums = c_.problem.layout == Layout::expert_major && c_.scenario.order == CombineOrder::per_rank;
    if (c_.scenario.staging == Staging::direct && !sums)
      f_.equal(uint64_t{0}, exchange_.last_call().copied_bytes, "bytes copied of registered rows");
    group_.barrier();  // all ranks have made the call, and may end the registration
  }

  void combine(RankData& data, Dispatched d, const switchyard::Handle& handle) {
    const Scenario& s = c_.scenario;
    std::optional<switchyard::RowBuffer> buffer;
    switchyard::RegisteredMemory registered;
    std::vector<std::byte> memory;
    if (memory_) return combine_on_device(data, std::move(d), handle);
    Rows y{nullptr, handle.rows(), s.hidden, s.y_type};
    switch (s.output_memory) {
      case OutputMemory::row_buffer:
        buffer = exchange_.allocate_rows(handle, s.y_type);
        y = buffer->rows();
        break;
      case OutputMemory::ordinary:
      case OutputMemory::registered:
        memory.resize(idx(y.rows * row_bytes(s, s.y_type)) + 1);
        y.data = memory.data();
        if (s.output_memory == OutputMemory::registered) registered = group_.register_memory(memory.data(), memory.size());
        break;
      case OutputMemory::in_place: y = d.x; break;
    }
    if (!s.identity) data.fill_outputs(y);
    const size_t bytes = idx(handle.rows() * row_bytes(s, s.y_type));
    if (s.identity && y.data != d.x.data && bytes > 0) std::memcpy(y.data, d.x.data, bytes);
    exchange_.combine(y, handle, data.out(), data.combine_options(), data.out_weights());
    if (registered) check_nothing_copied();
    if (bytes > 0) std::memset(y.data, 0xEE, bytes);  // the caller's again
    data.check_combined(f_);
  }

  /// The same through device memory.
  void combine_on_device(RankData& data, Dispatched d, const switchyard::Handle& handle) {
    const Scenario& s = c_.scenario;
    const int64_t allocated = d.x.rows, bytes = row_bytes(s, s.y_type);
    std::optional<switchyard::RowBuffer> buffer;
    switchyard::RegisteredMemory registered;
    std::vector<std::byte> host(idx(allocated * bytes) + 1, std::byte{0xFF});
    const Rows host_y{host.data(), allocated, s.hidden, s.y_type};
    if (s.identity && allocated > 0) memory_->read(host.data(), d.x.data, host.size() - 1);
    if (!s.identity) data.fill_outputs(host_y);
    Rows y = host_y;
    if (s.output_memory == OutputMemory::row_buffer) {
      buffer = exchange_.allocate_rows(handle, s.y_type);
      y = buffer->rows();
    } else if (s.output_memory == OutputMemory::in_place) {
      y = d.x;
    } else {
      y.data = memory_->upload(host.data(), host.size());
      if (s.output_memory == OutputMemory::registered) registered = group_.register_memory(y.data, host.size());
    }
    if (y.data) memory_->write(y.data, host.data(), idx(allocated * bytes));
    const int64_t tokens = c_.problem.tokens(group_.rank()), topk = c_.problem.topk;
    switchyard::CombineOptions o = data.combine_options();
    o.num_sms = options_.num_sms;
    o.stream = options_.stream;
    const int64_t given = c_.problem.layout == Layout::rank_major ? handle.rows() * topk : tokens * topk;
    if (o.weights) {  // as many as rows are allocated: the GPU reads those that count
      std::vector<float> all(idx(std::max(allocated * topk, given)) + 1, 0.0f);
      std::copy(o.weights, o.weights + given, all.begin());
      o.weights = static_cast<const float*>(memory_->upload(all.data(), all.size() * 4));
    }
    for (const void*& bias : o.bias)
      if (bias) bias = tokens > 0 ? memory_->upload(bias, idx(tokens * bytes)) : nullptr;
    void* out = tokens > 0 ? memory_->upload(data.out(), idx(tokens * bytes)) : nullptr;
    auto* out_weights =
        data.out_weights() ? static_cast<float*>(memory_->upload(data.out_weights(), idx(tokens * topk + 1) * 4)) : nullptr;
    meet();
    exchange_.combine(y, handle, out, o, out_weights);
    if (y.data) memory_->fill(y.data, 0xEE, idx(allocated * bytes));
    if (tokens > 0) memory_->read(data.out(), out, idx(tokens * bytes));
    if (out_weights) memory_->read(data.out_weights(), out_weights, idx(tokens * topk) * 4);
    if (registered) check_nothing_copied();
    registered = {};
    memory_->release();
    data.check_combined(f_);
  }

  switchyard::Group& group_;
  NormalExchange& exchange_;
  const Case& c_;
  Failures& f_;
  switchyard::DispatchOptions options_;
  DeviceMemory* memory_ = nullptr;  ///< null: host memory
  uint64_t calls_ = 0;
};

}  // namespace

void run_on(switchyard::Group& group, NormalExchange& exchange, const Case& c, Failures& failures) {
  Rank(group, exchange, c, failures).run();
}

void run_scenario(switchyard::Group& group, const Case& c, Failures& failures) {
  failures.set_context(c.scenario.name + ", construction");
  switchyard::detail::number_calls_from(group, c.scenario.first_epoch);
  NormalExchange exchange(group, make_config(c));
  run_on(group, exchange, c, failures);
}

size_t heap_bytes(const std::vector<std::shared_ptr<const Case>>& cases) {
  size_t bytes = 0;
  for (const auto& c : cases)
    bytes = std::max(bytes, NormalExchange::heap_bytes_for(make_config(*c), c->problem.world, kBackend));
  return bytes;
}

std::string to_string(const Workers& w) {
  return std::to_string(w.blocks) + "x" + std::to_string(w.warps) + (w.deferred ? "_deferred" : "");
}

std::string run_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const Case>>& cases) {
  Fleet fleet;
  fleet.world = cases.front()->problem.world;
  fleet.options.heap_bytes = heap_bytes(cases);
  fleet.options.num_blocks = workers.blocks;
  fleet.options.num_warps = workers.warps;
  fleet.deferred = workers.deferred;
  fleet.options.backend = kBackend;
  if (kBackend == switchyard::Backend::cuda) {
    fleet.options.timeout = patience(std::chrono::seconds(10));
    fleet.options.rendezvous_timeout = patience(std::chrono::seconds(60));
  }
  return joined(run_ranks(ranks, fleet, [&](switchyard::Group& group, Failures& failures) {
    for (const auto& c : cases) run_scenario(group, *c, failures);
  }));
}

}  // namespace harness
