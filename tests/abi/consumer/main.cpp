// SPDX-License-Identifier: Apache-2.0
// Uses an installed Switchyard as a user's program would: forms a group, calls a barrier, and catches the library's exception
// type.
#include <switchyard/group.hpp>
#include <switchyard/status.hpp>
#include <switchyard/version.h>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

bool groups_work() {
  switchyard::GroupOptions options;
  options.heap_bytes = size_t{1} << 20;
  std::vector<switchyard::Group> groups = switchyard::Group::in_process(3, options);
  std::vector<int> gathered(9, -1);
  std::vector<std::thread> ranks;
  for (auto& group : groups) {
    ranks.emplace_back([&group, &gathered] {
      const int mine = 10 + group.rank();
      group.all_gather(&mine, sizeof(mine), &gathered[static_cast<size_t>(group.rank()) * 3]);
      group.barrier();
    });
  }
  for (auto& rank : ranks) rank.join();
  return gathered == std::vector<int>{10, 11, 12, 10, 11, 12, 10, 11, 12};
}

bool errors_are_typed() {
  try {
    switchyard::Group::in_process(0);
  } catch (const switchyard::Error& error) {
    return error.code() == switchyard::ErrorCode::invalid_argument && std::strstr(error.what(), "world") != nullptr;
  }
  return false;
}

}  // namespace

int main() {
  if (!groups_work() || !errors_are_typed()) {
    std::puts("consumer: FAIL");
    return 1;
  }
  std::puts("consumer: PASS with Switchyard " SY_VERSION_STRING);
  return 0;
}
