// SPDX-License-Identifier: Apache-2.0
// `switchyard verify ledger`: the published check of the ledger combine, with its profile block.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace switchyard::tool {

struct LedgerVerifyOptions {
  bool chosen = false;  ///< `ledger` stood on the command line
  bool quick = false;   ///< the published small shape
  int64_t pes = 2;
  int64_t tokens = 64;
  int64_t hidden = 7168;
  int64_t topk = 8;
  int64_t experts_per_pe = 2;
  int64_t aiv_blocks = 24;
  int64_t drop_percent = 0;
  int64_t warmup = 3, measured = 5;
  int64_t blocks = 1, warps = 1;
  int64_t sms = 0;
  int64_t timeout_ms = 30000;
  std::string dtype = "f16";
  std::string backend = "cpu";
  bool processes = false;
  bool json = false;
};

/// Runs the check on `gpus` GPUs (0: the CPU). Returns what --json prints.
nlohmann::json measured_ledger(const LedgerVerifyOptions& options, int gpus);
/// \returns the exit status
int run_verify_ledger(const LedgerVerifyOptions& options);

}  // namespace switchyard::tool
