// SPDX-License-Identifier: Apache-2.0
// The ledger combine on the CPU: memory and call frame. The algorithm is in protocol/ledger/combine.hpp.
#include "exchange/ledger/impl.hpp"
#include "protocol/ledger/combine.hpp"

namespace switchyard::detail {

namespace {

template <class A>
class CpuLedger final : public LedgerImpl {
 public:
  CpuLedger(Group& group, const LedgerConfig& c) : LedgerImpl(group, c) {
    construct("LedgerCombine", "LedgerCombine::heap_bytes(...)", [&] {
      take_memory(Backend::cpu);
      sends_done_.resize(static_cast<size_t>(world()), 0);
      set_flags(group_.heap->view().base[rank()] + layout_.base, layout_.flags_bytes(), LedgerLayout::kLine,
                flag_word(epochs_.last()));
      if (layout_.has_sentinel_rows())
        blank_row(group_.heap->view().local(layout_.buffer(first_epoch_)),
                  static_cast<size_t>(layout_.buffers() * layout_.buffer_bytes()), sentinel_copies());
      return fields();
    });
  }

  std::shared_ptr<const LedgerData> prepare(const LedgerTables& tables) override {
    auto data = std::make_shared<LedgerData>();
    fill(tables, *data);
    return data;
  }

  void combine(const ConstRows& y, const float* probs, const PreparedLedger& ledger, void* out,
               const LedgerCombineOptions&) override {
    group_.check_usable("ledger combine");
    check_call(y, ledger, out);
    const uint64_t start = Cpu::now_ns();
    const LedgerData& data = ledger.data();
    LedgerParams p;
    group_.enter(Operation::ledger_combine, object_);
    p.call = group_.begin_call(Operation::ledger_combine);
    p.call.epoch = epochs_.next();
    const TraceSpan whole(p.call.tracer, kHostTrack, Event::ledger_combine, data.tokens);
    fill_call(p, y, probs, data, out);
    p.chunks = data.work.chunks.data();
    p.num_chunks = static_cast<int64_t>(data.work.chunks.size());
    p.chunks_of = data.work.chunks_of.data();
    p.sends_done = sends_done_.data();
    p.filled = filled_;
    p.row_of = data.row_of.data();
    p.senders_of = data.work.senders_of.data();
    p.sender_of = data.work.sender_of.data();
    on_workers([&](CpuWarp& w) { ledger_combine<A>(w, p); });
    group_.raise_fault("ledger combine", epochs_.calls());
    stats_ = sum_moved(group_.moved);
    stats_.total_us = static_cast<double>(Cpu::now_ns() - start) * 1e-3;
  }

  ConstRows returned() override {
    group_.check_usable("LedgerCombine::returned");
    return {group_.heap->view().local(layout_.buffer(epochs_.last())), filled_[epochs_.last() & 1], config.hidden,
            config.dtype};
  }
  CallStatistics last_call() override { return stats_; }

 private:
  CallEpochs epochs_{first_epoch_};
  std::vector<uint64_t> sends_done_;
  int64_t filled_[2] = {};  // rows of the last call of each parity
  CallStatistics stats_;
};

}  // namespace

template <class A>
std::unique_ptr<LedgerImpl> LedgerImpl::make_on_cpu(Group& group, const LedgerConfig& config) {
  return std::make_unique<CpuLedger<A>>(group, config);
}
template std::unique_ptr<LedgerImpl> LedgerImpl::make_on_cpu<SWITCHYARD_CPU_ARCH>(Group&, const LedgerConfig&);

}  // namespace switchyard::detail
