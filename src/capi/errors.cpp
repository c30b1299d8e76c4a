// SPDX-License-Identifier: Apache-2.0
#include "capi/errors.hpp"

#include <cstdio>
#include <new>

#include "capi/structs.hpp"
#include "switchyard/version.h"

namespace switchyard::detail {
namespace {

/// Fixed size and trivially destructible: storing an error can neither fail nor depend on the order of thread exit.
struct LastError {
  switchyard_code_t code;
  char text[2048];
  WaitReport report;
  int32_t failed_rank;
  switchyard_code_t reason;
  uint64_t missing;
};
constinit thread_local LastError last_error{};

void keep(switchyard_code_t code, const char* text) noexcept {
  last_error.code = code;
  std::snprintf(last_error.text, sizeof last_error.text, "%s", text);
}

switchyard_code_t code_of(ErrorCode code) { return static_cast<switchyard_code_t>(code); }

static_assert(static_cast<switchyard_code_t>(ErrorCode::ok) == SWITCHYARD_OK);
static_assert(static_cast<switchyard_code_t>(ErrorCode::invalid_argument) == SWITCHYARD_INVALID_ARGUMENT);
static_assert(static_cast<switchyard_code_t>(ErrorCode::unsupported) == SWITCHYARD_UNSUPPORTED);
static_assert(static_cast<switchyard_code_t>(ErrorCode::heap_exhausted) == SWITCHYARD_HEAP_EXHAUSTED);
static_assert(static_cast<switchyard_code_t>(ErrorCode::pool_exhausted) == SWITCHYARD_POOL_EXHAUSTED);
static_assert(static_cast<switchyard_code_t>(ErrorCode::capacity_exceeded) == SWITCHYARD_CAPACITY_EXCEEDED);
static_assert(static_cast<switchyard_code_t>(ErrorCode::peer_timeout) == SWITCHYARD_PEER_TIMEOUT);
static_assert(static_cast<switchyard_code_t>(ErrorCode::peer_failed) == SWITCHYARD_PEER_FAILED);
static_assert(static_cast<switchyard_code_t>(ErrorCode::mismatch) == SWITCHYARD_MISMATCH);
static_assert(static_cast<switchyard_code_t>(ErrorCode::rendezvous) == SWITCHYARD_RENDEZVOUS);
static_assert(static_cast<switchyard_code_t>(ErrorCode::io) == SWITCHYARD_IO);
static_assert(static_cast<switchyard_code_t>(ErrorCode::system) == SWITCHYARD_SYSTEM);

}  // namespace

}  // namespace switchyard::detail

using namespace switchyard::detail;

extern "C" {

switchyard_code_t sy_internal_keep_exception_1(void) noexcept {
  try {
    throw;
  } catch (const switchyard::PeerTimeout& error) {
    keep(code_of(error.code()), error.what());
    last_error.report = error.report();
  } catch (const switchyard::PeerFailed& error) {
    keep(code_of(error.code()), error.what());
    last_error.failed_rank = error.rank();
    last_error.reason = code_of(error.reason());
  } catch (const switchyard::RendezvousError& error) {
    keep(code_of(error.code()), error.what());
    last_error.missing = 0;
    for (const int rank : error.missing_ranks())
      if (rank >= 0 && rank < SWITCHYARD_MAX_RANKS) last_error.missing |= uint64_t{1} << rank;
  } catch (const switchyard::Error& error) {
    keep(code_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    keep(SWITCHYARD_SYSTEM, "out of memory");
  } catch (const std::exception& error) {
    keep(SWITCHYARD_SYSTEM, error.what());
  } catch (...) {
    keep(SWITCHYARD_SYSTEM, "an exception of unknown type");
  }
  return last_error.code;
}

switchyard_code_t sy_version(int32_t* major, int32_t* minor, int32_t* patch) {
  if (major) *major = SWITCHYARD_VERSION_MAJOR;
  if (minor) *minor = SWITCHYARD_VERSION_MINOR;
  if (patch) *patch = SWITCHYARD_VERSION_PATCH;
  return SWITCHYARD_OK;
}

const char* sy_version_string(void) { return SWITCHYARD_VERSION_STRING; }

const char* sy_code_name(switchyard_code_t code) { return switchyard::to_string(static_cast<switchyard::ErrorCode>(code)); }

const char* sy_last_error(void) { return last_error.text; }

switchyard_code_t sy_last_wait_report(sy_wait_report* report) {
  if (last_error.code != SWITCHYARD_PEER_TIMEOUT || !is_valid_struct(report, sizeof *report))
    return SWITCHYARD_INVALID_ARGUMENT;
  const switchyard::WaitReport& r = last_error.report;
  const sy_wait_report filled{sizeof filled,  r.operation, r.site, r.call,      r.waiting_rank,
                              r.awaited_rank, r.expected,  r.seen, r.waited_ms, r.silent_ms};
  write_struct(report, filled);
  return SWITCHYARD_OK;
}

switchyard_code_t sy_last_peer_failure(int32_t* rank, switchyard_code_t* reason) {
  if (last_error.code != SWITCHYARD_PEER_FAILED || !rank || !reason) return SWITCHYARD_INVALID_ARGUMENT;
  *rank = last_error.failed_rank;
  *reason = last_error.reason;
  return SWITCHYARD_OK;
}

switchyard_code_t sy_last_missing_ranks(uint64_t* ranks) {
  if (last_error.code != SWITCHYARD_RENDEZVOUS || !ranks) return SWITCHYARD_INVALID_ARGUMENT;
  *ranks = last_error.missing;
  return SWITCHYARD_OK;
}

}  // extern "C"
