// SPDX-License-Identifier: Apache-2.0
#include "run/in_child.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace switchyard::tool {
namespace {

using nlohmann::json;

[[noreturn]] void answer(const std::function<json()>& body, int pipe) {
  json out;
  try {
    out = {{"value", body()}};
  } catch (const std::exception& e) {
    out = {{"error", e.what()}};
  }
  const std::vector<uint8_t> bytes = json::to_cbor(out);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = write(pipe, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  _exit(0);
}

std::string read_all(int pipe) {
  std::string all;
  char chunk[4096];
  while (true) {
    const ssize_t n = read(pipe, chunk, sizeof chunk);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return all;
    all.append(chunk, static_cast<size_t>(n));
  }
}

}  // namespace

json run_in_child(const std::function<json()>& body) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error(fmt::format("pipe: {}", std::strerror(errno)));
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) {
    close(ends[0]);
    close(ends[1]);
    throw std::runtime_error(fmt::format("fork: {}", std::strerror(errno)));
  }
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    answer(body, ends[1]);
  }
  close(ends[1]);
  const std::string bytes = read_all(ends[0]);
  close(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (bytes.empty()) {
    throw std::runtime_error(WIFSIGNALED(status) ? fmt::format("the process was ended by signal {} ({})", WTERMSIG(status),
                                                               strsignal(WTERMSIG(status)))
                                                 : "the process ended without an answer");
  }
  json out = json::from_cbor(bytes.begin(), bytes.end());
  if (out.contains("error")) throw std::runtime_error(out["error"].get<std::string>());
  return std::move(out["value"]);
}

}  // namespace switchyard::tool
