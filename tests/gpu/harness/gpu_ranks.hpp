// SPDX-License-Identifier: Apache-2.0
// Test ranks on GPUs, as processes or as threads. The test program itself never uses a GPU, because the processes that it forks
// afterwards could not use one. Ranks that are threads therefore also run in a forked process.
#pragma once

#include <cuda_runtime_api.h>
#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "gpu/kernels/pattern.hpp"
#include "launch/on_threads.hpp"
#include "multiproc/fork_ranks.hpp"
#include "switchyard/status.hpp"

namespace switchyard::test {

using detail::Bootstrap;

inline constexpr Milliseconds kLong{60000};
inline constexpr size_t kMiB = size_t{1} << 20;

inline void require(bool condition, const std::string& what) { ChildRank::require(condition, what); }

inline void cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// Number of visible GPUs, determined in a separate process.
inline int count_gpus() {
  const auto ends = run_ranks(1, [](ChildRank& me) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    me.say(std::to_string(count));
  });
  return ends[0].ok() && !ends[0].said.empty() ? std::stoi(ends[0].said[0]) : 0;
}

enum class As { processes, threads };
inline const char* name_of(As as) { return as == As::processes ? "processes" : "threads"; }

struct GpuRank {
  Bootstrap& link;
  int device;  ///< current when the body starts; ranks are distributed over the visible GPUs
  int rank() const { return link.rank(); }
  int world() const { return link.world(); }
  void meet() const { link.barrier(kLong); }
};
using RankBody = std::function<void(const GpuRank&)>;

inline int device_of(int rank) {
  int count = 0;
  cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return rank % count;
}

inline void run_one(Bootstrap& link, const RankBody& body) {
  const int device = device_of(link.rank());
  cuda(cudaSetDevice(device), "cudaSetDevice");
  body({link, device});
  cuda(cudaDeviceSynchronize(), "at the end");
  cuda(cudaGetLastError(), "an error was left pending");
}

inline void run_threads(int world, const RankBody& body) {
  auto links = detail::make_thread_bootstraps(world);
  std::vector<std::exception_ptr> errors(links.size());
  launch::on_threads(links.size(), [&](size_t r) {
    try {
      run_one(*links[r], body);
    } catch (...) {
      errors[r] = std::current_exception();
    }
    links[r]->leave();
  });
  std::exception_ptr consequence;
  for (const auto& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const PeerFailed&) {
      consequence = error;  // another rank's error is more specific
    }
  }
  if (consequence) std::rethrow_exception(consequence);
}

/// Runs `body` on every rank and expects that none throws. `heap_kind` is the value of SWITCHYARD_CUDA_HEAP or null.
inline void run_gpu_ranks(As as, int world, const char* heap_kind, const RankBody& body) {
  const std::string store = "unix:@switchyard-test-" + detail::random_token();
  const auto prepare = [&] {
    if (heap_kind != nullptr) ::setenv("SWITCHYARD_CUDA_HEAP", heap_kind, 1);
  };
  const auto ends = as == As::processes
                        ? run_ranks(
                              world,
                              [&](ChildRank& me) {
                                prepare();
                                auto link = detail::connect_processes({me.rank(), world, store, "token"}, kLong);
                                run_one(*link, body);
                              },
                              Milliseconds{180000})
                        : run_ranks(
                              1,
                              [&](ChildRank&) {
                                prepare();
                                run_threads(world, body);
                              },
                              Milliseconds{180000});
  for (const RankEnd& end : ends) EXPECT_TRUE(end.ok()) << name_of(as) << ", " << end;
}

/// Returns the message of the Error thrown by `body`. The Error must have `code`.
template <class Body>
std::string text_of_error(ErrorCode code, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    require(error.code() == code, std::string("error has code ") + to_string(code) + ": " + error.what());
    return error.what();
  }
  throw std::runtime_error(std::string("no error, expected ") + to_string(code));
}

inline void require_contains(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "'" + text + "' contains '" + part + "'");
}

/// Compares words in a mapping with the pattern, reading them both with the SMs and with the copy engine.
inline void require_pattern(const std::byte* at, size_t words, uint32_t seed, const std::string& what) {
  if (words == 0) return;
  std::vector<uint32_t> got(words), again(words);
  uint32_t* copy = nullptr;
  cuda(cudaMalloc(reinterpret_cast<void**>(&copy), words * 4), "cudaMalloc");
  copy_by_kernel(copy, reinterpret_cast<const uint32_t*>(at), words);
  cuda(cudaMemcpy(got.data(), copy, words * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
  cuda(cudaMemcpy(again.data(), at, words * 4, cudaMemcpyDeviceToHost), "cudaMemcpy of a mapping");
  cuda(cudaFree(copy), "cudaFree");
  for (size_t i = 0; i < words; ++i) {
    const uint32_t want = word_of(seed, i);
    if (got[i] == want && again[i] == want) continue;
    throw std::runtime_error(what + ": word " + std::to_string(i) + " is " + std::to_string(got[i]) + " and " +
                             std::to_string(again[i]) + ", expected " + std::to_string(want));
  }
}

inline void require_zero(const std::byte* at, size_t bytes, const std::string& what) {
  std::vector<std::byte> got(bytes);
  cuda(cudaMemcpy(got.data(), at, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  const auto found = std::find_if(got.begin(), got.end(), [](std::byte b) { return b != std::byte{0}; });
  if (found != got.end()) throw std::runtime_error(what + ": byte " + std::to_string(found - got.begin()) + " is not zero");
}

/// Writes the pattern through a mapping: the first half with a kernel, and the rest with a copy from the host.
inline void write_pattern(std::byte* at, size_t words, uint32_t seed) {
  auto* const to = reinterpret_cast<uint32_t*>(at);
  const size_t half = words / 2;
  fill_by_kernel(to, half, seed);
  std::vector<uint32_t> rest;
  for (size_t i = half; i < words; ++i) rest.push_back(word_of(seed, i));
  if (!rest.empty()) cuda(cudaMemcpy(to + half, rest.data(), rest.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  cuda(cudaDeviceSynchronize(), "write_pattern");
}

/// Free bytes on the current device.
inline size_t free_bytes() {
  size_t free = 0, total = 0;
  cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

/// Collective: returns the number of open descriptors in this process, counted while no rank opens or closes any. Ranks may be
/// threads of one process, and reading the folder itself uses a descriptor.
inline int open_descriptors(const GpuRank& me) {
  static std::mutex one_reader;
  me.meet();
  std::unique_lock lock(one_reader);
  DIR* const folder = ::opendir("/proc/self/fd");
  require(folder != nullptr, "/proc/self/fd can be read");
  int count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  lock.unlock();
  me.meet();
  return count;
}

/// Ranks as processes and as threads (1, 2 and 4 ranks), with both kinds of heap.
struct Setting {
  As as;
  int world;
  const char* kind;
};
inline std::string name_of_setting(const testing::TestParamInfo<Setting>& info) {
  return std::string(name_of(info.param.as)) + std::to_string(info.param.world) + info.param.kind;
}

}  // namespace switchyard::test
