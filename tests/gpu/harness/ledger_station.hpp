// SPDX-License-Identifier: Apache-2.0
// Ledger combine of one rank on a GPU, with inputs in device memory and results compared with the oracle.
#pragma once

#include <algorithm>

#include "gpu/harness/object_rig.hpp"
#include "modes/ledger/ledger_rig.hpp"

namespace harness {

inline std::shared_ptr<const LedgerCase> gpu_case(int world, uint64_t seed = 3, DType type = DType::bf16, int64_t hidden = 96,
                                                  int64_t tokens = 12) {
  LedgerScenario s;
  s.name = "on GPUs";
  s.problem.world = world;
  s.problem.experts = 2 * world + 1;
  s.problem.topk = 3;
  s.problem.alignment = 4;
  for (int r = 0; r < world; ++r) s.tokens.push_back(r % 3 == 1 ? 5 : tokens);
  s.hidden = hidden;
  s.type = type;
  s.seed = seed;
  s.drop_percent = 10;
  return make_ledger_case(s);
}
inline size_t heap_of(const LedgerCase& c, int objects = 1) {
  return static_cast<size_t>(objects) * switchyard::LedgerCombine::heap_bytes(make_config(c), c.problem.world, kBackend);
}

/// One rank's object, the inputs of one repetition in device memory, and the results.
struct LedgerStation {
  LedgerStation(Station& s, const LedgerCase& c, int repetition = 0)
      : me(s), data(c, s.rank(), repetition), y(data.y()), bytes(data.out().size()) {
    y.data = s.upload(y.data, static_cast<size_t>(y.rows * y.cols) * 2);
    probs = static_cast<const float*>(s.upload(data.probs(), data.num_probs() * sizeof(float)));
    out = s.upload(data.out().data(), bytes);
  }
  switchyard::LedgerCombineOptions options(int stream = 0) const { return {me.stream(stream), num_sms}; }
  void combine(switchyard::LedgerCombine& ledger, const switchyard::PreparedLedger& prepared, int stream = 0) {
    ledger.combine(y, probs, prepared, out, options(stream));
  }
  /// Must be called when all ranks are idle.
  void check() {
    if (bytes > 0) me.read(data.out().data(), out, bytes);
    data.check_out(me.f);
    std::fill(data.out().begin(), data.out().end(), std::byte{0xEE});
  }

  Station& me;
  LedgerRankData data;
  switchyard::ConstRows y;
  const float* probs = nullptr;
  void* out = nullptr;
  size_t bytes;
  int num_sms = 2;
};

}  // namespace harness
