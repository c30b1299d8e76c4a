// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace switchyard::tool {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kRedraw = std::chrono::milliseconds(80);
constexpr int kTitleWidth = 30;
constexpr int kBarWidth = 24;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

size_t terminal_columns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20) return size.ws_col;
  return 80;
}

bool is_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && term != nullptr && std::strcmp(term, "dumb") != 0;
}

}  // namespace

Progress::Progress(bool quiet) : quiet_(quiet), tty_(is_terminal()) {}

Progress::~Progress() {
  const std::lock_guard lock(mutex_);
  if (open_) close("stopped");
}

void Progress::stage(const std::string& title, int64_t total) {
  const std::lock_guard lock(mutex_);
  if (open_) close("");
  title_ = title;
  note_.clear();
  done_ = 0;
  total_ = total;
  open_ = true;
  begin_ = Clock::now();
  drawn_ = begin_ - kRedraw;
  if (!quiet_ && tty_) draw();
}

void Progress::update(int64_t done, const std::string& note) {
  const std::lock_guard lock(mutex_);
  done_ = std::max(done_, done);
  note_ = note;
  if (!open_ || quiet_ || !tty_ || Clock::now() - drawn_ < kRedraw) return;
  draw();
}

void Progress::finish(const std::string& result) {
  const std::lock_guard lock(mutex_);
  if (open_) close(result);
}

void Progress::draw() {
  drawn_ = Clock::now();
  std::string line = fmt::format("  {:<{}}", title_, kTitleWidth);
  if (total_ > 0) {
    const int filled = static_cast<int>(std::min<int64_t>(kBarWidth, done_ * kBarWidth / total_));
    line +=
        fmt::format(" [{}{}] {:>3} %", std::string(static_cast<size_t>(filled), '#'),
                    std::string(static_cast<size_t>(kBarWidth - filled), '.'), std::min<int64_t>(100, done_ * 100 / total_));
  }
  line += fmt::format("  {:.1f} s", seconds_since(begin_));
  if (!note_.empty()) line += "  " + note_;
  line = line.substr(0, terminal_columns() - 1);
  fmt::print(stderr, "\r\033[K{}", line);
  std::fflush(stderr);
}

void Progress::close(const std::string& result) {
  open_ = false;
  if (quiet_) return;
  const std::string took = fmt::format("{:.1f} s", seconds_since(begin_));
  fmt::print(stderr, "{}  {:<{}} {:>8}{}{}\n", tty_ ? "\r\033[K" : "", title_, kTitleWidth, took, result.empty() ? "" : "  ",
             result);
  std::fflush(stderr);
}

}  // namespace switchyard::tool
