// SPDX-License-Identifier: Apache-2.0
// The fused layer on the CPU: memory, plan, and a single run of the group's workers. The workers run protocol/fused/layer.hpp.
#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "exchange/fused/impl.hpp"
#include "exchange/group/recycler.hpp"
#include "exchange/normal/plan/host_counts.hpp"
#include "protocol/fused/layer.hpp"

namespace switchyard::detail {

namespace {

PrivateBuffer private_memory(size_t bytes) {
  try {
    return PrivateBuffer::make(bytes);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::system, "MoeLayer: the system has no " + std::to_string(bytes) + " bytes of memory left");
  }
}

template <class A>
class CpuFused final : public FusedImpl {
 public:
  CpuFused(Group& group, const FusedOnCpu& from) : FusedImpl(group, from.config) {
    construct("MoeLayer", "MoeLayer::heap_bytes(...)", [&] {
      check_config(config, world());
      check_type_on_cpu(config);
      add_products(from.products);
      layout_ = layout_of(config, world());
      layout_.base = take_heap(static_cast<size_t>(layout_.bytes()), static_cast<size_t>(layout_.flags_bytes()));
      make_memory();
      return agreed_fields(config);
    });
  }

  void forward(const void* x, const ExpertIds& given, const float* weights, void* out, const FusedMoeCall& o) override {
    call({true, true}, x, given, weights, out, o);
  }
  void dispatch_up(const void* x, const ExpertIds& given, const float* weights, const FusedMoeCall& o) override {
    call({true, false}, x, given, weights, nullptr, o);
  }
  void down_combine(const float* weights, void* out, const FusedMoeCall& o) override {
    if (o.device_tokens) invalid("MoeLayerCall::device_tokens", " is not null: T is that of dispatch_up");
    call({false, true}, nullptr, {nullptr, p_.tokens, config.topk}, weights, out, o);
  }
  FusedMoeRows rows() const override {
    return {p_.memory.h, nullptr, 0, handle_.first_row.data(), num_rows_.data(), layout_.rows};
  }

  int add_weights(const MoeWeights&) override {
    throw Error(ErrorCode::unsupported,
                "FusedMoe::add_weights: the group is of CPUs, where products come from the caller: add_products");
  }
  int add_products(std::shared_ptr<FusedProducts> products) final {
    if (products == nullptr && local_experts() > 0) invalid("products", " is null");
    sets_.emplace(next_set_, std::move(products));
    return next_set_++;
  }
  void remove_weights(int set) override { sets_.erase(set); }

  void* tokens() const override { return group_.heap->view().local(layout_.x(0)); }
  std::span<const uint8_t> dropped() const override { return handle_.dropped; }
  CallStatistics last_call() override { return stats_; }

 private:
  static constexpr const char* kCall = "MoE layer";

  void call(const FusedParts& parts, const void* x, const ExpertIds& given, const float* weights, void* out,
            const FusedMoeCall& o) {
    group_.check_usable(kCall);
    check_turn(parts, o);
    products_ = find_set(sets_, o).get();
    check_arguments(parts, x, given, weights, out);
    check_selector(o);
    ExpertIds ids = given;
    if (o.device_tokens) ids.num_tokens = std::clamp<int64_t>(*o.device_tokens, 0, given.num_tokens);
    if (o.selector && parts.up) select_slots(o, ids, selected_slots());
    const uint64_t start = Cpu::now_ns();
    group_.enter(Operation::layer, object_);
    p_.call = group_.begin_call(Operation::layer);
    p_.call.epoch = epochs_.next();
    ++calls_;
    stats_ = {};
    p_.layout.first_token = 0;
    p_.parts = parts;
    p_.add = o.add;
    const TraceSpan whole(p_.call.tracer, kHostTrack, Event::layer, parts.up ? ids.num_tokens : p_.tokens);
    const TokenRange all{ids, static_cast<const std::byte*>(x), weights, static_cast<std::byte*>(out)};
    if (!parts.up || plan(ids, o, start, passes_.count > 0))
      run(all);
    else
      run_passes(all, o);
    end_turn(parts, o);
    stats_.total_us = static_cast<double>(Cpu::now_ns() - start) * 1e-3;
  }

  /// A range of this rank's tokens, with their rows of all arguments.
  struct TokenRange {
    ExpertIds ids;
    const std::byte* x;
    const float* weights;
    std::byte* out;
  };

