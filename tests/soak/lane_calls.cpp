// SPDX-License-Identifier: Apache-2.0
// The steps of a lane.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <thread>

#include "soak/lane.hpp"

namespace soak {

using namespace std::chrono_literals;
using switchyard::CombineOrder;
using switchyard::ConstRows;
using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::Layout;
using switchyard::LowLatencyExchange;
using switchyard::Overflow;
using switchyard::RowBuffer;
using switchyard::SizePolicy;

// ---- normal mode ----

void Lane::forward(Normal& o, bool again) {
  LayerCall call;
  call.form = form_of(kMaxTokens);
  call.arrays = next_arrays();
  call.number = number();
  call.options.num_sms = 0;
  if (all(2) % 4 == 0) call.options.size = SizePolicy::exact;
  again = again && !o.routed.empty();
  count(again ? "cached" : "forward");
  if (again) {
    call.again = &o.routed[all(3) % o.routed.size()];
    call.routed = call.again->number;
    place_.run(MakeRows{call.form, call.number, call.routed, rank(), call.arrays.x, call.arrays.out}, compute_);
  } else {
    call.routed = call.number;
    make_inputs(call.form, call.arrays, call.number);
  }
  Dispatched d = layer(o, call);
  if (!again) o.routed.push_back({d.handle, call.number, call.form.tokens(call.number(), rank())});
  if (o.routed.size() > 3) o.routed.pop_front();
  keep(o, std::move(d));
}

/// Runs dispatch, experts, combine and judge, with the calls on one stream and the rest on another, or all on one stream.
Dispatched Lane::layer(Normal& o, const LayerCall& call) {
  void* const comm = all(4) % 4 == 0 ? compute_ : comm_;
  const bool on_device = call.captured && kCuda;
  const int64_t tokens = on_device ? call.form.max_tokens : call.form.tokens(call.routed(), rank());
  DispatchOptions options = call.options;
  options.stream = comm;
  if (on_device) options.device_tokens = call.arrays.tokens;
  place_.order(compute_, comm);
  Dispatched d = call.again ? o.exchange.dispatch(rows_of(call.arrays, tokens), call.again->handle, options)
                            : o.exchange.dispatch(rows_of(call.arrays, tokens), ids_of(call.arrays, tokens), nullptr, options);
  place_.check_capture(compute_, "dispatch");
  place_.order(comm, compute_);
  if (comm != compute_) d.used_by(compute_);
  place_.check_capture(compute_, "used_by");
  const RowBuffer y = o.exchange.allocate_rows(d.handle, kType, compute_);
  place_.check_capture(compute_, "allocate_rows");
  compute(o, call, d, y.rows());
  place_.order(compute_, comm);
  switchyard::CombineOptions sum;
  sum.stream = comm;
  const bool odd = call.captured || all(5) % 2 == 1;  // ranks capture at different times
  if (o.exchange.config().layout == Layout::expert_major && odd) sum.order = CombineOrder::per_route;
  o.exchange.combine(y.rows(), d.handle, call.arrays.out, sum);
  place_.check_capture(compute_, "combine");
  place_.order(comm, compute_);
  const uint8_t* const dropped = d.dropped.empty() ? nullptr : d.dropped.data();
  place_.run(JudgeLayer{call.form, call.number, call.routed, rank(), dropped, call.fails, call.arrays.out, verdict_}, compute_);
  return d;
}

void Lane::compute(Normal& o, const LayerCall& call, const Dispatched& d, const switchyard::Rows& y) {
  if (call.fails) return;  // nothing was delivered, not even the routing of rows
  if (o.exchange.config().layout == Layout::rank_major) {
    place_.run(RankMajorExperts{call.form, rank(), d.x.data, d.topk_ids.data(), y.data, y.rows}, compute_);
    return;
  }
  const ExpertRow row{call.form, call.number, call.routed, rank(), d.x.data, y.data, verdict_};
  place_.run(ExpertMajorExperts{row, d.row_source.data(), d.expert_first_row.data(), y.rows}, compute_);
}

/// Drops rows at arbitrary times, like a garbage collector.
void Lane::keep(Normal& o, Dispatched d) {
  o.kept.push_back(std::move(d));
  while (o.kept.size() > mine(6) % 4) {
    const size_t which = mine(7) % o.kept.size();
    o.kept.erase(o.kept.begin() + static_cast<std::ptrdiff_t>(which));
  }
}

/// Number of rows that rank `to` would receive in eager call n.
int64_t Lane::rows_to(const Normal& o, CallNumber n, int to) const {
  const Form form = form_of(kMaxTokens);
  std::vector<int64_t> of_expert(static_cast<size_t>(form.experts_of(to)));
  int64_t tokens = 0;
  for (int from = 0; from < form.world; ++from) {
    for (int t = 0; t < form.tokens(n(), from); ++t) {
      bool here = false;
      for (int k = 0; k < form.topk; ++k) {
        const int expert = form.id(n(), from, t, k) - form.first_expert(to);
        if (expert < 0 || expert >= form.experts_of(to)) continue;
        ++of_expert[static_cast<size_t>(expert)];
        here = true;
      }
      tokens += here ? 1 : 0;
    }
  }
  if (o.exchange.config().layout == Layout::rank_major) return tokens;
  const int64_t align = o.exchange.config().expert_alignment;
  int64_t rows = 0;
  for (const int64_t count : of_expert) rows += (count + align - 1) / align * align;
  return rows;
}

/// Sends more rows than a rank accepts: the call either fails on all ranks or drops the routes that do not fit.
void Lane::overflow(Normal& o, bool drop) {
  LayerCall call;
  call.form = form_of(kMaxTokens);
  call.arrays = next_arrays();
  call.number = call.routed = number();
  call.options.size = SizePolicy::capacity;
  int64_t max = 0;
  for (int r = 0; r < life_.world; ++r) max = std::max(max, rows_to(o, call.number, r));
  call.options.capacity = std::max<int64_t>(1, static_cast<int64_t>(all(2) % static_cast<uint64_t>(max + max / 2 + 2)));
  if (drop) call.options.overflow = Overflow::drop_and_report;
  call.fails = !drop && max > call.options.capacity;
  make_inputs(call.form, call.arrays, call.number);
  count(drop ? "drop" : call.fails ? "overflow" : "capacity");
  if (!call.fails) {
    keep(o, layer(o, call));
    return;
  }
  if (kCuda) settle();  // a later failure is caused by this call
  must_fail(ErrorCode::capacity_exceeded, "a dispatch beyond the capacity", [&] {
    (void)layer(o, call);
    place_.finish(compute_);
    group_->check();
  });
}

/// Makes a call for which one rank has released too little memory.
void Lane::exhaust(Normal& o) {
  if (!o.counts_free_buffers()) return;
  count("exhausted");
  settle();
  const bool full = rank() == static_cast<int>(all(2) % static_cast<uint64_t>(life_.world));
  std::vector<RowBuffer> all_rows;
  while (full) {
    try {
      all_rows.push_back(o.exchange.allocate_rows(*o.first, kType, compute_));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::pool_exhausted) throw;
      break;
    }
  }
  LayerCall call;
  call.form = form_of(kMaxTokens);
  call.arrays = next_arrays();
  call.number = call.routed = number();
  call.options.size = SizePolicy::worst_case;
  call.fails = true;
  make_inputs(call.form, call.arrays, call.number);
  must_fail(ErrorCode::pool_exhausted, full ? "a dispatch without room" : "a dispatch to a rank without room", [&] {
    (void)layer(o, call);
    if (full) throw std::runtime_error("the rank without room was not told at once");
    place_.finish(compute_);
    group_->check();
  });
  place_.order(comm_, compute_);  // the rank without room took part in a call on comm_
}

