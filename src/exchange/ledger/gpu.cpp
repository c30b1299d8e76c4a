// SPDX-License-Identifier: Apache-2.0
// The ledger combine on a GPU: memory, prepared ledgers, stream order, launch. The algorithm is in protocol/ledger/combine.hpp.
#include <mutex>
#include <string>
#include <vector>

#include "base/carver.hpp"
#include "exchange/gpu/call_order.hpp"
#include "exchange/ledger/impl.hpp"
#include "exchange/ledger/launch.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

/// A prepared ledger in device memory.
struct LedgerTablesOnDevice {
  LedgerChunk* chunks = nullptr;
  int32_t* chunks_of = nullptr;
  int32_t* row_of = nullptr;
  uint64_t* senders_of = nullptr;
  uint8_t* sender_of = nullptr;
  int64_t bytes = 0;
};

/// Assigns memory at `base` with room for any ledger of the config; if `base` is null, only `bytes` is valid.
LedgerTablesOnDevice carve_ledger(std::byte* base, const LedgerConfig& c, const LedgerLayout& layout, int num_local_experts,
                                  int64_t chunk_bytes) {
  LedgerTablesOnDevice t;
  Carver carver(base);
  carver.take(t.chunks,
              max_ledger_chunks(layout.world * layout.rows, layout.world, num_local_experts, layout.row_bytes, chunk_bytes));
  carver.take(t.chunks_of, layout.world);
  carver.take(t.row_of, layout.rows);
  carver.take(t.senders_of, c.max_tokens);
  carver.take(t.sender_of, layout.rows);
  t.bytes = carver.bytes();
  return t;
}

/// The free places of an object for prepared ledgers. Thread-safe, including inside a driver callback.
class LedgerPlaces {
 public:
  explicit LedgerPlaces(int count) {
    for (int i = count - 1; i >= 0; --i) free_.push_back(i);
  }
  /// Returns -1 if no place is free.
  int take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return -1;
    const int place = free_.back();
    free_.pop_back();
    return place;
  }
  void give(int place) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(place);  // the constructor reserved the capacity
  }

 private:
  std::mutex mutex_;
  std::vector<int> free_;
};

struct CudaLedgerData final : LedgerData {
  std::shared_ptr<LedgerPlaces> places;
  int place = -1;
  LedgerTablesOnDevice tables;
  int64_t num_chunks = 0;
  ~CudaLedgerData() override {
    if (place >= 0) places->give(place);
  }
};

class CudaLedger final : public LedgerImpl {
 public:
  CudaLedger(Group& group, CudaRank& gpu, const LedgerConfig& c) : LedgerImpl(group, c), gpu_(gpu) {
    construct("LedgerCombine", "LedgerCombine::heap_bytes(...)", [&] {
      const DeviceGuard guard(gpu_.device());
      take_memory(Backend::cuda);
      initialize();
      return fields();
    });
  }

  ~CudaLedger() override {
    try {
      const DeviceGuard guard(gpu_.device());
      if (!order_) return;
      state_.end_after(order_->uses());
      ledgers_.end_after(order_->uses());
      gpu_.end_block(give_up_heap(), order_->uses());
      order_.reset();
    } catch (const Error&) {
      // Without a context, there is nothing left to free.
    }
  }

  std::shared_ptr<const LedgerData> prepare(const LedgerTables& tables) override {
    auto data = std::make_shared<CudaLedgerData>();
    fill(tables, *data);
    data->places = places_;
    data->place = places_->take();
    if (data->place < 0)
      throw Error(ErrorCode::pool_exhausted,
                  "prepare: LedgerConfig::max_ledgers = " + std::to_string(config.max_ledgers) +
                      " prepared ledgers are alive (destroy some, and graphs that use them, or raise it)");
    data->tables = carve(ledgers_.as<std::byte>(static_cast<size_t>(data->place * carve(nullptr).bytes)));
    upload(*data);
    data->num_chunks = static_cast<int64_t>(data->work.chunks.size());
    data->work = LedgerWork();
    data->row_of = std::vector<int32_t>();
    return data;
  }

  void combine(const ConstRows& y, const float* probs, const PreparedLedger& ledger, void* out,
               const LedgerCombineOptions& o) override {
    group_.check_usable("ledger combine");
    const DeviceGuard guard(gpu_.device());
    check_call(y, ledger, out);
    gpu_.check_sms("LedgerCombineOptions", o.num_sms);
    gpu_.check_pointer("expert_output.data", y.data, dtype_bytes(config.dtype, 1));
    gpu_.check_pointer("probs", probs, sizeof(float));
    gpu_.check_pointer("out", out, dtype_bytes(config.dtype, 1));
    enqueue(y, probs, ledger, out, o);
  }

  ConstRows returned() override {
    group_.check_usable("LedgerCombine::returned");
    const auto [epoch, rows] = last_executed_call();
    return {group_.heap->view().local(layout_.buffer(epoch)), rows, config.hidden, config.dtype};
  }

  CallStatistics last_call() override {
    const DeviceGuard guard(gpu_.device());
    return order_->statistics();
  }

 private:
  static constexpr size_t kFilledAt = 128, kSendsDoneAt = 256;  // in state_

