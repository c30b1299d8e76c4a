// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/deadline.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

/// A rank's report on its part of a step.
struct StepReport {
  int32_t code = 0;
  uint16_t field_at = 0, field_size = 0;  ///< Error::field() in the text
  char text[504] = {};
};

/// An error that all ranks throw after agreeing on it: the ranks are still in step, and no peer needs to be notified.
class AgreedError : public Error {
 public:
  using Error::Error;
};

/// Runs this rank's part of a step.
template <class Step>
StepReport attempt(const Step& step) {
  StepReport mine;
  const auto note = [&mine](ErrorCode code, const char* text) {
    mine.code = static_cast<int32_t>(code);
    std::snprintf(mine.text, sizeof mine.text, "%s", text);
  };
  try {
    step();
  } catch (const Error& error) {
    note(error.code(), error.what());
    const auto at = static_cast<size_t>(error.field().data() - error.what());
    if (at + error.field().size() < sizeof mine.text) {
      mine.field_at = static_cast<uint16_t>(at);
      mine.field_size = static_cast<uint16_t>(error.field().size());
    }
  } catch (const std::bad_alloc&) {
    note(ErrorCode::system, "out of memory");
  } catch (const std::exception& error) {
    note(ErrorCode::system, error.what());
  }
  return mine;
}

/// Throws the error reported by rank `rank`, if any.
inline void raise_if_failed(StepReport report, const char* subject, size_t rank) {
  if (report.code == 0) return;
  report.text[sizeof report.text - 1] = '\0';
  const std::string text = report.text;
  throw AgreedError(static_cast<ErrorCode>(report.code), std::string(subject) + ", rank " + std::to_string(rank) + ": " + text,
                    std::string_view(text).substr(std::min<size_t>(report.field_at, text.size()), report.field_size));
}

/// Collective. Runs `step` on every rank, then throws, on all ranks, the error of the lowest rank whose step threw: if one rank
/// lacks memory, all ranks throw its error with its text instead of waiting for the deadline. `subject` begins the text.
/// Returns only after the step has succeeded on all ranks, so it is also a barrier. After a step throws AgreedError, the ranks
/// are still in step with each other; after an exception from the bootstrap, they are not.
template <class Step>
void run_step(Bootstrap& bootstrap, const Deadline& deadline, const char* subject, const Step& step) {
  const std::vector<StepReport> all = bootstrap.gather(attempt(step), deadline.remaining());
  for (size_t r = 0; r < all.size(); ++r) raise_if_failed(all[r], subject, r);
}

/// Collective. Like run_step(), for a step that returns what this rank proposes to the others. \returns the proposals of all
/// ranks, of which every rank must decide the same
template <class Step>
auto propose_step(Bootstrap& bootstrap, const Deadline& deadline, const char* subject, const Step& step) {
  using Proposal = decltype(step());
  struct Proposed {
    StepReport report;
    Proposal proposal;
  };
  Proposed mine{};
  mine.report = attempt([&] { mine.proposal = step(); });
  std::vector<Proposal> all;
  size_t r = 0;
  for (const Proposed& share : bootstrap.gather(mine, deadline.remaining())) {
    raise_if_failed(share.report, subject, r++);
    all.push_back(share.proposal);
  }
  return all;
}

}  // namespace switchyard::detail
