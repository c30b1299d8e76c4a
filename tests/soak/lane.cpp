// SPDX-License-Identifier: Apache-2.0
#include "soak/lane.hpp"

#include <chrono>
#include <csignal>
#include <thread>

namespace soak {

using namespace std::chrono_literals;
using switchyard::ConstRows;
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
using switchyard::RowBuffer;
using switchyard::SizePolicy;
using switchyard::Staging;

namespace {

constexpr int kNumBuffers = 8;

int experts_of(const Life& life) { return 3 * life.world + 1; }

std::vector<NormalConfig> normal_configs(const Life& life) {
  NormalConfig config;
  config.hidden = life.hidden;
  config.num_experts = experts_of(life);
  config.topk = kTopk;
  config.max_tokens = kMaxTokens;
  config.invalid_ids = switchyard::InvalidIds::count;  // drawn routings have some invalid ids
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
  config.invalid_ids = switchyard::InvalidIds::count;  // drawn routings have some invalid ids
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
  config.dtype = kType;
  return config;
}

}  // namespace

size_t heap_bytes_of(const Life& life) {
  size_t bytes = LowLatencyExchange::heap_bytes(low_latency_config(life), life.world) +
                 LedgerCombine::heap_bytes(ledger_config(life), life.world, kBackend);
  for (const NormalConfig& config : normal_configs(life)) bytes += NormalExchange::heap_bytes(config, life.world, kBackend);
  return bytes;
}

Lane::Lane(const Life& life, int lane, Group group, Report& report)
    : life_(life),
      lane_(static_cast<uint64_t>(lane)),
      report_(report),
      place_(group.rank(), life.world),
      group_(std::move(group)) {
  compute_ = place_.stream(0);
  comm_ = place_.stream(1);
  verdict_ = place_.make<Verdict>(1);
  graph_number_ = place_.make<uint64_t>(1);
  for (int i = 0; i < 12; ++i) arrays_.push_back(make_arrays());
  if (lane == 0) {
    all_reduce_ =
        place_.make_all_reduce([&](const void* from, size_t bytes, void* to) { group_->all_gather(from, bytes, to); });
  }
  for (int i = 0; all_reduce_ && i < kNumBuffers; ++i) numbers_.push_back(place_.make<float>(kNumbers));
  if (all_reduce_) {  // its first call allocates and connects, which waits for all running work on the GPU
    all_reduce_->sum(numbers_[0], kNumbers);
    place_.finish(place_.stream(2));
  }
  make_objects();
}

Lane::~Lane() {
  try {
    if (compute_) place_.finish(compute_);
  } catch (const std::exception&) {
    // Without a context, nothing is running.
  }
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
    CallNumber n{uint64_t{1} << 32, nullptr, 0};  // a call that sends rows to every rank
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
    o->free_buffers = free_buffers_of(*o);
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
  a.x = place_.allocate(kMaxTokens * row);
  a.out = place_.allocate(kMaxTokens * row);
  a.int64_ids = arrays_.size() % 2 == 1;
  a.ids = place_.allocate(kMaxTokens * kTopk * 8);
  a.weights = place_.make<float>(kMaxTokens * kTopk);
  a.factors = place_.make<float>(static_cast<size_t>(experts_of(life_)));
  a.tokens = place_.make<int32_t>(1);
  return a;
}

void Lane::make_inputs(const Form& form, const CallArrays& arrays, CallNumber n) {
  place_.run(harness::MakeInputs{form, n, rank(), arrays}, compute_);
}

ExpertIds Lane::ids_of(const CallArrays& arrays, int64_t tokens) const { return {arrays.ids, tokens, kTopk, arrays.int64_ids}; }
ConstRows Lane::rows_of(const CallArrays& arrays, int64_t tokens) const { return {arrays.x, tokens, life_.hidden, kType}; }

void Lane::run() {
  for (step_ = 1; step_ <= life_.steps; ++step_) {
    end_if_requested();
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

void Lane::end_if_requested() {
  if (life_.end == End::in_order || rank() != life_.victim || static_cast<int>(lane_) != life_.victim_lane) return;
  if (step_ != life_.last_step) return;
  if (life_.end == End::killed) ::raise(SIGKILL);
  throw OwnError("the rank's own code fails");
}

/// Runs one step; each kind of step has its own frequency.
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

/// Waits for all work enqueued so far and reads the judges' verdicts.
void Lane::settle() {
  count("settled");
  place_.finish(compute_);
  place_.finish(comm_);
  group_->check();
  while (!place_.done(place_.stream(2))) {  // it may wait for a rank that has ended
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
                             "), place " + std::to_string(verdict.place) + ": expected " + std::to_string(verdict.expected) +
                             ", got " + std::to_string(verdict.got));
  }
  place_.run(ClearVerdict{verdict_}, compute_);
}

/// Requires `call` to throw this error, unless a peer has ended.
void Lane::must_fail(ErrorCode code, const char* what, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == code) return;
    throw;
  }
  throw std::runtime_error(std::string("no error from ") + what);
}

size_t Lane::free_buffers_of(Normal& o) {
  if (!o.counts_free_buffers()) return 0;
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
    size_t free_buffers = 0;
    for (int tries = 0; tries < 200 && (free_buffers = free_buffers_of(*o)) != o->free_buffers; ++tries)
      std::this_thread::sleep_for(10ms);
    if (free_buffers != o->free_buffers)
      throw std::runtime_error("the pool of object " + std::to_string(&o - normals_.data()) + " has room for " +
                               std::to_string(free_buffers) + " outputs instead of " + std::to_string(o->free_buffers) +
                               ": a leak");
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
