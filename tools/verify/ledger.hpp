// SPDX-License-Identifier: Apache-2.0
// `switchyard verify ledger`: the published check of the ledger combine, with its profile block.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

struct LedgerVerifyOptions {
  bool chosen = false;  ///< `ledger` was on the command line
  bool quick = false;   ///< the published small shape
  int64_t ranks = 2;
  int64_t tokens = 64;
  int64_t hidden = 7168;
  int64_t topk = 8;
  int64_t experts = 0;  ///< on all ranks, a multiple of `ranks`; 0: 2 per rank
  int64_t aiv_blocks = 24;
  int64_t drop_percent = 0;
  int64_t warmup = 3, iterations = 5;
  int64_t blocks = 1, warps = 1;
  int64_t sms = 0;
  int64_t late_us = 0;  ///< GPUs: delay of rank 0's entry into replayed calls after the others
  int64_t timeout_ms = 30000;
  std::string dtype = "f16";
  std::string backend = "cpu";
  bool processes = false;
  bool json = false;

  int64_t experts_per_rank() const { return experts > 0 ? experts / ranks : 2; }
};

/// Host memory needed by the check for all ranks together: heaps, rows and reference data.
double host_bytes(const LedgerVerifyOptions& options, int gpus);
/// Runs the check on `gpus` GPUs (0 means the CPU). Returns the document for --json. `on_progress` receives the number of
/// finished calls. \throws Error if it could not run
nlohmann::json measured_ledger(const LedgerVerifyOptions& options, int gpus,
                               const std::function<void(int64_t)>& on_progress = {});
/// \returns the exit status
int run_verify_ledger(const LedgerVerifyOptions& options);

}  // namespace switchyard::tool
