// SPDX-License-Identifier: Apache-2.0
// One rank's run of a script of whole exchanges, in host memory or through device memory.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <span>
#include <thread>

#include "exchange/group/impl.hpp"
#include "harness/device_memory.hpp"
#include "modes/flat/flat_function.hpp"
#include "modes/flat/flat_script.hpp"
#include "modes/normal/harness_rows.hpp"
#include "modes/low_latency/low_latency_cases.hpp"

namespace harness {

using switchyard::LowLatencyExchange;
using switchyard::LowLatencyOutput;

namespace {

/// Results of all repetitions lie side by side on a GPU if they take no more, else over each other.
constexpr size_t kMostOfOuts = size_t{24} << 20;

/// Of one call: its arguments where the backend can read them, and where its results go.
struct Prepared {
  std::vector<std::byte> x, host_out;
  std::vector<int64_t> ids;
  std::vector<int32_t> ids32;
  std::vector<float> weights;
  switchyard::ConstRows rows;
  switchyard::ExpertIds given_ids;
  const float* given_weights = nullptr;
  std::byte* out = nullptr;
  size_t step = 0;          ///< from the result of a repetition to the next one's
  LowLatencyOutput output;  ///< two_calls
};

class Rank {
 public:
  Rank(switchyard::Group& group, LowLatencyExchange& exchange, const FlatCase& c, Failures& f)
      : group_(group), exchange_(exchange), c_(c), f_(f), rank_(idx(group.rank())) {
#if defined(SWITCHYARD_TEST_CUDA)
    memory_ = &device_memory(group.rank(), group.options().device);
#endif
    oracle::Problem shape;
    shape.world = c.script.world;
    shape.experts = c.script.config.num_experts;
    const int first = shape.first_expert(group.rank()), last = shape.first_expert(group.rank() + 1);
    scale_.assign(c.scale.begin() + first, c.scale.begin() + last);
    scale_.push_back(0);  // never empty: null would mean no scaling
    given_scale_ = static_cast<const float*>(give(scale_.data(), scale_.size() * 4));
    for (size_t i = 0; i < c.calls.size(); ++i) prepare(i);
    if (std::any_of(c.script.calls.begin(), c.script.calls.end(), [](const FlatCall& call) { return call.function; }))
      function_ = flat_function(static_cast<float>(c.script.seed % 4));
  }

  /// On the CPU every call is checked when it returns; on a GPU all are when the last has been enqueued, of every repetition.
  void run() {
    meet();
    for (int repetition = 0; repetition < c_.script.repeats; ++repetition) {
      for (size_t i = 0; i < c_.calls.size(); ++i) {
        set_context(i);
        delay();
        call(i, static_cast<size_t>(repetition));
        if (memory_) continue;
        if (repetition + 1 == c_.script.repeats) scribble(i);
        check(i);
      }
    }
    if (!memory_) return;
    for (size_t i = 0; i < c_.calls.size(); ++i) {
      set_context(i);
      check(i);
    }
    memory_->release();
    meet();
  }

 private:
  const void* give(const void* host, size_t bytes) { return memory_ ? memory_->upload(host, bytes) : host; }
  /// Ranks of one process on GPUs: nobody copies while another rank's kernel waits for this one.
  void meet() {
    if (!memory_ || !group_.impl().bootstrap->same_process()) return;
    memory_->read(nullptr, nullptr, 0);
    group_.barrier();
  }
  void set_context(size_t i) { f_.set_context(c_.script.name + ", call " + std::to_string(i)); }

  void delay() {
    const FlatScript& s = c_.script;
    const uint64_t bits = oracle::mix(s.seed ^ kDelay, rank_, calls_++);
    if (s.max_delay_us > 0 && bits % 3 != 0)
      std::this_thread::sleep_for(std::chrono::microseconds(bits / 3 % static_cast<uint64_t>(s.max_delay_us)));
  }

