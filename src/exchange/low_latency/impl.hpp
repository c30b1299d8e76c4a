// SPDX-License-Identifier: Apache-2.0
// Shared by the backends of low-latency mode: the virtual interface behind LowLatencyExchange, its checks, and its parameters
// and outputs.
#pragma once

#include <memory>

#include "exchange/group/exchange_base.hpp"
#include "exchange/slots/impl.hpp"
#include "protocol/low_latency/dispatch.hpp"
#include "protocol/low_latency/flat_exchange.hpp"
#include "switchyard/low_latency.hpp"

namespace switchyard::detail {

/// Maximum LowLatencyConfig::hidden.
inline constexpr int64_t kMaxHidden = int64_t{1} << 20;

/// Throws invalid_argument, naming the field.
void check_config(const LowLatencyConfig& config, int world);
/// The type in which rows are sent.
inline DType sent_type(const LowLatencyConfig& c) { return c.scales == ScaleKind::none ? c.dtype : DType::fp8_e4m3; }
LowLatencyLayout low_latency_layout(const LowLatencyConfig& config, int world, uint64_t base);
ScalePlace scale_place(const LowLatencyConfig& config, int world);
/// Fields that must be identical on all ranks.
AgreedFields agreed_fields(const LowLatencyConfig& config);

/// Parts of an output's memory.
struct LowLatencyTables {
  std::byte* rows = nullptr;
  std::byte* scales = nullptr;
  int32_t* rows_of_expert = nullptr;
  int64_t* source_range = nullptr;
  int64_t* row_source = nullptr;
  LowLatencyRoute* routes = nullptr;
  int64_t* source_tokens = nullptr;
  int32_t* own_ids = nullptr;
  float* own_weights = nullptr;
  OwnDispatch* own = nullptr;
  int64_t bytes = 0;
};
/// Assigns the parts of the memory at `base`, or only counts bytes if `base` is null. `given`: the caller's memory for rows and
/// scales, or null.
LowLatencyTables carve_output(std::byte* base, const LowLatencyLayout& layout, const ScalePlace& scales, int rank,
                              const Rows* given);

/// Memory of an output. Each backend has a derived class that frees it.
struct LowLatencyBlock {
  LowLatencyBlock() = default;
  LowLatencyBlock(const LowLatencyBlock&) = delete;
  LowLatencyBlock& operator=(const LowLatencyBlock&) = delete;
  virtual ~LowLatencyBlock() = default;
  LowLatencyTables tables;
  uint64_t config_hash = 0;
  int rank = 0, world = 0;
  int64_t tokens = -1;   ///< number of the last dispatch, or its upper bound; -1: no dispatch yet
  bool pending = false;  ///< a split call has not been received
};

class LowLatencyImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  static constexpr bool kGpusSpanHosts = true;
  virtual ~LowLatencyImpl() {
    if (pending_block_) pending_block_->pending = false;
  }
  template <class A>
  static std::unique_ptr<LowLatencyImpl> make_on_cpu(Group& group, const LowLatencyConfig& config);  // cpu.cpp
  static std::unique_ptr<LowLatencyImpl> make_on_gpu(Group& group, const LowLatencyConfig& config);  // gpu.cpp
  LowLatencyImpl(const LowLatencyImpl&) = delete;
  LowLatencyImpl& operator=(const LowLatencyImpl&) = delete;

  LowLatencyOutput make_output(const Rows* given);
  LowLatencyRows make_rows(DType type);
  /// `known_memory`: see known_memory.hpp. `split`: runs only the sending half; a receive() must follow.
  void dispatch(const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output, const LowLatencyDispatchOptions& options,
                bool known_memory, bool split);
  void combine(const ConstRows& y, const LowLatencyOutput& output, void* out, const LowLatencyCombineOptions& options,
               bool known_memory, bool split);
  void all_to_all(const ConstRows& x, const ExpertIds& ids, void* out, const AllToAllOptions& options);
  /// The hook of the last split call.
  ReceiveHook receive_hook();
  virtual CallStatistics last_call() = 0;
  virtual int64_t invalid_ids() { return total_invalid_ids(); }

  const LowLatencyConfig config;

 protected:
  LowLatencyImpl(Group& group, const LowLatencyConfig& c);