void Lane::by_ledger() {
  count("ledger");
  Normal& o = *normals_[1];
  LayerCall call;
  call.form = form_of(kMaxTokens);
  call.arrays = next_arrays();
  call.number = call.routed = number();
  make_inputs(call.form, call.arrays, call.number);
  const int64_t tokens = call.form.tokens(call.number(), rank());
  DispatchOptions options;
  options.stream = compute_;
  const Dispatched d = o.exchange.dispatch(rows_of(call.arrays, tokens), ids_of(call.arrays, tokens), nullptr, options);
  const RowBuffer y = o.exchange.allocate_rows(d.handle, kType, compute_);
  compute(o, call, d, y.rows());
  ledger_->combine(y.rows(), nullptr, d.handle.ledger(), call.arrays.out, {.stream = compute_});
  place_.run(JudgeLayer{call.form, call.number, call.routed, rank(), nullptr, false, call.arrays.out, verdict_}, compute_);
}

// ---- low latency ----

/// `way` is 0 for two calls, 1 for call halves with work between them, 2 for the experts in combine, and 3 for all in one
/// launch.
void Lane::low_latency(const Form& form, const CallArrays& arrays, CallNumber n, int way) {
  make_inputs(form, arrays, n);
  void* const comm = all(4) % 4 == 0 ? compute_ : comm_;
  LowLatencyExchange& exchange = *low_latency_;
  place_.order(compute_, comm);
  const ConstRows x = rows_of(arrays, form.max_tokens);
  const ExpertIds ids = ids_of(arrays, form.max_tokens);
  if (way == 3) {
    exchange.moe_all_to_all(x, ids, arrays.out,
                            {.expert_scale = arrays.factors, .stream = comm, .device_tokens = arrays.tokens});
  } else {
    const switchyard::LowLatencyDispatchOptions options{.stream = comm, .device_tokens = arrays.tokens};
    if (way == 1) {
      const switchyard::ReceiveHook receive = exchange.dispatch_send(x, ids, *received_, options);
      receive();
    } else {
      exchange.dispatch(x, ids, *received_, options);
    }
    place_.order(comm, compute_);
    const ExpertRow row{form, n, n, rank(), received_->x.data, answers_->data, verdict_};
    place_.run(MaskedExperts{row, received_->rows_of_expert, received_->row_source, received_->rows_per_expert}, compute_);
    place_.order(compute_, comm);
    switchyard::LowLatencyCombineOptions sum{.stream = comm};
    const bool odd = n.replays != nullptr || all(5) % 2 == 1;  // ranks capture at different times
    if (way == 0 && odd) sum.order = CombineOrder::per_rank;
    if (way == 2) sum.expert_scale = arrays.factors;
    const ConstRows y = way == 2 ? ConstRows(received_->x) : ConstRows(*answers_);
    if (way == 1) {
      const switchyard::ReceiveHook receive = exchange.combine_send(y, *received_, arrays.out, sum);
      receive();
    } else {
      exchange.combine(y, *received_, arrays.out, sum);
    }
  }
  place_.order(comm, compute_);
  place_.run(JudgeLayer{form, n, n, rank(), nullptr, false, arrays.out, verdict_}, compute_);
}