  /// Runs the workers once, after a plan for these tokens.
  void run(const TokenRange& range) {
    if (p_.parts.up) {
      p_.routes = {handle_.ids.data(), handle_.route_row.data(), handle_.map, config.topk, range.weights};
      p_.tokens = range.ids.num_tokens;
      p_.x = range.x == tokens() ? nullptr : range.x;
    }
    p_.order.up_columns = p_.parts.up ? 1 : 0;
    p_.order.down_columns = p_.parts.down ? 1 : 0;
    p_.weights = layout_.per_rank ? nullptr : range.weights;
    p_.out = range.out;
    on_workers(
        [&](CpuWarp& w) { fused_layer<A>(w, p_, [&](CpuWarp& worker, const FusedTile& tile) { multiply(worker, tile); }); });
    group_.raise_fault(kCall, calls_);
    const CallStatistics moved = sum_moved(group_.moved);
#define SY_STATISTIC_MOVED(name) stats_.name += moved.name;
#define SY_STATISTIC_TIME(name)
#include "switchyard/statistics.def"
  }

  /// Overflow::split: executes a call whose routes exceed the capacity of a rank. All ranks run the same number of passes, even
  /// without remaining tokens; each pass has its own epoch.
  void run_passes(const TokenRange& all, const FusedMoeCall& o) {
    const int64_t max = *std::max_element(handle_.counts.tokens.begin(), handle_.counts.tokens.end());
    const bool in_place = all.x == tokens();
    for (int64_t first = 0; first < max; first += passes_.tokens) {
      const int64_t skipped = std::min(first, all.ids.num_tokens), routes = skipped * config.topk;
      TokenRange range = all;
      range.ids.num_tokens = std::min(all.ids.num_tokens - skipped, passes_.tokens);
      if (range.ids.num_tokens > 0) {
        range.ids.data = static_cast<const std::byte*>(all.ids.data) + routes * (all.ids.is_int64 ? 8 : 4);
        if (!in_place) range.x += skipped * layout_.row_bytes;
        if (all.weights != nullptr) range.weights += routes;
        range.out += skipped * layout_.row_bytes;
      }
      p_.call.epoch = epochs_.next();
      p_.layout.first_token = first;
      (void)plan(range.ids, o, Cpu::now_ns(), false);
      run(range);
    }
  }

  SelectedSlots selected_slots() { return SelectedSlots::in(reinterpret_cast<std::byte*>(slots_.data()), max_routes()); }

  std::string this_call() const { return kCall + (" (call " + std::to_string(calls_)) + ")"; }

  void make_memory() {
    memory_ = private_memory(static_cast<size_t>(carve_fused_on_cpu(nullptr, config, layout_.rows, p_.memory)));
    carve_fused_on_cpu(memory_.data.get(), config, layout_.rows, p_.memory);
    const uint64_t word = flag_word(epochs_.last());
    std::byte* const flags = reinterpret_cast<std::byte*>(p_.memory.arrived);
    *p_.memory.counters = {};
    set_flags(flags, memory_.data.get() + p_.memory.flags - flags, sizeof(uint64_t), word);
    set_flags(group_.heap->view().base[rank()] + layout_.base, layout_.flags_bytes(), sizeof(uint64_t), word);
    p_.layout = layout_;
    p_.type = DType::bf16;
    p_.hidden = config.hidden;
    slots_.resize(static_cast<size_t>(SelectedSlots::bytes(max_routes())) / 8);
    counts_row_.resize(static_cast<size_t>(layout_.control().counts_row_bytes()));
    handle_.layout = Layout::expert_major;
    handle_.rank = rank();
    handle_.reports_drops = config.overflow == Overflow::drop_and_report;
  }

  /// Computes the destinations of all routes and the rank's tiles. With Overflow::fail, all ranks throw if any capacity is
  /// exceeded. If `may_split`, returns false on all ranks, without destinations, instead. `start`: when the plan began.
  bool plan(const ExpertIds& ids, const FusedMoeCall& o, uint64_t start, bool may_split) {
    {
      const TraceSpan span(p_.call.tracer, kHostTrack, Event::plan, ids.num_tokens * ids.topk);
      local_.build(ids, config.num_experts, world());
      const bool counted = passes_.count > 0 && !may_split;  // by the plan of the whole call
      if (!counted) take_invalid(local_.invalid, config.invalid_ids, config.topk, config.num_experts);
    }
    gather_counts(ids, o);
    const bool fits = !may_split || first_overflow(handle_.counts, handle_.layout, handle_.alignment) < 0;
    if (fits) place(ids);
    stats_.plan_us += static_cast<double>(Cpu::now_ns() - start) * 1e-3;
    return fits;
  }

