// SPDX-License-Identifier: Apache-2.0
#include "soak/nccl.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace soak {
namespace {

// The part of NCCL's stable C interface that is used here.
struct UniqueId {
  char bytes[128];
};
using Comm = void*;
constexpr int kFloat32 = 7, kSum = 0;

struct Nccl {
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*comm_init_rank)(Comm*, int, UniqueId, int) = nullptr;
  int (*all_reduce)(const void*, void*, size_t, int, int, Comm, void*) = nullptr;
  int (*comm_abort)(Comm) = nullptr;

  bool load() {
    const char* const given = std::getenv("SWITCHYARD_TEST_NCCL");
    void* const library = ::dlopen(given ? given : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      return function != nullptr;
    };
    return find("ncclGetUniqueId", get_unique_id) && find("ncclCommInitRank", comm_init_rank) &&
           find("ncclAllReduce", all_reduce) && find("ncclCommAbort", comm_abort);
  }
};

void must(int result, const char* what) {
  if (result != 0) throw std::runtime_error(std::string(what) + ": NCCL result " + std::to_string(result));
}

class NcclAllReduce final : public AllReduce {
 public:
  NcclAllReduce(const Nccl& nccl, int rank, int world, const UniqueId& id, void* stream) : nccl_(nccl), stream_(stream) {
    must(nccl_.comm_init_rank(&comm_, world, id, rank), "ncclCommInitRank");
  }
  ~NcclAllReduce() override { (void)nccl_.comm_abort(comm_); }
  NcclAllReduce(const NcclAllReduce&) = delete;
  void sum(float* numbers, size_t count) override {
    must(nccl_.all_reduce(numbers, numbers, count, kFloat32, kSum, comm_, stream_), "ncclAllReduce");
  }

 private:
  Nccl nccl_;
  void* stream_;
  Comm comm_ = nullptr;
};

}  // namespace

std::unique_ptr<AllReduce> make_nccl(int rank, int world, void* stream, const Gather& gather) {
  struct Offer {
    int has_it = 0;
    UniqueId id{};
  } mine;
  Nccl nccl;
  mine.has_it = nccl.load() ? 1 : 0;
  if (mine.has_it && rank == 0) must(nccl.get_unique_id(&mine.id), "ncclGetUniqueId");
  std::vector<Offer> all(static_cast<size_t>(world));
  gather(&mine, sizeof mine, all.data());
  for (const Offer& offer : all) {
    if (!offer.has_it) return nullptr;
  }
  return std::make_unique<NcclAllReduce>(nccl, rank, world, all[0].id, stream);
}

}  // namespace soak
