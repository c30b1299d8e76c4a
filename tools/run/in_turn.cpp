// SPDX-License-Identifier: Apache-2.0
#include "run/in_turn.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <iterator>

#include "cli/verb.hpp"
#include "run/ranks.hpp"

namespace switchyard::tool {
namespace {

struct Interrupted : std::exception {};

/// During its lifetime, the first Ctrl-C, SIGTERM or SIGHUP is only recorded. The second one ends the program.
class Interrupts {
 public:
  Interrupts() {
    last_signal = 0;
    owner = getpid();
    for (size_t i = 0; i < std::size(kSignals); ++i) {
      sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler == SIG_IGN) continue;  // ignored by nohup
      struct sigaction action {};
      action.sa_handler = remember;
      action.sa_flags = SA_RESTART;
      sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~Interrupts() {
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  /// The recorded signal, or 0.
  static int which() { return last_signal; }

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

  static int64_t now_ms() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
  }

  static void remember(int signal) {
    if (last_signal != 0) {
      // timeout(1) sends its signal to the program and then to the program's process group; both count as one request.
      if (signal != SIGINT && signal == last_signal && now_ms() - last_signal_ms < 1000) return;
      ::signal(signal, SIG_DFL);
      raise(signal);  // delivered when this handler returns
      return;
    }
    last_signal_ms = now_ms();
    last_signal = signal;
    static constexpr char kText[] =
        "\n  interrupted: stops after this measurement and writes its results; a second signal stops at once\n";
    if (owner == getpid()) [[maybe_unused]]  // forked ranks inherit this handler
      const ssize_t written = write(STDERR_FILENO, kText, sizeof kText - 1);
  }
  static inline std::atomic<int> last_signal{0};
  static inline std::atomic<int64_t> last_signal_ms{0};
  static inline std::atomic<pid_t> owner{0};
  static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);
  struct sigaction before_[std::size(kSignals)] = {};
};

}  // namespace

int Stopped::status(bool passed) const {
  const int signal = guard ? Interrupts::which() : 0;
  if (!error && signal == 0) return passed ? kExitOk : kExitCheckFailed;
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Interrupted&) {
    fmt::print(stderr, "switchyard: {}\n", what);
  }
  std::fflush(nullptr);
  ::signal(signal, SIG_DFL);
  raise(signal);  // ends a script that runs this program, too
  return kExitRuntime;
}

Stopped in_turn(Progress& progress, size_t count, const std::function<std::string(size_t)>& one) {
  Stopped stopped;
  const auto guard = [&] {
    if (!stopped.guard && !ranks_are_launched()) stopped.guard = std::make_shared<Interrupts>();
  };
  if (count > 1) guard();
  for (size_t i = 0; i < count; ++i) {
    std::string words;
    try {
      words = one(i);
    } catch (const std::exception& e) {
      if (i == 0) throw;
      progress.finish("failed");
      stopped.what = e.what();
      stopped.error = std::current_exception();
      return stopped;
    }
    guard();  // from now on there are results to preserve
    progress.finish(words);
    if (stopped.guard && Interrupts::which() != 0 && i + 1 < count) {
      stopped.what = fmt::format("interrupted after {} of {}", i + 1, count);
      stopped.error = std::make_exception_ptr(Interrupted());
      return stopped;
    }
  }
  return stopped;
}

}  // namespace switchyard::tool
