// SPDX-License-Identifier: Apache-2.0
// The device (a GPU or the host) on which a rank's calls run, as used by the verbs: a stream, memory, and copies. Builds
// without CUDA have the same functions, but there the GPU functions throw or return nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace switchyard::tool {

inline constexpr int kMaxDeviceWarps = 20;  ///< per block, of any kernel of the library

/// All operations run on stream(), as do the rank's calls. It is never the legacy default stream, which ranks on the same GPU
/// would share. It may be used by only one thread at a time.
class RankDevice {
 public:
  virtual ~RankDevice() = default;
  virtual bool on_host() const { return false; }  ///< its memory is host memory, and calls accept any pointer
  virtual void* stream() const = 0;               ///< cudaStream_t, non-blocking; null on the host
  /// `bytes` bytes of device memory, valid until release() unless kept; null for 0 bytes.
  virtual void* allocate(size_t bytes) = 0;
  virtual void write(void* device, const void* host, size_t bytes) = 0;
  virtual void read(void* host, const void* device, size_t bytes) const = 0;
  virtual void fill(void* device, int byte, size_t bytes) = 0;
  virtual void wait() const = 0;
  /// Preserves current allocations across release().
  virtual void keep() = 0;
  /// Frees the whole arena except for kept memory. Later writes are ordered after work already on the stream.
  virtual void release() = 0;

  /// A device copy of `host`; null if `host` is null or has 0 bytes.
  template <class T>
  const T* upload(const T* host, size_t bytes) {
    if (!host || bytes == 0) return nullptr;
    void* copy = allocate(bytes);
    write(copy, host, bytes);
    return static_cast<const T*>(copy);
  }
  /// Memory that a call may read instead of `host`: a device copy, valid until release(), or, on the host, `host` itself.
  template <class T>
  const T* lend(const T* host, size_t bytes) {
    return on_host() ? host : upload(host, bytes);
  }
};

/// The contents of device memory, for the host to read and write: a copy or, on the host, the memory itself.
class Mirror {
 public:
  /// `bytes` bytes at `memory` on `device`, which must outlive this object. The constructor does not read them.
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

/// The device of rank `rank` for the calling thread: GPU number `rank` modulo `gpus`, or the host if `gpus` is 0. Never null. A
/// GPU's stream and arena are created at the first call and kept until the process ends. This is necessary because, while a
/// kernel waits for a peer, nothing may be allocated or freed on a GPU shared by the two ranks, and a new stream might share a
/// queue with that kernel. A larger arena replaces the old one, so request the largest first and then let all ranks meet.
/// \throws UsageError for GPUs if this build has no CUDA code; Error(system) naming the failed call.
std::shared_ptr<RankDevice> rank_device(int rank, int gpus, size_t arena_bytes);
std::shared_ptr<RankDevice> gpu_device(int rank, int gpus, size_t arena_bytes);

/// Whether this build has CUDA code. If it does not, `--backend cuda` is rejected with no_cuda_text().
bool built_with_cuda();
const char* no_cuda_text();
/// CUDA runtime version of this build, for example 13000 for 13.0; 0 without CUDA.
int cuda_runtime_version();
/// Resolution of each GPU's global timer in nanoseconds; empty if this build has no CUDA code. Do not call this function in a
/// process that will fork ranks. \throws std::runtime_error naming the failed call.
std::vector<uint64_t> measure_timer_ticks(int gpus);
/// For each GPU, "" if its memory, passed as a file descriptor, works on the next GPU (or on the GPU itself if there is no
/// other GPU or no access to it); otherwise the failed step and the reason. Empty if this build has no CUDA code. Do not call
/// this function in a process that will fork ranks.
std::vector<std::string> try_descriptor_exchange(int gpus, const std::vector<std::vector<bool>>& peer_access);

}  // namespace switchyard::tool