// ---- graphs ----

/// Called between two meetings of all lanes in the process. cudaGraphInstantiate waits for all running work on the GPU,
/// including another lane's kernels, which may wait for a peer whose host is also instantiating. Therefore, with two lanes, all
/// captures precede the first step.
void Lane::capture_graphs() {
  if (!kCuda || life_.lanes == 1) return;
  for (int family = 0; family < kFamilies; ++family) {
    for (size_t size = 0; size < kGraphTokens.size(); ++size) (void)graph_of(family, static_cast<int>(size));
  }
}

/// Captured at first use.
Lane::Sized& Lane::graph_of(int family, int size) {
  const auto [place, is_new] = graphs_.try_emplace({family, size});
  Sized& sized = place->second;
  if (is_new) {
    count("captures");
    sized.arrays = make_arrays();
    const Form form = form_of(kGraphTokens[static_cast<size_t>(size)]);
    sized.graph = place_.capture(compute_, [this, family, form, &sized] {
      if (family < kNormals) return normal_graph(*normals_[static_cast<size_t>(family)], form, sized.arrays);
      const CallNumber n{0, graph_number_, 16};
      low_latency(form, sized.arrays, n, family == kNormals ? 1 : 3);
      low_latency(form, sized.arrays, {1, graph_number_, 16}, 0);
    });
  }
  return sized;
}

/// Replays a graph of the family that all ranks are replaying, with a size chosen by this rank.
void Lane::replay() {
  const int family = static_cast<int>(all(2) % kFamilies);
  Sized& sized = graph_of(family, static_cast<int>(mine(3) % kGraphTokens.size()));
  count("replays of family " + std::to_string(family));
  place_.run(SetNumber{graph_number_, static_cast<uint64_t>(step_)}, compute_);
  sized.graph->launch(compute_);
}

/// Runs two layers, of which the second reuses the memory of the first.
void Lane::normal_graph(Normal& o, const Form& form, const CallArrays& arrays) {
  for (uint64_t l = 0; l < 2; ++l) {
    LayerCall call;
    call.form = form;
    call.arrays = arrays;
    call.number = call.routed = {l, graph_number_, 16};
    call.captured = true;
    make_inputs(form, arrays, call.number);
    (void)layer(o, call);
  }
}

// ---- outside the exchange ----

/// A forked child that exits does not release any of this process's resources.
void Lane::fork_helper() {
#if !defined(__SANITIZE_THREAD__)
  if (mine(2) % static_cast<uint64_t>(life_.world) != 0) return;
  count("forks");
  const pid_t child = ::fork();
  if (child == 0) {
    for (auto& o : normals_) o->kept.clear(), o->routed.clear();
    ledger_.reset();
    low_latency_.reset();
    group_.reset();
    ::_exit(0);
  }
  int status = 0;
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (child > 0 && ::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      ::kill(child, SIGKILL);
      (void)::waitpid(child, &status, 0);
      throw std::runtime_error("a forked child did not end");
    }
    std::this_thread::sleep_for(1ms);
  }
  if (child < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) throw std::runtime_error("a forked child failed");
#endif
}

void Lane::add_up() {
  if (!all_reduce_) return;
  if (numbers_used_ == numbers_.size()) settle();
  count("all_reduces");
  float* const numbers = numbers_[numbers_used_++];
  void* const stream = place_.stream(2);
  const auto world = static_cast<float>(life_.world), value = static_cast<float>(step_);
  place_.run(FillNumbers{numbers, kNumbers, value + static_cast<float>(rank())}, stream);
  all_reduce_->sum(numbers, kNumbers);
  const float sum = world * value + world * (world - 1) / 2;
  place_.run(JudgeNumbers{numbers, kNumbers, sum, number()(), verdict_}, stream);
}

}  // namespace soak
