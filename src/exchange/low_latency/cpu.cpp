// SPDX-License-Identifier: Apache-2.0
// Low-latency mode on the CPU: memory, launch and faults. The algorithms are in protocol/low_latency.
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "exchange/hosts/connect.hpp"
#include "exchange/group/recycler.hpp"
#include "exchange/hosts/schedule.hpp"
#include "exchange/low_latency/hosts/links.hpp"
#include "exchange/low_latency/impl.hpp"

namespace switchyard::detail {

namespace {

struct CpuLowLatencyBlock final : LowLatencyBlock {
  PrivateBuffer memory;
  CrossedOutput crossed;  ///< several hosts
};

PrivateBuffer private_memory(const char* function, size_t bytes) {
  try {
    return PrivateBuffer::make(bytes);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::system, std::string(function) + ": the system has no " + std::to_string(bytes) +
                                       " bytes of memory left; nothing has changed");
  }
}

template <class A>
class CpuLowLatency final : public LowLatencyImpl, SentCall {
 public:
  CpuLowLatency(Group& group, const LowLatencyConfig& c) : LowLatencyImpl(group, c) {
    construct([&] {
      // A barrier between more threads than cores costs more than it gains, so it is used only if the caller requests pieces.
      const int warps = group_.pool.num_warps();
      dispatch_senders_ = flat_senders_ = senders(config.pieces > 0 ? std::min(layout_.pieces, warps) : 1, warps);
      group_.pool.reserve_scratch(static_cast<size_t>(scratch_bytes()));
      // Archs that defer copies are used only in tests. They count places from the ids, as GPUs do when there is no room for
      // the sets.
      const auto words = static_cast<size_t>(TokenSets::words_for(static_cast<int>(config.max_tokens)));
      if (!A::kDefersCopies) sets_.resize(static_cast<size_t>(config.num_experts) * words);
      std::byte* const mine = group_.heap->view().base[rank()] + layout_.base;
      set_flags(mine, layout_.flags_bytes(), sizeof(uint64_t), flag_word(epochs_.last()));
      layout_.for_each_sentinel_row(
          [&](int64_t offset, int64_t bytes) { std::memset(mine + offset, 0, static_cast<size_t>(bytes)); });
    });
    if (!group_.host_map().one_host()) connect_hosts();
  }

  ~CpuLowLatency() override { std::erase(group_.sent_calls, static_cast<SentCall*>(this)); }

  CallStatistics last_call() override { return stats_; }

 private:
  std::shared_ptr<LowLatencyBlock> allocate_output(const Rows* given) override {
    auto block = std::make_shared<CpuLowLatencyBlock>();
    block->memory =
        private_memory("make_output", static_cast<size_t>(carve_output(nullptr, layout_, scales_, rank(), given).bytes));
    block->tables = carve_output(block->memory.data.get(), layout_, scales_, rank(), given);
    return block;
  }

  std::shared_ptr<void> allocate(size_t bytes) override {
    auto buffer = std::make_shared<PrivateBuffer>(private_memory("make_rows", bytes));
    return {buffer, buffer->data.get()};
  }

  void select(LowLatencyDispatchParams& p, SlotSelector& selector) {
    slots_.resize(static_cast<size_t>(config.max_tokens * config.topk));
    select_slots(p, selector, {slots_.data(), &p.map_version}, nullptr, nullptr, 0);
  }

  void run(LowLatencyDispatchParams& p, const LowLatencyDispatchOptions& o, LowLatencyBlock& block, Halves halves) override {
    if (halves != Halves::receive) {
      p.tokens = tokens_now(p.tokens, o.device_tokens);  // the caller may reuse device_tokens afterwards
      if (o.selector) select(p, *o.selector);
      take_ids(p.ids, p.tokens);
    }
    begin(p.call, Operation::dispatch, halves);
    const TraceSpan whole(p.call.tracer, kHostTrack, Event::dispatch, p.tokens);
    if (halves != Halves::receive) make_sets(p);
    if (hosts_) {
      over_hosts(p, block, halves);
    } else {
      crossed(block).host_of.clear();
      launch(halves, [&](CpuWarp& w, bool sends, bool receives) {
        if (sends) low_latency_send<A>(w, p);
        if (receives) low_latency_receive<A>(w, p);
      });
    }
    end("dispatch", halves);
  }

