// SPDX-License-Identifier: Apache-2.0
// What the runners of low-latency and flat scripts share.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "modes/normal/scenario.hpp"
#include "switchyard/low_latency.hpp"
#include "testing/test_access.hpp"

namespace harness {

/// Runs cases one after another, each on an object of its own, in one group; all failures, or "". A Case has a `script` with
/// name, world (the same for all) and config, and a run_on.
template <class Case>
std::string run_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const Case>>& cases) {
  using switchyard::LowLatencyExchange;
  Fleet fleet;
  fleet.world = cases.front()->script.world;
  fleet.options.num_blocks = workers.blocks;
  fleet.options.num_warps = workers.warps;
  fleet.deferred = workers.deferred;
  fleet.options.backend = kBackend;
  if (kBackend == switchyard::Backend::cuda) fleet.options.timeout = patience(std::chrono::seconds(10));
  fleet.options.heap_bytes = 0;
  for (const auto& c : cases)
    fleet.options.heap_bytes =
        std::max(fleet.options.heap_bytes, LowLatencyExchange::heap_bytes_for(c->script.config, c->script.world));
  return joined(run_ranks(ranks, fleet, [&](switchyard::Group& group, Failures& failures) {
    for (const auto& c : cases) {
      failures.set_context(c->script.name + ", construction");
      const size_t before = group.heap_used();
      {
        switchyard::detail::number_calls_from(group, c->script.first_epoch);
        LowLatencyExchange exchange(group, c->script.config);
        run_on(group, exchange, *c, failures);
      }
      failures.equal(before, group.heap_used(), "heap_used after destruction");
    }
  }));
}

}  // namespace harness
