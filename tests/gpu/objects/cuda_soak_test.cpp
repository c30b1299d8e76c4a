// SPDX-License-Identifier: Apache-2.0
// Thousands of calls of all kinds in random order, with random T, streams, and host and GPU delays.
#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

constexpr int kCases = 12, kRepetitions = 3;
/// One in kKeepOneOf calls is saved. After kMeetAfter calls, the ranks meet, and the saved calls are compared.
constexpr int kKeepOneOf = 5, kMeetAfter = 50;

struct Soak {
  const char* name;
  int world, calls;
  Layout layout;
  CombineOrder order = CombineOrder::per_rank;
  Staging staging = Staging::direct;
  Width width = Width::narrow;
};
std::ostream& operator<<(std::ostream& out, const Soak& s) { return out << s.name; }

std::vector<std::shared_ptr<const Case>> soak_cases(const Soak& soak) {
  std::vector<std::shared_ptr<const Case>> cases;
  for (uint64_t i = 0; i < kCases; ++i) {
    Scenario s = gpu_scenario("soak " + std::to_string(i), soak.world, soak.layout, 20, 300 + 2 * i);
    for (size_t r = 0; r < s.tokens.size(); ++r) s.tokens[r] = static_cast<int64_t>(oracle::mix(8, i, r) % 24);
    for (int64_t& tokens : s.tokens) tokens = tokens > 20 ? 0 : tokens;
    s.drop_percent = i % 3 == 0 ? 15 : 0;
    s.order = soak.order;
    s.staging = soak.staging;
    s.ring = {3, 2, 4};
    cases.push_back(make_case(with_width(s, soak.width)));
  }
  return cases;
}

/// Makes one rank's calls.
class Soaker {
 public:
  Soaker(Station& me, NormalExchange& exchange, const std::vector<std::shared_ptr<const Case>>& cases)
      : me_(me), exchange_(exchange), cases_(cases), sink_(reinterpret_cast<float*>(me.allocate(4))), inputs_(cases.size()) {
    for (size_t i = 0; i < cases.size(); ++i) {
      for (int r = 0; r < kRepetitions; ++r) {
        auto data = std::make_unique<RankData>(*cases[i], me.rank(), r);
        const Inputs in = me.upload(*cases[i], *data);
        inputs_[i].push_back({std::move(data), in});
      }
    }
  }

  /// Returns the number of compared calls.
  int run(int calls) {
    int compared = 0;
    me_.meet();
    for (int i = 0; i < calls; ++i) {
      call(i, i % kKeepOneOf == kKeepOneOf - 1);
      if (i % kMeetAfter != kMeetAfter - 1) continue;
      me_.meet();
      for (const Kept& kept : kept_) compare(kept);
      compared += static_cast<int>(kept_.size());
      kept_.clear();
      me_.meet();
    }
    return compared;
  }

 private:
  struct Input {
    std::unique_ptr<RankData> data;
    Inputs in;
  };
  struct Delivered {
    size_t which = 0, repetition = 0;
    Dispatched d;
  };
  /// Results of a call.
  struct Kept {
    std::string context;
    size_t which = 0, repetition = 0;
    Handle handle;
    Shot shot;
    void* out = nullptr;  ///< of a combine
  };

