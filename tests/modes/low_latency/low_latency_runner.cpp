// SPDX-License-Identifier: Apache-2.0
// Runs a low-latency script on one rank.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>

#include "modes/low_latency/low_latency_rank.hpp"
#include "modes/low_latency/low_latency_script.hpp"

namespace harness {

using switchyard::LowLatencyExchange;
using switchyard::LowLatencyOutput;
using Kind = LowLatencyStep::Kind;

namespace {

class Rank : LowLatencyRank {
 public:
  Rank(switchyard::Group& group, LowLatencyExchange& exchange, const LowLatencyCase& c, Failures& f, const Interlude& interlude)
      : LowLatencyRank(group, exchange, c.script, f), c_(c), interlude_(interlude) {
    for (int i = 0; i < c.script.outputs; ++i)
      outputs_.push_back(c.script.own_memory ? in_own_memory() : exchange.make_output());
    answers_ = exchange.make_rows(c.script.config.dtype);
  }

  void run() {
    int64_t invalid = exchange_.invalid_ids();
    for (int repetition = 0; repetition < c_.script.repeats; ++repetition) {
      for (size_t i = 0; i < c_.steps.size(); ++i) {
        const bool dispatch = c_.script.steps[i].kind == Kind::dispatch;
        f_.set_context(c_.script.name + ", step " + std::to_string(i) + (dispatch ? " (dispatch)" : " (combine)"));
        meet();
        if (group_.rank() == c_.script.slow_rank) std::this_thread::sleep_for(std::chrono::microseconds(c_.script.slow_us));
        arrive_late(c_.script.max_delay_us, c_.script.seed);
        dispatch ? run_dispatch(i) : run_combine(i);
        if (dispatch) invalid += oracle::invalid_ids(c_.steps[i].problem, group_.rank());
      }
    }
    f_.equal(invalid, exchange_.invalid_ids(), "invalid ids");
  }

 private:
  /// Expert output rows have room for the rows as sent; additional expert output rows hold their scales.
  LowLatencyOutput in_own_memory() {
    const auto& script = c_.script;
    own_.push_back(exchange_.make_rows(script.config.dtype));
    switchyard::Rows memory{own_.back().data,   own_.back().rows, script.config.hidden,
                            script.sent_type(), nullptr,          script.config.scales};
    if (script.config.scales != ScaleKind::none) {
      own_.push_back(exchange_.make_rows(script.config.dtype));
      memory.scales = own_.back().data;
    }
    LowLatencyOutput output = exchange_.make_output(memory);
    f_.check(output.x.data == memory.data && output.x.scales == memory.scales, "the output is where it shall be");
    return output;
  }

  /// Runs the call as a whole, or in two halves with the interlude between them. `sent` is called once inputs may be
  /// overwritten.
  template <class Whole, class Send, class Sent>
  void call(const LowLatencyStep& step, Whole&& whole, Send&& send, Sent&& sent) {
    if (!step.split) {
      whole();
      sent();
      return;
    }
    const switchyard::ReceiveHook receive = send();
    sent();
    if (interlude_) interlude_();
    receive();
  }

  // --- Dispatch
  void run_dispatch(size_t i) {
    const LowLatencyStep& step = c_.script.steps[i];
    const LowLatencyExpectation& e = c_.steps[i];
    const int64_t counted = e.problem.tokens(group_.rank()), max = c_.script.config.max_tokens;
    const int64_t tokens = step.tokens_in_memory ? max : counted;
    const DType type = step.quantised ? DType::fp8_e4m3 : c_.script.config.dtype;
    std::vector<std::byte> rows = e.x[rank_], scales = e.x_scales[rank_];
    std::vector<int64_t> ids = e.problem.ids[rank_];
    std::vector<float> weights = e.problem.weights[rank_];
    if (step.tokens_in_memory) {  // beyond T: rows and weights that must not be used, of tokens that choose experts
      rows.resize(idx(tokens * c_.script.row_bytes(type)), std::byte{0xFF});
      if (step.quantised) scales.resize(idx(tokens * c_.script.given_scale_bytes()), std::byte{0xFF});
      weights.resize(idx(tokens * e.problem.topk), -77.0f);
      while (ids.size() < weights.size()) ids.push_back(static_cast<int64_t>(ids.size()) % e.problem.experts);
    }
    switchyard::ConstRows x{give(rows), tokens, c_.script.config.hidden, type};
    if (step.quantised) {
      x.scales = give(scales);
      x.scale_kind = c_.script.config.scales;
    }
    const void* given_ids =
        step.int64_ids ? give(ids) : static_cast<const void*>(give(std::vector<int32_t>(ids.begin(), ids.end())));
    const switchyard::ExpertIds given{given_ids, tokens, e.problem.topk, step.int64_ids};
    auto options = on_stream(switchyard::LowLatencyDispatchOptions(), c_.script.num_sms);
    if (step.weights) options.topk_weights = give(weights);
    const int32_t stated = stated_tokens(i, counted);
    if (step.tokens_in_memory) options.device_tokens = give(&stated, 1);
    LowLatencyOutput& output = outputs_[idx(step.output)];
    call(
        step, [&] { exchange_.dispatch(x, given, output, options); },
        [&] { return exchange_.dispatch_send(x, given, output, options); }, [&] { memory_.release(); });
    check_delivered(e.views[rank_], e.sent, e.sent_scales, output);
    check_moved(e, static_cast<uint64_t>(c_.script.row_bytes(c_.script.sent_type()) + c_.script.sent_scale_bytes()));
  }

