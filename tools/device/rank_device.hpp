// SPDX-License-Identifier: Apache-2.0
// Where one rank's calls run, as the verbs use it: a stream, memory, copies. It is a GPU or the host itself. Builds without
// CUDA have the same functions; there those of GPUs say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace switchyard::tool {

inline constexpr int kMaxDeviceWarps = 20;  ///< per block, of any kernel of the library

/// All operations run on stream(), on which the rank's calls run too: never the legacy default stream, which ranks that share a
/// GPU would share. One thread at a time.
class RankDevice {
 public:
  virtual ~RankDevice() = default;
  virtual bool on_host() const { return false; }  ///< its memory is ordinary memory, and calls take any pointer
  virtual void* stream() const = 0;               ///< cudaStream_t, non-blocking; null on the host
  /// Most multiprocessors of a kernel that has to end while kernels of the other ranks of its GPU, of `world` ranks, wait for
  /// this one: those occupy their own share. 0: all, a rank has its GPU alone.
  virtual int sms_of_products(int) const { return 0; }
  /// `bytes` of device memory, valid until release(), or kept. 0 bytes: null.
  virtual void* allocate(size_t bytes) = 0;
  virtual void write(void* device, const void* host, size_t bytes) = 0;
  virtual void read(void* host, const void* device, size_t bytes) const = 0;
  virtual void fill(void* device, int byte, size_t bytes) = 0;
  virtual void wait() const = 0;
  /// What is allocated now stays so after release().
  virtual void keep() = 0;
  /// The arena is free again, but for what is kept; what is written later comes after what the stream has to do now.
  virtual void release() = 0;

  /// A device copy of `host`; null stays null, as do 0 bytes.
  template <class T>
  const T* upload(const T* host, size_t bytes) {
    if (!host || bytes == 0) return nullptr;
    void* copy = allocate(bytes);
    write(copy, host, bytes);
    return static_cast<const T*>(copy);
  }
  /// What a call may read instead of `host`: a device copy, valid until release(), or `host` itself on the host.
  template <class T>
  const T* lend(const T* host, size_t bytes) {
    return on_host() ? host : upload(host, bytes);
  }
};

/// The content of device memory, for the host to read and to write: a copy, or on the host that memory itself.
class Mirror {
 public:
  /// `bytes` at `memory` of the device, which must outlive this. Neither is read.
  Mirror(RankDevice& device, void* memory, size_t bytes);
  std::byte* data() { return device_.on_host() ? static_cast<std::byte*>(memory_) : copy_.data(); }
  size_t bytes() const { return bytes_; }
  void write() { device_.on_host() ? void() : device_.write(memory_, copy_.data(), bytes_); }
  void read() { device_.on_host() ? void() : device_.read(copy_.data(), memory_, bytes_); }

 private:
  RankDevice& device_;
  void* memory_;
  size_t bytes_;
  std::vector<std::byte> copy_;
};

/// Of rank `rank`, for the calling thread: GPU rank modulo `gpus`, or the host if there are 0. Never null. Of a GPU, stream and
/// arena are made at the first call and kept until the process ends: while a kernel waits for a peer, nothing may be allocated
/// or freed on a GPU that the two share, and a new stream may share a queue with that kernel. A larger arena than before is
/// made anew: ask for the largest first, and let all ranks meet afterwards. \throws UsageError for GPUs without CUDA code in
/// this build; Error(system) naming the failed call.
std::shared_ptr<RankDevice> rank_device(int rank, int gpus, size_t arena_bytes);
std::shared_ptr<RankDevice> gpu_device(int rank, int gpus, size_t arena_bytes);

/// This build has CUDA code. If not, `--backend cuda` is refused with no_cuda_text().
bool built_with_cuda();
const char* no_cuda_text();
/// CUDA runtime that this build was compiled with, 13000 = 13.0; 0 without.
int cuda_runtime_version();
/// Nanoseconds by which each GPU's global timer advances at a time; nothing without CUDA code in this build. Not in a process
/// that will fork ranks.
/// \throws std::runtime_error naming the failed call.
std::vector<uint64_t> measure_timer_ticks(int gpus);
/// Of each GPU: "" if memory of it passed as a file descriptor works on the next one (on itself if there is no other, or if it
/// has no access to that), else the step that fails and why. Nothing without CUDA code in this build. Not in a process
/// that will fork ranks.
std::vector<std::string> try_descriptor_exchange(int gpus, const std::vector<std::vector<bool>>& peer_access);

}  // namespace switchyard::tool
