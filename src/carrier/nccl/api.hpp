// SPDX-License-Identifier: Apache-2.0
// The few functions of NCCL that the library calls, found at run time: it links no NCCL and needs no header of it. Their C
// interface has been the same since version 2.19, and structs carry their size and version.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

namespace switchyard::detail {

/// Results of NCCL's functions that are told apart here; any other is an error, for NCCL to describe.
inline constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
/// ncclDataType_t of bytes.
inline constexpr int kNcclBytes = 1;
/// The lowest version: before it a communicator could not be ended reliably from another thread.
inline constexpr int kLeastNcclVersion = 21900;

/// A communicator; nothing is known of it.
using NcclComm = void*;

/// What ranks of a communicator find each other by.
struct NcclId {
  char bytes[128] = {};
};

/// ncclConfig_t of version 2.19, which later versions take.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kLeastNcclVersion;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // INT_MIN: as NCCL likes
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

struct NcclApi {
  int (*get_version)(int* version);
  int (*get_id)(NcclId* id);
  int (*init_rank)(NcclComm* comm, int ranks, NcclId id, int rank, NcclConfig* config);
  int (*async_error)(NcclComm comm, int* error);
  int (*finalize)(NcclComm comm);
  int (*destroy)(NcclComm comm);
  int (*abort)(NcclComm comm);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int type, int peer, NcclComm comm, void* stream);
  int (*receive)(void* to, size_t count, int type, int peer, NcclComm comm, void* stream);
  const char* (*error_text)(int result);
  const char* (*last_error)(NcclComm comm);
  int version = 0;    ///< 22809: 2.28.9
  std::string place;  ///< where it was found, for errors
};

/// "2.28.9"
std::string nccl_version_text(int version);

/// Looks NCCL up: the one that the process has, else the file that SWITCHYARD_NCCL names, else libnccl.so.2. It is never
/// unloaded. \throws Error(unsupported) with the names that were tried, what is missing, or a version before 2.19.
NcclApi load_nccl();
/// The same once for all; a failure is tried again. Any thread.
const NcclApi& nccl();

}  // namespace switchyard::detail
