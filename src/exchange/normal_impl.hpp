// SPDX-License-Identifier: Apache-2.0
// What the backends of normal mode share: the virtual interface behind NormalExchange, and every check that the host can make.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>

#include "exchange/exchange_base.hpp"
#include "layout/ring_layout.hpp"
#include "plan/plan.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::detail {

/// Row types of one call.
struct RowFormat {
  DType src_type, type;  ///< given, sent
  ScaleKind scales;
  bool quantize;
  int64_t src_row_bytes, row_bytes, scale_bytes;
};

/// Throws invalid_argument naming the field.
void check_config(const NormalConfig& config, int world);
/// Most rows that a rank can receive, whatever the routing.
int64_t worst_case_rows(const NormalConfig& config, int world);
/// Rings of `config`, as usual_ring() has them; none for direct staging.
RingLayout ring_layout(const NormalConfig& config, int world);
/// Rows that are appended before the consumer is told: as asked for, or as many as there are slots.
inline int send_chunk(const NormalConfig& config, const RingLayout& rings) {
  return static_cast<int>(std::min<int64_t>(config.ring.send_chunk, rings.slots));
}
/// Of everything in `config` that all ranks must agree on.
uint64_t config_hash(const NormalConfig& config);

/// Memory of rows that a user holds. Given back by the destructor, on any thread. Keeps the bookkeeping alive, not the heap:
/// rows of a pool must not be touched after their group is gone.
struct OutputBlock {
  size_t offset = 0;  ///< in the heap, if it is symmetric memory
  std::byte* data = nullptr;

  OutputBlock() = default;
  OutputBlock(const OutputBlock&) = delete;
  OutputBlock& operator=(const OutputBlock&) = delete;
  virtual ~OutputBlock() = default;
  virtual void used_by(void*) {}
};

class NormalImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  virtual ~NormalImpl() = default;
  NormalImpl(const NormalImpl&) = delete;
  NormalImpl& operator=(const NormalImpl&) = delete;

  virtual Dispatched dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights,
                              const DispatchOptions& options) = 0;
  virtual Dispatched redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options) = 0;
  /// CUDA: the stream whose work will touch rows first; not named: any.
  struct RowStream {
    bool named = false;
    void* stream = nullptr;
  };
  virtual RowBuffer allocate_rows(const Handle& handle, DType type, const RowStream& stream) = 0;
  /// CPU: nothing is captured.
  virtual std::shared_ptr<void> make_graph_memory() { return nullptr; }
  virtual void use_graph_memory(std::shared_ptr<void>) {}
  virtual void combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options,
                       float* out_weights) = 0;
  virtual CallStatistics last_call() = 0;

  const NormalConfig config;

 protected:
  NormalImpl(Group& group, const NormalConfig& c) : ExchangeBase(group), config(c) {}

  // normal_checks.cpp: throw invalid_argument or unsupported.
  RowFormat check_rows(const ConstRows& x, const DispatchOptions& options, int64_t tokens) const;
  void check_ids(const ExpertIds& ids) const;
  void check_handle(const Handle& handle) const;
  /// `rows`: least number of rows of y.
  void check_combine(const ConstRows& y, const Handle& handle, int64_t rows, const void* out, const CombineOptions& options,
                     const float* out_weights) const;
  /// Rows that a dispatch with a capacity takes at most, and allocates: no more than any routing can bring.
  int64_t capacity_of(const DispatchOptions& options) const {
    return std::min(options.capacity, worst_case_rows(config, world()));
  }
  /// Of a call: equal on all ranks that make the same one.
  uint64_t signature(Operation op, std::initializer_list<int64_t> values) const;
  /// Equal on all ranks, of this object only. With the epoch of a dispatch: the identity of the handle that it makes.
  uint64_t object() const { return mix_hash(group_.nonce, object_); }

  /// What a call's parameters are on every backend, whatever memory the tables lie in.
  void fill_move(struct DispatchParams& p, const ConstRows& x, const RowFormat& format, const HandleData& h) const;
  void fill_sum(struct CombineParams& p, const ConstRows& y, const HandleData& h, void* out, const CombineOptions& options,
                float* out_weights) const;

  void construct(const std::function<void()>& build) {
    ExchangeBase::construct("NormalExchange", "NormalConfig", [&] {
      check_config(config, world());
      build();
      return config_hash(config);
    });
  }

  RingLayout rings_;
};

/// On the CPU; a GPU's rank makes its own (device_rank.hpp).
std::unique_ptr<NormalImpl> make_cpu_normal(Group& group, const NormalConfig& config);

}  // namespace switchyard::detail
