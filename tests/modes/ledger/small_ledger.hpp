// SPDX-License-Identifier: Apache-2.0
// Small ledger combines for object and fault tests.
#pragma once

#include <memory>

#include "harness/outcome.hpp"
#include "modes/ledger/ledger_rig.hpp"

namespace harness {

/// An object with valid arguments for every call. Each test invalidates one of them.
struct SmallLedger {
  explicit SmallLedger(switchyard::Group& group) : SmallLedger(group, make_case(group.size())) {}
  SmallLedger(switchyard::Group& group, std::shared_ptr<const LedgerCase> c)
      : given(std::move(c)),
        data(*given, group.rank(), 0),
        ledger(group, make_config(*given)),
        y(data.y()),
        tables(data.tables()),
        out(data.out().data()) {}
  void combine() { ledger.combine(y, data.probs(), tables, out); }
  void round() { combine(); }

  /// Five experts, with rows padded to multiples of four. In each call, every rank waits for all others.
  static std::shared_ptr<const LedgerCase> make_case(int world) {
    LedgerScenario s;
    s.name = "small";
    s.problem.world = world;
    s.problem.experts = 5;
    s.problem.topk = 2;
    s.problem.alignment = 4;
    for (int r = 0; r < world; ++r) s.tokens.push_back(9 - r);
    s.hidden = 16;
    s.seed = 3;
    return make_ledger_case(s);
  }

  std::shared_ptr<const LedgerCase> given;
  LedgerRankData data;
  switchyard::LedgerCombine ledger;
  switchyard::ConstRows y;
  switchyard::LedgerTables tables;
  void* out;
};

}  // namespace harness
