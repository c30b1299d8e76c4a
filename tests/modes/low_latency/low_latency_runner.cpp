// SPDX-License-Identifier: Apache-2.0
// One rank's run of a low-latency script, in host memory or through device memory.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>

#include "exchange/group/impl.hpp"
#include "harness/device_memory.hpp"
#include "modes/normal/harness_rows.hpp"
#include "modes/low_latency/low_latency_cases.hpp"
#include "modes/low_latency/low_latency_script.hpp"

namespace harness {

using switchyard::LowLatencyExchange;
using switchyard::LowLatencyOutput;
using Kind = LowLatencyStep::Kind;

namespace {

/// What a dispatch delivered, in host memory.
struct Delivered {
  std::vector<std::byte> rows, scales;
  std::vector<int32_t> rows_of_expert;
  std::vector<int64_t> source_range, row_source;
};

class Rank {
 public:
  Rank(switchyard::Group& group, LowLatencyExchange& exchange, const LowLatencyCase& c, Failures& f, const Interlude& interlude)
      : group_(group), exchange_(exchange), c_(c), f_(f), interlude_(interlude) {
#if defined(SWITCHYARD_TEST_CUDA)
    memory_ = &device_memory(group.rank(), group.options().device);
#endif
    for (int i = 0; i < c.script.outputs; ++i) outputs_.push_back(exchange.make_output());
    answers_ = exchange.make_rows(c.script.config.row_type);
  }

  void run() {
    for (int repetition = 0; repetition < c_.script.repeats; ++repetition) {
      for (size_t i = 0; i < c_.steps.size(); ++i) {
        const bool dispatch = c_.script.steps[i].kind == Kind::dispatch;
        f_.set_context(c_.script.name + ", step " + std::to_string(i) + (dispatch ? " (dispatch)" : " (combine)"));
        meet();
        delay(i);
        dispatch ? run_dispatch(i) : run_combine(i);
      }
    }
  }

