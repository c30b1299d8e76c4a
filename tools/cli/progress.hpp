// SPDX-License-Identifier: Apache-2.0
// Progress of long-running work: a bar redrawn in place on a terminal, one line per stage elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace switchyard::tool {

/// Text of a stage in fewer than `columns` columns. The bar shrinks to make room for the note, but does not vanish. `total` 0:
/// no bar. The title is padded to `title_width`.
inline constexpr size_t kTitleWidth = 30;
std::string progress_line(const std::string& title, int64_t done, int64_t total, double seconds, const std::string& note,
                          size_t columns, size_t title_width = kTitleWidth);

/// Thread-safe. Writes to stderr, so stdout carries only results. If a signal ends the program while a line is being drawn,
/// that line is terminated first.
class Progress {
 public:
  /// With `quiet`, writes nothing.
  explicit Progress(bool quiet = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Disables the output of all objects from now on.
  static void silence();

  /// Pads the titles of all later stages to the longest of these, so columns align.
  void align(const std::vector<std::string>& titles);
  /// Ends the previous stage, if any. `total` 0: unknown.
  void stage(const std::string& title, int64_t total = 0);
  /// `done` of the stage's total; `note` follows the bar.
  void update(int64_t done, const std::string& note = "");
  /// Ends the stage; its line stays, with `result`.
  void finish(const std::string& result = "");

 private:
  void draw();
  void close(const std::string& result);

  std::mutex mutex_;
  bool quiet_;
  bool tty_;
  bool open_ = false;
  size_t title_width_ = kTitleWidth;
  std::string title_;
  std::string note_;
  int64_t done_ = 0;
  int64_t total_ = 0;
  std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::time_point drawn_;
};

}  // namespace switchyard::tool
