// SPDX-License-Identifier: Apache-2.0
// Shared by the backends of the ledger combine: the virtual interface behind LedgerCombine and values derived from a
// configuration.
#pragma once

#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "exchange/group/exchange_base.hpp"
#include "layout/ledger_layout.hpp"
#include "plan/ledger_work.hpp"
#include "switchyard/ledger.hpp"

namespace switchyard::detail {

/// Throws invalid_argument, naming the field.
void check_config(const LedgerConfig& config, int world);
/// Layout of the symmetric memory, without a base address.
LedgerLayout ledger_layout(const LedgerConfig& config, int world);

/// A prepared ledger. `work` and `row_of`: data that the backend keeps in host memory.
struct LedgerData {
  uint64_t object = 0;     ///< LedgerImpl::id of the object that made it
  uint64_t signature = 0;  ///< of calls with it; identical on all ranks that hold the same routing
  int64_t tokens = 0, rows = 0, returned = 0;
  bool some_unnamed = false;  ///< some returned rows are in no sum
  LedgerWork work;
  std::vector<int32_t> row_of;

  LedgerData() = default;
  LedgerData(const LedgerData&) = delete;
  LedgerData& operator=(const LedgerData&) = delete;
  virtual ~LedgerData() = default;
};

class LedgerImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  virtual ~LedgerImpl() = default;
  template <class A>
  static std::unique_ptr<LedgerImpl> make_on_cpu(Group& group, const LedgerConfig& config);  // cpu.cpp
  static std::unique_ptr<LedgerImpl> make_on_gpu(Group& group, const LedgerConfig& config);  // gpu.cpp
  LedgerImpl(const LedgerImpl&) = delete;
  LedgerImpl& operator=(const LedgerImpl&) = delete;

  virtual std::shared_ptr<const LedgerData> prepare(const LedgerTables& tables) = 0;
  virtual void combine(const ConstRows& y, const float* probs, const PreparedLedger& ledger, void* out,
                       const LedgerCombineOptions& options) = 0;
  virtual ConstRows returned() = 0;
  virtual CallStatistics last_call() = 0;
  /// prepare(), inside a collective call.
  PreparedLedger prepare_in_call(const LedgerTables& tables);
  PreparedLedger prepare_in_call(std::span<const std::byte> route_meta, int64_t tokens);

  const LedgerConfig config;

 protected:
  LedgerImpl(Group& group, const LedgerConfig& c);
  int64_t row_bytes() const { return static_cast<int64_t>(dtype_bytes(config.dtype, config.hidden)); }
  int64_t chunk_bytes() const { return int64_t{tuned_.chunk_kib > 0 ? tuned_.chunk_kib : kDefaultChunkKib} << 10; }

  /// Checks the tables and fills in all members of `data`.
  void fill(const LedgerTables& tables, LedgerData& data) const;
  /// Throws if any argument of a call is invalid.
  void check_call(const ConstRows& y, const PreparedLedger& ledger, const void* out) const;
  /// Sets the call parameters that do not depend on the backend, regardless of where the tables are.
  void fill_call(struct LedgerParams& p, const ConstRows& y, const float* probs, const LedgerData& ledger, void* out) const;
  /// Bytes of symmetric memory that survive sleep. These include blank sentinel rows because they are not zero.
  size_t kept_bytes() const {
    return layout_.has_sentinel_rows() ? std::numeric_limits<size_t>::max() : static_cast<size_t>(layout_.control_bytes());
  }
  /// A step of construct(): checks the configuration and takes symmetric memory.
  void take_memory(Backend backend);
  AgreedFields fields() const;
  uint64_t hash() const;  ///< of all of `config` that ranks must agree on

  TuningValues tuned_;  ///< set by the backend before the first prepare()
  LedgerLayout layout_;
  const uint64_t id_;
};

}  // namespace switchyard::detail
