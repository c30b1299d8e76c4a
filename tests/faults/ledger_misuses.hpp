// SPDX-License-Identifier: Apache-2.0
// Misuse of ledger combine that the host can detect, with one case for each kind.
#pragma once

#include <vector>

#include "faults/misuses.hpp"
#include "modes/ledger/small_ledger.hpp"

namespace harness {

inline std::vector<Misuse> ledger_misuses() {
  struct Case {
    const char* name;
    const char* in_text;
    void (*spoil)(SmallLedger&);
  };
  const Case cases[] = {
      {"tables", "cumsum_per_expert[0][1] = -7", [](SmallLedger& rig) { rig.tables.cumsum_per_expert[1] = -7; }},
      {"dtype", "expert_output.dtype = bf16: must be LedgerConfig::dtype, f16",
       [](SmallLedger& rig) { rig.y.dtype = switchyard::DType::bf16; }},
      {"hidden", "expert_output.cols = 15: must be LedgerConfig::hidden, 16", [](SmallLedger& rig) { rig.y.cols = 15; }},
      {"too_few_rows", "expert_output.rows = 3: the ledger speaks of ", [](SmallLedger& rig) { rig.y.rows = 3; }},
      {"no_rows", "expert_output.data is null", [](SmallLedger& rig) { rig.y.data = nullptr; }},
      {"no_out", "out is null", [](SmallLedger& rig) { rig.out = nullptr; }},
  };
  std::vector<MisuseOf<SmallLedger>> all;
  for (const Case& c : cases)
    all.push_back({c.name, c.in_text, [spoil = c.spoil](SmallLedger& rig, bool bad) {
                     if (bad) spoil(rig);
                     rig.combine();
                   }});
  all.push_back({"empty_ledger", "ledger is empty", [](SmallLedger& rig, bool bad) {
                   const auto prepared = bad ? switchyard::PreparedLedger() : rig.ledger.prepare(rig.tables);
                   rig.ledger.combine(rig.y, rig.data.probs(), prepared, rig.out);
                 }});
  return on_rigs(all, [](switchyard::Group& group) { return SmallLedger(group); });
}

}  // namespace harness
