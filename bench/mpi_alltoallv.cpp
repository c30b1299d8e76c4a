// SPDX-License-Identifier: Apache-2.0
// The exchange of `switchyard bench`, packed by hand and sent with MPI_Alltoallv, for comparison.
//
// The work is the same: the same routing, the same rows, one row per (token, rank) with its ids and weights, and results
// checked bit by bit. So are the timing rules: a barrier before each call, time from entry to exit on the slowest rank, and
// alternating input sets that do not fit into any cache. Work that a careful user would do outside the call is done in advance
// and not timed: allocating and touching buffers of the final size, and committing MPI datatypes.
//
//   mpirun -n 2 --bind-to core mpi_alltoallv --tokens 512 --json peer.json
#define OMPI_SKIP_MPICXX 1  // the C interface only
#include <fmt/core.h>
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "check/scenario.hpp"
#include "measure/figures.hpp"
#include "measure/result_file.hpp"
#include "run/routing_source.hpp"

// The sum is compiled for several instruction sets, like the library's.
#if defined(__GNUC__) && !defined(__clang__)
#define SWITCHYARD_MULTIVERSION __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define SWITCHYARD_MULTIVERSION
#endif

namespace {

using namespace switchyard;
using namespace switchyard::measure;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Options {
  int64_t tokens = 512, hidden = 7168, iterations = 40, warmup = 5, sets = 0, seed = 1;
  int threads = 1;
  std::string routing = "uniform", json_path, commit = "unknown";
};

size_t at(int64_t i) { return static_cast<size_t>(i); }
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
int as_int(int64_t v) { return static_cast<int>(v); }

/// out = bf16(sum over i ascending of rows[i]), in float32 from +0.
SWITCHYARD_MULTIVERSION void sum_rows(const uint16_t* const* rows, int n, int64_t hidden, uint16_t* out) {
  constexpr int64_t kBlock = 512;
  for (int64_t c0 = 0; c0 < hidden; c0 += kBlock) {
    const int64_t count = std::min(kBlock, hidden - c0);
    float sum[kBlock] = {};
    for (int i = 0; i < n; ++i) {
      const uint16_t* row = rows[i] + c0;
      for (int64_t c = 0; c < count; ++c) {
        const uint32_t word = static_cast<uint32_t>(row[c]) << 16;
        float value;
        std::memcpy(&value, &word, sizeof value);
        sum[c] += value;
      }
    }
    for (int64_t c = 0; c < count; ++c) {
      uint32_t word;
      std::memcpy(&word, &sum[c], sizeof word);
      out[c0 + c] = static_cast<uint16_t>((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);  // rows are finite
    }
  }
}

/// Static data for one input set, and the buffers for its exchange.
struct Set {
  tool::Scenario scenario;
  tool::RowArray x, out;
  std::vector<int> send_counts, send_at, recv_counts, recv_at;  // rows, by rank
  std::vector<int64_t> row_of_pair;                // send buffer row of each (token, rank), in the order of `pair_begin`
  std::vector<int64_t> pair_begin;                 // [T + 1]
  std::vector<std::byte> received, received_meta;  // one row, and one record, per received (token, rank)
};

class Peer {
 public:
  Peer(const Options& o, int rank, int world) : o_(o), rank_(rank), world_(world) {
    const tool::RoutingSource source("--routing", o.routing, {0, 0, world, static_cast<uint64_t>(o.seed)});
    topk_ = source.topk();
    experts_ = source.experts();
    description_ = source.description();
    row_bytes_ = o.hidden * 2;
    meta_bytes_ = 4 + 8 * topk_;
    tool::Scenario base;
    base.world = world;
    base.experts = experts_;
    base.topk = topk_;
    base.hidden = o.hidden;
    base.seed = static_cast<uint64_t>(o.seed);
    machine_ = this_machine();
    const double per_set = static_cast<double>(world * o.tokens * row_bytes_) * (2.0 + std::min<double>(world, topk_));
    num_sets_ = o.sets > 0 ? as_int(o.sets)
                           : rotation_sets(per_set, static_cast<double>(machine_.llc_bytes),
                                           static_cast<double>(machine_.memory_available) / 3);
    o_.warmup = std::max(o_.warmup, num_sets_ - o_.iterations);  // every set is combined once, so all results are checked
    std::vector<std::vector<Routing>> routing;
    for (int r = 0; r < world; ++r) routing.push_back(source.batches(r, o.tokens, num_sets_));
    for (int i = 0; i < num_sets_; ++i) {
      sets_.emplace_back();
      sets_.back().scenario = base;
      for (int r = 0; r < world; ++r) sets_.back().scenario.routing.push_back(routing[at(r)][at(i)]);
      make_set(sets_.back(), static_cast<uint64_t>(i));
    }
    MPI_Type_contiguous(as_int(row_bytes_), MPI_BYTE, &row_type_);
    MPI_Type_contiguous(as_int(meta_bytes_), MPI_BYTE, &meta_type_);
    MPI_Type_commit(&row_type_);
    MPI_Type_commit(&meta_type_);
  }

  void run() {
    for (Set& set : sets_) dispatch(set);
    std::vector<double> dispatch_s, combine_s;
    for (int64_t i = 0; i < o_.warmup + o_.iterations; ++i) {
      Set& set = sets_[at(i % num_sets_)];
      const double c = timed([&] { combine(set); });
      const double d = timed([&] { dispatch(set); });
      if (i < o_.warmup) continue;
      combine_s.push_back(c);
      dispatch_s.push_back(d);
    }
    const std::string problem = verify();
    report(dispatch_s, combine_s, problem);
  }

  bool passed() const { return passed_; }

 private:
  template <class F>
  double timed(F f) {
    MPI_Barrier(MPI_COMM_WORLD);
    const Clock::time_point begin = Clock::now();
    f();
    return seconds_since(begin);
  }

  void make_set(Set& set, uint64_t index) {
    const tool::Scenario& s = set.scenario;
    set.x = tool::token_rows(s.seed, index, rank_, o_.tokens, o_.hidden, DType::bf16, ScaleKind::none);
    set.out = tool::RowArray(o_.tokens, o_.hidden, DType::bf16);
    const auto rows = oracle::rows_to(s.problem(), rank_).size();
    set.received.assign(rows * at(row_bytes_), std::byte{1});
    set.received_meta.assign(rows * at(meta_bytes_), std::byte{1});
    int64_t pairs = 0;
    for (int64_t t = 0; t < o_.tokens; ++t) pairs += ranks_of(s, t).second;
    send_rows_.resize(std::max(send_rows_.size(), at(pairs * row_bytes_)), std::byte{1});
    send_meta_.resize(std::max(send_meta_.size(), at(pairs * meta_bytes_)), std::byte{1});
    for (std::vector<int>* v : {&set.send_counts, &set.send_at, &set.recv_counts, &set.recv_at}) v->assign(at(world_), 0);
    set.row_of_pair.resize(at(pairs));
    set.pair_begin.resize(at(o_.tokens) + 1);
    total_pairs_ += pairs;
    total_remote_ += pairs;
    for (int64_t t = 0; t < o_.tokens; ++t) total_remote_ -= (ranks_of(s, t).first >> rank_) & 1u;
    for (const int32_t id : s.routing[at(rank_)].topk_ids) total_routes_ += s.valid(id) ? 1 : 0;
  }

  /// Bit mask of the ranks to which a token of this rank is sent, and the number of these ranks.
  std::pair<uint64_t, int> ranks_of(const tool::Scenario& s, int64_t t) const {
    uint64_t mask = 0;
    const int whole = experts_ / world_, larger = experts_ % world_;
    for (int k = 0; k < topk_; ++k) {
      const int32_t id = s.id(rank_, t, k);
      if (!s.valid(id)) continue;
      const int boundary = larger * (whole + 1);
      mask |= uint64_t{1} << (id < boundary ? id / (whole + 1) : larger + (id - boundary) / whole);
    }
    return {mask, __builtin_popcountll(mask)};
  }

  /// Computes the tokens' destinations and the counts of all ranks.
  void plan(Set& set) {
    std::fill(set.send_counts.begin(), set.send_counts.end(), 0);
    masks_.resize(at(o_.tokens));
    for (int64_t t = 0; t < o_.tokens; ++t) {
      masks_[at(t)] = ranks_of(set.scenario, t).first;
      for (uint64_t m = masks_[at(t)]; m != 0; m &= m - 1) ++set.send_counts[at(__builtin_ctzll(m))];
    }
    MPI_Alltoall(set.send_counts.data(), 1, MPI_INT, set.recv_counts.data(), 1, MPI_INT, MPI_COMM_WORLD);
    for (int r = 1; r < world_; ++r) {
      set.send_at[at(r)] = set.send_at[at(r - 1)] + set.send_counts[at(r - 1)];
      set.recv_at[at(r)] = set.recv_at[at(r - 1)] + set.recv_counts[at(r - 1)];
    }
    std::vector<int> next = set.send_at;
    int64_t pair = 0;
    for (int64_t t = 0; t < o_.tokens; ++t) {
      set.pair_begin[at(t)] = pair;
      for (uint64_t m = masks_[at(t)]; m != 0; m &= m - 1) set.row_of_pair[at(pair++)] = next[at(__builtin_ctzll(m))]++;
    }
    set.pair_begin[at(o_.tokens)] = pair;
  }

  void pack(const Set& set) {
    const Routing& routing = set.scenario.routing[at(rank_)];
#ifdef _OPENMP
#pragma omp parallel for num_threads(o_.threads) schedule(static)
#endif
    for (int64_t t = 0; t < o_.tokens; ++t) {
      for (int64_t p = set.pair_begin[at(t)]; p < set.pair_begin[at(t + 1)]; ++p) {
        const auto row = at(set.row_of_pair[at(p)]);
        std::memcpy(&send_rows_[row * at(row_bytes_)], set.x.row(t), at(row_bytes_));
        std::byte* meta = &send_meta_[row * at(meta_bytes_)];
        const auto token = static_cast<int32_t>(t);
        std::memcpy(meta, &token, 4);
        std::memcpy(meta + 4, &routing.topk_ids[at(t * topk_)], 4 * at(topk_));
        std::memcpy(meta + 4 + 4 * topk_, &routing.topk_weights[at(t * topk_)], 4 * at(topk_));
      }
    }
  }

  void dispatch(Set& set) {
    plan(set);
    pack(set);
    MPI_Alltoallv(send_rows_.data(), set.send_counts.data(), set.send_at.data(), row_type_, set.received.data(),
                  set.recv_counts.data(), set.recv_at.data(), row_type_, MPI_COMM_WORLD);
    MPI_Alltoallv(send_meta_.data(), set.send_counts.data(), set.send_at.data(), meta_type_, set.received_meta.data(),
                  set.recv_counts.data(), set.recv_at.data(), meta_type_, MPI_COMM_WORLD);
  }

  /// Experts are the identity: the received rows are returned, and their owner sums them in ascending rank order.
  void combine(Set& set) {
    MPI_Alltoallv(set.received.data(), set.recv_counts.data(), set.recv_at.data(), row_type_, send_rows_.data(),
                  set.send_counts.data(), set.send_at.data(), row_type_, MPI_COMM_WORLD);
#ifdef _OPENMP
#pragma omp parallel for num_threads(o_.threads) schedule(static)
#endif
    for (int64_t t = 0; t < o_.tokens; ++t) {
      const uint16_t* rows[kMaxRanks];
      int n = 0;
      for (int64_t p = set.pair_begin[at(t)]; p < set.pair_begin[at(t + 1)]; ++p) {
        rows[n++] = reinterpret_cast<const uint16_t*>(&send_rows_[at(set.row_of_pair[at(p)] * row_bytes_)]);
      }
      sum_rows(rows, n, o_.hidden, reinterpret_cast<uint16_t*>(set.out.row(t)));
    }
  }

  /// The first difference on this rank, or "".
  std::string verify() {
    std::vector<std::byte> expected(at(row_bytes_));
    for (size_t i = 0; i < sets_.size(); ++i) {
      const Set& set = sets_[i];
      const tool::Scenario& s = set.scenario;
      const std::vector<oracle::Origin> rows = oracle::rows_to(s.problem(), rank_);
      for (size_t row = 0; row < rows.size(); ++row) {
        const oracle::Origin& o = rows[row];
        const uint64_t key =
            tool::row_key(s.seed, i, tool::RowKind::token, static_cast<uint64_t>(o.source), static_cast<uint64_t>(o.token));
        tool::fill_row(expected.data(), DType::bf16, o_.hidden, key);
        const std::string d =
            tool::row_difference(&set.received[row * at(row_bytes_)], expected.data(), DType::bf16, o_.hidden);
        if (!d.empty()) return fmt::format("set {}, received row {}: {}", i, row, d);
        const std::byte* meta = &set.received_meta[row * at(meta_bytes_)];
        const Routing& routing = s.routing[at(o.source)];
        const auto token = static_cast<int32_t>(o.token);
        if (std::memcmp(meta, &token, 4) != 0 ||
            std::memcmp(meta + 4, &routing.topk_ids[at(o.token * topk_)], 4 * at(topk_)) != 0 ||
            std::memcmp(meta + 4 + 4 * topk_, &routing.topk_weights[at(o.token * topk_)], 4 * at(topk_)) != 0) {
          return fmt::format("set {}, received row {}: its token, ids or weights differ", i, row);
        }
      }
      tool::CombineCase c;
      c.set = i;
      c.identity = true;
      tool::ExpectedSums sums(s, c, rank_);
      for (int64_t t = 0; t < o_.tokens; ++t) {
        sums.make(t, expected.data());
        const std::string d = tool::row_difference(set.out.row(t), expected.data(), DType::bf16, o_.hidden);
        if (!d.empty()) return fmt::format("set {}, combined token {}: {}", i, t, d);
      }
    }
    return "";
  }

  std::vector<double> slowest_of(const std::vector<double>& mine) {
    std::vector<double> all(mine.size());
    MPI_Allreduce(mine.data(), all.data(), as_int(static_cast<int64_t>(mine.size())), MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return all;
  }

  void report(const std::vector<double>& dispatch_s, const std::vector<double>& combine_s, const std::string& problem) {
    const std::vector<double> d = slowest_of(dispatch_s), c = slowest_of(combine_s);
    std::vector<double> both;
    for (size_t i = 0; i < d.size(); ++i) both.push_back(d[i] + c[i]);
    int64_t sums[4] = {total_pairs_, total_remote_, total_routes_, problem.empty() ? 0 : 1};
    MPI_Allreduce(MPI_IN_PLACE, sums, 4, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    passed_ = sums[3] == 0;
    if (!problem.empty()) fmt::print(stderr, "rank {}: {}\n", rank_, problem);
    if (rank_ != 0) return;
    const Times dispatch = summarize(d), combine = summarize(c), total = summarize(both);
    const auto row = static_cast<double>(row_bytes_);
    const ExchangeBytes bytes =
        exchange_bytes(world_ * o_.tokens, sums[0] / num_sets_, sums[1] / num_sets_, sums[2] / num_sets_, row, row, row);
    fmt::print(
        "MPI_Alltoallv, {} ranks, {} tokens, hidden {}, {}: dispatch {:.1f} us (p99 {:.1f}), combine {:.1f} us (p99 {:.1f}), "
        "both {:.1f} us, {}\n",
        world_, o_.tokens, o_.hidden, description_, dispatch.p50 * 1e6, dispatch.p99 * 1e6, combine.p50 * 1e6,
        combine.p99 * 1e6, total.p50 * 1e6, passed_ ? "PASS" : "FAIL");
    if (o_.json_path.empty()) return;
    char library[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    MPI_Get_library_version(library, &length);
    const json config = {{"ranks", world_},
                         {"ranks_are", "processes"},
                         {"threads_per_rank", o_.threads},
                         {"tokens_per_rank", o_.tokens},
                         {"hidden", o_.hidden},
                         {"experts", experts_},
                         {"topk", topk_},
                         {"layout", "rank_major"},
                         {"dtype", "bf16"},
                         {"order", "per_rank"},
                         {"routing", description_},
                         {"seed", o_.seed},
                         {"warmup", o_.warmup},
                         {"library", std::string(library)}};
    const json run = {{"config", config},
                      {"input_sets", num_sets_},
                      {"dispatch", to_json(dispatch)},
                      {"combine", to_json(combine)},
                      {"both", to_json(total)},
                      {"bytes", to_json(bytes)},
                      {"verified", passed_}};
    write_json(o_.json_path, {{"schema", "switchyard.bench/1"},
                              {"what", "mpi_alltoallv"},
                              {"commit", o_.commit},
                              {"date", utc_now()},
                              {"machine", to_json(machine_)},
                              {"runs", json::array({run})}});
  }

  Options o_;
  int rank_, world_;
  int topk_ = 0, experts_ = 0, num_sets_ = 0;
  std::string description_;
  int64_t row_bytes_ = 0, meta_bytes_ = 0;
  int64_t total_pairs_ = 0, total_remote_ = 0, total_routes_ = 0;
  bool passed_ = false;
  Machine machine_;
  std::vector<Set> sets_;
  std::vector<std::byte> send_rows_, send_meta_;
  std::vector<uint64_t> masks_;
  MPI_Datatype row_type_ = MPI_DATATYPE_NULL, meta_type_ = MPI_DATATYPE_NULL;
};

Options parse(int argc, char** argv) {
  Options o;
  CLI::App app("The exchange of `switchyard bench`, packed by hand over MPI_Alltoallv. Start it with mpirun.", "mpi_alltoallv");
  app.add_option("--tokens", o.tokens, "Tokens per rank")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--hidden", o.hidden, "Row length")->check(CLI::Range(8, 1 << 17))->capture_default_str();
  app.add_option("--routing", o.routing, "Routing source, as for switchyard bench")->capture_default_str();
  app.add_option("--iterations", o.iterations, "Timed iterations")->check(CLI::Range(20, 1 << 20))->capture_default_str();
  app.add_option("--warmup", o.warmup, "Iterations before them")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--sets", o.sets, "Input sets used in turn; 0: so many that no cache holds them")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app.add_option("--threads", o.threads, "Threads of a rank that pack and sum")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--seed", o.seed, "Seed of rows and routing")->capture_default_str();
  app.add_option("--json", o.json_path, "File to write; -: standard output");
  app.add_option("--commit", o.commit, "Commit to write down")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e) == 0 ? 0 : 2);
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (options.json_path == kStandardOutput) claim_standard_output();
  MPI_Init(&argc, &argv);
  int rank = 0, world = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  int status = 3;
  try {
    Peer peer(options, rank, world);
    peer.run();
    status = peer.passed() ? 0 : 1;
  } catch (const std::exception& e) {
    fmt::print(stderr, "mpi_alltoallv: rank {}: {}\n", rank, e.what());
    MPI_Abort(MPI_COMM_WORLD, status);
  }
  MPI_Finalize();
  return status;
}
