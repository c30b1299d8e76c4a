// SPDX-License-Identifier: Apache-2.0
// The few NCCL functions that the library calls, looked up at run time: the library does not link NCCL and needs no NCCL
// header. Their C interface has not changed since version 2.19, and structs contain their size and version.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

namespace switchyard::detail {

/// Result codes of NCCL functions that are distinguished here; any other code is an error that NCCL describes.
inline constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
/// ncclDataType_t of bytes.
inline constexpr int kNcclBytes = 1;
/// Minimum version; earlier versions could not reliably abort a communicator from another thread.
inline constexpr int kMinNcclVersion = 21900;

/// An opaque communicator.
using NcclComm = void*;

/// Identifier with which the ranks of a communicator find each other.
struct NcclId {
  char bytes[128] = {};
};

/// ncclConfig_t as of version 2.19, which later versions accept.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kMinNcclVersion;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // INT_MIN: chosen by NCCL
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// NCCL's device API as of version 2.30.7; later versions accept structs that declare an earlier version.

/// Minimum version for kernel-initiated networking (GIN): the first with signals that cover a single put (weak signals), which
/// are supported by every network that kernels can drive.
inline constexpr int kMinGinVersion = 23007;
inline constexpr unsigned kNcclMagic = 0xcafebeef;
/// ncclGinConnectionType_t: kernels reach all ranks in a communicator, or only those reached through the same network card.
inline constexpr int kNcclGinFull = 1, kNcclGinRail = 2;

/// ncclCommProperties.
struct NcclProperties {
  size_t size = sizeof(NcclProperties);
  unsigned magic = kNcclMagic;
  unsigned version = kMinGinVersion;
  int rank = 0;
  int ranks = 0;
  int cuda_device = 0;
  int nvml_device = 0;
  bool device_api = false;
  bool multimem = false;
  int gin_type = 0;  ///< 0: kernels do not reach all ranks over the network
  int lsa_teams = 0;
  bool host_rma = false;
  int railed_gin_type = 0;  ///< 0: kernels do not reach the ranks of a rail either
};

/// ncclDevCommRequirements.
struct NcclRequirements {
  size_t size = sizeof(NcclRequirements);
  unsigned magic = kNcclMagic;
  unsigned version = kMinGinVersion;  ///< of the header that kernels were compiled with
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
  std::string place;  ///< where it was found, for error messages
  NcclGinApi gin;
  std::string no_gin;  ///< why kernels cannot use the network, with `gin` empty; "" if they can
};

/// "2.28.9"
std::string nccl_version_text(int version);

/// Looks up NCCL: the one already loaded in the process, else the file named by SWITCHYARD_NCCL, else libnccl.so.2. NCCL is
/// never unloaded. \throws Error(unsupported) naming the libraries tried, the missing function, or a version before 2.19.
NcclApi load_nccl();
/// Result of load_nccl(), cached for the process; after a failure, the next call tries again. Any thread.
const NcclApi& nccl();

}  // namespace switchyard::detail
