// SPDX-License-Identifier: Apache-2.0
// Runs a script of whole exchanges on one rank.
#include <algorithm>
#include <cmath>
#include <span>

#include "modes/flat/flat_function.hpp"
#include "modes/flat/flat_script.hpp"
#include "modes/low_latency/low_latency_rank.hpp"

namespace harness {

using switchyard::LowLatencyExchange;
using switchyard::LowLatencyOutput;

namespace {

/// On a GPU, the results of all repetitions are stored consecutively if they need no more memory than this; otherwise each
/// repetition overwrites the previous one.
constexpr size_t kMaxOutBytes = size_t{24} << 20;

/// State of one call: its arguments in backend memory, and the location of its results.
struct Prepared {
  std::vector<std::byte> host_out;
  switchyard::ConstRows rows;
  switchyard::ExpertIds ids;
  const float *weights = nullptr, *scale = nullptr;
  std::byte* out = nullptr;
  size_t step = 0;          ///< distance from the result of one repetition to the next
  LowLatencyOutput output;  ///< two_calls
};

class Rank : LowLatencyRank {
 public:
  Rank(switchyard::Group& group, LowLatencyExchange& exchange, const FlatCase& c, Failures& f)
      : LowLatencyRank(group, exchange, c.script, f), c_(c) {
    const oracle::Problem shape = c.script.problem();
    const int first = shape.first_expert(group.rank()), last = shape.first_expert(group.rank() + 1);
    scale_.assign(c.scale.begin() + first, c.scale.begin() + last);
    scale_.push_back(0);  // never empty: null would mean no scaling
    if (std::any_of(c.script.calls.begin(), c.script.calls.end(), [](const FlatCall& call) { return call.function; }))
      function_ = flat_function(static_cast<float>(c.script.seed % 4));
  }

  /// On the CPU, every call is checked when it returns. On a GPU, the calls of all repetitions are checked after the last one
  /// has been enqueued.
  void run() {
    const auto repeats = static_cast<size_t>(c_.script.repeats);
    int64_t invalid = 0;
    for (const FlatExpectation& e : c_.calls) invalid += oracle::invalid_ids(e.problem, group_.rank());
    invalid = exchange_.invalid_ids() + c_.script.repeats * invalid;
    memory_.on_device() ? run_queued(repeats) : run_each(repeats);
    f_.equal(invalid, exchange_.invalid_ids(), "invalid ids");
  }

 private:
  void run_each(size_t repeats) {
    for (size_t repetition = 0; repetition < repeats; ++repetition) {
      for (size_t i = 0; i < c_.calls.size(); ++i) {
        set_context(i);
        Prepared p = prepare(i, 1);
        call(i, p, 0);
        memory_.release();
        check(i, p);
        check_moved(i);
      }
    }
  }

  void run_queued(size_t repeats) {
    std::vector<Prepared> prepared;
    for (size_t i = 0; i < c_.calls.size(); ++i) prepared.push_back(prepare(i, repeats));
    meet();
    for (size_t repetition = 0; repetition < repeats; ++repetition) {
      for (size_t i = 0; i < c_.calls.size(); ++i) {
        set_context(i);
        call(i, prepared[i], repetition);
      }
    }
    for (size_t i = 0; i < c_.calls.size(); ++i) {
      set_context(i);
      check(i, prepared[i]);
    }
    check_moved(c_.calls.size() - 1);  // the object records only its last call
    memory_.release();
    meet();
  }

  void set_context(size_t i) { f_.set_context(c_.script.name + ", call " + std::to_string(i)); }

  Prepared prepare(size_t i, size_t repeats) {
    const FlatCall& call = c_.script.calls[i];
    const FlatExpectation& e = c_.calls[i];
    const LowLatencyConfig& config = c_.script.config;
    const int64_t tokens = e.problem.tokens(group_.rank());
    const std::vector<int64_t>& ids = e.problem.ids[rank_];
    Prepared p;
    p.rows = switchyard::ConstRows{give(e.x[rank_]), tokens, config.hidden, config.dtype};
    const void* given_ids =
        call.int64_ids ? give(ids) : static_cast<const void*>(give(std::vector<int32_t>(ids.begin(), ids.end())));
    p.ids = {given_ids, tokens, config.topk, call.int64_ids};
    if (call.weights) p.weights = give(e.problem.weights[rank_]);
    if (call.scaled) p.scale = give(scale_);
    const size_t size = e.out[rank_].size();
    if (memory_.on_device() && size * repeats * c_.calls.size() <= kMaxOutBytes) p.step = (size + 255) / 256 * 256;
    p.host_out.assign(size + p.step * (repeats - 1), std::byte{0xA5});
    p.out = static_cast<std::byte*>(memory_.lend(p.host_out.data(), p.host_out.size()));
    if (call.two_calls) p.output = exchange_.make_output();
    return p;
  }

