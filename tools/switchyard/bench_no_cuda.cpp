// SPDX-License-Identifier: Apache-2.0
#include "bench_cuda.hpp"
#include "bench_low_latency.hpp"
#include "cli.hpp"
#include "rank_device.hpp"

namespace switchyard::tool {

void check_normal_cuda(const BenchOptions&) { throw UsageError(no_cuda_text()); }
nlohmann::json measured_normal_cuda(const BenchOptions&) { throw UsageError(no_cuda_text()); }
int run_bench_cuda(const BenchOptions&, std::vector<BenchOptions>) { throw UsageError(no_cuda_text()); }
std::unique_ptr<LatencyClock> make_cuda_clock(Group&, const Scenario&, const BenchOptions&, size_t) {
  throw UsageError(no_cuda_text());
}
std::unique_ptr<ReplayClock> make_cuda_replay_clock(Group&) { throw UsageError(no_cuda_text()); }
size_t cuda_clock_bytes(const Scenario&, const BenchOptions&, size_t) { throw UsageError(no_cuda_text()); }

}  // namespace switchyard::tool
