// SPDX-License-Identifier: Apache-2.0
// The file of `switchyard tune`: what it keeps of an older one, and files for single measurements.
#pragma once

#include <string>
#include <vector>

#include "switchyard/tuning.hpp"

namespace switchyard::tool {

/// An entry to write, and the lines of comment above it.
struct CommentedEntry {
  TuningEntry entry;
  std::vector<std::string> comments;
};

/// Text of the file at `path`, or of one without entries if it does not exist or is empty. \throws Error(invalid_argument) if
/// it is no tuning file.
std::string read_or_new(const std::string& path);
/// `text` with these entries at its end. Entries of the same keys go, with the comments directly above them; all else stays.
std::string merged(const std::string& text, const std::vector<CommentedEntry>& entries);

/// While it lives, groups that are formed by this process, or by ones that it forks, read their tuning from a file of its own.
/// One at a time; the process has one thread whenever a member is called.
class TuningOverride {
 public:
  TuningOverride();
  ~TuningOverride();
  TuningOverride(const TuningOverride&) = delete;
  TuningOverride& operator=(const TuningOverride&) = delete;
  /// Groups formed from now on have these entries; the first of several equally near ones counts.
  void set(const std::vector<TuningEntry>& entries);

 private:
  int file_;
  std::string before_;
  bool was_set_;
};

}  // namespace switchyard::tool