 private:
  // --- Memory
  const void* give(const void* host, size_t bytes) { return memory_ ? memory_->upload(host, bytes) : host; }
  void* give(std::vector<std::byte>& host) { return memory_ ? memory_->upload(host.data(), host.size()) : host.data(); }
  void put(void* to, const std::vector<std::byte>& host) {
    if (host.empty()) return;
    memory_ ? memory_->write(to, host.data(), host.size()) : static_cast<void>(std::memcpy(to, host.data(), host.size()));
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
  /// Ranks of one process on GPUs: nobody copies while another rank's kernel waits for this one.
  void meet() {
    if (!memory_ || !group_.impl().bootstrap->same_process()) return;
    memory_->read(nullptr, nullptr, 0);
    group_.barrier();
  }

  void delay(size_t step) {
    const LowLatencyScript& s = c_.script;
    int64_t us = group_.rank() == s.slow_rank ? s.slow_us : 0;
    const uint64_t bits = oracle::mix(s.seed ^ kDelay, static_cast<uint64_t>(group_.rank()), step, calls_++);
    if (s.max_delay_us > 0 && bits % 3 != 0) us += static_cast<int64_t>(bits / 3 % static_cast<uint64_t>(s.max_delay_us));
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  /// Runs the call in one piece, or in two with the interlude between them. `sent`: all that was given may be overwritten.
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
    const size_t rank = idx(group_.rank());
    const int64_t counted = e.problem.tokens(group_.rank()), most = c_.script.config.max_tokens;
    const int64_t tokens = step.tokens_in_memory ? most : counted;
    std::vector<std::byte> rows = e.x[rank], scales = e.x_scales[rank];
    std::vector<int64_t> ids = e.problem.ids[rank];
    std::vector<float> weights = e.problem.weights[rank];
    int32_t stated = stated_tokens(i, counted);
    if (step.tokens_in_memory) {  // behind T: rows and weights that nobody may use, of tokens that choose experts
      rows.resize(idx(tokens * c_.row_bytes(step.quantised ? DType::fp8_e4m3 : c_.script.config.row_type)), std::byte{0xFF});
      if (step.quantised) scales.resize(idx(tokens) * given_scale_bytes(), std::byte{0xFF});
      weights.resize(idx(tokens * e.problem.topk), -77.0f);
      while (ids.size() < weights.size()) ids.push_back(static_cast<int64_t>(ids.size()) % e.problem.experts);
    }
    std::vector<int32_t> ids32(ids.begin(), ids.end());
    switchyard::ConstRows x{give(rows.data(), rows.size()), tokens, c_.script.config.hidden, c_.script.config.row_type};
    if (step.quantised) {
      x.dtype = DType::fp8_e4m3;
      x.scales = give(scales.data(), scales.size());
      x.scale_kind = c_.script.config.scales;
    }
    const size_t id_bytes = ids.size() * (step.int64_ids ? 8 : 4);
    const switchyard::ExpertIds given{give(step.int64_ids ? static_cast<void*>(ids.data()) : ids32.data(), id_bytes), tokens,
                                      e.problem.topk, step.int64_ids};
    switchyard::LowLatencyDispatchOptions options;
    if (step.weights) options.weights = static_cast<const float*>(give(weights.data(), weights.size() * 4));
    if (step.tokens_in_memory) options.device_tokens = static_cast<const int32_t*>(give(&stated, sizeof stated));
    if (memory_) {
      options.stream = memory_->stream();
      options.num_sms = c_.script.num_sms;
    }
    LowLatencyOutput& output = outputs_[idx(step.output)];
    call(
        step, [&] { exchange_.dispatch(x, given, output, options); },
        [&] { return exchange_.dispatch_send(x, given, output, options); },
        [&] {
          std::fill(rows.begin(), rows.end(), std::byte{0xEE});
          std::fill(scales.begin(), scales.end(), std::byte{0xEE});
          std::fill(ids.begin(), ids.end(), 0);
          std::fill(ids32.begin(), ids32.end(), 0);
          std::fill(weights.begin(), weights.end(), -77.0f);
          stated = 1;
          if (memory_) memory_->release();
        });
    check_delivered(e, deliver(e, output));
    check_bytes(e.traffic[rank], static_cast<uint64_t>(c_.row_bytes(c_.sent_type())) + scale_bytes());
  }

  /// What stands for a T of `counted`.
  int32_t stated_tokens(size_t step, int64_t counted) const {
    const uint64_t way = oracle::mix(c_.script.seed, 177, step, static_cast<uint64_t>(group_.rank())) % 3;
    if (counted == 0 && way > 0) return way == 1 ? -1 : std::numeric_limits<int32_t>::min();
    const int64_t most = c_.script.config.max_tokens;
    if (counted == most && way > 0) return way == 1 ? static_cast<int32_t>(most + 1) : std::numeric_limits<int32_t>::max();
    return static_cast<int32_t>(counted);
  }

  size_t given_scale_bytes() const {
    const LowLatencyConfig& config = c_.script.config;
    return switchyard::scale_row_bytes(config.hidden, config.scales, config.scale_group);
  }

  /// Bytes of a row's scales as they travel.
  uint64_t scale_bytes() const {
    const LowLatencyConfig& config = c_.script.config;
    const auto groups = static_cast<uint64_t>((config.hidden + config.scale_group - 1) / config.scale_group);
    return config.scales == ScaleKind::none ? 0 : groups * (config.scales == ScaleKind::f32 ? 4 : 1);
  }

  Delivered deliver(const LowLatencyExpectation& e, const LowLatencyOutput& o) {
    const oracle::LowLatencyView& view = e.views[idx(group_.rank())];
    const auto experts = static_cast<int64_t>(view.arrivals.size());
    f_.equal(view.rows_per_expert, o.rows_per_expert, "rows_per_expert");
    f_.equal(experts * view.rows_per_expert, o.x.rows, "x.rows");
    f_.equal(c_.script.config.hidden, o.x.cols, "x.cols");
    f_.check(o.x.dtype == c_.sent_type() && o.x.scale_kind == c_.script.config.scales, "x.dtype or x.scale_kind");
    f_.equal(c_.scale_shape().column(), o.scale_rows, "scale_rows");
    check_alignment(o);
    Delivered d;
    d.rows_of_expert = fetch(o.rows_of_expert, experts);
    d.source_range = fetch(o.source_range, experts * c_.script.world);
    d.row_source = fetch(o.row_source, o.x.rows);
    d.rows = fetch(static_cast<const std::byte*>(o.x.data), o.x.rows * c_.row_bytes(o.x.dtype));
    if (c_.script.config.scales != ScaleKind::none) {
      const int64_t bytes = c_.scale_shape().offset(experts, 0, 0);
      d.scales = fetch(static_cast<const std::byte*>(o.x.scales), bytes);
    }
    return d;
  }

  /// What masked grouped GEMMs and tensor maps ask for: rows (of whole 16 bytes), scale rows and columns of scales begin at
  /// 16 bytes, in every expert.
  void check_alignment(const LowLatencyOutput& o) {
    const auto at = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    f_.check(at(o.x.data) % 256 == 0 && at(o.rows_of_expert) % 16 == 0, "x or rows_of_expert is not aligned");
    if (c_.script.config.scales == ScaleKind::none) return;
    const oracle::ScaleShape shape = c_.scale_shape();
    const bool columns = c_.script.config.scale_order == ScaleOrder::column_major;
    const int64_t step = c_.script.config.scales == ScaleKind::f32 ? 1 : 4;
    bool aligned = at(o.x.scales) % 256 == 0;
    for (int64_t expert = 0; expert < 3; ++expert)
      for (int64_t i = 0; i < (columns ? shape.places() : o.rows_per_expert); i += columns ? step : 1)
        aligned &= shape.offset(expert, columns ? 0 : i, columns ? i : 0) % 16 == 0;
    f_.check(aligned, "scales are not aligned");
  }

  void check_delivered(const LowLatencyExpectation& e, const Delivered& d) {
    const oracle::LowLatencyView& view = e.views[idx(group_.rank())];
    if (!f_.equal_range(view.rows_of_expert, d.rows_of_expert, "rows_of_expert")) return;
    f_.equal_range(view.source_range, d.source_range, "source_range");
    const int64_t bytes = c_.row_bytes(c_.sent_type());
    for (size_t expert = 0; expert < view.arrivals.size(); ++expert) {
      for (size_t r = 0; r < view.arrivals[expert].size(); ++r) {
        const oracle::Arrival& from = view.arrivals[expert][r];
        const auto row = static_cast<int64_t>(expert) * view.rows_per_expert + static_cast<int64_t>(r);
        const std::string name = "expert " + std::to_string(expert) + " row " + std::to_string(r);
        if (!f_.equal(from.packed(), d.row_source[idx(row)], name + " row_source")) return;
        const std::byte* sent = e.sent[idx(from.source)].data() + from.token * bytes;
        if (std::memcmp(sent, d.rows.data() + row * bytes, idx(bytes)) != 0) return f_.add(name + ": rows differ");
        if (!check_scales(e, d, from, static_cast<int64_t>(expert), static_cast<int64_t>(r)))
          return f_.add(name + ": scales differ");
      }
    }
  }

  /// Also that places beyond the last group are zero.
  bool check_scales(const LowLatencyExpectation& e, const Delivered& d, const oracle::Arrival& from, int64_t expert,
                    int64_t row) const {
    const LowLatencyConfig& config = c_.script.config;
    if (config.scales == ScaleKind::none) return true;
    const size_t size = config.scales == ScaleKind::f32 ? 4 : 1;
    const oracle::ScaleShape shape = c_.scale_shape();
    const size_t given = given_scale_bytes();
    const std::byte* sent = e.sent_scales[idx(from.source)].data() + idx(from.token) * given;
    const std::byte zero[4] = {};
    for (int64_t g = 0; g < shape.places(); ++g) {
      const std::byte* expected = g < shape.groups() ? sent + idx(g) * size : zero;
      if (std::memcmp(expected, d.scales.data() + shape.offset(expert, row, g), size) != 0) return false;
    }
    return true;
  }

  void check_bytes(const oracle::Traffic& t, uint64_t row) {
    const switchyard::CallStatistics stats = exchange_.last_call();
    f_.equal(t.remote * row, stats.remote_bytes, "remote_bytes");
    f_.equal(t.local * row, stats.local_bytes, "local_bytes");
    f_.equal(t.local + t.remote, stats.payload_rows, "payload_rows");
  }

  // --- Combine
  /// Every row that combine may read, and NaN in all others.
  std::vector<std::byte> expert_outputs(size_t i) const {
    const oracle::LowLatencyView& view = c_.steps[c_.steps[i].dispatch].views[idx(group_.rank())];
    const int64_t bytes = c_.row_bytes(c_.script.steps[i].y_type);
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
    const size_t rank = idx(group_.rank());
    const LowLatencyOutput& output = outputs_[idx(step.output)];
    size_t out_bytes = e.out[rank].size();
    std::vector<float> weights = e.replaced_weights.empty() ? std::vector<float>() : e.replaced_weights[rank];
    if (c_.script.steps[e.dispatch].tokens_in_memory) {  // as if every rank had max_tokens: nothing may be written behind T
      out_bytes = idx(c_.script.config.max_tokens * c_.row_bytes(step.y_type));
      weights.resize(idx(c_.script.config.max_tokens * c_.script.config.topk));
    }
    std::vector<std::byte> host_y, out(out_bytes, std::byte{0xA5});
    if (!step.identity) host_y = expert_outputs(i);
    constexpr size_t kLarge = size_t{32} << 20;  // more of them would not fit the memory for uploads
    const bool in_made_rows = !step.identity && step.y_type == answers_.dtype && (i % 2 == 0 || host_y.size() > kLarge);
    if (in_made_rows) put(answers_.data, host_y);
    void* const y = step.identity ? output.x.data : in_made_rows ? answers_.data : give(host_y);
    void* to = memory_ ? memory_->upload(out.data(), out.size()) : out.data();
    switchyard::LowLatencyCombineOptions options;
    options.order = step.order;
    if (!e.replaced_weights.empty()) options.weights = static_cast<const float*>(give(weights.data(), weights.size() * 4));
    if (memory_) {
      options.stream = memory_->stream();
      options.num_sms = c_.script.num_sms;
    }
    const switchyard::ConstRows rows = in_made_rows
                                           ? switchyard::ConstRows(answers_)
                                           : switchyard::ConstRows{y, output.x.rows, c_.script.config.hidden, step.y_type};
    meet();
    call(
        step, [&] { exchange_.combine(rows, output, to, options); },
        [&] { return exchange_.combine_send(rows, output, to, options); },
        [&] {
          if (host_y.empty()) return;
          memory_ ? memory_->fill(y, 0xEE, host_y.size()) : static_cast<void>(std::memset(y, 0xEE, host_y.size()));
        });
    if (memory_ && !out.empty()) memory_->read(out.data(), to, out.size());
    if (memory_) memory_->release();
    const auto behind = out.begin() + static_cast<std::ptrdiff_t>(e.out[rank].size());
    f_.check(std::all_of(behind, out.end(), [](std::byte b) { return b == std::byte{0xA5}; }), "out is written behind T");
    check_combined(step, e.out[rank], out);
    check_bytes(e.traffic[rank], static_cast<uint64_t>(c_.row_bytes(step.y_type)));
  }

  void check_combined(const LowLatencyStep& step, const std::vector<std::byte>& expected, const std::vector<std::byte>& out) {
    const int64_t hidden = c_.script.config.hidden;
    const auto elements = static_cast<int64_t>(expected.size() / switchyard::dtype_bytes(step.y_type));
    const int64_t n = oracle::first_difference(step.y_type, expected.data(), out.data(), elements);
    if (n == elements) return;
    std::ostringstream text;
    text << "combined token " << n / hidden << " column " << n % hidden << ": expected "
         << oracle::load(step.y_type, expected.data(), n) << ", got " << oracle::load(step.y_type, out.data(), n);
    f_.add(text.str());
  }

  switchyard::Group& group_;
  LowLatencyExchange& exchange_;
  const LowLatencyCase& c_;
  Failures& f_;
  const Interlude& interlude_;
  DeviceMemory* memory_ = nullptr;  ///< null: host memory
  std::vector<LowLatencyOutput> outputs_;
  switchyard::LowLatencyRows answers_;  ///< y of large and of every other combine of the row type
  uint64_t calls_ = 0;
};

}  // namespace

void run_on(switchyard::Group& group, LowLatencyExchange& exchange, const LowLatencyCase& c, Failures& failures,
            const Interlude& interlude) {
  Rank(group, exchange, c, failures, interlude).run();
}

std::string run_scripts(Ranks ranks, const Workers& workers, const std::vector<LowLatencyScript>& scripts) {
  std::vector<std::shared_ptr<const LowLatencyCase>> cases;
  for (const LowLatencyScript& s : scripts) cases.push_back(make_low_latency_case(s));
  return run_cases(ranks, workers, cases);
}

}  // namespace harness