  void call(int i, bool keep) {
    const uint64_t bits = oracle::mix(21, static_cast<uint64_t>(i));  // equal on all ranks
    const uint64_t mine = oracle::mix(22, static_cast<uint64_t>(i), static_cast<uint64_t>(me_.rank()) + 1);  // of this rank
    const cudaStream_t stream = me_.stream(static_cast<int>(mine % 3));
    if (mine / 4 % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine / 64 % 3000));
    if (mine / 4 % 8 == 1) launch_busy(1, 32, mine / 64 % 500000, sink_, stream);
    const uint64_t kind = held_.empty() ? 0 : bits % 4;
    const size_t pick = held_.empty() ? 0 : bits / 8 % held_.size();
    Kept kept;
    kept.context = "call " + std::to_string(i) + " of kind " + std::to_string(kind);
    me_.f.set_context(kept.context);
    Delivered* what = nullptr;
    if (kind < 2) {  // dispatch, or cached dispatch with a held handle
      Delivered next;
      next.which = kind == 0 ? bits / 64 % kCases : held_[pick].which;
      next.repetition = bits / 4096 % kRepetitions;
      const Inputs& in = inputs_[next.which][next.repetition].in;
      const DispatchOptions o = me_.dispatch_options(*cases_[next.which], stream);
      next.d = kind == 0 ? exchange_.dispatch(in.x, in.ids, in.weights, o) : exchange_.dispatch(in.x, held_[pick].d.handle, o);
      held_.push_back(std::move(next));
      if (held_.size() > 3) held_.pop_front();
      what = &held_.back();
    } else {
      what = &held_[pick];
      const Inputs& in = inputs_[what->which][what->repetition].in;
      void* const out = keep ? me_.allocate(in.out_bytes) : static_cast<std::byte*>(in.out);  // saved results use fresh memory
      exchange_.combine(what->d.x, what->d.handle, out, me_.combine_options(*cases_[what->which], stream));
      if (keep) kept.out = out;
    }
    if (!keep) return;
    kept.which = what->which, kept.repetition = what->repetition, kept.handle = what->d.handle;
    kept.shot = me_.shoot(what->d, stream);
    what->d.used_by(stream);
    kept_.push_back(std::move(kept));
  }

  void compare(const Kept& kept) {
    Input& input = inputs_[kept.which][kept.repetition];
    me_.f.set_context(kept.context);
    me_.check(*cases_[kept.which], *input.data, kept.shot, kept.handle);
    if (kept.out) me_.check_combined(*input.data, input.in, kept.out);
  }

  Station& me_;
  NormalExchange& exchange_;
  const std::vector<std::shared_ptr<const Case>>& cases_;
  float* sink_;
  std::vector<std::vector<Input>> inputs_;
  std::deque<Delivered> held_;  ///< up to three, oldest first
  std::vector<Kept> kept_;
};

class GpuSoak : public testing::TestWithParam<Soak> {};

TEST_P(GpuSoak, RandomCallsAndDelays) {
  const Soak& soak = GetParam();
  const auto cases = soak_cases(soak);
  const NormalConfig config = config_with_large_pool(*cases[0], 6);
  isolated(
      [&] {
        on_gpus(soak.world, heap_for(config, soak.world), [&](Station& me) {
          NormalExchange exchange(me.group, config);
          Soaker soaker(me, exchange, cases);
          me.f.equal(soak.calls / kKeepOneOf, soaker.run(soak.calls), "calls compared");
          me.group.check();
          me.meet();
        });
      },
      180s);
}

constexpr auto kRankMajor = Layout::rank_major, kExpertMajor = Layout::expert_major;
constexpr auto kPerRank = CombineOrder::per_rank, kPerRoute = CombineOrder::per_route;
INSTANTIATE_TEST_SUITE_P(
    Gpu, GpuSoak,
    testing::Values(Soak{"rank_major", 4, 3000, kRankMajor}, Soak{"expert_major", 4, 3000, kExpertMajor},
                    Soak{"per_route", 4, 3000, kExpertMajor, kPerRoute},
                    Soak{"ring_rank_major", 4, 3000, kRankMajor, kPerRank, Staging::ring},
                    Soak{"ring_expert_major", 4, 1000, kExpertMajor, kPerRank, Staging::ring},
                    Soak{"ring_per_route", 4, 1000, kExpertMajor, kPerRoute, Staging::ring},
                    Soak{"W8_rank_major", 8, 1000, kRankMajor}, Soak{"W8_per_route", 8, 1000, kExpertMajor, kPerRoute},
                    Soak{"W8_ring_expert_major", 8, 1000, kExpertMajor, kPerRank, Staging::ring},
                    Soak{"wide_rank_major", 4, 1000, kRankMajor, kPerRank, Staging::direct, Width::wide},
                    Soak{"wide_expert_major", 4, 1000, kExpertMajor, kPerRank, Staging::direct, Width::wide},
                    Soak{"W2_wide_per_route", 2, 1000, kExpertMajor, kPerRoute, Staging::direct, Width::wide}),
    [](const auto& soak) { return std::string(soak.param.name); });

}  // namespace
}  // namespace harness
