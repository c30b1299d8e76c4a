// SPDX-License-Identifier: Apache-2.0
// Progress of long-running work: on a terminal, a bar redrawn in place; elsewhere, one line per stage.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace switchyard::tool {

/// A stage's text in fewer than `columns` columns. The bar shrinks to make room for the note but does not disappear. `total` 0:
/// no bar. The title is padded to `title_width`.
inline constexpr size_t kTitleWidth = 30;
std::string progress_line(const std::string& title, int64_t done, int64_t total, double seconds, const std::string& note,
                          size_t columns, size_t title_width = kTitleWidth);

/// Thread-safe. Writes to stderr so that stdout contains only results. If a signal ends the program while a line is being
/// drawn, the line is terminated first.
class Progress {
 public:
  /// With `quiet`, writes nothing.
  explicit Progress(bool quiet = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Disables all output by objects of this class from now on.
  static void silence();

  /// Pads the titles of all later stages to the width of the longest of these so that columns align.
  void align(const std::vector<std::string>& titles);
  /// Ends the previous stage, if any. `total` 0: unknown.
  void stage(const std::string& title, int64_t total = 0);
  /// `done` out of the stage's total; `note` follows the bar.
  void update(int64_t done, const std::string& note = "");
  /// Ends the stage; its line stays, followed by `result`.
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
