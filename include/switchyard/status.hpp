// SPDX-License-Identifier: Apache-2.0
/// \file
/// Errors. Every failure leaves the library as one exception type, switchyard::Error, or a class derived from it
/// that carries more data. Nothing is thrown by a destructor.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

/// What kind of failure an Error reports. The values are part of the C ABI (`switchyard_code_t`).
enum class ErrorCode : int32_t {
  ok = 0,
  invalid_argument = 1,   ///< a caller's argument is outside its contract; the text names it, its value and what is allowed
  unsupported = 2,        ///< legal elsewhere, not available with this backend, machine or combination
  heap_exhausted = 3,     ///< the symmetric heap has no room left
  pool_exhausted = 4,     ///< the output pool of one exchange object has no room left
  capacity_exceeded = 5,  ///< more rows than the caller's capacity, under Overflow::fail; not sticky
  peer_timeout = 6,       ///< a wait passed its deadline; sticky
  peer_failed = 7,        ///< a peer reported an error or died; sticky
  mismatch =
      8,  ///< the ranks made different calls (mode, shape or options): all of them get this; sticky, but for construction
  rendezvous = 9,  ///< the group could not be formed
  io = 10,         ///< a file could not be read, written or understood
  system = 11,     ///< the operating system refused something, memory for example
};

/// Stable, lower-case name of a code, for example "peer_timeout".
const char* to_string(ErrorCode code) noexcept;

/// Base of every exception that Switchyard throws.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  /// `field`: what the text is about, as the text names it.
  Error(ErrorCode code, const std::string& what, std::string_view field) : Error(code, what) {
    const size_t at = field.empty() ? std::string::npos : what.find(field);
    if (at != std::string::npos) field_at_ = at, field_size_ = field.size();
  }
  ErrorCode code() const noexcept { return code_; }
  /// The field or argument whose value was refused, "NormalConfig::hidden" or "topk", or a product of them, "max_tokens *
  /// topk"; a part of what(). Empty where an error is about something else.
  std::string_view field() const noexcept { return {what() + field_at_, field_size_}; }

 private:
  ErrorCode code_;
  size_t field_at_ = 0, field_size_ = 0;
};

/// The full story of a wait that did not end: which call, where in it, who waited for whom, and on what.
struct WaitReport {
  const char* operation = "";  ///< "dispatch", "combine", ...
  const char* site = "";       ///< name of the flag, as in docs/concepts/flags.md
  uint64_t call = 0;           ///< number of the call on its object, from 1
  int waiting_rank = -1;
  int awaited_rank = -1;
  uint64_t expected = 0;  ///< smallest flag word that would have ended the wait
  uint64_t seen = 0;      ///< last flag word read
  double waited_ms = 0;
  const char* advice = "";  ///< what else may be the cause, where this group makes it likely
  /// How long nothing has come from the awaited rank, if it is a process on another host; negative otherwise.
  double silent_ms = -1;
};

/// A wait passed its deadline. The group is unusable afterwards: destroy it and form a new one.
class PeerTimeout : public Error {
 public:
  explicit PeerTimeout(const WaitReport& report);
  const WaitReport& report() const noexcept { return report_; }

 private:
  WaitReport report_;
};

/// A peer raised an error, its process ended, or it destroyed its Group while others needed it. The group is unusable
/// afterwards.
class PeerFailed : public Error {
 public:
  PeerFailed(int rank, ErrorCode reason, const std::string& context, bool left = false);
  int rank() const noexcept { return rank_; }            ///< the rank that failed
  ErrorCode reason() const noexcept { return reason_; }  ///< what it reported; `system` if its process ended or it left
  bool left() const noexcept {
    return left_;
  }  ///< it called Group::leave(), or its Group was destroyed, in order or because its own code threw

 private:
  int rank_;
  ErrorCode reason_;
  bool left_;
};

/// The group could not be formed; names the ranks that never came (empty if the cause lies elsewhere).
class RendezvousError : public Error {
 public:
  RendezvousError(const std::string& what, std::vector<int> missing = {})
      : Error(ErrorCode::rendezvous, what), missing_(std::move(missing)) {}
  const std::vector<int>& missing_ranks() const noexcept { return missing_; }

 private:
  std::vector<int> missing_;
};

}  // namespace switchyard