  void prepare(size_t i) {
    const FlatCall& call = c_.script.calls[i];
    const FlatExpectation& e = c_.calls[i];
    const LowLatencyConfig& config = c_.script.config;
    const int64_t tokens = e.problem.tokens(group_.rank());
    Prepared& p = prepared_.emplace_back();
    p.x = e.x[rank_];
    p.ids = e.problem.ids[rank_];
    p.ids32.assign(p.ids.begin(), p.ids.end());
    p.weights = e.problem.weights[rank_];
    const size_t size = e.out[rank_].size(), repeats = static_cast<size_t>(c_.script.repeats);
    if (memory_ && size * repeats * c_.calls.size() <= kMostOfOuts) p.step = (size + 255) / 256 * 256;
    p.host_out.assign(size + p.step * (repeats - 1), std::byte{0xA5});
    p.rows = switchyard::ConstRows{give(p.x.data(), p.x.size()), tokens, config.hidden, config.row_type};
    const void* ids = call.int64_ids ? static_cast<const void*>(p.ids.data()) : p.ids32.data();
    p.given_ids = {give(ids, p.ids.size() * (call.int64_ids ? 8 : 4)), tokens, config.topk, call.int64_ids};
    if (call.weights) p.given_weights = static_cast<const float*>(give(p.weights.data(), p.weights.size() * 4));
    p.out = memory_ ? static_cast<std::byte*>(memory_->upload(p.host_out.data(), p.host_out.size())) : p.host_out.data();
    if (call.two_calls) p.output = exchange_.make_output();
  }

  void call(size_t i, size_t repetition) {
    Prepared& p = prepared_[i];
    std::byte* const out = p.out ? p.out + repetition * p.step : nullptr;
    const FlatCall& call = c_.script.calls[i];
    void* const stream = memory_ ? memory_->stream() : nullptr;
    const int sms = memory_ ? c_.script.num_sms : 0;
    const float* scale = call.scaled ? given_scale_ : nullptr;
    if (!call.two_calls) {
      switchyard::AllToAllOptions o;
      o.weights = p.given_weights;
      if (call.function)
        o.row_function = &function_;
      else
        o.expert_scale = scale;
      o.stream = stream;
      o.num_sms = sms;
      exchange_.moe_all_to_all(p.rows, p.given_ids, out, o);
      return;
    }
    switchyard::LowLatencyDispatchOptions d;
    d.weights = p.given_weights;
    d.stream = stream;
    d.num_sms = sms;
    exchange_.dispatch(p.rows, p.given_ids, p.output, d);
    switchyard::LowLatencyCombineOptions o;
    o.expert_scale = scale;
    o.stream = stream;
    o.num_sms = sms;
    exchange_.combine({p.output.x.data, p.output.x.rows, p.output.x.cols, p.output.x.dtype}, p.output, out, o);
  }

  /// All that was given is the caller's again.
  void scribble(size_t i) {
    Prepared& p = prepared_[i];
    std::fill(p.x.begin(), p.x.end(), std::byte{0xEE});
    std::fill(p.ids.begin(), p.ids.end(), 0);
    std::fill(p.ids32.begin(), p.ids32.end(), 0);
    std::fill(p.weights.begin(), p.weights.end(), -77.0f);
  }

  void check(size_t i) {
    const FlatCall& call = c_.script.calls[i];
    const FlatExpectation& e = c_.calls[i];
    Prepared& p = prepared_[i];
    if (call.two_calls) check_delivered(e, p.output);
    if (memory_ && !p.host_out.empty()) memory_->read(p.host_out.data(), p.out, p.host_out.size());
    const size_t size = e.out[rank_].size();
    for (size_t at = 0; at + size <= p.host_out.size(); at += p.step) {
      if (p.step > 0)
        f_.set_context(c_.script.name + ", call " + std::to_string(i) + ", repetition " + std::to_string(at / p.step));
      check_out(e, {p.host_out.data() + at, size});
      if (p.step == 0) break;
    }
    if (!memory_) std::fill(p.host_out.begin(), p.host_out.end(), std::byte{0xA5});
    if (memory_ && i + 1 < c_.calls.size()) return;  // it knows its last call only
    const switchyard::CallStatistics stats = exchange_.last_call();
    const oracle::Traffic &there = e.sent[rank_], &back = e.returned[rank_];
    const uint64_t both = call.two_calls ? 0 : 1, row = static_cast<uint64_t>(c_.row_bytes());
    f_.equal((both * there.remote + back.remote) * row, stats.remote_bytes, "remote_bytes");
    f_.equal((both * there.local + back.local) * row, stats.local_bytes, "local_bytes");
    f_.equal(both * (there.local + there.remote) + back.local + back.remote, stats.payload_rows, "payload_rows");
  }

