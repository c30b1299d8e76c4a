// SPDX-License-Identifier: Apache-2.0
// A soak test of a serving worker: in life after life, ranks make random calls of all modes on one or two lanes each, inside
// and outside of lazily captured graphs. They encounter rows that exceed capacities, full pools, garbage collectors, forked
// helpers, another library's collectives, and ranks that throw or are killed. Every result is judged. Ends with a summary, or
// with the number of the failed life and its error.
#include <barrier>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "multiproc/fork_ranks.hpp"
#include "soak/lane.hpp"

namespace {

using namespace std::chrono_literals;
using soak::End;
using soak::Life;
using soak::Report;
using Counts = std::map<std::string, uint64_t>;
using switchyard::Group;
using switchyard::GroupOptions;
using switchyard::test::ChildRank;
using switchyard::test::RankEnd;

using soak::kCuda;
constexpr auto kLongestLife = 150s;

const char kUsage[] =
    "Usage: %s [--seconds N] [--seed N] [--ranks N] [--as threads|processes|both] [--life N]\n"
    "  --seconds  how long new lives begin (60)\n"
    "  --seed     of all that is drawn (1)\n"
    "  --ranks    of each group (CPU: 3; GPU: as many as there are, at least 2)\n"
    "  --as       threads of a process, processes, or some lives so, others so (both; ranks that share a GPU: processes)\n"
    "  --life     only this life, 0, 1, ...\n";

struct Options {
  int64_t seconds = 60, seed = 1, ranks = 0, life = -1;
  bool threads = true, processes = true;
};

bool parse(int argc, char** argv, Options& o) {
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--as" && (value == "threads" || value == "processes" || value == "both")) {
      o.threads = value != "processes", o.processes = value != "threads";
      continue;
    }
    int64_t* const to = name == "--seconds" ? &o.seconds
                        : name == "--seed"  ? &o.seed
                        : name == "--ranks" ? &o.ranks
                        : name == "--life"  ? &o.life
                                            : nullptr;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), to ? *to : o.life);
    if (!to || error != std::errc() || end != value.data() + value.size() || *to < 0) return false;
  }
  return o.ranks <= 16;
}

