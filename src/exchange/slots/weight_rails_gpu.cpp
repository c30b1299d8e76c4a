// SPDX-License-Identifier: Apache-2.0
// Weights between hosts on GPUs: rounds of the rank, in stream order.
#include <chrono>
#include <map>
#include <utility>
#include <vector>

#include "exchange/gpu/rank.hpp"
#include "exchange/hosts/rounds.hpp"
#include "exchange/slots/weight_rails.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

class GpuWeightRails final : public WeightRails {
 public:
  GpuWeightRails(Group& group, void* stream)
      : group_(group.impl()), gpu_(rank_of(group)), stream_(static_cast<gpu::Stream>(stream)) {
    group_.collectively("move_weights", [&] {
      const DeviceGuard guard(gpu_.device());
      const RelaxedCapture relaxed;
      rounds_ = GpuRounds::of(group_, gpu_);
    });
  }
  ~GpuWeightRails() override {
    if (in_flight_) memory_.end_after(gpu_.until_end());  // the network may still access it
    release();
  }

  void reserve(std::span<const RailTransfer> transfers) override {
    release();
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    size_t bytes = 0;
    const auto take = [&](size_t size) {
      return std::exchange(bytes, bytes + (size + kAlignment - 1) / kAlignment * kAlignment);
    };
    for (const RailTransfer& transfer : transfers) at_[transfer.peer] = {take(transfer.send), take(transfer.receive)};
    if (bytes > 0) memory_ = DeviceMemory(bytes, gpu_.copy_stream());
  }
  void release() noexcept override {
    at_.clear();
    in_flight_ = false;
    try {
      const DeviceGuard guard(gpu_.device());
      memory_ = DeviceMemory();
    } catch (const Error&) {
      // Without a context, no memory remains to be freed.
    }
  }
  std::byte* outgoing(int peer) override { return memory_.as<std::byte>(at_.at(peer).send); }
  const std::byte* incoming(int peer) const override { return memory_.as<std::byte>(at_.at(peer).receive); }

  void exchange(std::span<const RailTransfer> transfers) override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    std::vector<PeerTransfer> round;
    for (const RailTransfer& transfer : transfers) {
      const Offsets& at = at_.at(transfer.peer);
      round.push_back({transfer.peer,
                       {memory_.as<std::byte>(at.send), transfer.send},
                       {memory_.as<std::byte>(at.receive), transfer.receive}});
    }
    in_flight_ = true;
    rounds_->post(round, stream_, Operation::barrier, std::chrono::nanoseconds(bounded_ns(group_.options.timeout)));
  }

 private:
  static constexpr size_t kAlignment = 256;
  struct Offsets {
    size_t send, receive;
  };

  Group::Impl& group_;
  CudaRank& gpu_;
  const gpu::Stream stream_;
  std::shared_ptr<GpuRounds> rounds_;
  DeviceMemory memory_;
  bool in_flight_ = false;     ///< since the first exchange(), until release()
  std::map<int, Offsets> at_;  ///< by peer
};

}  // namespace

std::shared_ptr<WeightRails> weight_rails_on_gpu(Group& group, void* stream) {
  return std::make_shared<GpuWeightRails>(group, stream);
}

}  // namespace switchyard::detail
