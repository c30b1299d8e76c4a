// SPDX-License-Identifier: Apache-2.0
// One expert-parallel layer over four ranks that are threads of this process. No cluster, GPU or launcher is needed.
//
// Every token is sent to the ranks that hold its two experts. Expert e multiplies the received rows by e + 1. Combine returns
// the results and sums them with the tokens' weights. All numbers are small, so the result can be checked exactly.
#include <switchyard/normal.hpp>

#include <atomic>
#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

using namespace switchyard;

constexpr int kRanks = 4, kExperts = 8, kTopk = 2, kTokens = 100, kHidden = 64;

// One element of token t on rank r.
float value(int r, int t, int column) { return static_cast<float>((r * 7 + t * 3 + column) % 16); }
int expert(int r, int t, int k) { return (r + t + 3 * k) % kExperts; }
float weight(int k) { return k == 0 ? 0.75f : 0.25f; }

// The expert layer of this rank, in place: rows are grouped by expert, ready for one matrix product per expert.
void run_experts(const Dispatched& received, int first) {
  float* rows = static_cast<float*>(received.x.data);
  for (size_t e = 0; e < received.tokens_per_expert.size(); ++e) {
    float* begin = rows + received.expert_first_row[e] * kHidden;
    float* end = begin + received.tokens_per_expert[e] * kHidden;
    for (float* x = begin; x < end; ++x) *x *= static_cast<float>(first + static_cast<int>(e) + 1);
  }
}

// Runs one rank. Returns the number of wrong elements.
int run_rank(Group& group, const NormalConfig& config) {
  const int rank = group.rank();
  std::vector<float> x(kTokens * kHidden), out(kTokens * kHidden), weights(kTokens * kTopk);
  std::vector<int32_t> ids(kTokens * kTopk);
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < kHidden; ++j) x[static_cast<size_t>(t * kHidden + j)] = value(rank, t, j);
    for (int k = 0; k < kTopk; ++k) {
      ids[static_cast<size_t>(t * kTopk + k)] = expert(rank, t, k);
      weights[static_cast<size_t>(t * kTopk + k)] = weight(k);
    }
  }

  NormalExchange exchange(group, config);  // collective
  const Dispatched received =
      exchange.dispatch({x.data(), kTokens, kHidden, DType::f32}, ExpertIds::of(ids.data(), kTokens, kTopk), weights.data());
  run_experts(received, first_expert(kExperts, kRanks, rank));
  exchange.combine(received.x, received.handle, out.data());  // reads the rows in place

  int wrong = 0;
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < kHidden; ++j) {
      float expected = 0;
      for (int k = 0; k < kTopk; ++k) expected += weight(k) * static_cast<float>(expert(rank, t, k) + 1) * value(rank, t, j);
      wrong += out[static_cast<size_t>(t * kHidden + j)] != expected;
    }
  }
  return wrong;
}

int main() try {
  NormalConfig config;
  config.hidden = kHidden;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.max_tokens = kTokens;
  config.layout = Layout::expert_major;
  config.dtype = DType::f32;

  GroupOptions options;
  options.heap_bytes = NormalExchange::heap_bytes(config, kRanks);
  std::vector<Group> groups = Group::in_process(kRanks, options);

  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (Group& group : groups) {
    ranks.emplace_back([&] {
      try {
        wrong += run_rank(group, config);
      } catch (const std::exception& error) {  // the other ranks stop waiting too, each with an error that names the cause
        std::fprintf(stderr, "rank %d: %s\n", group.rank(), error.what());
        wrong += 1;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::printf("%d ranks as threads, %d tokens each: %s\n", kRanks, kTokens, wrong == 0 ? "PASS" : "FAIL");
  return wrong == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