/// Runs the lane. Returns "" if it ended as required, otherwise a description of the error.
std::string run_lane(const Life& life, int rank, int lane, std::barrier<>& meet, Report& report,
                     const std::function<Group()>& join) {
  const bool hit = life.end == End::killed || (life.end == End::throws && lane == life.victim_lane);
  bool met = false;
  const auto meet_once = [&] {
    if (!std::exchange(met, true)) meet.arrive_and_drop();
  };
  std::string wrong;
  try {
    soak::Lane worker(life, lane, join(), report);
    meet.arrive_and_wait();
    worker.capture_graphs();
    meet.arrive_and_wait();  // no rank ends before all its lanes have arrived
    met = true;
    worker.run();
    if (hit && life.world > 1) wrong = "it has not heard of the end of rank " + std::to_string(life.victim);
  } catch (const soak::OwnError&) {
    ++report.counts["ranks_threw"];
  } catch (const switchyard::PeerFailed& error) {
    const bool of_victim = error.rank() == life.victim || life.world > 2;  // or of a rank that was notified before this one
    if (hit && rank != life.victim && of_victim) {
      ++report.counts[life.end == End::killed ? "heard_of_the_killed" : "heard_of_the_thrower"];
    } else {
      wrong = error.what();
    }
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  meet_once();
  if (wrong.empty()) return "";
  return "rank " + std::to_string(rank) + ", lane " + std::to_string(lane) + ": " + wrong +
         " (last steps:" + report.last_steps() + ")";
}

GroupOptions group_options(const Life& life) {
  GroupOptions options;
  options.backend = soak::kBackend;
  options.heap_bytes = soak::heap_bytes_of(life);
  options.timeout = 30s;
  options.num_sms = soak::num_sms_for(life.world, life.lanes);
  return options;
}

/// Runs the life's ranks `ranks`, with all their lanes, in this process. \throws std::runtime_error with all errors.
void run_in_process(const Life& life, const std::vector<int>& ranks, const std::string& store, const ChildRank& child) {
  const GroupOptions options = group_options(life);
  std::array<std::vector<Group>, soak::kMaxLanes> groups;
  if (!life.processes) {
    for (auto& lane : groups) lane = Group::in_process(life.world, options);
  }
  std::mutex lock;
  std::string wrong;
  Counts total;
  std::vector<std::unique_ptr<std::barrier<>>> meets;
  std::vector<std::thread> threads;
  for (const int rank : ranks) {
    std::barrier<>& meet = *meets.emplace_back(std::make_unique<std::barrier<>>(life.lanes));
    for (int lane = 0; lane < life.lanes; ++lane) {
      threads.emplace_back([&, rank, lane] {
        soak::Report report;
        const std::string text = run_lane(life, rank, lane, meet, report, [&] {
          if (!life.processes) return std::move(groups[static_cast<size_t>(lane)][static_cast<size_t>(rank)]);
          return Group::connect(rank, life.world, store + std::to_string(lane), "soak", options);
        });
        const std::lock_guard hold(lock);
        if (!text.empty()) wrong += (wrong.empty() ? "" : "; ") + text;
        for (const auto& [name, count] : report.counts) total[name] += count;
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& [name, count] : total) child.say(name + "=" + std::to_string(count));
  if (!wrong.empty()) throw std::runtime_error(wrong);
}

/// Returns true if the life went as expected; otherwise prints the error.
bool live(const Life& life, Counts& total) {
  const std::string store = "unix:@switchyard-soak-" + std::to_string(::getpid()) + "-" + std::to_string(life.seed) + "-";
  const auto ends = switchyard::test::run_ranks(
      life.processes ? life.world : 1,
      [&](ChildRank& me) {
        std::vector<int> ranks;
        for (int r = 0; r < life.world; ++r) {
          if (!life.processes || r == me.rank()) ranks.push_back(r);
        }
        run_in_process(life, ranks, store, me);
      },
      kLongestLife);
  bool good = true;
  for (const RankEnd& end : ends) {
    for (const std::string& line : end.said) {
      const size_t at = line.find('=');
      total[line.substr(0, at)] += std::strtoull(line.c_str() + at + 1, nullptr, 10);
    }
    const bool killed = life.end == End::killed && end.rank == life.victim && end.signal == SIGKILL && !end.overdue;
    if (killed) ++total["ranks_killed"];
    if (end.ok() || killed) continue;
    good = false;
    std::printf("%s %d: %s\n", life.processes ? "process" : "the process of all ranks", end.rank,
                end.overdue         ? "it hangs"
                : end.error.empty() ? "it crashed"
                                    : end.error.c_str());
    if (!end.ok() && end.error.empty()) std::printf("  exit code %d, signal %d\n", end.exit_code, end.signal);
  }
  ++total[std::string("lives_") + name_of(life.end)];
  ++total[life.processes ? "lives_of_processes" : "lives_of_threads"];
  return good;
}

std::string text_of(const Life& life) {
  return std::string(life.processes ? "processes" : "threads") + ", " + std::to_string(life.steps) + " steps, " +
         std::to_string(life.hidden) + " columns, " + std::to_string(life.lanes) + (life.lanes == 1 ? " lane" : " lanes") +
         ", ends " + name_of(life.end) +
         (life.end == End::in_order ? ""
                                    : " (rank " + std::to_string(life.victim) + ", lane " + std::to_string(life.victim_lane) +
                                          ", step " + std::to_string(life.last_step) + ")");
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, kUsage, argv[0]);
    return 2;
  }
  // Ranks that share a GPU: their streams must not share a queue, and a lazy load may wait for another rank's kernel.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("NCCL_MAX_CTAS", "8", 0);
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  const int gpus = soak::count_gpus();
  if (kCuda && gpus == 0) {
    std::fprintf(stderr, "no GPU is visible\n");
    return 1;
  }
  const int world = options.ranks > 0 ? static_cast<int>(options.ranks) : kCuda ? std::max(2, gpus) : 3;
  // If ranks are threads and share a GPU, none may allocate, free or capture while another rank's kernels wait, so this is not
  // run.
  if (kCuda && gpus < world) options.threads = false, options.processes = true;
  constexpr int kMinSteps = kCuda ? 300 : 60;
  constexpr int kWidths[3] = {kCuda ? 256 : 64, kCuda ? 1024 : 128, kCuda ? 2048 : 256};
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  Counts total;
  bool good = true;
  uint64_t n = options.life >= 0 ? static_cast<uint64_t>(options.life) : 0;
  for (; good && (options.life >= 0 || seconds() < static_cast<double>(options.seconds)); ++n) {
    const Life life = soak::draw_life(soak::draw(static_cast<uint64_t>(options.seed), n), world, options.threads,
                                      options.processes, kMinSteps, kWidths);
    std::printf("life %llu after %.0f s: %s\n", static_cast<unsigned long long>(n), seconds(), text_of(life).c_str());
    std::fflush(stdout);
    good = live(life, total);
    if (options.life >= 0) break;
  }
  std::printf("\nserving worker on %s, %d ranks, seed %lld: %.0f s\n",
              kCuda ? (std::to_string(gpus) + " GPUs").c_str() : "the CPU", world, static_cast<long long>(options.seed),
              seconds());
  for (const auto& [name, count] : total) std::printf("  %-24s %llu\n", name.c_str(), static_cast<unsigned long long>(count));
  std::printf(good ? "no mismatch, no hang, no leak\n" : "FAILED\n");
  return good ? 0 : 1;
}
