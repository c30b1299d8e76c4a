// SPDX-License-Identifier: Apache-2.0
#include "soak/lane.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <thread>

namespace soak {

using namespace std::chrono_literals;
using switchyard::CombineOrder;
using switchyard::ConstRows;
using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::Group;
using switchyard::Layout;
using switchyard::LedgerCombine;
using switchyard::LedgerConfig;
using switchyard::LowLatencyConfig;
using switchyard::LowLatencyExchange;
using switchyard::NormalConfig;
using switchyard::NormalExchange;
using switchyard::Overflow;
using switchyard::RowBuffer;
using switchyard::SizePolicy;
using switchyard::Staging;

namespace {

constexpr bool kCuda = kBackend == switchyard::Backend::cuda;
constexpr size_t kNumbers = size_t{1} << 16;
constexpr int kNumberRooms = 8, kFamilies = kNormals + 2;

int experts_of(const Life& life) { return 3 * life.world + 1; }

std::vector<NormalConfig> normal_configs(const Life& life) {
  NormalConfig config;
  config.hidden = life.hidden;
  config.num_experts = experts_of(life);
  config.topk = kTopk;
  config.max_tokens = kMaxTokens;
  const size_t rows = static_cast<size_t>(life.world) * kMaxTokens;
  config.pool_bytes = 40 * rows * static_cast<size_t>(life.hidden) * 2 + (size_t{4} << 20);
  NormalConfig ring = config;
  ring.staging = Staging::ring;
  if (!kCuda) ring.pool_bytes = 0;
  NormalConfig expert_major = config;
  expert_major.layout = Layout::expert_major;
  expert_major.expert_alignment = 8;
  expert_major.pool_bytes *= kTopk;
  return {config, expert_major, ring};
}

LowLatencyConfig low_latency_config(const Life& life) {
  LowLatencyConfig config;
  config.hidden = life.hidden;
  config.num_experts = experts_of(life);
  config.topk = kTopk;
  config.max_tokens = kMaxTokens;
  config.scales = switchyard::ScaleKind::none;
  config.sending = draw(life.seed, 20) % 2 ? switchyard::Sending::per_rank : switchyard::Sending::per_route;
  return config;
}

LedgerConfig ledger_config(const Life& life) {
  LedgerConfig config;
  config.hidden = life.hidden;
  config.num_experts = experts_of(life);
  config.topk = kTopk;
  config.max_tokens = kMaxTokens;
  config.row_type = kType;
  return config;
}

}  // namespace

size_t heap_bytes_of(const Life& life) {
  size_t bytes = LowLatencyExchange::heap_bytes_for(low_latency_config(life), life.world) +
                 LedgerCombine::heap_bytes_for(ledger_config(life), life.world, kBackend);
  for (const NormalConfig& config : normal_configs(life)) bytes += NormalExchange::heap_bytes_for(config, life.world, kBackend);
  return bytes;
}

Lane::Lane(const Life& life, int lane, Group group, Report& report)
    : life_(life), lane_(static_cast<uint64_t>(lane)), report_(report), place_(group.rank(), life.world), group_(std::move(group)) {
  compute_ = place_.stream(0);
  comm_ = place_.stream(1);
  verdict_ = place_.make<Verdict>(1);
  graph_number_ = place_.make<uint64_t>(1);
  for (int i = 0; i < 12; ++i) arrays_.push_back(make_arrays());
  if (lane == 0) {
    all_reduce_ = place_.make_all_reduce([&](const void* from, size_t bytes, void* to) { group_->all_gather(from, bytes, to); });
  }
  for (int i = 0; all_reduce_ && i < kNumberRooms; ++i) numbers_.push_back(place_.make<float>(kNumbers));
  if (all_reduce_) {  // its first call allocates and makes connections, which waits for all that runs on the GPU
    all_reduce_->sum(numbers_[0], kNumbers);
    place_.finish(place_.stream(2));
  }
  make_objects();
}

void Lane::make_objects() {
  for (const NormalConfig& config : normal_configs(life_)) normals_.push_back(std::make_unique<Normal>(*group_, config));
  low_latency_.emplace(*group_, low_latency_config(life_));
  received_.emplace(low_latency_->make_output());
  answers_.emplace(low_latency_->make_rows());
  ledger_.emplace(*group_, ledger_config(life_));
  for (auto& o : normals_) {
    const CallArrays& arrays = next_arrays();
    const Form form = form_of(kMaxTokens);
    CallNumber n{uint64_t{1} << 32, nullptr, 0};  // one that brings rows to every rank
    for (int r = 0; r < life_.world; ++r) {
      if (rows_to(*o, n, r) == 0) ++n.first, r = -1;
    }
    make_inputs(form, arrays, n);
    place_.order(compute_, comm_);
    const int64_t tokens = form.tokens(n(), rank());
    DispatchOptions options;
    options.stream = comm_;
    options.size = SizePolicy::worst_case;
    o->first = o->exchange.dispatch(rows_of(arrays, tokens), ids_of(arrays, tokens), nullptr, options).handle;
    place_.order(comm_, compute_);
    o->room = room_of(*o);
  }
  group_->barrier();
}

Form Lane::form_of(int tokens) const {
  Form form;
  form.seed = life_.seed;
  form.world = life_.world;
  form.experts = experts_of(life_);
  form.topk = kTopk;
  form.max_tokens = tokens;
  form.hidden = life_.hidden;
  form.type = kType;
  return form;
}

CallArrays Lane::make_arrays() {
  CallArrays a;
  const size_t row = static_cast<size_t>(life_.hidden) * 2;
  a.x = place_.room(kMaxTokens * row);
  a.out = place_.room(kMaxTokens * row);
  a.int64_ids = arrays_.size() % 2 == 1;
  a.ids = place_.room(kMaxTokens * kTopk * 8);
  a.weights = place_.make<float>(kMaxTokens * kTopk);
  a.factors = place_.make<float>(static_cast<size_t>(experts_of(life_)));
  a.tokens = place_.make<int32_t>(1);
  return a;
}

void Lane::make_inputs(const Form& form, const CallArrays& arrays, CallNumber n) {
  place_.run(harness::MakeInputs{form, n, rank(), arrays}, compute_);
}

ExpertIds Lane::ids_of(const CallArrays& arrays, int64_t tokens) const {
  return {arrays.ids, tokens, kTopk, arrays.int64_ids};
}
ConstRows Lane::rows_of(const CallArrays& arrays, int64_t tokens) const {
  return {arrays.x, tokens, life_.hidden, kType};
}

void Lane::run() {
  for (step_ = 1; step_ <= life_.steps; ++step_) {
    end_if_told();
    try {
      step();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw std::runtime_error("step " + std::to_string(step_) + ": " + error.what());
    }
  }
  finish();
}

void Lane::end_if_told() {
  if (life_.end == End::in_order || rank() != life_.victim || static_cast<int>(lane_) != life_.victim_lane) return;
  if (step_ != life_.last_step) return;
  if (life_.end == End::killed) ::raise(SIGKILL);
  throw OwnError("the rank's own code fails");
}

/// The kinds of steps, each as often as its number says.
void Lane::step() {
  if (mine(1) % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine(2) % 3000));
  Normal& o = *normals_[all(0) % kNormals];
  report_.steps[step_] = "object " + std::to_string(all(0) % kNormals);
  const uint64_t kind = all(1) % 64;
  if (kind < 14) return forward(o, false);
  if (kind < 20) return forward(o, true);
  if (kind < 36) return replay();
  if (kind < 48) {
    const CallArrays& arrays = next_arrays();
    const Form form = form_of(kMaxTokens);
    count("low_latency way " + std::to_string(all(2) % 4));
    return low_latency(form, arrays, number(), static_cast<int>(all(2) % 4));
  }
  if (kind < 50) return overflow(o, false);
  if (kind < 53) return overflow(o, true);
  if (kind < 54) return exhaust(o);
  if (kind < 57) return by_ledger();
  if (kind < 58) return fork_helper();
  if (kind < 61) return add_up();
  settle();
}

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

