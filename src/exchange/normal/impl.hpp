// SPDX-License-Identifier: Apache-2.0
// Normal mode: the calls behind NormalExchange and the kernel parameters for all backends (calls.cpp), with all checks that the
// host can perform (checks.cpp). A backend provides memory, runs kernels and waits for them.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <vector>

#include "exchange/group/exchange_base.hpp"
#include "exchange/group/output_block.hpp"
#include "exchange/slots/impl.hpp"
#include "layout/ring_layout.hpp"
#include "plan/plan.hpp"
#include "protocol/normal/combine_pull.hpp"
#include "protocol/normal/dispatch_direct.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::detail {

/// Row types in one call.
struct RowFormat {
  DType src_type, type;  ///< of the input, and of the rows as sent
  ScaleKind scales;
  bool quantize;
  int64_t src_row_bytes, row_bytes, scale_bytes;

  ScaleKind src_scales() const { return quantize ? ScaleKind::none : scales; }
};

/// Throws invalid_argument, naming the field.
void check_config(const NormalConfig& config, int world);
/// Maximum number of rows that a rank can receive under any routing.
int64_t worst_case_rows(const NormalConfig& config, int world);
/// Rings of `config`, with the defaults of default_ring(); none with direct staging.
RingLayout ring_layout(const NormalConfig& config, int world);
/// Rows appended per announcement to the consumer: as configured, but at most the number of slots.
inline int send_chunk(const NormalConfig& config, const RingLayout& rings) {
  return static_cast<int>(std::min<int64_t>(config.ring.send_chunk, rings.slots));
}
/// Fields that must be identical on all ranks.
AgreedFields agreed_fields(const NormalConfig& config);

/// Implements enqueue_routing_layout() for arguments whose ranges have been checked; see plan/routing_layout.cu.
void count_routing(const ExpertIds& ids, const ExpertRanges& map, const RoutingLayoutView& out, void* stream);

class NormalImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  virtual ~NormalImpl() = default;
  static constexpr bool kGpusSpanHosts = true;
  template <class A>
  static std::unique_ptr<NormalImpl> make_on_cpu(Group& group, const NormalConfig& config);  // cpu.cpp
  static std::unique_ptr<NormalImpl> make_on_gpu(Group& group, const NormalConfig& config);  // gpu.cpp
  NormalImpl(const NormalImpl&) = delete;
  NormalImpl& operator=(const NormalImpl&) = delete;

  // calls.cpp: the calls of NormalCalls (known_memory.hpp).
  Dispatched dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& given,
                      bool known_memory, SlotSelector* selector);
  virtual void reserve_slots() = 0;
  /// Cached dispatch.
  Dispatched redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& given, bool known_memory);
  void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options, float* out_weights,
               bool known_memory);
  /// CUDA: the stream whose work will access rows first; any stream if `named` is false.
  struct RowStream {
    bool named = false;
    void* stream = nullptr;
  };
  RowBuffer allocate_rows(const Handle& handle, DType type, const RowStream& stream);
  /// CPU: nothing is captured.
  virtual std::shared_ptr<void> make_graph_memory() { return nullptr; }
  virtual void use_graph_memory(std::shared_ptr<void>) {}
  void set_site(uint32_t site);
  virtual CallStatistics last_call() = 0;
  virtual int64_t invalid_ids() { return total_invalid_ids(); }

  const NormalConfig config;

 protected:
  /// Where the counts gathered by a dispatch are known: on the host, which waits for them in the call, or only on the device.
  enum class CountsAt { host, device };
  NormalImpl(Group& group, const NormalConfig& c, CountsAt counts_at) : ExchangeBase(group), config(c), counts_at_(counts_at) {}

  // ---- Parts of a call ----

  /// Caller memory that is passed to a call, or null.
  struct Operand {
    const char* name;
    const void* data;
    size_t alignment;  ///< required by kernels, in bytes
  };
  /// A call's work besides moving rows: quantizing rows to fp8 in transit, or copying rows before peers read them.
  enum class ExtraWork : uint8_t { moves, quantises, copies };
  /// Input of begin().
  struct Frame {
    Operation operation;
    const char* options;  ///< type that contains `num_sms`, for errors
    void* stream;
    int num_sms;
    bool known_memory;
    ExtraWork extra_work;
    int64_t tokens;
    std::initializer_list<Operand> operands;
  };
  /// One collective call from beginning to end. Each backend derives a class with additional state.
  struct Call {
    Call() = default;
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    virtual ~Call() = default;
    CallContext context;         ///< counts on the device: without the epoch
    uint64_t signature = 0;      ///< ranks compare it; see signature()
    bool captured = false;       ///< in a graph
    bool always_pushes = false;  ///< combine per_route pushes rows even if their owners could read them in place
    /// For a dispatch to the caller's memory: this rank writes the rows of its own tokens there itself, as if its rows were at
    /// own_rows.
    bool own_placed = false;
    uint64_t own_rows = 0;
  };
  /// Routing of a fresh dispatch.
  struct Routing {
    const ExpertIds& ids;
    const float* weights;
    int64_t capacity;       ///< maximum rows that this rank receives, or kNoBound
    bool fail_on_overflow;  ///< all ranks end the call if one needs more than its capacity
    const DispatchOptions& options;
    const uint32_t* map_version;  ///< counts on the device: see with_map_version(); null: no slots are selected
  };
  static constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();
  /// A dispatch in progress.
  struct Dispatch {
    Dispatch(const ConstRows& caller_rows, const RowFormat& f, const DispatchOptions& o, const float* w = nullptr)
        : x(caller_rows), format(f), options(o), weights(w) {}
    const ConstRows& x;
    const RowFormat& format;
    const DispatchOptions& options;
    const float* weights;                      ///< weights in the records of a fresh dispatch
    std::shared_ptr<HandleData> fresh;         ///< null: cached dispatch
    std::shared_ptr<const HandleData> handle;  ///< `fresh`, or the caller's handle
    std::shared_ptr<OutputBlock> rows;         ///< null until taken
    Placement place{};                         ///< published by this rank
    bool placed = false;                       ///< rows arrive at options.out rather than in `rows`
    /// Rows that arrive in `rows` are copied to options.out as they arrive (place.dispatch.copies_out). In a group of one rank,
    /// there may be no such rows, because own rows are placed directly.
    bool copied = false;
    std::exception_ptr error;  ///< this rank cannot take part: no rank moves anything

    OutputLayout output() const { return {handle->rows_allocated, format.row_bytes, format.scale_bytes}; }
    int64_t output_bytes() const { return placed ? 0 : output().bytes(); }  ///< of `rows`
    std::byte* out() const { return static_cast<std::byte*>(options.out->data); }
    MoveCopies copies(const Call& call) const {
      if (place.dispatch.copies_out == 0 || error) return {};
      return {rows->data, out(), static_cast<std::byte*>(options.out->scales), !call.own_placed};
    }
    RecordLayout records() const { return {fresh ? fresh->records_allocated : 0, handle->topk}; }
  };
  /// Arrays of a handle delivered by a dispatch, in the backend's memory; an array that the handle lacks is null.
  struct HandleArrays {
    const int32_t *record_route = nullptr, *record_token = nullptr;
    const float *record_weight = nullptr, *row_weight = nullptr;
    const int64_t *row_source = nullptr, *first_row = nullptr, *kept = nullptr, *aligned = nullptr, *local_dropped = nullptr;
    const int64_t* invalid_ids = nullptr;
    const uint8_t* dropped = nullptr;
  };

  // ---- Implemented by a backend ----

  /// Memory for the slots of one call, allocated by reserve_slots().
  virtual SelectedSlots selected_slots() = 0;
  /// Performs the backend's own checks of memory and multiprocessors and begins the call.
  virtual std::unique_ptr<Call> begin(const Frame& frame) = 0;
  virtual void end(Call& call) = 0;
  /// Throws Error(pool_exhausted); see throw_pool_exhausted.
  virtual std::shared_ptr<OutputBlock> allocate(Call& call, size_t bytes, Content content) = 0;
  virtual std::shared_ptr<OutputBlock> allocate_for(const RowStream& stream, size_t bytes) = 0;
  /// Takes memory for d.output() and d.records() and sets d.rows and d.place. Throws Error(pool_exhausted).
  virtual void take_output(Call& call, Dispatch& d) = 0;
  /// Returns an empty handle with room for the tables of `tokens` tokens. If there is no room, sets `error`; the handle then
  /// only serves to take part in the call.
  virtual std::shared_ptr<HandleData> make_handle(Call& call, int64_t tokens, std::exception_ptr& error) = 0;
  /// Returns the caller's handle with tables that this backend's kernels can read.
  virtual std::shared_ptr<const HandleData> use_handle(Call& call, const Handle& handle) = 0;
  virtual HandleArrays arrays_of(const HandleData& h) const = 0;
  /// Exchanges counts and builds the tables of `h`. `offer`: this rank's placement if it is known before the counts, otherwise
  /// null. If counts are on the host, the counts and the resulting sizes are available on return.
  virtual void plan(Call& call, const Routing& routing, HandleData& h, const Placement* offer) = 0;
  /// Called after plan() if sizes depend on the counts; waits for the counts. Returns false if the call is left out; `error`
  /// then contains the reason.
  virtual bool await_counts(Call& call, HandleData& h, std::exception_ptr& error) = 0;
  /// Moves rows and, for a fresh dispatch, completes its handle.
  virtual void move(Call& call, Dispatch& d, const MoveShape& shape) = 0;
  /// Copies the arrived rows and their scales to d.options.out, unless they were copied as they arrived.
  virtual void copy_out(Call& call, const Dispatch& d) = 0;
  /// `error`: as in Dispatch.
  virtual void sum(Call& call, const HandleData& h, const SumShape& shape, const CombineOptions& options,
                   const SumStaging& staging, const std::exception_ptr& error) = 0;

  // ---- Available to a backend ----

  bool through_rings() const { return config.staging == Staging::ring; }
  bool spans_hosts() const { return !group_.host_map().one_host(); }
  /// The order in which kernels sum; on one host, per_host is replaced by the equivalent order.
  CombineOrder effective_order(CombineOrder order) const;
  /// Unique identity of this object, the same on all ranks. Combined with the epoch of a dispatch, it identifies the handle
  /// created by that dispatch.
  uint64_t object() const { return mix_hash(group_.nonce, object_); }
  /// Identity of the caller as sent to peers: the site or this object.
  uint64_t caller() const { return site_ != 0 ? kSiteOfCall | site_ : object_; }
  /// `state`: a description of the pool.
  [[noreturn]] void throw_pool_exhausted(size_t bytes, const std::string& state) const;

  /// Weights by which a combine multiplies rows. At most one is not null.
  struct SumWeights {
    const float* of_records;  ///< the dispatch's, per record: expert-major per_rank
    const float* of_routes;   ///< the dispatch's, per route: expert-major per_route
    const float* given;       ///< the caller's, which replace those of the dispatch
  };
  /// Returns the weights for a combine with a handle whose tables contain `of_records` and `of_routes` (or null).
  static SumWeights weights_of(const HandleData& h, const CombineOptions& o, const float* of_records, const float* of_routes);

  void construct(const std::function<void()>& build) {
    ExchangeBase::construct("NormalExchange", "NormalExchange::heap_bytes(...)", [&] {
      check_config(config, world());
      build();
      return agreed_fields(config);
    });
  }

  RingLayout rings_;
  ControlLayout control_;

 private:
  // checks.cpp: these throw invalid_argument or unsupported.
  RowFormat check_rows(const ConstRows& x, const DispatchOptions& options, int64_t tokens) const;
  /// `rows`: number of allocated rows; 0 if only the counts determine it.
  void check_out(const DispatchOptions& options, const RowFormat& format, int64_t rows) const;
  void check_ids(const ExpertIds& ids) const;
  void check_selector(SlotSelector* selector) const;
  void check_handle(const Handle& handle) const;
  void check_combine(const ConstRows& y, const Handle& handle, const void* out, const CombineOptions& options,
                     const float* out_weights) const;

  uint32_t site_ = 0;  ///< see NormalExchange::set_site

  // calls.cpp
  /// Signature of a call, identical on all ranks that make the same call. `h`: the call's handle, if it has one. The identity
  /// of the dispatch that made the handle is mixed in here or, if only the device knows it, by the kernel.
  uint64_t signature(Operation op, std::initializer_list<int64_t> options, const HandleData* h = nullptr) const;
  MoveShape move_shape(const Dispatch& d) const;
  /// Replaces the ids of a call with slots in selected_slots(), which it returns.
  SelectedSlots select_slots(SlotSelector& selector, ExpertIds& ids, const DispatchOptions& options);
  SumShape sum_shape(const ConstRows& y, const HandleData& h, void* out, const CombineOptions& options,
                     float* out_weights) const;

  // calls.cpp
  DispatchOptions resolved(DispatchOptions options) const;
  /// Maximum numbers of rows and records on a handle's rank, as far as the host knows.
  struct Extent {
    int64_t rows, records;
  };
  Extent extent_of(const HandleData& h) const;
  /// Rows that a dispatch with a capacity allocates: the capacity, but no more than any routing can produce.
  int64_t capacity_of(const DispatchOptions& options) const {
    return std::min(options.capacity, worst_case_rows(config, world()));
  }
  std::shared_ptr<HandleData> new_handle(Call& call, const ExpertIds& ids, const DispatchOptions& options,
                                         std::exception_ptr& error);
  /// Rows that a fresh dispatch allocates if the size does not depend on the counts.
  int64_t static_rows(const DispatchOptions& options) const {
    return options.size == SizePolicy::capacity ? capacity_of(options) : worst_case_rows(config, world());
  }
  /// Sets the numbers of rows and records for which a fresh dispatch has room. With SizePolicy::exact, call once the counts are
  /// known.
  void choose_sizes(const DispatchOptions& options, HandleData& h) const;
  /// Takes memory and sets the placement: the address of the memory, or the reason why there is none.
  void offer(Call& call, Dispatch& d);
  /// Moves rows, ends the call and delivers the result, or throws on all ranks.
  Dispatched finish(Call& call, Dispatch& d);
  Dispatched deliver(const Dispatch& d) const;
  /// True if only this rank reads the rows of a combine, regardless of where they are.
  bool alone(const HandleData& h) const { return world() == 1 && h.layout == Layout::rank_major; }
  /// True if a combine of rank-major rows first copies them, in stage(), to symmetric memory, where peers read them.
  bool copies_first(const ConstRows& y, const HandleData& h) const;
  /// Decides for all combines which rows are read in place and which are staged. `held`: memory that must live until the call
  /// ends.
  SumStaging stage(Call& call, const HandleData& h, const SumShape& shape, std::vector<std::shared_ptr<OutputBlock>>& held,
                   std::exception_ptr& error);

  const CountsAt counts_at_;
  const uint64_t config_hash_ = hash_of(1, agreed_fields(config));
};

}  // namespace switchyard::detail
