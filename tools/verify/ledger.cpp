// SPDX-License-Identifier: Apache-2.0
#include "verify/ledger.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/progress.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "device/clock.hpp"
#include "device/gpu_probe.hpp"
#include "measure/figures.hpp"
#include "oracle/rows.hpp"
#include "run/names.hpp"
#include "run/ranks.hpp"
#include "switchyard/ledger.hpp"
#include "verify/ledger_fixture.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
using Steady = std::chrono::steady_clock;

constexpr double kTolerance = 1e-2;  // absolute and relative tolerance of the published check

double us_since(Steady::time_point begin) { return std::chrono::duration<double, std::micro>(Steady::now() - begin).count(); }

/// One rank's part of the check.
class LedgerRank {
 public:
  LedgerRank(const LedgerFixture& fixture, Group& group, RankDevice& device, int sms)
      : f_(fixture),
        rank_(group.rank()),
        group_(group),
        device_(device),
        ledger_(group, fixture.config()),
        tables_(fixture.tables(rank_)),
        host_probs_(fixture.probs(rank_)) {
    options_.stream = device.stream();
    options_.num_sms = sms;
    fill_expert_output();
    fill_golden();
  }

  json run(int64_t warmup, int64_t measured, RankLink& link) {
    json samples = json::array(), prepares = json::array();
    for (int64_t i = 0; i < warmup + measured; ++i) {
      device_.release();
      const auto prepare_begin = Steady::now();
      prepare();
      const double prepared = us_since(prepare_begin);
      group_.barrier();  // all ranks are ready: waiting for them is not part of the time
      const auto begin = Steady::now();
      ledger_.combine({y_, rows_, f_.hidden, f_.type}, probs_, prepared_, out_, options_);
      device_.wait();
      const double sample = us_since(begin);
      check(i == 0 ? "" : fmt::format(" (call {})", i + 1));
      group_.barrier();
      if (rank_ == 0) link.progress(i + 1, "");
      if (i < warmup) continue;
      prepares.push_back(prepared);
      samples.push_back(sample);
    }
    return {{"prepare", prepares}, {"combine", samples}};
  }

  /// Collective, after run(). Seconds for replays of the call by itself. Checks the output of the last replay.
  json time_replayed(Clock& clock, int64_t late_us, int64_t n) {
    LedgerCombineOptions options = options_;
    options.stream = clock.device().stream();
    device_.fill(out_, 0xEE, static_cast<size_t>(f_.tokens) * f_.row_bytes());
    device_.wait();
    json seconds = time_entered_late(
        clock, rank_, late_us,
        [&] {
          ledger_.combine({y_, rows_, f_.hidden, f_.type}, probs_, prepared_, out_, options);
        },
        10, n);
    check(" after the timed replays");
    return seconds;
  }

  /// Findings of all checks so far.
  json findings() const { return {{"problem", problem_}, {"max_diff", max_diff_}, {"compared", compared_}}; }

  /// Device memory for one iteration.
  static size_t device_bytes(const LedgerFixture& f) {
    const auto rows = static_cast<size_t>(f.world * f.routes() + f.tokens);
    return rows * f.row_bytes() + static_cast<size_t>(f.routes()) * 4 + 4096;
  }

 private:
  /// Ledger, expert outputs and probabilities in the memory required by the backend; they are recreated with the same contents
  /// for every call.
  void prepare() {
    prepared_ = ledger_.prepare(tables_);
    rows_ = prepared_.rows();
    y_ = device_.upload(host_y_.data(), host_y_.size());
    probs_ = device_.upload(host_probs_.data(), host_probs_.size() * sizeof(float));
    const size_t bytes = static_cast<size_t>(f_.tokens) * f_.row_bytes();
    out_ = device_.allocate(bytes);
    device_.fill(out_, 0xEE, bytes);
    device_.wait();
  }

