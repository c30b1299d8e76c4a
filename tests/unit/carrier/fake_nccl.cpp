// SPDX-License-Identifier: Apache-2.0
#include "unit/carrier/fake_nccl.hpp"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "carrier/nccl/api.hpp"

namespace {

using switchyard::test::FakeNccl;

FakeNccl& fake() {
  static auto* const made = new FakeNccl;
  return *made;
}

/// The ID that NCCL passes by value.
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
  // The config's version and `blocking`, at offsets that are valid for every build with an NCCL header.
  const auto* const words = reinterpret_cast<const int*>(static_cast<const char*>(config) + 8);
  *comm = reinterpret_cast<void*>(static_cast<uintptr_t>(++fake().comms));
  fake().record("init " + name(*comm) + ": rank " + std::to_string(rank) + " of " + std::to_string(ranks) + ", id " +
                std::string(1, id.bytes[0]) + ", version " + std::to_string(words[1]) + ", blocking " +
                std::to_string(words[2]));
  return fake().init_result;
}
int ncclCommGetAsyncError(void*, int* error) {
  const std::lock_guard lock(fake().mutex);
  *error = fake().in_progress > 0 ? 7 : fake().state;
  if (fake().in_progress > 0) --fake().in_progress;
  return 0;
}
int ncclCommFinalize(void* comm) {
  fake().record("finalize " + name(comm));
  return 7;
}
int ncclCommDestroy(void* comm) {
  fake().record("destroy " + name(comm));
  fake().end_one();
  return 0;
}
int ncclCommAbort(void* comm) {
  while (fake().holds_aborts) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  fake().record("abort " + name(comm));
  fake().end_one();
  return 0;
}
int ncclGroupStart() {
  fake().record("group");
  return 0;
}
int ncclGroupEnd() {
  fake().record("end");
  return fake().group_end_result;
}
int ncclSend(const void*, size_t count, int type, int peer, void* comm, void* stream) {
  fake().record("send " + std::to_string(count) + " of type " + std::to_string(type) + " to " + std::to_string(peer) + " of " +
                name(comm) + " on " + std::to_string(reinterpret_cast<uintptr_t>(stream)));
  return fake().send_result;
}
int ncclRecv(void*, size_t count, int type, int peer, void* comm, void* stream) {
  fake().record("receive " + std::to_string(count) + " of type " + std::to_string(type) + " from " + std::to_string(peer) +
                " of " + name(comm) + " on " + std::to_string(reinterpret_cast<uintptr_t>(stream)));
  return 0;
}
const char* ncclGetErrorString(int) { return "a fake error"; }
const char* ncclGetLastError(void*) { return "and its reason"; }

#if FAKE_NCCL_VERSION >= 23007
int ncclCommQueryProperties(void* comm, switchyard::detail::NcclProperties* to) {
  fake().record("properties of " + name(comm) + ", version " + std::to_string(to->version));
  to->ranks = fake().ranks_of_comm;
  to->device_api = fake().device_api;
  to->gin_type = fake().gin_type;
  to->railed_gin_type = fake().railed_gin_type;
  to->lsa_teams = fake().lsa_teams;
  return 0;
}
int ncclDevCommCreate(void* comm, const switchyard::detail::NcclRequirements* wanted, void* made) {
  fake().record("device comm of " + name(comm) + ": version " + std::to_string(wanted->version) + ", " +
                std::to_string(wanted->gin_signals) + " signals, " + std::to_string(wanted->gin_counters) +
                " counters, connection " + std::to_string(wanted->gin_connection));
  *static_cast<uint64_t*>(made) = reinterpret_cast<uintptr_t>(comm);
  return fake().device_comm_result;
}
int ncclDevCommDestroy(void* comm, const void*) {
  fake().record("destroy device comm of " + name(comm));
  return 0;
}
int ncclCommWindowRegister(void* comm, void* memory, size_t bytes, void** window, int flags) {
  fake().record("window of " + name(comm) + ": " + std::to_string(bytes) + ", flags " + std::to_string(flags));
  *window = fake().has_window ? memory : nullptr;
  return fake().window_result;
}
int ncclCommWindowDeregister(void* comm, void*) {
  fake().record("destroy window of " + name(comm));
  return 0;
}
int ncclMemFree(void* memory) {
  std::free(memory);
  const std::lock_guard lock(fake().mutex);
  --fake().allocated;
  return 0;
}
#endif
#if FAKE_NCCL_VERSION >= 23007 && !defined(FAKE_NCCL_WITHOUT_MEMORY)
int ncclMemAlloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  const std::lock_guard lock(fake().mutex);
  ++fake().allocated;
  return 0;
}
#endif

}  // extern "C"
