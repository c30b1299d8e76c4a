// SPDX-License-Identifier: Apache-2.0
// Skewed routing on four in-process ranks, one thread each, without and with replicas of the busiest experts.
//
// A SlotSelector counts the routes to each expert and replaces each id with a slot of the map in force. The ranks gather the
// counts, plan identical replicas and put the new map in force. The slots are the experts of the second exchange; a slot
// performs the computation of its expert. The results of both exchanges must be bitwise identical.
#include <switchyard/expert_map.hpp>
#include <switchyard/normal.hpp>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

using namespace switchyard;

constexpr int kRanks = 4, kExperts = 16, kTopk = 2, kTokens = 1000, kHidden = 32;
constexpr int kSlots = kExperts / kRanks + 2;  // two spare slots per rank

NormalConfig config_of(int num_experts) {
  NormalConfig config;
  config.hidden = kHidden;
  config.num_experts = num_experts;
  config.topk = kTopk;
  config.max_tokens = kTokens;
  config.layout = Layout::expert_major;
  config.dtype = DType::f32;
  return config;
}

// The tokens of a rank. Expert 0 receives the most routes, followed by expert 1, ...
struct Tokens {
  explicit Tokens(int rank) : x(kTokens * kHidden), weights(kTokens * kTopk), ids(kTokens * kTopk) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank)) % 1000) / 999;
    for (size_t f = 0; f < ids.size(); ++f) {
      const auto draw = static_cast<int>((f * 37 + static_cast<size_t>(rank) * 11) % 256);
      ids[f] = (draw * draw / (256 * 16) + static_cast<int>(f % kTopk)) % kExperts;
      weights[f] = f % kTopk == 0 ? 0.7f : 0.3f;
    }
  }
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
};

// Plans from the routes of one call of all ranks. Applications plan from those of a few hundred.
ExpertMap plan(const std::vector<int64_t>& routes) {
  std::vector<int64_t> per_expert(kExperts);
  for (size_t i = 0; i < routes.size(); ++i) per_expert[i % kExperts] += routes[i];
  return plan_experts(per_expert, home_map(kExperts, kRanks, kSlots));
}

// Runs the layer. `expert_of`: the expert of this rank's i-th group of rows. Returns the number of rows of this rank.
int64_t run_layer(Group& group, const NormalConfig& config, const Tokens& in, const std::vector<int32_t>& ids,
                  const std::vector<int32_t>& expert_of, std::vector<float>& out) {
  NormalExchange exchange(group, config);
  const Dispatched received = exchange.dispatch({const_cast<float*>(in.x.data()), kTokens, kHidden, DType::f32},
                                                ExpertIds::of(ids.data(), kTokens, kTopk), in.weights.data());
  auto* rows = static_cast<float*>(received.x.data);
  for (size_t i = 0; i < expert_of.size(); ++i)
    for (int64_t at = 0; at < received.tokens_per_expert[i] * kHidden; ++at)
      rows[received.expert_first_row[i] * kHidden + at] *= 1 / static_cast<float>(expert_of[i] + 3);
  CombineOptions options;
  options.order = CombineOrder::per_route;  // sums in order of k, independent of the rank of each expert
  exchange.combine(received.x, received.handle, out.data(), options);
  return received.rows;
}

// Returns true if both outputs are equal. Stores the number of this rank's rows in `home` and `planned`.
bool run_rank(Group& group, std::vector<int64_t>& home, std::vector<int64_t>& planned) {
  const int rank = group.rank();
  const auto r = static_cast<size_t>(rank);
  const Tokens in(rank);
  std::vector<float> expected(in.x.size()), out(in.x.size());
  std::vector<int32_t> here;
  for (int e = first_expert(kExperts, kRanks, rank); e < first_expert(kExperts, kRanks, rank + 1); ++e) here.push_back(e);
  home[r] = run_layer(group, config_of(kExperts), in, in.ids, here, expected);

  SlotSelector selector(group, home_map(kExperts, kRanks, kSlots));
  std::vector<int32_t> slots(in.ids.size());
  selector.select(ExpertIds::of(in.ids.data(), kTokens, kTopk), slots.data());  // counts; these slots are not used

  const std::vector<int64_t> routes = selector.gather_routes();
  const ExpertMap map = plan(routes);
  const auto first = map.expert_of_slot.begin() + rank * kSlots;
  selector.set_map(map, routes);  // after the weights of the new slots have been loaded
  selector.select(ExpertIds::of(in.ids.data(), kTokens, kTopk), slots.data());
  planned[r] = run_layer(group, config_of(map.num_slots()), in, slots, {first, first + kSlots}, out);
  return out == expected;
}

double busiest(const std::vector<int64_t>& rows) {
  int64_t sum = 0;
  for (const int64_t n : rows) sum += n;
  return static_cast<double>(*std::max_element(rows.begin(), rows.end()) * kRanks) / static_cast<double>(sum);
}

int main() try {
  GroupOptions options;
  options.heap_bytes = 2 * NormalExchange::heap_bytes(config_of(kRanks * kSlots), kRanks);
  std::vector<Group> groups = Group::in_process(kRanks, options);
  std::vector<int64_t> home(kRanks), planned(kRanks);
  std::atomic<int> failed{0};
  std::vector<std::thread> ranks;
  for (Group& group : groups) {
    ranks.emplace_back([&] {
      try {
        failed += run_rank(group, home, planned) ? 0 : 1;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", group.rank(), error.what());
        failed += 1;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const bool passed = failed == 0 && busiest(planned) < 1.02;
  std::printf("rows of the busiest rank over the mean: %.2f, with replicas %.2f; same bits: %s\n", busiest(home),
              busiest(planned), passed ? "PASS" : "FAIL");
  return passed ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