  /// The row to which route f returns on this rank, or -1 if there is none.
  int32_t row_of(int64_t f) const { return tables_.expanded_row_idx[static_cast<size_t>(f)]; }

  /// Rows ordered by (local expert, source, route order), which is the order in which a dispatch delivers them.
  void fill_expert_output() {
    const std::vector<oracle::Origin> rows = oracle::rows_to(f_.problem(), rank_);
    host_y_.resize(rows.size() * f_.row_bytes());
    std::byte* row = host_y_.data();
    for (const oracle::Origin& o : rows) {
      f_.fill_row(o.source, o.token, row);
      row += f_.row_bytes();
    }
  }

  /// The return buffer, the results, and their maximum difference from the float32 sums.
  struct Golden {
    std::vector<std::byte> returned, out;
    double max_diff = 0;
  };
  void fill_golden() {
    golden_.out.resize(static_cast<size_t>(f_.tokens) * f_.row_bytes());
    for (int64_t t = 0; t < f_.tokens; ++t) {
      std::byte* const row = golden_.out.data() + static_cast<size_t>(t) * f_.row_bytes();
      const std::vector<float> sums = golden_sums(t);
      oracle::store_row(f_.type, sums.data(), f_.hidden, row);
      for (int64_t c = 0; c < f_.hidden; ++c) {
        const auto sum = static_cast<double>(sums[static_cast<size_t>(c)]);
        golden_.max_diff = std::max(golden_.max_diff, std::abs(static_cast<double>(oracle::load(f_.type, row, c)) - sum));
      }
    }
    const auto valid =
        std::count_if(tables_.expanded_row_idx.begin(), tables_.expanded_row_idx.end(), [](int32_t at) { return at >= 0; });
    golden_.returned.resize(static_cast<size_t>(valid) * f_.row_bytes());
    for (int64_t f = 0; f < f_.routes(); ++f)
      if (const int32_t at = row_of(f); at >= 0)
        f_.fill_row(rank_, f / f_.topk, golden_.returned.data() + static_cast<size_t>(at) * f_.row_bytes());
  }
  /// A token's sums in float32.
  std::vector<float> golden_sums(int64_t t) const {
    std::vector<float> x(static_cast<size_t>(f_.hidden)), sums(x.size());
    for (size_t c = 0; c < x.size(); ++c) x[c] = oracle::rounded(f_.type, f_.input(rank_, t, static_cast<int64_t>(c)));
    std::vector<oracle::Term> terms;
    for (int64_t f = t * f_.topk; f < (t + 1) * f_.topk; ++f)
      if (row_of(f) >= 0) terms.push_back({x.data(), host_probs_[static_cast<size_t>(f)]});
    oracle::SumSpec spec;
    spec.type = DType::f32;
    spec.hidden = f_.hidden;
    spec.order = CombineOrder::per_route;
    spec.weighted = true;
    oracle::combine_row(spec, terms, sums.data());
    return sums;
  }

  void fail(const std::string& what) {
    if (problem_.empty()) problem_ = what;
  }

  void check(const std::string& when) {
    const ConstRows returned = ledger_.returned();
    const auto valid = static_cast<int64_t>(golden_.returned.size() / f_.row_bytes());
    if (valid != returned.rows) {
      fail(fmt::format("return buffer: {} rows, expected {}{}", returned.rows, valid, when));
    } else {
      got_.resize(golden_.returned.size());
      device_.read(got_.data(), returned.data, got_.size());
      if (got_ != golden_.returned) name_returned_row(when);
    }
    got_.resize(golden_.out.size());
    device_.read(got_.data(), out_, got_.size());
    if (got_ == golden_.out)
      max_diff_ = std::max(max_diff_, golden_.max_diff);
    else
      for (int64_t t = 0; t < f_.tokens; ++t) check_token(t, got_.data() + static_cast<size_t>(t) * f_.row_bytes(), when);
    compared_ += (valid + f_.tokens) * f_.hidden;
  }

