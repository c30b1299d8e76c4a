// SPDX-License-Identifier: Apache-2.0
// A library with NCCL's functions that transfers no data: it records its calls and returns the configured results.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace switchyard::test {

struct FakeNccl {
  std::mutex mutex;
  std::vector<std::string> log;  ///< "send 48 to 1 of c0", in order
  int comms = 0, ended = 0;      ///< numbers of communicators created so far, and destroyed or aborted
  int in_progress = 0;           ///< number of further state queries that return "in progress"
  int init_result = 7, group_end_result = 7, send_result = 0;
  int state = 0;                           ///< state of all communicators once in_progress is 0
  std::atomic<bool> holds_aborts = false;  ///< aborts return only after it becomes false
  // Since version 2.30.7.
  bool device_api = true, has_window = true;
  int gin_type = 3, railed_gin_type = 3, lsa_teams = 2;
  int ranks_of_comm = 2;
  int window_result = 7, device_comm_result = 7;
  int allocated = 0;  ///< memory blocks not yet released

  void reset() {
    const std::lock_guard lock(mutex);
    log.clear();
    comms = ended = in_progress = send_result = state = allocated = 0;
    init_result = group_end_result = window_result = device_comm_result = 7;
    holds_aborts = false;
    device_api = has_window = true;
    gin_type = railed_gin_type = 3;
    lsa_teams = ranks_of_comm = 2;
  }
  void record(const std::string& what) {
    const std::lock_guard lock(mutex);
    log.push_back(what);
  }
  void end_one() {
    const std::lock_guard lock(mutex);
    ++ended;
  }
  std::vector<std::string> take_log() {
    const std::lock_guard lock(mutex);
    return std::exchange(log, {});
  }
};

}  // namespace switchyard::test
