// SPDX-License-Identifier: Apache-2.0
/// \file
/// Errors. Every failure is reported as switchyard::Error or a derived class with more data. Destructors never throw.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

/// Kind of failure reported by an Error. The values are part of the C ABI (`sy_code`).
enum class ErrorCode : int32_t {
  ok = 0,
  invalid_argument = 1,   ///< an argument violates its contract; the text gives its name, its value and the allowed values
  unsupported = 2,        ///< valid, but not available with this backend, machine or combination
  heap_exhausted = 3,     ///< the symmetric heap has no room left
  pool_exhausted = 4,     ///< the output pool of one exchange object has no room left
  capacity_exceeded = 5,  ///< more rows than the caller's capacity, under Overflow::fail; not sticky
  peer_timeout = 6,       ///< a wait exceeded its deadline; sticky
  peer_failed = 7,        ///< a peer reported an error or died; sticky
  mismatch =
      8,  ///< the ranks made different calls (mode, shape or options): thrown on all of them; sticky, except in construction
  rendezvous = 9,  ///< the group could not be formed
  io = 10,         ///< a file could not be read, written or parsed
  system = 11,     ///< the operating system refused a request, for example for memory
};

/// Stable, lowercase name of a code, for example "peer_timeout".
const char* to_string(ErrorCode code) noexcept;

/// Base class of all exceptions thrown by Switchyard.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  /// `field` is the subject of the message and must occur verbatim in it.
  Error(ErrorCode code, const std::string& what, std::string_view field) : Error(code, what) {
    const size_t at = field.empty() ? std::string::npos : what.find(field);
    if (at != std::string::npos) field_at_ = at, field_size_ = field.size();
  }
  ErrorCode code() const noexcept { return code_; }
  /// The rejected field or argument, such as "NormalConfig::hidden" or "topk", or a product of them, such as "max_tokens *
  /// topk". It is a substring of what(), and empty if the error does not concern a field.
  std::string_view field() const noexcept { return {what() + field_at_, field_size_}; }

 private:
  ErrorCode code_;
  size_t field_at_ = 0, field_size_ = 0;
};

/// Details of a wait that timed out: the call, the place in it, the waiting and awaited ranks, and the flag.
struct WaitReport {
  const char* operation = "";  ///< "dispatch", "combine", ...
  const char* site = "";       ///< name of the flag, as in docs/concepts/flags.md
  uint64_t call = 0;           ///< number of the call on its object, from 1
  int waiting_rank = -1;
  int awaited_rank = -1;
  uint64_t expected = 0;  ///< smallest flag word that would have ended the wait
  uint64_t seen = 0;      ///< last flag word read
  double waited_ms = 0;
  const char* advice = "";  ///< other likely cause in this group, if any
  /// Time since the last heartbeat of the awaited rank if it is a process on another host; otherwise negative.
  double silent_ms = -1;
};

/// A wait exceeded its deadline. The group is unusable afterwards: destroy it and form a new one.
class PeerTimeout : public Error {
 public:
  explicit PeerTimeout(const WaitReport& report);
  const WaitReport& report() const noexcept { return report_; }

 private:
  WaitReport report_;
};

/// A peer reported an error, its process ended, or it destroyed its Group while peers still depended on it. The group is
/// unusable afterwards.
class PeerFailed : public Error {
 public:
  PeerFailed(int rank, ErrorCode reason, const std::string& context, bool left = false);
  int rank() const noexcept { return rank_; }            ///< the rank that failed
  ErrorCode reason() const noexcept { return reason_; }  ///< reported code; `system` if its process ended or it left
  bool left() const noexcept {
    return left_;
  }  ///< the rank called Group::leave(), or its Group was destroyed, normally or because its own code threw

 private:
  int rank_;
  ErrorCode reason_;
  bool left_;
};

/// The group could not be formed; lists the ranks that never arrived (empty if there was another cause).
class RendezvousError : public Error {
 public:
  RendezvousError(const std::string& what, std::vector<int> missing = {})
      : Error(ErrorCode::rendezvous, what), missing_(std::move(missing)) {}
  const std::vector<int>& missing_ranks() const noexcept { return missing_; }

 private:
  std::vector<int> missing_;
};

}  // namespace switchyard