  LedgerTablesOnDevice carve(std::byte* base) const {
    return carve_ledger(base, config, layout_, ExpertRanges{config.num_experts, world()}.count(rank()), chunk_bytes());
  }

  void initialize() {
    places_ = std::make_shared<LedgerPlaces>(config.max_ledgers);
    const gpu::Stream copies = gpu_.copy_stream();
    const int64_t bytes = carve(nullptr).bytes;
    ledgers_ = DeviceMemory(static_cast<size_t>(bytes) * static_cast<size_t>(config.max_ledgers), copies);
    state_ = DeviceMemory(kSendsDoneAt + sizeof(uint64_t) * kMaxRanks, copies);
    const EpochState initial{epoch_before(first_epoch_), 0};
    std::byte* flags = group_.heap->view().base[rank()] + layout_.base;
    check_cuda(gpu::copy_to_device(state_.as<void>(), &initial, sizeof initial, copies), "state");
    set_device_flags(flags, layout_.flags_bytes(), flag_word(initial.epoch), copies);
    if (layout_.has_sentinel_rows())
      check_cuda(
          gpu::fill(group_.heap->view().local(layout_.buffer(first_epoch_)), static_cast<int>(sentinel_copies().blank & 0xffu),
                    static_cast<size_t>(layout_.buffers() * layout_.buffer_bytes()), copies),
          "return buffers");
    check_cuda(gpu::wait_for_stream(copies), "flags");
    order_.emplace(gpu_, "LedgerCombine", object_, InvalidIds::count);  // the host checks its ids
  }

  /// Waits first because enqueued calls may still be reading an earlier ledger at this place.
  void upload(const CudaLedgerData& data) {
    const DeviceGuard guard(gpu_.device());
    order_->wait();
    const RelaxedCapture relaxed;  // some stream of this thread may be captured
    const auto copy = [&](auto* to, const auto& from) {
      if (from.empty()) return;
      check_cuda(gpu::copy_to_device(to, from.data(), from.size() * sizeof from[0], gpu_.copy_stream()), "copy of a ledger");
    };
    copy(data.tables.chunks, data.work.chunks);
    copy(data.tables.chunks_of, data.work.chunks_of);
    copy(data.tables.row_of, data.row_of);
    copy(data.tables.senders_of, data.work.senders_of);
    copy(data.tables.sender_of, data.work.sender_of);
    check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of a ledger");
  }

  /// Orders the launch after this object's previous one. A captured launch is ordered by the user, and its graph keeps the
  /// ledger alive.
  void enqueue(const ConstRows& y, const float* probs, const PreparedLedger& ledger, void* out, const LedgerCombineOptions& o) {
    const auto& data = static_cast<const CudaLedgerData&>(ledger.data());
    auto* stream = static_cast<gpu::Stream>(o.stream);
    const int blocks = gpu_.blocks(o.num_sms, tuned_.sms, gpu_.max_blocks());
    CudaLedgerParams p;
    p.l.call = gpu_.context(bounded_ns(group_.options.timeout), Operation::ledger_combine);
    order_->set_counters(p.l.call);
    fill_call(p.l, y, probs, data, out);
    p.l.chunks = data.tables.chunks;
    p.l.num_chunks = data.num_chunks;
    p.l.chunks_of = data.tables.chunks_of;
    p.l.sends_done = state_.as<uint64_t>(kSendsDoneAt);
    p.l.filled = state_.as<int64_t>(kFilledAt);
    p.l.row_of = data.tables.row_of;
    p.l.senders_of = data.tables.senders_of;
    p.l.sender_of = data.tables.sender_of;
    p.state = state_.as<EpochState>();
    if (tuned_.warps > 0) p.warps = tuned_.warps;
    const CallStream at = order_->begin(stream);
    if (at.capture.active) keep_in_graph(ledger.share(), at.capture.graph);
    launch_ledger(p, blocks, gpu_.limits(), stream);
    order_->end(at, blocks * p.warps);
  }

  struct LastCall {
    uint64_t epoch;
    int64_t rows;  // rows that were returned
  };
  /// The last call executed by the GPU, including replays, regardless of calls enqueued or captured later.
  LastCall last_executed_call() {
    const DeviceGuard guard(gpu_.device());
    order_->wait();
    EpochState state{};
    int64_t filled[2] = {};
    const auto read = [&](void* to, size_t at, size_t bytes) {
      check_cuda(gpu::copy_to_host(to, state_.as<std::byte>(at), bytes, gpu_.copy_stream()), "last call");
    };
    read(&state, 0, sizeof state);
    read(filled, kFilledAt, sizeof filled);
    check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "last call");
    return {state.epoch, filled[state.epoch & 1]};
  }

  CudaRank& gpu_;
  DeviceMemory state_;    // EpochState, rows of the last calls, then chunks returned by owner
  DeviceMemory ledgers_;  // max_ledgers places
  std::shared_ptr<LedgerPlaces> places_;
  std::optional<CallOrder> order_;
};

}  // namespace

std::unique_ptr<LedgerImpl> LedgerImpl::make_on_gpu(Group& group, const LedgerConfig& config) {
  return std::make_unique<CudaLedger>(group, rank_of(group), config);
}

}  // namespace switchyard::detail