  void name_returned_row(const std::string& when) {
    for (int64_t f = 0; f < f_.routes(); ++f) {
      const int32_t row = row_of(f);
      const size_t at = static_cast<size_t>(std::max(row, 0)) * f_.row_bytes();
      if (row >= 0 && std::memcmp(got_.data() + at, golden_.returned.data() + at, f_.row_bytes()) != 0)
        return fail(fmt::format("return buffer: row {} (route {}) differs{}", row, f, when));
    }
  }

  void check_token(int64_t t, const std::byte* got, const std::string& when) {
    const std::vector<float> sums = golden_sums(t);
    for (int64_t c = 0; c < f_.hidden; ++c) {
      const float golden = sums[static_cast<size_t>(c)], value = oracle::load(f_.type, got, c);
      const double diff = std::abs(static_cast<double>(value) - golden);
      max_diff_ = std::max(max_diff_, diff);
      if (!(diff <= kTolerance + kTolerance * std::abs(golden)))
        fail(fmt::format("token {} column {}: {} given, {} expected within 1e-2{}", t, c, value, golden, when));
      else if (value != oracle::rounded(f_.type, golden))
        fail(fmt::format("token {} column {}: {} is not the float32 sum {} rounded once{}", t, c, value, golden, when));
    }
  }

  const LedgerFixture& f_;
  const int rank_;
  Group& group_;
  RankDevice& device_;
  LedgerCombine ledger_;
  LedgerCombineOptions options_;
  PreparedLedger prepared_;
  const LedgerTables tables_;
  const std::vector<float> host_probs_;
  std::vector<std::byte> host_y_;
  Golden golden_;
  std::vector<std::byte> got_;
  int64_t rows_ = 0;
  const std::byte* y_ = nullptr;
  const float* probs_ = nullptr;
  void* out_ = nullptr;
  std::string problem_;
  double max_diff_ = 0;
  int64_t compared_ = 0;
};

/// Mean and maximum of the samples, where each sample is the maximum over the ranks.
struct Profile {
  double average = 0, largest = 0;
};
Profile profile_of(const std::vector<json>& ranks, const char* name) {
  Profile p;
  const size_t samples = ranks.front()[name].size();
  for (size_t i = 0; i < samples; ++i) {
    double slowest = 0;
    for (const json& r : ranks) slowest = std::max(slowest, r[name][i].get<double>());
    p.average += slowest / static_cast<double>(samples);
    p.largest = std::max(p.largest, slowest);
  }
  return p;
}

std::vector<json> run_on_ranks(const LedgerFixture& fixture, const LedgerVerifyOptions& o, int gpus,
                               const std::function<void(int64_t)>& on_progress) {
  RankJob job;
  job.world = fixture.world;
  job.processes = o.processes;
  job.size_flags = "--tokens, --hidden or --ranks";
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(o.warps);
  job.group.timeout = std::chrono::milliseconds(o.timeout_ms);
  job.group.backend = gpus > 0 ? Backend::cuda : Backend::cpu;
  job.group.heap_bytes = LedgerCombine::heap_bytes(fixture.config(), fixture.world, job.group.backend);
  const bool timed = gpus >= fixture.world;  // ranks that share a GPU would wait for each other's kernels
  if (timed) job.group.heap_bytes += 2 * gpu_clock_bytes(0);
  const size_t arena = LedgerRank::device_bytes(fixture);
  const RankBody body = [&](Group& group, RankLink& link) {
    const std::shared_ptr<RankDevice> device = rank_device(group.rank(), gpus, arena);
    group.barrier();  // every rank has its stream and memory before any rank waits for another
    LedgerRank rank(fixture, group, *device, static_cast<int>(o.sms));
    json result = rank.run(o.warmup, o.iterations, link);
    if (timed) result["kernel"] = rank.time_replayed(*make_gpu_clock(group, Timing::replayed, {}), o.late_us, 100);
    result.update(rank.findings());
    group.barrier();  // memory must not be freed earlier
    return result;
  };
  return run_ranks(job, body, [&](int, int64_t done, const std::string&) {
    if (on_progress) on_progress(done);
  });
}

