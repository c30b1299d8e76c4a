// SPDX-License-Identifier: Apache-2.0
#include "switchyard/status.hpp"

#include <cstdio>

namespace switchyard {
namespace {

// Number of low bits of a flag word that hold its value; the epoch is in the bits above. It must equal kFlagValueBits in
// arch/ops.hpp, a layer that this one may not include; tests/multiproc/bootstrap_test.cpp checks that they match.
constexpr int kValueBits = 24;

std::string describe_word(uint64_t word) {
  char text[96];
  if (word == 0) return "never raised";
  std::snprintf(text, sizeof text, "at epoch %llu with value %llu", static_cast<unsigned long long>(word >> kValueBits),
                static_cast<unsigned long long>(word & ((uint64_t{1} << kValueBits) - 1)));
  return text;
}

std::string describe_timeout(const WaitReport& report) {
  const std::string waiting = "rank " + std::to_string(report.waiting_rank);
  const std::string awaited = "rank " + std::to_string(report.awaited_rank);
  char waited[32];
  std::snprintf(waited, sizeof waited, "%.0f ms", report.waited_ms);
  std::string text = std::string(report.operation) + " (call " + std::to_string(report.call) + "): " + waiting + " waited " +
                     waited + " for flag '" + report.site + "' of " + awaited + ", which should be " +
                     describe_word(report.expected) + " or later but was " + describe_word(report.seen);
  if (report.silent_ms >= 0) {
    std::snprintf(waited, sizeof waited, "%.0f ms", report.silent_ms);
    text += report.silent_ms >= 500 ? std::string("; its host has been silent for ") + waited
                                    : std::string("; its host was heard of ") + waited + " ago";
  }
  text += "; " + awaited + " is late, stuck or made a different call, and the group cannot be used any more";
  if (*report.advice != '\0') text += std::string(". ") + report.advice;
  return text;
}

std::string describe_failure(int rank, ErrorCode reason, const std::string& context, bool left) {
  std::string text = context.empty() ? std::string() : context + ": ";
  text += "rank " + std::to_string(rank);
  if (left) {
    text +=
        " left the group while others still needed it (it called leave(), or its Group was destroyed, in order or because its "
        "own code threw)";
  } else if (reason == ErrorCode::system) {
    text += " is gone (its process ended or its connection broke)";
  } else {
    text += std::string(" reported the error ") + to_string(reason);
  }
  return text + "; the group cannot be used any more";
}

}  // namespace

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::ok: return "ok";
    case ErrorCode::invalid_argument: return "invalid_argument";
    case ErrorCode::unsupported: return "unsupported";
    case ErrorCode::heap_exhausted: return "heap_exhausted";
    case ErrorCode::pool_exhausted: return "pool_exhausted";
    case ErrorCode::capacity_exceeded: return "capacity_exceeded";
    case ErrorCode::peer_timeout: return "peer_timeout";
    case ErrorCode::peer_failed: return "peer_failed";
    case ErrorCode::mismatch: return "mismatch";
    case ErrorCode::rendezvous: return "rendezvous";
    case ErrorCode::io: return "io";
    case ErrorCode::system: return "system";
  }
  return "unknown";
}

PeerTimeout::PeerTimeout(const WaitReport& report)
    : Error(ErrorCode::peer_timeout, describe_timeout(report)), report_(report) {}

PeerFailed::PeerFailed(int rank, ErrorCode reason, const std::string& context, bool left)
    : Error(ErrorCode::peer_failed, describe_failure(rank, reason, context, left)), rank_(rank), reason_(reason), left_(left) {}

}  // namespace switchyard