  void call(size_t i, Prepared& p, size_t repetition) {
    arrive_late(c_.script.max_delay_us, c_.script.seed);
    std::byte* const out = p.out ? p.out + repetition * p.step : nullptr;
    const FlatCall& call = c_.script.calls[i];
    const int sms = c_.script.num_sms;
    if (!call.two_calls) {
      auto o = on_stream(switchyard::AllToAllOptions(), sms);
      o.topk_weights = p.weights;
      if (call.function)
        o.row_function = &function_;
      else
        o.expert_scale = p.scale;
      exchange_.moe_all_to_all(p.rows, p.ids, out, o);
      return;
    }
    auto d = on_stream(switchyard::LowLatencyDispatchOptions(), sms);
    d.topk_weights = p.weights;
    exchange_.dispatch(p.rows, p.ids, p.output, d);
    auto o = on_stream(switchyard::LowLatencyCombineOptions(), sms);
    o.expert_scale = p.scale;
    exchange_.combine({p.output.x.data, p.output.x.rows, p.output.x.cols, p.output.x.dtype}, p.output, out, o);
  }

  void check(size_t i, Prepared& p) {
    const FlatExpectation& e = c_.calls[i];
    if (c_.script.calls[i].two_calls) check_delivered(e.views[rank_], e.x, {}, p.output);
    memory_.read(p.host_out.data(), p.out, p.host_out.size());
    const size_t size = e.out[rank_].size();
    for (size_t at = 0; at + size <= p.host_out.size(); at += p.step) {
      if (p.step > 0)
        f_.set_context(c_.script.name + ", call " + std::to_string(i) + ", repetition " + std::to_string(at / p.step));
      const std::span<const std::byte> out(p.host_out.data() + at, size);
      check_combined(c_.script.config.dtype, e.out[rank_], out);
      check_closed_form(e, out);
      if (p.step == 0) break;
    }
  }

  /// Checks the traffic of call i: rows in both directions, or only the returned rows if combine is called separately.
  void check_moved(size_t i) {
    const FlatExpectation& e = c_.calls[i];
    oracle::Traffic rows = e.returned[rank_];
    if (!c_.script.calls[i].two_calls) {
      rows.local += e.sent[rank_].local;
      rows.remote += e.sent[rank_].remote;
    }
    check_traffic(exchange_.last_call(), rows, static_cast<uint64_t>(c_.row_bytes()));
  }

  void check_closed_form(const FlatExpectation& e, std::span<const std::byte> out) {
    for (size_t n = 0; n < e.closed[rank_].size(); ++n) {
      const double closed = e.closed[rank_][n];
      const double got = oracle::load(c_.script.config.dtype, out.data(), static_cast<int64_t>(n));
      if (!(std::fabs(got - closed) <= 5e-3 + 1e-2 * std::fabs(closed)))
        return f_.add("element " + std::to_string(n) + " is " + std::to_string(got) +
                      ", not within the contest's tolerance of " + std::to_string(closed));
    }
  }

  const FlatCase& c_;
  std::vector<float> scale_;
  switchyard::RowFunction function_;
};

}  // namespace

void run_on(switchyard::Group& group, LowLatencyExchange& exchange, const FlatCase& c, Failures& failures) {
  Rank(group, exchange, c, failures).run();
}

std::string run_scripts(Ranks ranks, const Workers& workers, const std::vector<FlatScript>& scripts) {
  std::vector<std::shared_ptr<const FlatCase>> cases;
  for (const FlatScript& s : scripts) cases.push_back(make_flat_case(s));
  return run_each(ranks, workers, cases);
}

}  // namespace harness