  /// Exchanges the counts of local_.
  void gather_counts(const ExpertIds& ids, const FusedMoeCall& o) {
    const CallContext& call = p_.call;
    const int64_t capacity = config.capacity > 0 ? layout_.rows : std::numeric_limits<int64_t>::max();
    const CountsHead head{fused_signature(hash(), p_.parts, o, o.selector ? *selected_slots().version : 0), ids.num_tokens,
                          capacity, 0};
    OtherCall other;
    const bool ok = exchange_host_counts<A>(solo_, call, layout_.control(), head, local_, counts_row_, handle_.counts, &other);
    if (!ok) group_.raise_fault(kCall, calls_);
    if (other.rank >= 0) group_.throw_mismatch(this_call(), other.rank, {Site::counts, head.signature, other.signature});
  }
  void place(const ExpertIds& ids) {
    if (config.overflow == Overflow::fail)
      check_capacity(handle_.counts, handle_.layout, handle_.alignment, this_call(), "MoeLayerConfig::capacity");
    const TraceSpan span(p_.call.tracer, kHostTrack, Event::plan, ids.num_tokens * ids.topk);
    build_owner_side(local_, handle_);
    cut_tiles();
  }

  /// Divides an expert's rows into the tiles required by the products. Each product has a single column tile because the bits
  /// oneDNN produces for a column may depend on neighboring columns.
  void cut_tiles() {
    const auto experts = handle_.first_row.size();
    first_tiles_.assign(1, 0);
    tile_row_.assign(1, 0);
    num_rows_.clear();
    for (size_t e = 0; e < experts; ++e) {
      const int64_t end = e + 1 < experts ? handle_.first_row[e + 1] : handle_.rows;
      for (int64_t row = handle_.first_row[e]; row < end; tile_row_.push_back(row)) {
        const int64_t rows = products_->tile_rows(end - row);
        check_range("FusedProducts::tile_rows", rows, 1, end - row);
        row += rows;
      }
      first_tiles_.push_back(static_cast<int>(tile_row_.size()) - 1);
      num_rows_.push_back(end - handle_.first_row[e]);
    }
    // With this lag, each worker can process an up tile of other rows before the first of an expert's rows is needed.
    const int lag = std::min(group_.pool.total(), static_cast<int>(experts));
    p_.order = {first_tiles_.data(), static_cast<int>(experts), lag, 1, 1};
    p_.tile_row = tile_row_.data();
  }

  void multiply(const CpuWarp& w, const FusedTile& tile) const {
    const FusedMemory& m = p_.memory;
    std::byte* const h = m.h + tile.row * config.intermediate * 2;
    const int64_t at = tile.row * layout_.row_bytes;
    if (tile.down)
      products_->down(w.index(), tile.expert, h, tile.rows, m.y + at);
    else
      products_->up(w.index(), tile.expert, m.x_rows + at, tile.rows, h);
  }

  std::map<int, std::shared_ptr<FusedProducts>> sets_;
  FusedProducts* products_ = nullptr;  ///< of the current call
  FusedLayout layout_;
  PrivateBuffer memory_;
  FusedLayerParams p_;  ///< of the current call
  const SplitPasses passes_ = split_passes(config, world());
  CallEpochs epochs_{first_epoch_};
  uint64_t calls_ = 0;  ///< number of calls so far; each may have several epochs
  CpuWarp solo_{0, 0, 1, 1, nullptr};
  LocalPlan local_;
  HandleData handle_;  ///< the sender's part of the last call's plan
  std::vector<std::byte> counts_row_;
  std::vector<int> first_tiles_;
  std::vector<int64_t> tile_row_, num_rows_;
  CallStatistics stats_;
  std::vector<int64_t> slots_;  // SelectedSlots
};

}  // namespace

template <class A>
std::unique_ptr<FusedImpl> FusedImpl::make_on_cpu(Group& group, const FusedOnCpu& from) {
  return std::make_unique<CpuFused<A>>(group, from);
}
template std::unique_ptr<FusedImpl> FusedImpl::make_on_cpu<SWITCHYARD_CPU_ARCH>(Group&, const FusedOnCpu&);

}  // namespace switchyard::detail
