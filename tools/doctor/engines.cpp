// SPDX-License-Identifier: Apache-2.0
// `doctor --engines`: the list of engines printed by the Python package.
#include <fmt/core.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/verb.hpp"
#include "doctor/doctor.hpp"

extern char** environ;

namespace switchyard::tool {
namespace {

/// Exits with kAbsent if this Python has no package switchyard that lists engines.
constexpr const char* kProbe =
    "import importlib.util as u, sys\n"
    "sys.exit(0 if u.find_spec('switchyard') and u.find_spec('switchyard.engines') else 69)";
constexpr int kAbsent = 69;

std::string python() {
  const char* named = std::getenv("SWITCHYARD_PYTHON");
  return named == nullptr || *named == '\0' ? "python3" : named;
}

/// Runs a program with this process's standard streams. \returns its exit status, or 128 + the signal that ended it
/// \throws std::runtime_error if it cannot be started
int run_program(const std::vector<std::string>& words) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  std::fflush(stdout);
  pid_t pid = 0;
  if (const int error = posix_spawnp(&pid, arguments[0], nullptr, nullptr, arguments.data(), environ))
    throw std::runtime_error(
        fmt::format("{}: {}; set SWITCHYARD_PYTHON to the Python that runs the engines", words[0], std::strerror(error)));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) throw std::runtime_error(fmt::format("{}: {}", words[0], std::strerror(errno)));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int list_engines() {
  const int found = run_program({python(), "-c", kProbe});
  if (found == kAbsent) {
    fmt::print(
        "{} has no package switchyard: install the wheel there, or set SWITCHYARD_PYTHON to the Python that runs the engines\n",
        python());
    return kExitCheckFailed;
  }
  if (found != 0) throw std::runtime_error(fmt::format("{}: the package switchyard cannot be imported, see above", python()));
  const int listed = run_program({python(), "-m", "switchyard.engines"});
  if (listed == kExitOk || listed == kExitCheckFailed) return listed;
  throw std::runtime_error(fmt::format("{} -m switchyard.engines: exit status {}", python(), listed));
}

}  // namespace switchyard::tool
