// SPDX-License-Identifier: Apache-2.0
// Low-latency mode on a GPU: memory, stream order, launches. The algorithms are in protocol/low_latency.
#include <algorithm>
#include <optional>
#include <vector>

#include "exchange/gpu/call_order.hpp"
#include "exchange/gpu/held_memory.hpp"
#include "exchange/low_latency/hosts/gpu_links.hpp"
#include "exchange/low_latency/impl.hpp"
#include "exchange/low_latency/launch.hpp"
#include "exchange/slots/gpu.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

struct CudaLowLatencyBlock final : LowLatencyBlock {
  std::shared_ptr<HeldMemory> memory;
  CrossedIds crossed;  ///< several hosts: crossed_bytes bytes
  int64_t crossed_bytes = 0;
  std::vector<int> host_of;  ///< several hosts: [W] of the group that last dispatched
};

class CudaLowLatency final : public LowLatencyImpl {
 public:
  CudaLowLatency(Group& group, CudaRank& gpu, const LowLatencyConfig& c) : LowLatencyImpl(group, c), gpu_(gpu) {
    construct([&] {
      const DeviceGuard guard(gpu_.device());
      const bool one_each = layout_.max_units() <= gpu_.max_blocks();  // one message per block
      const int64_t columns = one_each ? kPartColumns : 2 * kPartColumns;
      const int64_t parts = (config.hidden + columns - 1) / columns;
      const auto of = [&](int warps) {
        return senders(static_cast<int>(std::clamp<int64_t>(warps - 2, 1, parts)), warps);  // two without: entries, counts
      };
      dispatch_senders_ = of(warps_or(tuned_.dispatch_warps));
      flat_senders_ = of(warps_or(tuned_.warps));
      initialize();
    });
    if (group_.host_map().one_host()) return;
    group_.collectively("LowLatencyExchange", [&] {
      const DeviceGuard guard(gpu_.device());
      hosts_ = std::make_unique<GpuLowLatencyLinks>(group_, gpu_, layout_);
    });
  }

  ~CudaLowLatency() override {
    try {
      const DeviceGuard guard(gpu_.device());
      if (!order_) return;
      if (hosts_) order_->wait();  // this host takes part in the rounds of its calls
      if (hosts_) hosts_->set_uses(order_->uses());
      hosts_.reset();
      state_.end_after(order_->uses());
      gpu_.end_block(give_up_heap(), order_->uses());
      order_.reset();
    } catch (const Error&) {
      // Without a context, there is nothing left to free.
    }
  }

  CallStatistics last_call() override {
    const DeviceGuard guard(gpu_.device());
    return order_->statistics();
  }
  int64_t invalid_ids() override { return order_->invalid_ids(); }

 private:
  // 16 columns per lane, so that a row is loaded in one round; twice as many if a block sends several messages, because each is
  // then sent by half of its warps.
  static constexpr int64_t kPartColumns = 512;

  /// Warps per block in a launch.
  static int warps_or(int tuned) { return tuned > 0 ? tuned : kLowLatencyWarps; }