  /// The value stored in memory for a T of `counted`.
  int32_t stated_tokens(size_t step, int64_t counted) const {
    const uint64_t way = oracle::mix(c_.script.seed, 177, step, rank_) % 3;
    if (counted == 0 && way > 0) return way == 1 ? -1 : std::numeric_limits<int32_t>::min();
    const int64_t max = c_.script.config.max_tokens;
    if (counted == max && way > 0) return way == 1 ? static_cast<int32_t>(max + 1) : std::numeric_limits<int32_t>::max();
    return static_cast<int32_t>(counted);
  }

  // --- Combine
  /// Returns every row that combine may read, with NaN in all others.
  std::vector<std::byte> expert_outputs(size_t i) const {
    const oracle::LowLatencyView& view = c_.steps[c_.steps[i].dispatch].views[rank_];
    const int64_t bytes = c_.script.row_bytes(c_.script.steps[i].y_type);
    std::vector<std::byte> y(idx(static_cast<int64_t>(view.arrivals.size()) * view.rows_per_expert * bytes), std::byte{0xFF});
    for (size_t expert = 0; expert < view.arrivals.size(); ++expert) {
      std::byte* to = y.data() + static_cast<int64_t>(expert) * view.rows_per_expert * bytes;
      for (const oracle::Arrival& from : view.arrivals[expert]) {
        const auto row = c_.output_row(i, group_.rank(), from);
        std::memcpy(to, row.data(), row.size());
        to += bytes;
      }
    }
    return y;
  }

  void run_combine(size_t i) {
    const LowLatencyStep& step = c_.script.steps[i];
    const LowLatencyExpectation& e = c_.steps[i];
    const LowLatencyOutput& output = outputs_[idx(step.output)];
    size_t out_bytes = e.out[rank_].size();
    std::vector<float> weights = e.replaced_weights.empty() ? std::vector<float>() : e.replaced_weights[rank_];
    if (c_.script.steps[e.dispatch].tokens_in_memory) {  // as if all ranks had max_tokens: nothing may be written beyond T
      out_bytes = idx(c_.script.config.max_tokens * c_.script.row_bytes(step.y_type));
      weights.resize(idx(c_.script.config.max_tokens * c_.script.config.topk));
    }
    std::vector<std::byte> host_y, out(out_bytes, std::byte{0xA5});
    if (!step.identity) host_y = expert_outputs(i);
    constexpr size_t kLarge = size_t{32} << 20;  // more than this would not fit into the memory for uploads
    const bool in_made_rows = !step.identity && step.y_type == answers_.dtype && (i % 2 == 0 || host_y.size() > kLarge);
    if (in_made_rows) memory_.write(answers_.data, host_y.data(), host_y.size());
    void* const y = step.identity ? output.x.data : in_made_rows ? answers_.data : memory_.give(host_y.data(), host_y.size());
    void* const to = memory_.lend(out.data(), out.size());
    auto options = on_stream(switchyard::LowLatencyCombineOptions(), c_.script.num_sms);
    options.order = step.order;
    if (!e.replaced_weights.empty()) options.topk_weights = give(weights);
    const switchyard::ConstRows rows = in_made_rows
                                           ? switchyard::ConstRows(answers_)
                                           : switchyard::ConstRows{y, output.x.rows, c_.script.config.hidden, step.y_type};
    meet();
    call(
        step, [&] { exchange_.combine(rows, output, to, options); },
        [&] { return exchange_.combine_send(rows, output, to, options); }, [&] { memory_.fill(y, 0xEE, host_y.size()); });
    memory_.read(out.data(), to, out.size());
    memory_.release();
    const auto behind = out.begin() + static_cast<std::ptrdiff_t>(e.out[rank_].size());
    f_.check(std::all_of(behind, out.end(), [](std::byte b) { return b == std::byte{0xA5}; }), "out is written behind T");
    check_combined(step.y_type, e.out[rank_], out);
    check_moved(e, static_cast<uint64_t>(c_.script.row_bytes(step.y_type)));
  }

  void check_moved(const LowLatencyExpectation& e, uint64_t row_bytes) {
    const switchyard::CallStatistics moved = exchange_.last_call();
    check_traffic(moved, e.traffic[rank_], row_bytes);
    f_.equal(e.crossings[rank_] * row_bytes, moved.network_bytes, "network_bytes");
  }

  const LowLatencyCase& c_;
  const Interlude& interlude_;
  std::vector<switchyard::LowLatencyRows> own_;  ///< memory of the outputs; the outputs are destroyed first
  std::vector<LowLatencyOutput> outputs_;
  switchyard::LowLatencyRows answers_;  ///< y of large and of every other combine of the row type
};

}  // namespace

void run_on(switchyard::Group& group, LowLatencyExchange& exchange, const LowLatencyCase& c, Failures& failures,
            const Interlude& interlude) {
  Rank(group, exchange, c, failures, interlude).run();
}

std::string run_scripts(Ranks ranks, const Workers& workers, const std::vector<LowLatencyScript>& scripts) {
  std::vector<std::shared_ptr<const LowLatencyCase>> cases;
  for (const LowLatencyScript& s : scripts) cases.push_back(make_low_latency_case(s));
  return run_each(ranks, workers, cases);
}

}  // namespace harness