/// Dispatch, experts, combine and the judge: the calls on one stream, the rest on another, or all on one.
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
  if (call.fails) return;  // nothing was delivered, not even which rows are whose
  if (o.exchange.config().layout == Layout::rank_major) {
    place_.run(RankMajorExperts{call.form, rank(), d.x.data, d.topk_ids.data(), y.data, y.rows}, compute_);
    return;
  }
  const ExpertRow row{call.form, call.number, call.routed, rank(), d.x.data, y.data, verdict_};
  place_.run(ExpertMajorExperts{row, d.row_source.data(), d.expert_first_row.data(), y.rows}, compute_);
}

/// Lets go of rows as a garbage collector would: whenever this rank likes.
void Lane::keep(Normal& o, Dispatched d) {
  o.kept.push_back(std::move(d));
  while (o.kept.size() > mine(6) % 4) {
    const size_t which = mine(7) % o.kept.size();
    o.kept.erase(o.kept.begin() + static_cast<std::ptrdiff_t>(which));
  }
}

/// Rows that rank `to` would receive in eager call n.
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

/// More rows than a rank takes: the call fails on all ranks, or drops what has no room.
void Lane::overflow(Normal& o, bool drop) {
  LayerCall call;
  call.form = form_of(kMaxTokens);
  call.arrays = next_arrays();
  call.number = call.routed = number();
  call.options.size = SizePolicy::capacity;
  int64_t most = 0;
  for (int r = 0; r < life_.world; ++r) most = std::max(most, rows_to(o, call.number, r));
  call.options.capacity = std::max<int64_t>(1, static_cast<int64_t>(all(2) % static_cast<uint64_t>(most + most / 2 + 2)));
  if (drop) call.options.overflow = Overflow::drop_and_report;
  call.fails = !drop && most > call.options.capacity;
  make_inputs(call.form, call.arrays, call.number);
  count(drop ? "drop" : call.fails ? "overflow" : "capacity");
  if (!call.fails) {
    keep(o, layer(o, call));
    return;
  }
  if (kCuda) settle();  // what fails after it is this
  must_fail(ErrorCode::capacity_exceeded, "a dispatch beyond the capacity", [&] {
    (void)layer(o, call);
    place_.finish(compute_);
    group_->check();
  });
}

