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

// Of NCCL's device API, as of version 2.30.7: a later NCCL takes what says that it is of an earlier version.

/// The lowest version that may be asked for networking by kernels (GIN): the first whose signals cover one put alone (weak
/// ones), which is what every network has that kernels can drive.
inline constexpr int kLeastGinVersion = 23007;
inline constexpr unsigned kNcclMagic = 0xcafebeef;
/// ncclGinConnectionType_t: kernels reach all ranks of a communicator, or those that the same network card reaches.
inline constexpr int kNcclGinFull = 1, kNcclGinRail = 2;

/// ncclCommProperties.
struct NcclProperties {
  size_t size = sizeof(NcclProperties);
  unsigned magic = kNcclMagic;
  unsigned version = kLeastGinVersion;
  int rank = 0;
  int ranks = 0;
  int cuda_device = 0;
  int nvml_device = 0;
  bool device_api = false;
  bool multimem = false;
  int gin_type = 0;  ///< 0: kernels do not reach all ranks over the network
  int lsa_teams = 0;
  bool host_rma = false;
  int railed_gin_type = 0;  ///< 0: nor those of a rail
};

/// ncclDevCommRequirements.
struct NcclRequirements {
  size_t size = sizeof(NcclRequirements);
  unsigned magic = kNcclMagic;
  unsigned version = kLeastGinVersion;  ///< of the header that kernels were compiled with
  void* resources = nullptr;
  void* teams = nullptr;
  bool lsa_multimem = false;
  int barriers = 0;
  int lsa_barriers = 0;
  int rail_gin_barriers = 0;
  int lsa_blocks = 0;
  int lsa_slots = 0;
  bool gin_force = false;
  int gin_contexts = 1;
  int gin_signals = 0;
  int gin_counters = 0;
  int gin_connection = 0;
  bool gin_exclusive = false;
  int gin_queue_depth = 0;
  int gin_traffic_class = INT_MIN;
  int world_gin_barriers = 0;
  bool strong_signals = false;
  bool va_signals = false;
};

struct NcclGinApi {
  int (*properties)(NcclComm comm, NcclProperties* properties);
  int (*make_device_comm)(NcclComm comm, const NcclRequirements* wanted, void* device_comm);
  int (*destroy_device_comm)(NcclComm comm, const void* device_comm);
  int (*make_window)(NcclComm comm, void* memory, size_t bytes, void** window, int flags);
  int (*destroy_window)(NcclComm comm, void* window);
  int (*allocate)(void** memory, size_t bytes);
  int (*release)(void* memory);
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
  NcclGinApi gin;
  std::string no_gin;  ///< why it cannot be asked for networking by kernels, and `gin` is empty; "" if it can
};

/// "2.28.9"
std::string nccl_version_text(int version);

/// Looks NCCL up: the one that the process has, else the file that SWITCHYARD_NCCL names, else libnccl.so.2. It is never
/// unloaded. \throws Error(unsupported) with the names that were tried, what is missing, or a version before 2.19.
NcclApi load_nccl();
/// The same once for all; a failure is tried again. Any thread.
const NcclApi& nccl();

}  // namespace switchyard::detail
