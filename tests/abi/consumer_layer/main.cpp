// SPDX-License-Identifier: Apache-2.0
// Uses the other libraries together with the exchange: tokens with a generated routing pass through an expert. All errors share
// one exception type.
#include <switchyard/expert.hpp>
#include <switchyard/group.hpp>
#include <switchyard/routing.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

bool routing_works() {
  switchyard::GeneratorSpec spec;
  spec.num_experts = 4;
  spec.topk = 2;
  spec.pattern = switchyard::Pattern::round_robin;
  const switchyard::Routing routing = switchyard::generate(spec, 0, 3);
  return routing.topk_ids == std::vector<int32_t>{0, 1, 2, 3, 0, 1};
}

/// One expert of 1 x 1 matrices of ones: y = silu(1) * 1, within bf16.
bool experts_work() {
  const uint16_t one = 0x3F80;
  const std::vector<uint16_t> w13(2, one), w2(1, one);
  switchyard::ExpertMlp mlp({1, 1, 1}, w13.data(), w2.data());
  uint16_t y = 0;
  const int64_t first_row = 0, num_rows = 1;
  mlp.forward(&one, {&first_row, 1}, {&num_rows, 1}, &y);
  return y == 0x3F3B;  // 0.7311
}

bool errors_are_typed() {
  try {
    switchyard::ExpertMlp({0, 1, 1}, nullptr, nullptr);
  } catch (const switchyard::Error& error) {
    return error.code() == switchyard::ErrorCode::invalid_argument;
  }
  return false;
}

}  // namespace

int main() {
  std::vector<switchyard::Group> alone = switchyard::Group::in_process(1);
  alone[0].barrier();
  const bool ok = routing_works() && experts_work() && errors_are_typed();
  std::puts(ok ? "consumer: PASS" : "consumer: FAIL");
  return ok ? 0 : 1;
}
