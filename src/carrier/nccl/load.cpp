// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>

#include "carrier/nccl/api.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr char kLibraryName[] = "libnccl.so.2", kLibraryVariable[] = "SWITCHYARD_NCCL";

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::unsupported, "NCCL: " + text); }

/// A handle for dlsym, and the name under which it was found.
struct Library {
  void* handle = nullptr;
  std::string place;
};

Library find_library() {
  if (void* const loaded = ::dlopen(kLibraryName, RTLD_NOW | RTLD_NOLOAD))
    return {loaded, std::string(kLibraryName) + " of the process"};
  if (::dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) return {RTLD_DEFAULT, "the NCCL that the process is linked with"};
  const char* const given = std::getenv(kLibraryVariable);
  const std::string file = given && *given ? given : kLibraryName;
  if (void* const loaded = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return {loaded, file};
  const char* const why = ::dlerror();
  refuse("no library can be loaded; groups of GPUs on several hosts need one. " + std::string(kLibraryVariable) +
         " may name the file. Tried: the process, then " + file + (why ? std::string(" (") + why + ")" : ""));
}

/// \returns false if it is missing
template <class Function>
bool look_up(Function& function, const Library& in, const char* name) {
  void* const address = ::dlsym(in.handle, name);
  function = reinterpret_cast<Function>(address);
  return address != nullptr;
}

template <class Function>
void find(Function& function, const Library& in, const char* name) {
  if (!look_up(function, in, name)) refuse(in.place + " has no " + name + ": it is no NCCL of version 2.19 or later");
}

/// Looks up the functions for kernel-initiated networking, or records why they are missing.
void find_gin(NcclApi& api, const Library& in) {
  if (api.version < kMinGinVersion) {
    api.no_gin = "NCCL " + nccl_version_text(api.version) + " is older than " + nccl_version_text(kMinGinVersion);
    return;
  }
  const auto take = [&](auto& function, const char* name) {
    if (!look_up(function, in, name) && api.no_gin.empty()) api.no_gin = in.place + " has no " + name;
  };
  take(api.gin.properties, "ncclCommQueryProperties");
  take(api.gin.make_device_comm, "ncclDevCommCreate");
  take(api.gin.destroy_device_comm, "ncclDevCommDestroy");
  take(api.gin.make_window, "ncclCommWindowRegister");
  take(api.gin.destroy_window, "ncclCommWindowDeregister");
  take(api.gin.allocate, "ncclMemAlloc");
  take(api.gin.release, "ncclMemFree");
}

}  // namespace

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

NcclApi load_nccl() {
  const Library library = find_library();
  NcclApi api{};
  api.place = library.place;
  find(api.get_version, library, "ncclGetVersion");
  if (api.get_version(&api.version) != kNcclSuccess) refuse(library.place + " does not tell its version");
  if (api.version < kMinNcclVersion)
    refuse(library.place + " is " + (api.version < 10000 ? "older than 2.9" : "version " + nccl_version_text(api.version)) +
           ": at least 2.19 is needed, before which a communicator could not be ended reliably");
  find(api.get_id, library, "ncclGetUniqueId");
  find(api.init_rank, library, "ncclCommInitRankConfig");
  find(api.async_error, library, "ncclCommGetAsyncError");
  find(api.finalize, library, "ncclCommFinalize");
  find(api.destroy, library, "ncclCommDestroy");
  find(api.abort, library, "ncclCommAbort");
  find(api.group_start, library, "ncclGroupStart");
  find(api.group_end, library, "ncclGroupEnd");
  find(api.send, library, "ncclSend");
  find(api.receive, library, "ncclRecv");
  find(api.error_text, library, "ncclGetErrorString");
  find(api.last_error, library, "ncclGetLastError");
  find_gin(api, library);
  return api;
}

const NcclApi& nccl() {
  static std::mutex mutex;
  static std::optional<NcclApi> loaded;
  const std::lock_guard lock(mutex);
  if (!loaded) loaded = load_nccl();
  return *loaded;
}

}  // namespace switchyard::detail