/// The report without measurements.
json report_of(const LedgerVerifyOptions& o, const LedgerFixture& fixture) {
  const LedgerFormatBytes bytes = ledger_format_bytes(fixture.config(), fixture.world, static_cast<int>(o.aiv_blocks));
  return {{"ranks", o.ranks},
          {"tokens", o.tokens},
          {"hidden", o.hidden},
          {"topk", o.topk},
          {"experts", o.ranks * o.experts_per_rank()},
          {"dtype", o.dtype},
          {"backend", o.backend},
          {"late_us", o.late_us},
          {"ranks_are", o.processes ? "processes" : "threads"},
          {"workspace_bytes", bytes.workspace},
          {"route_meta_bytes", bytes.route_meta},
          {"window_bytes", bytes.window},
          {"guard_bytes", bytes.guard},
          {"prepare_fixture_us", nullptr},
          {"combine_e2e_us", nullptr},
          {"kernel_us", nullptr},
          {"samples", o.iterations},
          {"machine", to_json(measure::this_machine())},
          {"commit", source_commit()},
          {"date", measure::utc_now()},
          {"passed", false},
          {"problem", ""},
          {"compared", 0},
          {"max_diff", 0.0}};
}

/// Adds the findings and measurements from the ranks.
void add_results(json& report, const std::vector<json>& ranks) {
  std::string problem;
  double max_diff = 0;
  int64_t compared = 0;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto text = ranks[r]["problem"].get<std::string>();
    if (problem.empty() && !text.empty()) problem = fmt::format("rank {}: {}", r, text);
    max_diff = std::max(max_diff, ranks[r]["max_diff"].get<double>());
    compared += ranks[r]["compared"].get<int64_t>();
  }
  const Profile prepare = profile_of(ranks, "prepare"), combine = profile_of(ranks, "combine");
  report["prepare_fixture_us"] = {{"avg", prepare.average}, {"max", prepare.largest}};
  report["combine_e2e_us"] = {{"avg", combine.average}, {"max", combine.largest}};
  if (ranks.front().contains("kernel")) {
    const measure::Times kernel = measure::times_of(ranks, "/kernel");
    report["kernel_us"] = {{"median", kernel.p50 * 1e6}, {"p99", kernel.p99 * 1e6}};
  }
  report["passed"] = problem.empty();
  report["problem"] = problem;
  report["compared"] = compared;
  report["max_diff"] = max_diff;
}

LedgerVerifyOptions resolved(LedgerVerifyOptions o) {
  if (o.quick) {
    o.tokens = 8;
    o.hidden = 64;
    o.topk = 2;
    o.experts = 2;
    o.ranks = 2;
  }
  if (o.experts % o.ranks != 0)
    throw UsageError(fmt::format("--experts: {} given; allowed: a multiple of --ranks {}", o.experts, o.ranks));
  const bool cpu = backend_named(o.backend) == Backend::cpu;
  if (cpu && o.sms > 0) throw UsageError("--sms: given with --backend cpu; multiprocessors belong to GPUs (--blocks, --warps)");
  if (cpu && o.late_us > 0) throw UsageError("--late-us: given with --backend cpu; only replayed kernels are timed so");
  return o;
}

