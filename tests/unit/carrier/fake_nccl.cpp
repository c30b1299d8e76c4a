// SPDX-License-Identifier: Apache-2.0
#include "unit/carrier/fake_nccl.hpp"

#include <cstdint>
#include <string>
#include <utility>

namespace {

using switchyard::test::FakeNccl;

FakeNccl& fake() {
  static auto* const made = new FakeNccl;
  return *made;
}

/// What NCCL takes by value.
struct Id {
  char bytes[128];
};

std::string name(void* comm) { return "c" + std::to_string(reinterpret_cast<uintptr_t>(comm) - 1); }

}  // namespace

extern "C" {

FakeNccl* fake_nccl() { return &fake(); }

int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}
int ncclGetUniqueId(Id* id) {
  id->bytes[0] = 'i';
  return 0;
}
int ncclCommInitRankConfig(void** comm, int ranks, Id id, int rank, void* config) {
  // The version and `blocking` of the config, where they are for everybody who was built with a header of NCCL.
  const auto* const words = reinterpret_cast<const int*>(static_cast<const char*>(config) + 8);
  *comm = reinterpret_cast<void*>(static_cast<uintptr_t>(++fake().comms));
  fake().tell("init " + name(*comm) + ": rank " + std::to_string(rank) + " of " + std::to_string(ranks) + ", id " +
              std::string(1, id.bytes[0]) + ", version " + std::to_string(words[1]) + ", blocking " + std::to_string(words[2]));
  return fake().init_result;
}
int ncclCommGetAsyncError(void*, int* error) {
  const std::lock_guard lock(fake().mutex);
  *error = fake().in_progress > 0 ? 7 : fake().state;
  if (fake().in_progress > 0) --fake().in_progress;
  return 0;
}
int ncclCommFinalize(void* comm) {
  fake().tell("finalize " + name(comm));
  return 7;
}
int ncclCommDestroy(void* comm) {
  fake().tell("destroy " + name(comm));
  fake().end_one();
  return 0;
}
int ncclCommAbort(void* comm) {
  fake().tell("abort " + name(comm));
  fake().end_one();
  return 0;
}
int ncclGroupStart() {
  fake().tell("group");
  return 0;
}
int ncclGroupEnd() {
  fake().tell("end");
  return fake().group_end_result;
}
int ncclSend(const void*, size_t count, int type, int peer, void* comm, void* stream) {
  fake().tell("send " + std::to_string(count) + " of type " + std::to_string(type) + " to " + std::to_string(peer) + " of " +
              name(comm) + " on " + std::to_string(reinterpret_cast<uintptr_t>(stream)));
  return fake().send_result;
}
int ncclRecv(void*, size_t count, int type, int peer, void* comm, void* stream) {
  fake().tell("receive " + std::to_string(count) + " of type " + std::to_string(type) + " from " + std::to_string(peer) +
              " of " + name(comm) + " on " + std::to_string(reinterpret_cast<uintptr_t>(stream)));
  return 0;
}
const char* ncclGetErrorString(int) { return "a fake error"; }
const char* ncclGetLastError(void*) { return "and its reason"; }

}  // extern "C"
