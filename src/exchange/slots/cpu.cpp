// SPDX-License-Identifier: Apache-2.0
// SlotSelector on the CPU. The calling thread replaces the ids.
#include <algorithm>
#include <cstring>
#include <utility>

#include "exchange/slots/impl.hpp"

namespace switchyard::detail {

namespace {

class CpuSlotSelector final : public SlotSelectorImpl {
 public:
  CpuSlotSelector(Group& group, const ExpertMap& map, std::span<const int64_t> routes, const char* object)
      : SlotSelectorImpl(group, map) {
    construct(object, "", [&] {
      words_ = make_table(map, routes, 1);
      counts_.assign(static_cast<size_t>(map.num_experts), 0);
      return fields(map, routes);
    });
    count_selector();
  }

  const int64_t* routes() const override { return counts_.data(); }

 private:
  SlotTable table() const { return {words_.data(), map().num_experts, map().num_slots(), rank()}; }

  template <class Id>
  void replace(const ExpertIds& ids, void* slots) {
    const SlotTable table = this->table();
    const auto* from = static_cast<const Id*>(ids.data);
    auto* to = static_cast<Id*>(slots);
    for (int64_t t = 0; t < ids.num_tokens; ++t)
      for (int64_t i = t * ids.topk; i < (t + 1) * ids.topk; ++i) {
        const int64_t id = from[i];
        if (id >= 0 && id < table.num_experts) ++counts_[static_cast<size_t>(id)];
        if (to) to[i] = static_cast<Id>(table(id, t));
      }
  }

  void check_call(const ExpertIds&, const void*) const override {}
  void run(const ExpertIds& ids, const SelectedSlots& to, void*, const int32_t* device_tokens, int) override {
    ExpertIds now = ids;
    if (device_tokens) now.num_tokens = std::clamp<int64_t>(*device_tokens, 0, ids.num_tokens);
    ids.is_int64 ? replace<int64_t>(now, to.slots) : replace<int32_t>(now, to.slots);
    if (to.version) *to.version = table().version();
  }
  void check_stream(const char*, void*) const override {}
  void read_ids(const ExpertIds& ids, void* to, void*) override { std::memcpy(to, ids.data, bytes_of(ids)); }
  void write_slots(const ExpertIds& ids, const void* from, void* slots, void*) override {
    std::memcpy(slots, from, bytes_of(ids));
  }
  void stage_table(std::vector<uint32_t> words) override { staged_ = std::move(words); }
  void use_table(void*) override { words_.swap(staged_); }
  void read_routes(int64_t* routes, bool reset) override {
    std::copy(counts_.begin(), counts_.end(), routes);
    if (reset) std::fill(counts_.begin(), counts_.end(), 0);
  }

  std::vector<uint32_t> words_, staged_;
  std::vector<int64_t> counts_;
};

}  // namespace

std::unique_ptr<SlotSelectorImpl> SlotSelectorImpl::make_on_cpu(Group& group, const ExpertMap& map,
                                                                std::span<const int64_t> routes, const char* object) {
  return std::make_unique<CpuSlotSelector>(group, map, routes, object);
}

}  // namespace switchyard::detail