  enum class Halves { both, send, receive };
  /// Called once everything except the call context is filled in and checked. `block`: the output's block.
  virtual void run(LowLatencyDispatchParams& p, const LowLatencyDispatchOptions& options, LowLatencyBlock& block,
                   Halves halves) = 0;
  virtual void run(LowLatencyCombineParams& p, const LowLatencyCombineOptions& options, LowLatencyBlock& block,
                   Halves halves) = 0;
  virtual void run(FlatParams& p, const AllToAllOptions& options) = 0;
  virtual std::shared_ptr<LowLatencyBlock> allocate_output(const Rows* given) = 0;
  /// Allocates private memory of this backend.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  /// Checks the address; implemented by backends that can inspect memory. `alignment` in bytes.
  virtual void check_pointer(const char*, const void*, size_t, bool /*known*/) const {}
  virtual void check_sms(const char*, int) const {}
  /// Identifies the capture of `stream` (CUDA); 0 if it is not being captured.
  virtual unsigned long long capture_id(void*) const { return 0; }
  /// Throws unless the function was created for this backend.
  virtual void check_row_function(const RowFunctionBase&) const {}
  /// Scratch bytes that a warp needs on the CPU: for a part or piece of a row, or for places.
  int64_t scratch_bytes() const;
  /// Alignment of rows in the caller's memory, in bytes: 16, or one element if rows are not multiples of 16 bytes.
  size_t row_alignment(DType type) const {
    const size_t row = dtype_bytes(type, config.hidden);
    return row % 16 == 0 ? 16 : dtype_bytes(type, 1);
  }
  /// Hash of all values that ranks must agree on: the config and, if the config leaves it open, the number of pieces.
  uint64_t hash() const { return mix_hash(config_hash_, static_cast<uint64_t>(layout_.piece_columns)); }
  /// Lays out the symmetric region for rows divided into `pieces` pieces; 0 selects the library's default without a tuning.
  void cut_rows(int pieces);
  /// How the warps of a block share the sending of messages; see LowLatencyDispatchParams.
  struct Senders {
    int parts = 1, part_columns = 0, teams = 1;
  };
  /// Lets up to `max` of a block's `warps` warps send one message together, if there are enough columns for each. With 1,
  /// blocks need no barrier.
  Senders senders(int max, int warps) const;
  /// Runs the entire body of every constructor. When `build` runs, `layout_` already has its place in the heap.
  void construct(const std::function<void()>& build);

  /// Replaces the ids of a call with slots in `to`. `p.tokens` is T or an upper bound of T.
  void select_slots(LowLatencyDispatchParams& p, SlotSelector& selector, const SelectedSlots& to, void* stream,
                    const int32_t* device_tokens, int num_sms) {
    SelectorAccess::impl(selector).run({p.ids.ids, p.tokens, config.topk, p.ids.is_int64}, to, stream, device_tokens, num_sms);
    p.ids.ids = to.slots;
  }
  /// take_invalid() for the first `tokens` tokens of ids in host memory.
  void take_ids(const IdReader& ids, int tokens) {
    const ExpertIds given{ids.ids, tokens, config.topk, ids.is_int64};
    take_invalid(find_invalid_routes(given, tokens, config.num_experts), config.invalid_ids, config.topk, config.num_experts);
  }

  TuningValues tuned_;  ///< of low-latency mode; `sms` and `warps`: of the flat exchange
  LowLatencyLayout layout_;
  ScalePlace scales_;
  Senders dispatch_senders_, flat_senders_;

 private:
  const uint64_t config_hash_ = hash_of(2, agreed_fields(config));
  void choose_shape();  ///< from the configuration, which it checks, and from the tuning in force
  void check_output_memory(const Rows& memory) const;
  void check_tokens(const ConstRows& x, const ExpertIds& ids, bool known_memory) const;
  void check_dispatch(const ConstRows& x, const ExpertIds& ids, const LowLatencyOutput& output,
                      const LowLatencyDispatchOptions& options, bool known_memory) const;
  /// Parameters that describe the sent data and its destinations.
  LowLatencyDispatchParams sent(const ConstRows& x, const ExpertIds& ids, const Senders& senders) const;
  void check_combine(const ConstRows& y, const LowLatencyOutput& output, const void* out,
                     const LowLatencyCombineOptions& options, bool known_memory) const;
  void check_all_to_all(const ConstRows& x, const ExpertIds& ids, const void* out, const AllToAllOptions& options) const;
  void check_row_function(const AllToAllOptions& options) const;
  void check_selector(const char* name, SlotSelector* selector) const;
  /// Throws unless rows of this type can be combined.
  void check_combined(DType type, const char* name) const;
  void check_output(const LowLatencyOutput& output) const;
  void check_idle(const char* operation) const;
  void receive(uint64_t call);

  // A split call that has not been received.
  enum class Pending { none, dispatch, combine };
  void keep_pending(Pending what, const LowLatencyOutput& output, void* stream);
  Pending pending_ = Pending::none;
  unsigned long long pending_capture_ = 0;
  std::shared_ptr<LowLatencyBlock> pending_block_;  ///< memory of its output
  uint64_t split_calls_ = 0;
  LowLatencyDispatchParams pending_dispatch_;
  LowLatencyCombineParams pending_combine_;
  LowLatencyDispatchOptions dispatch_options_;
  LowLatencyCombineOptions combine_options_;
};

}  // namespace switchyard::detail