  void run(LowLatencyCombineParams& p, const LowLatencyCombineOptions&, LowLatencyBlock& block, Halves halves) override {
    if (hosts_) check_crossed(block);
    begin(p.call, Operation::combine, halves);
    p.combined = p.own->call;
    const TraceSpan whole(p.call.tracer, kHostTrack, Event::combine, p.own->tokens);
    if (hosts_) {
      over_hosts(p, block, halves);
    } else {
      launch(halves, [&](CpuWarp& w, bool sends, bool receives) {
        if (sends) low_latency_return<A>(w, p);
        if (receives) low_latency_sum<A>(w, p);
      });
    }
    end("combine", halves);
  }

  void run(FlatParams& p, const AllToAllOptions& o) override {
    p.d.tokens = tokens_now(p.d.tokens, o.device_tokens);
    if (o.selector) select(p.d, *o.selector);
    take_ids(p.d.ids, p.d.tokens);
    begin(p.d.call, Operation::all_to_all, Halves::both);
    p.c.call = p.d.call;
    const TraceSpan whole(p.d.call.tracer, kHostTrack, Event::all_to_all, p.d.tokens);
    if (o.row_function == nullptr) {
      launch(Halves::both, [&](CpuWarp& w, bool, bool) { flat_exchange<A>(w, p, ScaledRows{}); });
    } else {
      const auto& f = static_cast<const CpuRowFunction&>(*o.row_function->impl());
      const auto make = [&f](float* x, int64_t n, const RowOrigin& row, int64_t column) { f.apply(x, n, row, column); };
      launch(Halves::both, [&](CpuWarp& w, bool, bool) { flat_exchange<A>(w, p, make); });
    }
    end("moe_all_to_all", Halves::both);
  }

  /// Builds, for each expert, the set of tokens that choose it; the sending workers read these sets.
  void make_sets(LowLatencyDispatchParams& p) {
    if (sets_.empty()) return;
    const int words = TokenSets::words_for(p.tokens), topk = p.layout.topk;
    std::fill_n(sets_.begin(), static_cast<ptrdiff_t>(config.num_experts) * words, 0u);
    for (int f = 0; f < p.tokens * topk; ++f) {
      const int32_t expert = p.ids(f);
      const int t = f / topk;
      if (expert >= 0)
        sets_[static_cast<size_t>(expert) * static_cast<size_t>(words) + static_cast<size_t>(t / 32)] |= 1u << t % 32;
    }
    p.sets = {sets_.data(), words};
  }

  // Several hosts.

  /// Collective.
  void connect_hosts() {
    group_.collectively("LowLatencyExchange", [&] {
      hosts_ = std::make_unique<LowLatencyLinks>(group_.host_map(), rank(), detail::connect_hosts(group_), group_.round_bytes,
                                                 layout_);
      try {
        hosts_->set_returned(SymmetricHeap::create(*group_.bootstrap, static_cast<size_t>(hosts_->returned_bytes()),
                                                   group_.deadline_of(Operation::construction)));
      } catch (const AgreedError& error) {
        throw AgreedError(error.code(),
                          std::string("LowLatencyExchange: rows that come back to other hosts have memory besides "
                                      "the heap, which LowLatencyConfig::max_tokens sizes: ") +
                              error.what());
      }
    });
  }

  static CrossedOutput& crossed(LowLatencyBlock& block) { return static_cast<CpuLowLatencyBlock&>(block).crossed; }
  void check_crossed(LowLatencyBlock& block) const {
    if (crossed(block).host_of != hosts_->host_of())
      throw Error(ErrorCode::unsupported, "combine: the output was filled in a group of other hosts; dispatch again");
  }

