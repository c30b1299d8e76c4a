// SPDX-License-Identifier: Apache-2.0
// The file written by `switchyard tune`: merging with an older file, and temporary files for individual measurements.
#pragma once

#include <string>
#include <vector>

#include "switchyard/tuning.hpp"

namespace switchyard::tool {

/// An entry to write, with the comment lines above it.
struct CommentedEntry {
  TuningEntry entry;
  std::vector<std::string> comments;
};

/// Text of the file at `path`, or of a file without entries if `path` does not exist or is empty. \throws
/// Error(invalid_argument) if it is not a tuning file
std::string read_or_new(const std::string& path);
/// Appends these entries to `text`. Existing entries with the same keys are removed, along with the comments directly above
/// them; everything else is kept.
std::string merged(const std::string& text, const std::vector<CommentedEntry>& entries);

/// During its lifetime, groups formed by this process or by processes forked from it read their tuning from a temporary file.
/// Only one object may exist at a time, and the process must have only one thread whenever a member is called.
class TuningOverride {
 public:
  TuningOverride();
  ~TuningOverride();
  TuningOverride(const TuningOverride&) = delete;
  TuningOverride& operator=(const TuningOverride&) = delete;
  /// Groups formed from now on use these entries. If several entries are equally close, the first one counts.
  void set(const std::vector<TuningEntry>& entries);

 private:
  int file_;
  std::string before_;
  bool was_set_;
};

}  // namespace switchyard::tool