  void initialize() {
    slots_at_ = round_up(sizeof(LowLatencyState), 16);
    state_ = DeviceMemory(static_cast<size_t>(slots_at_ + SelectedSlots::bytes(config.max_tokens * config.topk)),
                          gpu_.copy_stream());
    const LowLatencyState initial{epoch_before(first_epoch_), 0};
    std::byte* flags = group_.heap->view().base[rank()] + layout_.base;
    check_cuda(gpu::copy_to_device(state_.as<void>(), &initial, sizeof initial, gpu_.copy_stream()), "state");
    set_device_flags(flags, layout_.flags_bytes(), flag_word(initial.epoch), gpu_.copy_stream());
    layout_.for_each_sentinel_row([&](int64_t offset, int64_t bytes) {
      check_cuda(gpu::fill(flags + offset, 0, static_cast<size_t>(bytes), gpu_.copy_stream()), "rows that come back");
    });
    check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "flags");
    order_.emplace(gpu_, "LowLatencyExchange", object_, config.invalid_ids);
  }

  std::shared_ptr<LowLatencyBlock> allocate_output(const Rows* given) override {
    auto block = std::make_shared<CudaLowLatencyBlock>();
    const int64_t bytes = round_up(carve_output(nullptr, layout_, scales_, rank(), given).bytes, 256);
    block->crossed_bytes = hosts_ ? hosts_->crossed_bytes() : 0;
    block->memory = hold(static_cast<size_t>(bytes + block->crossed_bytes));
    auto* const at = static_cast<std::byte*>(block->memory->data());
    block->tables = carve_output(at, layout_, scales_, rank(), given);
    block->crossed.ids = reinterpret_cast<int32_t*>(at + bytes);
    return block;
  }

  std::shared_ptr<HeldMemory> hold(size_t bytes) const {
    const DeviceGuard guard(gpu_.device());
    return HeldMemory::make(bytes, gpu_);
  }
  std::shared_ptr<void> allocate(size_t bytes) override {
    const std::shared_ptr<HeldMemory> held = hold(bytes);
    return {held, held->data()};
  }

  void check_pointer(const char* name, const void* p, size_t alignment, bool known) const override {
    gpu_.check_pointer(name, p, alignment, known);
  }
  void check_sms(const char* name, int num_sms) const override { gpu_.check_sms(name, num_sms); }

  void run(LowLatencyDispatchParams& p, const LowLatencyDispatchOptions& o, LowLatencyBlock& given, Halves halves) override {
    auto& block = static_cast<CudaLowLatencyBlock&>(given);
    if (hosts_ && block.crossed_bytes < hosts_->crossed_bytes())
      throw Error(ErrorCode::unsupported, "dispatch: the output was made in a group of other hosts; make one by this object");
    block.host_of = hosts_ ? hosts_->host_of() : std::vector<int>();
    const int32_t* const tokens = halves == Halves::receive ? nullptr : o.device_tokens;  // the caller may reuse it afterwards
    const int warps = warps_or(tuned_.dispatch_warps);
    enqueue(o.stream, gpu_.blocks(o.num_sms, tuned_.dispatch_sms, gpu_.max_blocks()), warps, Operation::dispatch, p.call, {p.x},
            block.memory.get(), [&](int blocks, const CallStream& at) {
              const DeviceLimits limits = gpu_.limits_of_call(o.num_sms);
              const bool selects = o.selector != nullptr && halves != Halves::receive;
              if (selects && !hosts_ && select_in_dispatch(p, o, launched(halves), blocks, warps, limits, at.stream)) return;
              if (selects) select_slots(p, *o.selector, selected_slots(), at.stream, tokens, o.num_sms);
              const uint32_t* const version = selects ? selected_slots().version : nullptr;
              if (hosts_)
                return hosts_->dispatch(p, state_.as<LowLatencyState>(), tokens, version, block.crossed,
                                        {at.stream, at.capture.active, launched(halves), blocks, warps});
              launch_low_latency(CudaLowLatencyDispatch{p, state_.as<LowLatencyState>(), tokens, warps, version},
                                 launched(halves), blocks, limits, at.stream);
            });
  }
  /// Returns false, without a launch, if the ids must be replaced before the call.
  bool select_in_dispatch(const LowLatencyDispatchParams& p, const LowLatencyDispatchOptions& o, LaunchedHalves halves,
                          int blocks, int warps, const DeviceLimits& limits, gpu::Stream stream) {
    bool launched = false;
    static_cast<GpuSlotSelector&>(SelectorAccess::impl(*o.selector)).in_order(stream, [&](const SlotSelection& selection) {
      launched = launch_low_latency(CudaLowLatencyDispatch{p, state_.as<LowLatencyState>(), o.device_tokens, warps}, selection,
                                    halves, blocks, limits, stream);
    });
    return launched;
  }
  SelectedSlots selected_slots() const {
    return SelectedSlots::in(state_.as<std::byte>(static_cast<size_t>(slots_at_)), config.max_tokens * config.topk);
  }
  void run(LowLatencyCombineParams& p, const LowLatencyCombineOptions& o, LowLatencyBlock& given, Halves halves) override {
    auto& block = static_cast<CudaLowLatencyBlock&>(given);
    if (hosts_ && block.host_of != hosts_->host_of())
      throw Error(ErrorCode::unsupported, "combine: the output was filled in a group of other hosts; dispatch again");
    const int warps = warps_or(tuned_.combine_warps);
    enqueue(o.stream, gpu_.blocks(o.num_sms, tuned_.combine_sms, gpu_.max_blocks()), warps, Operation::combine, p.call,
            {p.y, p.out}, block.memory.get(), [&](int blocks, const CallStream& at) {
              if (hosts_)
                return hosts_->combine(p, state_.as<LowLatencyState>(), block.crossed,
                                       {at.stream, at.capture.active, launched(halves), blocks, warps});
              launch_low_latency(CudaLowLatencyCombine{p, state_.as<LowLatencyState>(), warps}, launched(halves), blocks,
                                 gpu_.limits_of_call(o.num_sms), at.stream);
            });
  }
  void run(FlatParams& p, const AllToAllOptions& o) override {
    const int warps = warps_or(tuned_.warps);
    enqueue(o.stream, gpu_.blocks(o.num_sms, tuned_.sms, gpu_.max_blocks()), warps, Operation::all_to_all, p.d.call,
            {p.d.x, p.c.out}, nullptr, [&](int blocks, const CallStream& at) {
              p.c.call = p.d.call;
              if (o.selector != nullptr)
                select_slots(p.d, *o.selector, selected_slots(), at.stream, o.device_tokens, o.num_sms);
              const CudaFlat flat{p, state_.as<LowLatencyState>(), o.device_tokens, warps,
                                  o.selector != nullptr ? selected_slots().version : nullptr};
              if (o.row_function == nullptr) return launch_low_latency(flat, blocks, gpu_.limits_of_call(o.num_sms), at.stream);
              const auto& f = static_cast<const CudaRowFunction&>(*o.row_function->impl());
              check_cuda(f.launch(flat, blocks, gpu_.limits_of_call(o.num_sms), at.stream),
                         "all-to-all kernel of a row function");
            });
  }
  void check_row_function(const RowFunctionBase& given) const override {
    const auto& f = static_cast<const CudaRowFunction&>(given);
    if (f.abi != CudaRowFunction::kAbi)
      invalid("AllToAllOptions::row_function was compiled against the headers of another version: compile it again");
    if (f.device != gpu_.device())
      invalid("AllToAllOptions::row_function was made for GPU " + std::to_string(f.device) + ", this rank's GPU is " +
              std::to_string(gpu_.device()) + ": the GPU must be current when row_function_on_gpu is called");
  }
  static LaunchedHalves launched(Halves halves) { return {halves != Halves::receive, halves != Halves::send}; }

  unsigned long long capture_id(void* stream) const override {
    const DeviceGuard guard(gpu_.device());
    const CaptureState capture = capture_of(static_cast<gpu::Stream>(stream));
    return capture.active ? capture.id : 0;
  }

  /// `used`: addresses that the call uses. Library memory at these addresses and `output` are kept until the call ends or, for
  /// a captured call, as long as the graph exists.
  template <class Launch>
  void enqueue(void* given, int blocks, int warps, Operation operation, CallContext& context,
               std::initializer_list<const void*> used, HeldMemory* output, Launch&& launch) {
    const DeviceGuard guard(gpu_.device());
    auto* stream = static_cast<gpu::Stream>(given);
    context = gpu_.context(bounded_ns(group_.options.timeout), operation);
    order_->set_counters(context);
    const CallStream at = order_->begin(stream);
    for (const void* p : used)
      if (const std::shared_ptr<MemoryHolder> holder = gpu_.holders().find(p)) holder->used_on(stream, at.capture);
    if (output != nullptr) output->used_on(stream, at.capture);
    launch(blocks, at);
    order_->end(at, blocks * warps);
  }

  CudaRank& gpu_;
  DeviceMemory state_;    ///< LowLatencyState, then selected_slots()
  int64_t slots_at_ = 0;  ///< in state_
  std::optional<CallOrder> order_;
  std::unique_ptr<GpuLowLatencyLinks> hosts_;  ///< null: all ranks are on this host
};

}  // namespace

std::unique_ptr<LowLatencyImpl> LowLatencyImpl::make_on_gpu(Group& group, const LowLatencyConfig& config) {
  return std::make_unique<CudaLowLatency>(group, rank_of(group), config);
}

}  // namespace switchyard::detail
