// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace switchyard::tool {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kRedraw = std::chrono::milliseconds(80);
constexpr size_t kLongestBar = 24, kShortestBar = 10;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

size_t terminal_columns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20) return size.ws_col;
  return 80;
}

/// The process with an unfinished line, or 0; needed because forked ranks inherit this handler.
std::atomic<pid_t> drawing{0};
static_assert(std::atomic<pid_t>::is_always_lock_free);

void end_line(int signal) {
  if (drawing.load() == getpid()) [[maybe_unused]]
    const ssize_t written = write(STDERR_FILENO, "\n", 1);
  raise(signal);  // the default action, which SA_RESETHAND has restored
}

void end_lines_on_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now {};
    if (sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) continue;
    now.sa_handler = end_line;
    now.sa_flags = static_cast<int>(SA_RESETHAND) | SA_NODEFER;
    sigaction(signal, &now, nullptr);
  }
}

std::atomic<bool> silenced{false};

bool is_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && term != nullptr && std::strcmp(term, "dumb") != 0;
}

}  // namespace

std::string progress_line(const std::string& title, int64_t done, int64_t total, double seconds, const std::string& note,
                          size_t columns, size_t title_width) {
  const std::string begin = fmt::format("  {:<{}}", title, title_width);
  std::string end = fmt::format("  {:.1f} s", seconds);
  if (!note.empty()) end += "  " + note;
  if (total == 0) return (begin + end).substr(0, columns - 1);
  const std::string share = fmt::format("] {:>3} %", std::min<int64_t>(100, done * 100 / total));
  const size_t others = begin.size() + 2 + share.size() + end.size() + 1;
  const size_t bar = std::clamp(columns > others ? columns - others : 0, kShortestBar, kLongestBar);
  const size_t filled = std::min(bar, static_cast<size_t>(done) * bar / static_cast<size_t>(total));
  return (begin + " [" + std::string(filled, '#') + std::string(bar - filled, '.') + share + end).substr(0, columns - 1);
}

void Progress::silence() { silenced = true; }

Progress::Progress(bool quiet) : quiet_(quiet || silenced), tty_(is_terminal()) {
  if (tty_ && !quiet_) end_lines_on_signals();
}

Progress::~Progress() {
  const std::lock_guard lock(mutex_);
  if (open_) close("stopped");
}

void Progress::align(const std::vector<std::string>& titles) {
  const std::lock_guard lock(mutex_);
  for (const std::string& title : titles) title_width_ = std::max(title_width_, title.size());
}

void Progress::stage(const std::string& title, int64_t total) {
  const std::lock_guard lock(mutex_);
  if (open_) close("");
  title_ = title;
  title_width_ = std::max(title_width_, title.size());
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
  const std::string line = progress_line(title_, done_, total_, seconds_since(begin_), note_, terminal_columns(), title_width_);
  drawing = getpid();
  fmt::print(stderr, "\r\033[K{}", line);
  std::fflush(stderr);
}

void Progress::close(const std::string& result) {
  open_ = false;
  if (quiet_) return;
  const std::string took = fmt::format("{:.1f} s", seconds_since(begin_));
  fmt::print(stderr, "{}  {:<{}} {:>8}{}{}\n", tty_ ? "\r\033[K" : "", title_, title_width_, took, result.empty() ? "" : "  ",
             result);
  std::fflush(stderr);
  drawing = 0;
}

}  // namespace switchyard::tool
