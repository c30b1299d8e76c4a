// SPDX-License-Identifier: Apache-2.0
// A library with NCCL's functions that carries nothing: it writes down what it is told and answers what it is told to.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace switchyard::test {

struct FakeNccl {
  std::mutex mutex;
  std::vector<std::string> told;  ///< "send 48 to 1 of c0", in order
  int comms = 0, ended = 0;       ///< made so far, and destroyed or aborted
  int in_progress = 0;            ///< so many questions for a state are answered "in progress"
  int init_result = 7, group_end_result = 7, send_result = 0;
  int state = 0;  ///< of all communicators, otherwise

  void tell(const std::string& what) {
    const std::lock_guard lock(mutex);
    told.push_back(what);
  }
  void end_one() {
    const std::lock_guard lock(mutex);
    ++ended;
  }
  std::vector<std::string> take_told() {
    const std::lock_guard lock(mutex);
    return std::exchange(told, {});
  }
};

}  // namespace switchyard::test