  void send_half(const LowLatencyDispatchParams& p, LowLatencyBlock&) {
    run_phase("dispatch", [&](CpuWarp& w) {
      p.call.moved[w.index()].network_bytes += pack_crossing<A>(w, p, hosts_->remote());
      return true;
    });
    round_ = hosts_->take_round();
    hosts_->post_dispatch(round_);
    on_workers([&](CpuWarp& w) {
      const uint64_t crossed = p.call.moved[w.index()].network_bytes;
      low_latency_send<A>(w, p);
      p.call.moved[w.index()].network_bytes = crossed;
    });
    raise("dispatch");
  }
  void send_half(const LowLatencyCombineParams& p, LowLatencyBlock& block) {
    const PhasedCombineParams phased = hosts_->phased(p, crossed(block));
    on_workers([&](CpuWarp& w) {
      low_latency_return<A>(w, phased);
      if (is_announcer(w)) write_combine_heads<A>(w, phased);
    });
    raise("combine");
  }

  /// This rank's work for other ranks in a receiving half: exchanges rows between hosts and passes them on.
  void cross(const LowLatencyDispatchParams& p, LowLatencyBlock& block) {
    const CrossedIds ids = hosts_->take_crossed(crossed(block));
    await(p.call, round_, "dispatch");
    run_phase("dispatch", [&](CpuWarp& w) { return forward_crossing_tokens<A>(w, p, hosts_->remote(), ids); });
    meet(p.call, dispatch_header(p), kHeaderTokenBits, "dispatch");
  }
  void cross(const LowLatencyCombineParams& p, LowLatencyBlock& block) {
    const PhasedCombineParams phased = hosts_->phased(p, crossed(block));
    // A proxy sends rows only after ranks of its host have returned them. Headers cross in a round of their own, so that a
    // report names the missing rank and not its proxy.
    const uint64_t headers = hosts_->take_round();
    post_relay(p.call, hosts_->carrier(), headers, hosts_->peers(), nullptr, 0,
               [&](const RailPeer&) { return static_cast<int64_t>(p.header()); });
    const auto take_headers = [&] {
      const auto publish = [&](int source, int64_t theirs, const std::byte*) {
        publish_header_of<A>(solo_, p.call, layout_, source, static_cast<uint64_t>(theirs));
      };
      (void)take_relay<A>(solo_, p.call, hosts_->carrier(), headers, hosts_->peers(), 0, publish);
      meet(p.call, p.header(), 0, "combine");
      return true;
    };
    const int64_t rounds = hosts_->place_rows(phased);
    const uint64_t first = hosts_->reserve_rounds(rounds);
    const auto send = [&](int64_t k) {
      run_phase("combine", [&](CpuWarp& w) { return collect_returned<A>(w, phased, k); });
      hosts_->post_combine(phased, first, k);
      return true;
    };
    const auto take = [&](int64_t k) {
      await(p.call, first + static_cast<uint64_t>(k), "combine");
      return true;
    };
    (void)run_rounds(rounds, send, take_headers, take);
    if (!check_returned<A>(solo_, phased)) raise("combine");
  }
  void receive_local(const LowLatencyDispatchParams& p, LowLatencyBlock&) {
    on_workers([&](CpuWarp& w) { (void)low_latency_receive<A>(w, p); });
  }
  void receive_local(const LowLatencyCombineParams& p, LowLatencyBlock& block) {
    const PhasedCombineParams phased = hosts_->phased(p, crossed(block));
    on_workers([&](CpuWarp& w) { (void)low_latency_sum<A>(w, phased); });
    p.call.moved[0].network_bytes += hosts_->received_bytes(phased);
  }

  /// Runs the given halves of a call. `block` must live until both halves have finished.
  template <class P>
  void over_hosts(const P& p, LowLatencyBlock& block, Halves halves) {
    if (halves != Halves::receive) send_half(p, block);
    if (halves == Halves::send) {
      pass_on_ = [this, sent = p, &block]() mutable {
        sent.call = context(sent.call.operation);
        cross(sent, block);
        stats_.network_bytes += sum_moved(group_.moved).network_bytes;
      };
      group_.sent_calls.push_back(this);
      return;
    }
    if (halves == Halves::both) cross(p, block);  // otherwise begin() has done it
    receive_local(p, block);
  }
  void pass_on() override { pass_on_(); }

