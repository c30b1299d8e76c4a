// SPDX-License-Identifier: Apache-2.0
#include "capi/errors.hpp"

#include <cstdio>
#include <new>

#include "capi/structs.hpp"
#include "switchyard/version.h"

namespace switchyard::detail {
namespace {

/// Fixed size and trivially destructible: storing an error cannot fail and does not depend on the order of thread exit.
struct LastError {
  sy_code code;
  char text[2048];
  WaitReport report;
  int32_t failed_rank;
  sy_code reason;
  uint64_t missing;
};
constinit thread_local LastError last_error{};

void keep(sy_code code, const char* text) noexcept {
  last_error.code = code;
  std::snprintf(last_error.text, sizeof last_error.text, "%s", text);
}

sy_code code_of(ErrorCode code) { return static_cast<sy_code>(code); }

}  // namespace

}  // namespace switchyard::detail

using namespace switchyard::detail;

extern "C" {

sy_code sy_internal_keep_exception_1(void) noexcept {
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
      if (rank >= 0 && rank < SY_MAX_RANKS) last_error.missing |= uint64_t{1} << rank;
  } catch (const switchyard::Error& error) {
    keep(code_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    keep(SY_SYSTEM, "out of memory");
  } catch (const std::exception& error) {
    keep(SY_SYSTEM, error.what());
  } catch (...) {
    keep(SY_SYSTEM, "an exception of unknown type");
  }
  return last_error.code;
}

sy_code sy_version(int32_t* major, int32_t* minor, int32_t* patch) {
  if (major) *major = SY_VERSION_MAJOR;
  if (minor) *minor = SY_VERSION_MINOR;
  if (patch) *patch = SY_VERSION_PATCH;
  return SY_OK;
}

const char* sy_version_string(void) { return SY_VERSION_STRING; }

const char* sy_code_name(sy_code code) { return switchyard::to_string(static_cast<switchyard::ErrorCode>(code)); }

const char* sy_last_error(void) { return last_error.text; }

sy_code sy_last_wait_report(sy_wait_report* report) {
  if (last_error.code != SY_PEER_TIMEOUT || !is_valid_struct(report, sizeof *report)) return SY_INVALID_ARGUMENT;
  fill(report, last_error.report);
  return SY_OK;
}

sy_code sy_last_peer_failure(int32_t* rank, sy_code* reason) {
  if (last_error.code != SY_PEER_FAILED || !rank || !reason) return SY_INVALID_ARGUMENT;
  *rank = last_error.failed_rank;
  *reason = last_error.reason;
  return SY_OK;
}

sy_code sy_last_missing_ranks(uint64_t* ranks) {
  if (last_error.code != SY_RENDEZVOUS || !ranks) return SY_INVALID_ARGUMENT;
  *ranks = last_error.missing;
  return SY_OK;
}

}  // extern "C"