void print_report(const LedgerVerifyOptions& o, const json& r) {
  const auto us = [&](const char* what, const char* figure) { return r.at(what).at(figure).get<double>(); };
  fmt::print("[PROFILE] LedgerCombine\n");
  fmt::print("  M={} K={} ranks={} topK={} expertPerPe={} warmup={} measured={} samples={}\n", o.tokens, o.hidden, o.ranks,
             o.topk, o.experts_per_rank(), o.warmup, o.iterations, o.iterations);
  fmt::print("  bytes: workspace={} routeMeta={} window={} guard={}\n", r.at("workspace_bytes").get<size_t>(),
             r.at("route_meta_bytes").get<size_t>(), r.at("window_bytes").get<size_t>(), r.at("guard_bytes").get<size_t>());
  if (!r.at("combine_e2e_us").is_null()) {  // all ranks finished
    fmt::print("  prepare_fixture: avg={:.1f} us max={:.1f} us\n", us("prepare_fixture_us", "avg"),
               us("prepare_fixture_us", "max"));
    fmt::print("  combine_e2e: avg={:.1f} us max={:.1f} us\n", us("combine_e2e_us", "avg"), us("combine_e2e_us", "max"));
  }
  if (!r.at("kernel_us").is_null())
    fmt::print("  kernel: median={:.1f} us {}={:.1f} us (replayed graph, cold L2, slowest rank)\n", us("kernel_us", "median"),
               measure::tail_name(o.iterations), us("kernel_us", "p99"));
  fmt::print("  compared={} max_diff={:.3g}\n", r.at("compared").get<int64_t>(), r.at("max_diff").get<double>());
  const auto problem = r.at("problem").get<std::string>();
  if (!problem.empty()) fmt::print("  {}\n", problem);
  fmt::print("  verify={}\n", problem.empty() ? "PASS" : "FAIL");
}

}  // namespace

double host_bytes(const LedgerVerifyOptions& o, int gpus) {
  const LedgerFixture f(o);
  const double heap = gpus > 0 ? 0 : static_cast<double>(LedgerCombine::heap_bytes(f.config(), f.world));
  // The experts' outputs (while they are being appended, as a copy, and for their check), and the results and their check.
  const double rows = 4 * static_cast<double>(f.routes()) + 2 * static_cast<double>(f.tokens);
  return f.world * (heap + rows * static_cast<double>(f.row_bytes()));
}

json measured_ledger(const LedgerVerifyOptions& o, int gpus, const std::function<void(int64_t)>& on_progress) {
  const LedgerFixture fixture(o);
  json report = report_of(o, fixture);
  try {
    add_results(report, run_on_ranks(fixture, o, gpus, on_progress));
  } catch (const RankError& e) {
    if (!e.blames_exchange()) throw;
    report["problem"] = e.what();
  }
  return report;
}

int run_verify_ledger(const LedgerVerifyOptions& asked) {
  const LedgerVerifyOptions o = resolved(asked);
  std::string gpu_names;
  int gpus = 0;
  if (backend_named(o.backend) == Backend::cuda) {
    const UsedGpus used = gpus_to_use();
    gpus = used.count();
    gpu_names = used.probe.names();
    if (!o.json) fmt::print("  GPUs: {}\n", gpu_names);
  }
  if (o.late_us > 0 && gpus < o.ranks)
    throw UsageError(
        fmt::format("--late-us: given with --ranks {} and {}; allowed: a GPU for each rank", o.ranks, counted(gpus, "GPU")));
  require_memory(fmt::format("--tokens {} --hidden {} --topk {} --ranks {}", o.tokens, o.hidden, o.topk, o.ranks),
                 host_bytes(o, gpus), measure::this_machine().memory_available);
  const auto print_report_json = [&](json report) {
    report["gpus"] = gpu_names;
    print_json(report);
  };
  json report;
  try {
    Progress progress(o.json);
    progress.stage("ledger combine", o.warmup + o.iterations);
    report = measured_ledger(o, gpus, [&](int64_t done) { progress.update(done); });
    progress.finish();
  } catch (const Error& e) {
    if (o.json) {
      report = report_of(o, LedgerFixture(o));
      report["problem"] = e.what();
      print_report_json(report);
    }
    throw;
  }
  if (o.json)
    print_report_json(report);
  else
    print_report(o, report);
  return report.at("passed").get<bool>() ? kExitOk : kExitCheckFailed;
}

}  // namespace switchyard::tool