  template <class T>
  std::vector<T> fetch(const T* from, int64_t count) {
    std::vector<T> to(idx(count));
    if (count == 0) return to;
    if (memory_) {
      memory_->read(to.data(), from, idx(count) * sizeof(T));
    } else {
      std::memcpy(to.data(), from, idx(count) * sizeof(T));
    }
    return to;
  }

  /// Who came to which expert, and with which row.
  void check_delivered(const FlatExpectation& e, const LowLatencyOutput& o) {
    const oracle::LowLatencyView& view = e.views[rank_];
    const auto experts = static_cast<int64_t>(view.arrivals.size()), bytes = c_.row_bytes();
    if (!f_.equal_range(view.rows_of_expert, fetch(o.rows_of_expert, experts), "rows_of_expert")) return;
    f_.equal_range(view.source_range, fetch(o.source_range, experts * c_.script.world), "source_range");
    for (int64_t expert = 0; expert < experts; ++expert) {
      const auto& arrivals = view.arrivals[idx(expert)];
      const int64_t first = expert * view.rows_per_expert, count = static_cast<int64_t>(arrivals.size());
      const auto sources = fetch(o.row_source + first, count);
      const auto rows = fetch(static_cast<const std::byte*>(o.x.data) + first * bytes, count * bytes);
      for (int64_t r = 0; r < count; ++r) {
        const std::string name = "expert " + std::to_string(expert) + " row " + std::to_string(r);
        const oracle::Arrival& from = arrivals[idx(r)];
        if (!f_.equal(from.packed(), sources[idx(r)], name + " row_source")) return;
        const std::byte* sent = e.x[idx(from.source)].data() + from.token * bytes;
        if (std::memcmp(sent, rows.data() + r * bytes, idx(bytes)) != 0) return f_.add(name + ": rows differ");
      }
    }
  }

  void check_out(const FlatExpectation& e, std::span<const std::byte> out) {
    const int64_t hidden = c_.script.config.hidden;
    const DType type = c_.script.config.row_type;
    const std::vector<std::byte>& expected = e.out[rank_];
    const auto elements = static_cast<int64_t>(expected.size() / switchyard::dtype_bytes(type));
    if (const int64_t n = oracle::first_difference(type, expected.data(), out.data(), elements); n < elements) {
      std::ostringstream text;
      text << "token " << n / hidden << " column " << n % hidden << ": expected " << oracle::load(type, expected.data(), n)
           << ", got " << oracle::load(type, out.data(), n);
      return f_.add(text.str());
    }
    for (size_t n = 0; n < e.closed[rank_].size(); ++n) {
      const double closed = e.closed[rank_][n], got = oracle::load(type, out.data(), static_cast<int64_t>(n));
      if (!(std::fabs(got - closed) <= 5e-3 + 1e-2 * std::fabs(closed)))
        return f_.add("element " + std::to_string(n) + " is " + std::to_string(got) +
                      ", not within the contest's tolerance of " + std::to_string(closed));
    }
  }

  switchyard::Group& group_;
  LowLatencyExchange& exchange_;
  const FlatCase& c_;
  Failures& f_;
  size_t rank_;
  DeviceMemory* memory_ = nullptr;  ///< null: host memory
  std::vector<float> scale_;
  const float* given_scale_ = nullptr;
  switchyard::RowFunction function_;
  std::vector<Prepared> prepared_;
  uint64_t calls_ = 0;
};

}  // namespace

void run_on(switchyard::Group& group, LowLatencyExchange& exchange, const FlatCase& c, Failures& failures) {
  Rank(group, exchange, c, failures).run();
}

std::string run_scripts(Ranks ranks, const Workers& workers, const std::vector<FlatScript>& scripts) {
  std::vector<std::shared_ptr<const FlatCase>> cases;
  for (const FlatScript& s : scripts) cases.push_back(make_flat_case(s));
  return run_cases(ranks, workers, cases);
}

}  // namespace harness
