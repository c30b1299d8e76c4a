// SPDX-License-Identifier: Apache-2.0
// Finds and loads the MPI module.
#include <dlfcn.h>
#include <limits.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "carrier/mpi/module.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr char kName[] = "libswitchyard_mpi.so", kVariable[] = "SWITCHYARD_MPI_MODULE";

/// Folder of the file containing this function.
std::string own_folder() {
  Dl_info info{};
  char path[PATH_MAX];
  if (::dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || ::realpath(info.dli_fname, path) == nullptr)
    return "";
  const std::string file = path;
  return file.substr(0, file.rfind('/'));
}

/// Possible paths of the module: only the user's, if set; otherwise next to this library or program, then the system's search
/// path.
std::vector<std::string> places() {
  if (const char* const given = std::getenv(kVariable); given && *given) return {given};
  const std::string folder = own_folder();
  return {folder + "/" + kName, folder + "/../lib/" + kName, folder + "/../" + kName, kName};
}

/// First line of the MPI version text; empty if the process has no MPI.
std::string first_line(const char* text) {
  const std::string all = text ? text : "";
  return all.substr(0, all.find('\n'));
}
std::string library_of_process() {
  using Version = int (*)(char*, int*);
  const auto version = reinterpret_cast<Version>(::dlsym(RTLD_DEFAULT, "MPI_Get_library_version"));
  if (version == nullptr) return "";
  char text[8192] = "";  // larger than any MPI_MAX_LIBRARY_VERSION_STRING
  int length = 0;
  return version(text, &length) == 0 ? first_line(text) : "";
}

const MpiModule& load() {
  const std::string of_process = library_of_process();
  std::string reasons;
  for (const std::string& place : places()) {
    if (place.find('/') != std::string::npos && ::access(place.c_str(), F_OK) != 0) {  // shorter message than the loader's
      reasons += std::string(reasons.empty() ? "" : "; ") + place + ": no such file";
      continue;
    }
    void* const file = ::dlopen(place.c_str(), RTLD_NOW | RTLD_GLOBAL);  // MPI's own plug-ins look up its symbols
    if (file == nullptr) {
      const char* const why = ::dlerror();
      reasons += std::string(reasons.empty() ? "" : "; ") + (why ? why : place.c_str());
      continue;
    }
    const auto entry = reinterpret_cast<MpiModuleEntry>(::dlsym(file, kMpiModuleEntry));
    if (entry == nullptr)
      throw Error(ErrorCode::unsupported,
                  "MPI: " + place + " is of another version of Switchyard: it has no " + kMpiModuleEntry);
    const MpiModule& module = *entry();
    const std::string of_module = first_line(module.library());
    if (!of_process.empty() && of_process != of_module)
      throw Error(ErrorCode::unsupported, "MPI: the process has " + of_process + ", and " + place + " was built with " +
                                              of_module + ": build it with the MPI that the program uses");
    return module;
  }
  throw Error(ErrorCode::unsupported, std::string("MPI: the module ") + kName +
                                          " cannot be loaded. It is built where CMake finds MPI; " + kVariable +
                                          " may name the file. Tried: " + reasons);
}

/// Loads the module once; after a failure, the next call tries again.
const MpiModule& module() {
  static std::mutex mutex;
  static const MpiModule* loaded = nullptr;
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) loaded = &load();
  return *loaded;
}

void check(MpiEnd end, const MpiText& why) {
  if (end == MpiEnd::ok) return;
  const ErrorCode code = end == MpiEnd::unsupported ? ErrorCode::unsupported
                         : end == MpiEnd::timeout   ? ErrorCode::rendezvous
                                                    : ErrorCode::system;
  throw Error(code, std::string("MPI: ") + why.text);
}

}  // namespace

int mpi_process(std::chrono::milliseconds deadline) {
  int process = -1;
  MpiText why{};
  check(module().begin(deadline.count(), &process, &why), why);
  return process;
}

std::unique_ptr<Carrier> make_mpi_carrier(const MpiCarrierSpec& spec) {
  Carrier* made = nullptr;
  MpiText why{};
  check(module().make(&spec, &made, &why), why);
  return std::unique_ptr<Carrier>(made);
}

}  // namespace switchyard::detail