/// One rank has let go of too little memory.
void Lane::exhaust(Normal& o) {
  if (!o.counts_room()) return;
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
  place_.order(comm_, compute_);  // the rank without room took part in a call there
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

/// way 0: two calls; 1: halves with work between them; 2: the experts in combine; 3: all in one launch.
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

/// Captured when it is first wanted.
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

/// A graph of the family that all ranks replay now, of a size that this rank chooses.
void Lane::replay() {
  const int family = static_cast<int>(all(2) % kFamilies);
  Sized& sized = graph_of(family, static_cast<int>(mine(3) % kGraphTokens.size()));
  count("replays of family " + std::to_string(family));
  place_.run(SetNumber{graph_number_, static_cast<uint64_t>(step_)}, compute_);
  sized.graph->launch(compute_);
}

/// Two layers, of which the second has the memory of the first.
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

// ---- beside the exchange ----

/// A forked child that ends takes nothing with it.
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

/// Waits for everything so far and looks at what the judges found.
void Lane::settle() {
  count("settled");
  place_.finish(compute_);
  place_.finish(comm_);
  group_->check();
  while (!place_.done(place_.stream(2))) {  // it may wait for a rank that is gone
    group_->check();
    std::this_thread::sleep_for(100us);
  }
  numbers_used_ = 0;
  const Verdict verdict = place_.read(verdict_);
  report_.counts["layers_judged"] += verdict.calls;
  report_.counts["expert_rows_judged"] += verdict.rows;
  if (verdict.mismatches != 0) {
    throw std::runtime_error(std::to_string(verdict.mismatches) + " wrong elements; the first: kind " +
                             std::to_string(verdict.what) + ", call " + std::to_string(verdict.call) + " (step " +
                             std::to_string(verdict.call / 16) + ":" + report_.steps[static_cast<int>(verdict.call / 16)] +
                             "), place " + std::to_string(verdict.place) + ": expected " +
                             std::to_string(verdict.expected) + ", got " + std::to_string(verdict.got));
  }
  place_.run(ClearVerdict{verdict_}, compute_);
}

/// The error must come, unless a peer has ended.
void Lane::must_fail(ErrorCode code, const char* what, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == code) return;
    throw;
  }
  throw std::runtime_error(std::string("no error from ") + what);
}

size_t Lane::room_of(Normal& o) {
  if (!o.counts_room()) return 0;
  std::vector<RowBuffer> rows;
  try {
    for (;;) rows.push_back(o.exchange.allocate_rows(*o.first, kType));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::pool_exhausted) throw;
  }
  return rows.size();
}

void Lane::finish() {
  settle();
  graphs_.clear();
  for (auto& o : normals_) {
    o->kept.clear();
    o->routed.clear();
    size_t room = 0;
    for (int tries = 0; tries < 200 && (room = room_of(*o)) != o->room; ++tries) std::this_thread::sleep_for(10ms);
    if (room != o->room)
      throw std::runtime_error("the pool of object " + std::to_string(&o - normals_.data()) + " has room for " +
                               std::to_string(room) + " outputs instead of " + std::to_string(o->room) + ": a leak");
  }
  normals_.clear();
  low_latency_.reset();
  received_.reset();
  answers_.reset();
  ledger_.reset();
  if (draw(life_.seed, 21) % 2) group_->barrier();
  count("lanes_in_order");
}

}  // namespace soak
