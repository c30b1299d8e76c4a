// SPDX-License-Identifier: Apache-2.0
// Thousands of low-latency calls of one rank, created and judged in closed form (closed_form.hpp) and ordered only by their
// streams: dispatches, combines and whole exchanges, whole or in two halves, on one or several streams.
//
// A Rig supplies the place of execution: host memory and loops (closed_form_test.cpp), or a GPU
// (gpu/modes/cuda_low_latency_test.cpp).
//   int rank() const;
//   void* room(size_t bytes);                        memory for the arrays, aligned to 256 bytes
//   void* stream(int lane);
//   void enqueue(const Job& job, void* stream);      runs job(i) for all i
//   void pause(uint64_t ns, void* stream);           delays later work
//   void pace(void* stream);                         after every call: bounds how far the host runs ahead
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "harness/draw.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/low_latency/closed_form.hpp"
#include "switchyard/low_latency.hpp"
#include "testing/test_access.hpp"

namespace harness {

/// Whether ranks with this form can exchange and sum rows in one call.
inline bool has_all_to_all(const Form& form) { return form.scales == ScaleKind::none && !spans_hosts(form.world); }

struct StreamPlan {
  int lanes = 1;         ///< streams, each with its own arrays and outputs
  int first_stream = 0;  ///< index in the rig
  int num_sms = 0;       ///< of all calls; GPUs
  bool dispatch_only = false;
  int slow_rank = -1;  ///< late by slow_ns in every 50th call
  uint64_t slow_ns = 0;
  uint64_t max_pause_ns = 0;  ///< of every rank, in every fourth call
};

/// An object, and the calls to be made on it.
struct StreamedCase {
  Form form;
  StreamPlan plan;
  switchyard::Sending sending = switchyard::Sending::per_rank;
  int pieces = 0;
  uint64_t first_epoch = 1;