  /// Runs body(warp), which returns false after recording a fault, on all workers as one phase of a call.
  template <class F>
  void run_phase(const char* operation, F&& body) {
    on_workers([&](CpuWarp& w) { (void)body(w); });
    raise(operation);
  }
  void await(const CallContext& call, uint64_t round, const char* operation) {
    if (!await_round<A>(solo_, call, hosts_->carrier(), round)) raise(operation);
  }
  /// Waits until all ranks on all hosts have entered the call, so that later waits are for late ranks rather than missing ones.
  void meet(const CallContext& call, uint64_t header, int own_bits, const char* operation) {
    raise(operation);
    if (!wait_entered<A>(solo_, call, layout_, header, own_bits)) raise(operation);
  }

  /// Handles a missing rank of another host. If that rank's proxy is missing too, changes the fault to refer to the proxy.
  void name_proxy(FaultRecord& fault) const {
    if (fault.mismatch || fault.awaited_rank < 0 || fault.site != Site::call_header) return;
    const int proxy = hosts_->other_proxy(fault.awaited_rank);
    if (proxy < 0) return;
    const uint64_t seen = A::peek(group_.heap->view().local(layout_.header(fault.epoch, proxy)));
    if (flag_reached(seen, flag_word(fault.epoch))) return;
    fault.awaited_rank = proxy;
    fault.seen = seen;
  }

  /// Throws the fault recorded by warps.
  void raise(const char* operation) {
    if (hosts_ && group_.fault.ready != 0) {
      name_proxy(group_.fault);
      hosts_->carrier().abort();
    }
    group_.raise_fault(operation, epochs_.calls());
  }

  // The call frame.

  void begin(CallContext& call, Operation operation, Halves halves) {
    start_ns_ = Cpu::now_ns();
    if (halves == Halves::receive) {
      group_.pass_on();
    } else {
      group_.enter(operation, object_, halves == Halves::both);
      epochs_.next();
    }
    call = context(operation);
  }
  CallContext context(Operation operation) {
    CallContext call = group_.begin_call(operation);
    call.epoch = epochs_.last();
    return call;
  }

  template <class F>
  void launch(Halves halves, F&& body) {
    on_workers([&](CpuWarp& w) { body(w, halves != Halves::receive, halves != Halves::send); });
  }

  /// The receiving half moves bytes only over the network. Adds these bytes and the elapsed time to the statistics of the
  /// sending half, regardless of calls in between.
  void end(const char* operation, Halves halves) {
    raise(operation);
    const double before = halves == Halves::receive ? stats_.total_us : 0;
    const CallStatistics moved = sum_moved(group_.moved);
    if (halves != Halves::receive)
      stats_ = moved;
    else
      stats_.network_bytes += moved.network_bytes;
    stats_.total_us = before + static_cast<double>(Cpu::now_ns() - start_ns_) * 1e-3;
  }

  std::vector<uint32_t> sets_;  // room for max_tokens, or empty
  std::vector<int64_t> slots_;  // of a call with a selector; int32_t if its ids are
  CallEpochs epochs_{first_epoch_};
  uint64_t start_ns_ = 0;
  CallStatistics stats_;
  CpuWarp solo_{0, 0, 1, 1, nullptr};
  uint64_t round_ = 0;  ///< of the last dispatch
  std::function<void()> pass_on_;
  std::unique_ptr<LowLatencyLinks> hosts_;  ///< null: all ranks are on this host
};

}  // namespace

template <class A>
std::unique_ptr<LowLatencyImpl> LowLatencyImpl::make_on_cpu(Group& group, const LowLatencyConfig& config) {
  return std::make_unique<CpuLowLatency<A>>(group, config);
}
template std::unique_ptr<LowLatencyImpl> LowLatencyImpl::make_on_cpu<SWITCHYARD_CPU_ARCH>(Group&, const LowLatencyConfig&);

}  // namespace switchyard::detail
