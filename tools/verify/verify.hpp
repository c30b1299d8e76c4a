// SPDX-License-Identifier: Apache-2.0
// `switchyard verify`: runs all requested configurations and prints PASS or FAIL for each check.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/check_result.hpp"
#include "cli/verb.hpp"
#include "run/names.hpp"
#include "run/ranks.hpp"

namespace switchyard::tool {

extern const Verb kVerifyVerb;

struct VerifyOptions {
  std::string backend = "cpu";
  std::vector<std::string> modes = {"normal", "low_latency", "flat"};
  std::vector<std::string> layouts = kLayouts;
  std::vector<std::string> dtypes = kRowKinds;
  std::vector<std::string> quantize;  ///< empty: none; layers on GPUs: all kinds allowed by their sizes
  std::vector<std::string> staging = kStaging;
  std::vector<std::string> orders = kOrders;
  std::vector<std::string> routings = {"uniform", "zipf", "drops"};
  std::vector<int64_t> ranks;  ///< empty: 1, 2, 4; CUDA: the number of GPUs
  std::vector<int64_t> blocks = {1};
  std::vector<int64_t> warps = {1};
  std::vector<int64_t> sms;  ///< CUDA: multiprocessors of each call; empty: the library's default
  std::vector<int64_t> tokens = {32};
  std::vector<int64_t> hidden = {256};
  int64_t experts = 0;  ///< 0: 64 for synthetic routing, the file's own for recordings
  int64_t topk = 0;     ///< 0: 8 for synthetic routing, the file's own for recordings
  int64_t alignment = 4;
  int64_t intermediate = 64;  ///< layer: width of an expert's MLP
  int64_t repeat = 1;
  int64_t seed = 1;
  int64_t timeout_ms = 30000;
  bool processes = false;
  bool equal_tokens = false;
  bool verbose = false;
  bool json = false;
};

/// One element of the Cartesian product of the lists.
struct VerifyCase {
  std::string mode, layout, dtype, quantize, staging, routing;
  int ranks = 1, blocks = 1, warps = 1;
  int sms = 0;   ///< CUDA: multiprocessors of each call; 0: the library's default
  int gpus = 0;  ///< GPUs over which the ranks are distributed; 0: ranks run on the CPU
  int64_t tokens = 0, hidden = 0, intermediate = 0;
  std::vector<std::string> orders;
  uint64_t seed = 1;
};

/// Names of the modes that can be checked.
std::vector<std::string> verify_modes();
std::vector<VerifyCase> verify_cases(const VerifyOptions& options);
/// Device memory that each rank of the case needs in addition to the heap.
size_t device_bytes(const VerifyCase& c, const VerifyOptions& options);
/// Maximum host memory that the case needs for all ranks together: heaps, rows and check data.
double host_bytes(const VerifyCase& c, const VerifyOptions& options);
/// Throws on an invalid case before anything runs: UsageError (also if the case does not fit into `available` bytes) or the
/// library's Error.
void check_verify_case(const VerifyCase& c, const VerifyOptions& options, size_t available);
/// Runs one case on all ranks and merges their results by check. `arena`: the maximum device_bytes of all cases. \throws
/// RankError, Error, UsageError like run_ranks and RoutingSource
std::vector<CheckResult> run_verify_case(const VerifyCase& c, const VerifyOptions& options, size_t arena = 0);
/// \returns the exit status
int run_verify(const VerifyOptions& options);

}  // namespace switchyard::tool