  switchyard::LowLatencyConfig config() const {
    switchyard::LowLatencyConfig c;
    c.hidden = form.hidden;
    c.num_experts = form.experts;
    c.topk = form.topk;
    c.max_tokens = form.max_tokens;
    c.dtype = form.type;
    c.scales = form.scales;
    c.scale_group = form.group;
    c.scale_order = form.column_major ? switchyard::ScaleOrder::column_major : switchyard::ScaleOrder::row_major;
    c.sending = sending;
    c.pieces = pieces;
    c.invalid_ids = switchyard::InvalidIds::count;
    return c;
  }
  /// Creates the object for this case. Collective.
  switchyard::LowLatencyExchange make(switchyard::Group& group) const {
    switchyard::detail::number_calls_from(group, first_epoch);
    return switchyard::LowLatencyExchange(group, config());
  }
};

/// Row formats of a case: eight formats in turn, so eight seeds cover them all.
struct Travel {
  ScaleKind scales;
  int group;
  bool column_major;
  bool has_constants;  ///< bf16 and per rank: kernels with constants exist
};
inline constexpr Travel kTravels[] = {
    {ScaleKind::none, 128, false, true},   {ScaleKind::f32, 128, false, true}, {ScaleKind::none, 128, false, false},
    {ScaleKind::ue8m0, 128, true, false},  {ScaleKind::f32, 128, true, false}, {ScaleKind::ue8m0, 64, true, false},
    {ScaleKind::ue8m0, 128, false, false}, {ScaleKind::f32, 32, false, false},
};

/// Draws a case with at most 10 choices, for which sums are exact in bf16.
inline StreamedCase draw_case(uint64_t seed, int world) {
  Draw draw(oracle::mix(seed, 0xC105ED));
  StreamedCase c;
  Form& f = c.form;
  const Travel& way = kTravels[seed % std::size(kTravels)];
  f.seed = draw.bits();
  f.world = world;
  f.experts = static_cast<int>(draw.one_in(6) ? draw.between(1, 3) : draw.between(2, 40));
  f.max_tokens = static_cast<int>(draw.one_in(4) ? draw.between(1, 3) : draw.between(4, 24));
  f.topk = static_cast<int>(draw.between(1, 10));
  f.scales = way.scales;
  f.group = way.group;
  f.column_major = way.column_major;
  f.hidden = 128 * static_cast<int>(draw.between(1, 6));
  if (!way.has_constants) {
    f.type = draw.one_of({DType::bf16, DType::f16, DType::f32});
    f.hidden =
        f.scales == ScaleKind::none ? 2 * static_cast<int>(draw.between(1, 150)) : 16 * static_cast<int>(draw.between(1, 60));
    c.sending = draw.one_in(2) ? switchyard::Sending::per_route : switchyard::Sending::per_rank;
  }
  c.pieces = static_cast<int>(draw.one_in(2) ? 0 : draw.between(1, 16));
  c.first_epoch = draw.one_in(3) ? (uint64_t{1} << 40) - static_cast<uint64_t>(draw.between(0, 60)) : 1;
  c.plan.lanes = static_cast<int>(draw.between(1, 2));
  c.plan.max_pause_ns = draw.one_in(3) ? 0 : static_cast<uint64_t>(draw.between(1, 300'000));
  if (draw.one_in(4)) {
    c.plan.slow_rank = static_cast<int>(draw.between(0, world - 1));
    c.plan.slow_ns = 2'000'000;
  }
  if (seed % 3 == 0) c.plan.num_sms = static_cast<int>(draw.between(3, 14));  // else the rank's entire share of its GPU
  return c;
}

template <class Rig>
class StreamedCalls {
 public:
  using Output = switchyard::LowLatencyOutput;
  static constexpr int kOutputs = 2;
  static constexpr size_t kMaxRigBytes = size_t{32} << 20;  ///< larger arrays are allocated by the exchange

  /// Local. Allocates.
  StreamedCalls(Rig& rig, switchyard::LowLatencyExchange& exchange, const StreamedCase& c)
      : rig_(rig), exchange_(exchange), f_(c.form), plan_(c.plan), lanes_(static_cast<size_t>(c.plan.lanes)) {
    verdict_ = reinterpret_cast<Verdict*>(rig.allocate(sizeof(Verdict)));
    rig_.enqueue(Spoil{reinterpret_cast<uint32_t*>(verdict_), sizeof(Verdict) / 4, 0}, rig_.stream(0));
    for (size_t i = 0; i < lanes_.size(); ++i) make_lane(lanes_[i], static_cast<int>(i));
  }

  /// Makes calls first to first + count - 1, which are identical on all ranks.
  void run(uint64_t first, uint64_t count) {
    for (uint64_t n = first; n < first + count; ++n) {
      const uint64_t bits = f_.draw(100, n), mine = f_.draw(101, n, rig_.rank());
      Lane& lane = lanes_[bits % lanes_.size()];
      if (plan_.max_pause_ns > 0 && mine % 4 == 0) rig_.pause(mine / 4 % plan_.max_pause_ns, lane.stream);
      if (rig_.rank() == plan_.slow_rank && n % 50 == 25) rig_.pause(plan_.slow_ns, lane.stream);
      const uint64_t kind = bits / 64 % 8, output = bits / 512 % kOutputs;
      const Choices choices{bits / 4096 % 4 == 0, bits / 16384 % 2 == 0, bits / 32768 % 2 == 0, bits / 65536 % 2 == 0,
                            bits / 131072 % 3 == 0};
      if (!plan_.dispatch_only && lane.filled[output].valid && kind >= 4) {
        combine({n}, lane, output, choices);
      } else if (!plan_.dispatch_only && has_all_to_all(f_) && kind == 3) {
        all_to_all({n}, lane, choices);
      } else if (!plan_.dispatch_only && f_.scales == switchyard::ScaleKind::none && kind == 2) {
        pair({n}, lane, output, choices);
      } else {
        dispatch({n}, lane, output, choices);
      }
      rig_.pace(lane.stream);
    }
  }

  struct Choices {
    bool split = false, weighted = true, per_rank = false, the_rows = false;
    bool given = false;  ///< a dispatch that receives its rows as fp8, if they are sent as fp8
  };
  struct Filled {
    bool valid = false, weighted = false;
    CallNumber number;
  };
  struct Lane {
    void* stream = nullptr;
    CallArrays a;
    float* replaced = nullptr;
    void* y = nullptr;
    switchyard::LowLatencyRows made;  ///< y of large shapes
    std::vector<Output> outputs;
    Filled filled[kOutputs];
  };
  Lane& lane(size_t i) { return lanes_[i]; }
  /// Function that replaces the factors in whole exchanges. It must multiply by the same factors. Null: none.
  const switchyard::RowFunction* function = nullptr;
  /// Excludes outputs filled only by a graph from the combines of run().
  void forget() {
    for (Lane& lane : lanes_) {
      for (Filled& filled : lane.filled) filled = {};
    }
  }
  std::function<void()> between;  ///< runs between the halves of a split call
  const Verdict* verdict() const { return verdict_; }
  uint64_t judged() const { return judged_; }
  /// Number of dispatches so far whose rows were passed as fp8.
  uint64_t given() const { return given_; }

  void dispatch(const CallNumber& number, Lane& lane, size_t output, const Choices& choices) {
    rig_.enqueue(MakeInputs{f_, number, rig_.rank(), lane.a}, lane.stream);
    switchyard::LowLatencyDispatchOptions o;
    o.stream = lane.stream;
    o.num_sms = plan_.num_sms;
    o.topk_weights = choices.weighted ? lane.a.weights : nullptr;
    const int64_t tokens = given_tokens(number, lane, choices, &o.device_tokens);
    Output& to = lane.outputs[output];
    const bool given = choices.given && lane.a.codes != nullptr;
    given_ += given ? 1 : 0;
    const switchyard::ConstRows x = given ? quantised_rows(lane, tokens) : rows(lane.a.x, tokens);
    if (choices.split) {
      const switchyard::ReceiveHook receive = exchange_.dispatch_send(x, ids(lane, tokens), to, o);
      spoil(lane.a.x, x_bytes(), lane.stream);
      if (given) spoil(lane.a.codes, code_bytes(), lane.stream);
      if (given) spoil(lane.a.scales, scale_bytes(), lane.stream);
      spoil(lane.a.weights, choice_bytes(4), lane.stream);
      spoil(lane.a.ids, choice_bytes(lane.a.int64_ids ? 8 : 4), lane.stream);
      if (between) between();
      receive();
    } else {
      exchange_.dispatch(x, ids(lane, tokens), to, o);
    }
    lane.filled[output] = {true, choices.weighted, number};
    judge(JudgeDispatch{f_, number, {rig_.rank()}, arrays(to), verdict_, given}, lane.stream);
  }

  void combine(const CallNumber& number, Lane& lane, size_t output, const Choices& choices) {
    Output& from = lane.outputs[output];
    const Filled& filled = lane.filled[output];
    const bool the_rows = choices.the_rows && f_.scales == switchyard::ScaleKind::none;
    if (!the_rows) rig_.enqueue(MakeAnswers{f_, number, {rig_.rank()}, arrays(from), lane.y}, lane.stream);
    spoil(lane.a.out, x_bytes(), lane.stream, kUntouched);
    switchyard::LowLatencyCombineOptions o;
    o.stream = lane.stream;
    o.num_sms = plan_.num_sms;
    if (choices.per_rank) o.order = switchyard::CombineOrder::per_rank;
    Weights weights = filled.weighted ? Weights::of_dispatch : Weights::none;
    if (!choices.per_rank && !choices.weighted) {
      rig_.enqueue(MakeWeights{f_, number, rig_.rank(), lane.replaced}, lane.stream);
      o.topk_weights = lane.replaced;
      weights = Weights::of_combine;
    }
    const switchyard::ConstRows y{the_rows ? from.x.data : lane.y, from.x.rows, f_.hidden, f_.type};
    if (choices.split) {
      const switchyard::ReceiveHook receive = exchange_.combine_send(y, from, lane.a.out, o);
      if (!the_rows) spoil(lane.y, y_bytes(), lane.stream);
      if (between) between();
      receive();
    } else {
      exchange_.combine(y, from, lane.a.out, o);
    }
    const Answers answers = the_rows ? Answers::the_rows : Answers::made;
    judge(JudgeSums{f_, number, filled.number, rig_.rank(), answers, weights, lane.a.out, verdict_}, lane.stream);
  }

  /// Enqueues a dispatch directly followed by a combine of its rows.
  void pair(const CallNumber& number, Lane& lane, size_t output, const Choices& choices) {
    rig_.enqueue(MakeInputs{f_, number, rig_.rank(), lane.a}, lane.stream);
    switchyard::LowLatencyDispatchOptions o;
    switchyard::LowLatencyCombineOptions c;
    o.stream = c.stream = lane.stream;
    o.num_sms = c.num_sms = plan_.num_sms;
    o.topk_weights = choices.weighted ? lane.a.weights : nullptr;
    if (choices.per_rank) c.order = switchyard::CombineOrder::per_rank;
    const int64_t tokens = given_tokens(number, lane, choices, &o.device_tokens);
    Output& to = lane.outputs[output];
    exchange_.dispatch(rows(lane.a.x, tokens), ids(lane, tokens), to, o);
    exchange_.combine({to.x.data, to.x.rows, f_.hidden, f_.type}, to, lane.a.out, c);
    lane.filled[output] = {true, choices.weighted, number};
    const Weights weights = choices.weighted ? Weights::of_dispatch : Weights::none;
    judge(JudgeDispatch{f_, number, {rig_.rank()}, arrays(to), verdict_}, lane.stream);
    judge(JudgeSums{f_, number, number, rig_.rank(), Answers::the_rows, weights, lane.a.out, verdict_}, lane.stream);
  }

  void all_to_all(const CallNumber& number, Lane& lane, const Choices& choices) {
    rig_.enqueue(MakeInputs{f_, number, rig_.rank(), lane.a}, lane.stream);
    exchange_whole(number, lane, choices, lane.stream);
    judge_whole(number, lane, choices, lane.stream);
  }

  /// Enqueues whole exchanges with the arrays of each lane, directly one after the other on the first lane's stream: calls
  /// number, number + 1, ...
  void all_to_all_of_lanes(const CallNumber& number, const Choices& choices) {
    const auto of_lane = [&](size_t i) { return CallNumber{number.first + i, number.replays, number.per_replay}; };
    void* const stream = lanes_[0].stream;
    for (size_t i = 0; i < lanes_.size(); ++i) rig_.enqueue(MakeInputs{f_, of_lane(i), rig_.rank(), lanes_[i].a}, stream);
    for (size_t i = 0; i < lanes_.size(); ++i) exchange_whole(of_lane(i), lanes_[i], choices, stream);
    for (size_t i = 0; i < lanes_.size(); ++i) judge_whole(of_lane(i), lanes_[i], choices, stream);
  }

 private:
  void exchange_whole(const CallNumber& number, const Lane& lane, const Choices& choices, void* stream) {
    switchyard::AllToAllOptions o;
    o.stream = stream;
    o.num_sms = plan_.num_sms;
    o.topk_weights = choices.weighted ? lane.a.weights : nullptr;
    o.expert_scale = choices.the_rows || function != nullptr ? nullptr : lane.a.factors;
    if (!choices.the_rows) o.row_function = function;
    const int64_t tokens = given_tokens(number, lane, choices, &o.device_tokens);
    exchange_.moe_all_to_all(rows(lane.a.x, tokens), ids(lane, tokens), lane.a.out, o);
  }
  void judge_whole(const CallNumber& number, const Lane& lane, const Choices& choices, void* stream) {
    judge(JudgeSums{f_, number, number, rig_.rank(), choices.the_rows ? Answers::the_rows : Answers::the_rows_times_factors,
                    choices.weighted ? Weights::of_dispatch : Weights::none, lane.a.out, verdict_},
          stream);
  }
  void make_lane(Lane& lane, int i) {
    lane.stream = rig_.stream(plan_.first_stream + i);
    lane.a.int64_ids = i % 2 == 1;
    lane.a.x = rig_.allocate(x_bytes());
    if (f_.scales != switchyard::ScaleKind::none) {
      lane.a.codes = rig_.allocate(code_bytes());
      lane.a.scales = rig_.allocate(scale_bytes());
    }
    lane.a.ids = rig_.allocate(choice_bytes(8));
    lane.a.weights = static_cast<float*>(rig_.allocate(choice_bytes(4)));
    lane.a.factors = static_cast<float*>(rig_.allocate(static_cast<size_t>(f_.experts) * 4));
    lane.a.tokens = static_cast<int32_t*>(rig_.allocate(4));
    lane.a.out = rig_.allocate(x_bytes());
    lane.replaced = static_cast<float*>(rig_.allocate(choice_bytes(4)));
    if (y_bytes() <= kMaxRigBytes) {
      lane.y = rig_.allocate(y_bytes());
    } else {
      lane.made = exchange_.make_rows(f_.type);
      lane.y = lane.made.data;
    }
    for (int output = 0; output < kOutputs; ++output) lane.outputs.push_back(exchange_.make_output());
  }

  size_t x_bytes() const { return static_cast<size_t>(f_.max_tokens) * switchyard::dtype_bytes(f_.type, f_.hidden); }
  size_t code_bytes() const { return static_cast<size_t>(f_.max_tokens * f_.hidden); }
  size_t scale_bytes() const {
    return static_cast<size_t>(f_.max_tokens) * switchyard::scale_row_bytes(f_.hidden, f_.scales, f_.group);
  }
  size_t y_bytes() const { return x_bytes() * static_cast<size_t>(f_.world * std::max(1, f_.experts_of(rig_.rank()))); }
  size_t choice_bytes(size_t each) const { return static_cast<size_t>(f_.max_tokens * f_.topk) * each; }

  /// If the size is not a multiple of 4, the last bytes stay unchanged.
  void spoil(void* memory, size_t bytes, void* stream, uint32_t with = kNaN) {
    rig_.enqueue(Spoil{static_cast<uint32_t*>(memory), static_cast<int64_t>(bytes / 4), with}, stream);
  }
  template <class Job>
  void judge(const Job& job, void* stream) {
    ++judged_;
    rig_.enqueue(job, stream);
  }

  /// T, either passed by the caller or only stored in memory that the call reads when it runs.
  int64_t given_tokens(const CallNumber& number, const Lane& lane, const Choices& choices, const int32_t** device_tokens) {
    if (number.replays == nullptr && choices.split) return f_.tokens(number(), rig_.rank());
    *device_tokens = lane.a.tokens;
    return f_.max_tokens;
  }
  switchyard::ConstRows rows(const void* data, int64_t tokens) const { return {data, tokens, f_.hidden, f_.type}; }
  switchyard::ConstRows quantised_rows(const Lane& lane, int64_t tokens) const {
    return {lane.a.codes, tokens, f_.hidden, DType::fp8_e4m3, lane.a.scales, f_.scales};
  }
  switchyard::ExpertIds ids(const Lane& lane, int64_t tokens) const { return {lane.a.ids, tokens, f_.topk, lane.a.int64_ids}; }
  DeliveredArrays arrays(const Output& o) const {
    return {o.x.data, o.x.scales, o.rows_of_expert, o.source_range, o.row_source};
  }

  Rig& rig_;
  switchyard::LowLatencyExchange& exchange_;
  Form f_;
  StreamPlan plan_;
  std::vector<Lane> lanes_;
  Verdict* verdict_ = nullptr;
  uint64_t judged_ = 0, given_ = 0;
};

/// Returns "" or a description of the error.
inline std::string describe(const Verdict& v, uint64_t judged) {
  constexpr const char* kNames[] = {"rows_of_expert", "source_range", "row_source", "row", "scale", "sum", "beyond T"};
  if (v.calls != judged) return "judged " + std::to_string(v.calls) + " calls of " + std::to_string(judged);
  if (v.mismatches == 0) return "";
  return std::to_string(v.mismatches) + " mismatches, one in call " + std::to_string(v.call) + ", " + kNames[v.what] + "[" +
         std::to_string(v.place) + "]: expected " + std::to_string(v.expected) + ", got " + std::to_string(v.got);
}

}  // namespace harness
