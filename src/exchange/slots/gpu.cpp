// SPDX-License-Identifier: Apache-2.0
// SlotSelector on a GPU: memory and stream order. The address of the table is constant, so captured calls use each new map.
#include <string>
#include <utility>

#include "exchange/slots/gpu.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

class CudaSlotSelector final : public GpuSlotSelector {
 public:
  CudaSlotSelector(Group& group, CudaRank& gpu, const ExpertMap& map, std::span<const int64_t> routes, const char* object)
      : GpuSlotSelector(group, map), gpu_(gpu) {
    construct(object, "", [&] {
      const DeviceGuard guard(gpu_.device());
      const std::vector<uint32_t> words = make_table(map, routes, 1);
      table_bytes_ = words.size() * sizeof words[0];
      counts_bytes_ = static_cast<size_t>(map.num_experts) * sizeof(int64_t);
      memory_ = DeviceMemory(counts_bytes_ + table_bytes_, gpu_.copy_stream());
      copy(table(), words);
      order_.emplace(gpu_, object, object_, InvalidIds::count);
      return fields(map, routes);
    });
    count_selector();
  }

  ~CudaSlotSelector() override {
    try {
      const DeviceGuard guard(gpu_.device());
      if (!order_) return;
      memory_.end_after(order_->uses());
      staged_.end_after(MemoryUses(gpu_.shared_points()).until(order_->last()));
      order_.reset();
    } catch (const Error&) {
      // Without a context, no memory remains to be freed.
    }
  }

  const int64_t* routes() const override { return memory_.as<int64_t>(); }

  void run(const ExpertIds& ids, const SelectedSlots& to, void* stream, const int32_t* device_tokens, int num_sms) override {
    const DeviceGuard guard(gpu_.device());
    in_order(static_cast<gpu::Stream>(stream), [&](const SlotSelection& selection) {
      const SelectParams p{ids.data, to.slots, ids.is_int64, ids.topk, ids.num_tokens, device_tokens, selection, to.version};
      launch_select(p, gpu_.blocks(num_sms, 0, gpu_.max_blocks()), static_cast<gpu::Stream>(stream));
    });
  }

 private:
  uint32_t* table() const { return memory_.as<uint32_t>(counts_bytes_); }

  SlotSelection selection() const override {
    return {{table(), map().num_experts, map().num_slots(), rank()}, memory_.as<unsigned long long>()};
  }

  /// Copies `words` and waits for the copy stream.
  void copy(uint32_t* to, const std::vector<uint32_t>& words) {
    const RelaxedCapture relaxed;  // some stream of this thread may be captured
    check_cuda(gpu::copy_to_device(to, words.data(), table_bytes_, gpu_.copy_stream()), "copy of a slot table");
    check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of a slot table");
  }

  void check_call(const ExpertIds& ids, const void* slots) const override {
    if (ids.num_tokens == 0) return;
    const DeviceGuard guard(gpu_.device());
    gpu_.check_pointer("topk_ids.data", ids.data, ids.is_int64 ? 8 : 4);
    gpu_.check_pointer("slots", slots, ids.is_int64 ? 8 : 4);
  }

  void check_stream(const char* name, void* stream) const override {
    const DeviceGuard guard(gpu_.device());
    auto* const given = static_cast<gpu::Stream>(stream);
    if (capture_of(given).active)
      invalid(std::string(name) + ": the stream is being captured; graphs use the map in force when they run");
    if (!gpu::is_legacy(given)) gpu_.check_stream(given);
  }

  void stage_table(std::vector<uint32_t> words) override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    staged_.end_after(MemoryUses(gpu_.shared_points()).until(order_->last()));  // an enqueued copy may still read it
    staged_ = DeviceMemory(table_bytes_, gpu_.copy_stream());
    copy(staged_.as<uint32_t>(), words);
  }

  void use_table(void* stream) override {
    const DeviceGuard guard(gpu_.device());
    const CallStream at = order_->begin(static_cast<gpu::Stream>(stream));
    check_cuda(gpu::copy_on_device(table(), staged_.as<uint32_t>(), table_bytes_, at.stream), "new slot table");
    order_->end(at, 0);
  }

  void read_ids(const ExpertIds& ids, void* to, void* stream) override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    const auto on = static_cast<gpu::Stream>(stream);
    check_cuda(gpu::copy_to_host(to, ids.data, bytes_of(ids), on), "copy of ids");
    check_cuda(gpu::wait_for_stream(on), "copy of ids");
  }

  void write_slots(const ExpertIds& ids, const void* from, void* slots, void* stream) override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    // `from` is pageable memory, from which the driver copies before it returns.
    check_cuda(gpu::copy_to_device(slots, from, bytes_of(ids), static_cast<gpu::Stream>(stream)), "copy of slots");
  }

  void read_routes(int64_t* routes, bool reset) override {
    const DeviceGuard guard(gpu_.device());
    order_->wait();
    const RelaxedCapture relaxed;
    check_cuda(gpu::copy_to_host(routes, memory_.as<int64_t>(), counts_bytes_, gpu_.copy_stream()), "route counts");
    if (reset) check_cuda(gpu::fill(memory_.as<int64_t>(), 0, counts_bytes_, gpu_.copy_stream()), "route counts");
    check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "route counts");
  }

  CudaRank& gpu_;
  DeviceMemory memory_;  ///< counters, then the table in force
  DeviceMemory staged_;  ///< the table of the last set_map()
  size_t table_bytes_ = 0, counts_bytes_ = 0;
};

}  // namespace

std::unique_ptr<SlotSelectorImpl> SlotSelectorImpl::make_on_gpu(Group& group, const ExpertMap& map,
                                                                std::span<const int64_t> routes, const char* object) {
  return std::make_unique<CudaSlotSelector>(group, rank_of(group), map, routes, object);
}

}  // namespace switchyard::detail
