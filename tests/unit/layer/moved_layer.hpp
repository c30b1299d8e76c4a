// SPDX-License-Identifier: Apache-2.0
// One rank with a MoeLayer over the slots of a map of experts, whose weights move, and the same layer without replicas, which
// must give the same bits. The code is shared by both backends, like moe_rank.hpp.
#pragma once

#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/expert_map.hpp"
#include "unit/layer/moe_rank.hpp"

namespace switchyard::testing {

template <class Rig>
class MovedLayer {
 public:
  static constexpr int kSpareSlots = 2;
  static constexpr size_t kStagingBytes = size_t{1} << 20;

  static size_t heap_bytes(const MoeCase& m) {
    return m.heap_bytes(Rig::kBackend) + MoeLayer::heap_bytes(of_slots(m), m.c.world(), Rig::kBackend) + kStagingBytes;
  }

  /// `meet` is collective: afterwards, all ranks are idle. `copy_stream`: of SlotWeights.
  MovedLayer(Rig& rig, Group& group, const MoeCase& m, void* copy_stream, std::function<void()> meet)
      : rig_(rig), group_(group), m_(m), rank_(group.rank()), copy_stream_(copy_stream), meet_(std::move(meet)) {
    const auto tokens = static_cast<size_t>(m.c.max_tokens()), routes = tokens * static_cast<size_t>(m.c.topk);
    for (void** rows : {&x_, &out_}) *rows = rig.allocate(tokens * m.c.row_bytes());
    for (int32_t** ids : {&ids_, &slots_}) *ids = static_cast<int32_t*>(rig.allocate(routes * 4));
    weights_ = static_cast<float*>(rig.allocate(routes * 4));
    add_arrays();
  }

  /// Collective. Returns how a layer over slots differs from one without replicas, before and after moves of its weights.
  std::string check() {
    const int first = first_expert(m_.c.experts, m_.c.world(), rank_),
              end = first_expert(m_.c.experts, m_.c.world(), rank_ + 1);
    const MoeWeights own = make_weights(rig_, m_, first, end);
    MoeLayer plain = made(m_.moe(), own);
    ExpertMap map = home_map(m_.c.experts, m_.c.world(), slots_per_rank(m_));
    fill_slots(map);
    MoeLayer layer = made(of_slots(m_), in_slots());
    SlotSelector selector(group_, map);
    const std::vector<SlotArray> arrays = slot_arrays();
    SlotWeights moving(group_, map.slots_per_rank, arrays, {kStagingBytes, copy_stream_});
    std::string found;
    const auto compare = [&](MoeLayer& moved, const char* when, void* weights_ready = nullptr) {
      for (uint32_t call = 1; call <= 2; ++call) {
        write(call);
        const std::vector<std::byte> expected = result_of(plain, ids_);
        selector.select(ids(ids_), slots_, rig_.stream());
        if (result_of(moved, slots_, call == 1 ? weights_ready : nullptr) != expected)
          found += m_.c.name + ": other bits than without replicas " + when + "; ";
      }
    };
    compare(layer, "before the moves");

    const ExpertMap replicas = with_replicas(map);
    moving.move(group_, map, replicas, rig_.stream());
    moving.wait(rig_.stream());
    selector.set_map(replicas, {}, rig_.stream());
    meet_();
    if constexpr (Rig::kBackend == Backend::cuda) compare(layer, "after a move that a call waits for", moving.ready_event());
    MoeLayer after_replicas = layer.with_weights(in_slots());
    compare(after_replicas, "after a move in the background");
    found += uses_replicas(map);

    const ExpertMap exchanged = exchange(replicas);
    meet_();
    const int64_t received = move_weights(group_, replicas, exchanged, arrays, {kStagingBytes, rig_.stream()});
    if (m_.c.world() > 1 && received == 0) found += "no weights were exchanged; ";
    selector.set_map(exchanged, {}, rig_.stream());
    MoeLayer after_exchange = layer.with_weights(in_slots());
    compare(after_exchange, "after an exchange of experts");
    meet_();
    return found;
  }

 private:
  struct Array {
    std::byte *of_experts, *of_slots;
    size_t bytes;  ///< per expert
  };

  static int slots_per_rank(const MoeCase& m) { return (m.c.experts + m.c.world() - 1) / m.c.world() + kSpareSlots; }
  static MoeLayerConfig of_slots(const MoeCase& m) {
    MoeLayerConfig config = m.moe();
    config.num_experts = m.c.world() * slots_per_rank(m);
    return config;
  }

  void add_arrays() {
    const RankWeights all = make_weights(rig_, m_, 0, m_.c.experts);
    const size_t bytes = dtype_bytes(m_.type(), m_.c.hidden * m_.c.intermediate);
    const auto scales = static_cast<size_t>(num_scales(m_.c.hidden) * num_scales(m_.c.intermediate)) * 4;
    const auto add = [&](void* of_experts, size_t per_expert) {
      arrays_.push_back({static_cast<std::byte*>(of_experts),
                         static_cast<std::byte*>(rig_.allocate(per_expert * static_cast<size_t>(slots_per_rank(m_)))),
                         per_expert});
    };
    add(all.w13, 2 * bytes);
    add(all.w2, bytes);
    if (!m_.fp8) return;
    add(all.w13_scales, 2 * scales);
    add(all.w2_scales, scales);
  }
  /// Empty slots contain NaN.
  void fill_slots(const ExpertMap& map) {
    for (const Array& array : arrays_)
      for (int s = 0; s < map.slots_per_rank; ++s) {
        std::vector<std::byte> bytes(array.bytes, std::byte{0xff});
        if (const int e = map.expert_of_slot[static_cast<size_t>(rank_ * map.slots_per_rank + s)]; e >= 0)
          rig_.read(bytes.data(), array.of_experts + static_cast<size_t>(e) * array.bytes, array.bytes);
        rig_.write(array.of_slots + static_cast<size_t>(s) * array.bytes, bytes.data(), array.bytes);
      }
  }
  std::vector<SlotArray> slot_arrays() const {
    std::vector<SlotArray> arrays;
    for (const Array& array : arrays_) arrays.push_back({array.of_slots, array.bytes});
    return arrays;
  }
  MoeWeights in_slots() const {
    MoeWeights w{arrays_[0].of_slots, arrays_[1].of_slots, nullptr, nullptr, rig_.stream(), nullptr};
    if (m_.fp8) w.w13_scales = arrays_[2].of_slots, w.w2_scales = arrays_[3].of_slots;
    return w;
  }
  MoeLayer made(MoeLayerConfig config, const MoeWeights& w) const {
    config.w13_scales = w.w13_scales;
    config.w2_scales = w.w2_scales;
    return {group_, config, w.w13, w.w2, rig_.stream()};
  }

  /// Every spare slot holds an expert of another rank.
  static ExpertMap with_replicas(ExpertMap map) {
    for (int p = 0; p < map.num_slots(); ++p)
      if (int32_t& e = map.expert_of_slot[static_cast<size_t>(p)]; e < 0) e = (p * 7 + 3) % map.num_experts;
    return map;
  }
  /// Slot p holds the expert of slot p + C - 1, so that most ranks exchange most of their experts.
  static ExpertMap exchange(const ExpertMap& map) {
    ExpertMap to = map;
    for (int p = 0; p < map.num_slots(); ++p)
      to.expert_of_slot[static_cast<size_t>(p)] =
          map.expert_of_slot[static_cast<size_t>((p + map.slots_per_rank - 1) % map.num_slots())];
    return to;
  }

  ExpertIds ids(int32_t* of) const { return ExpertIds::of(of, tokens(), m_.c.topk); }
  int64_t tokens() const { return m_.c.tokens[static_cast<size_t>(rank_)]; }
  void write(uint32_t call) {
    const LayerInput input(m_.c, call, rank_);
    rig_.write(x_, input.x.data(), input.x.size());
    rig_.write(ids_, input.ids.data(), input.ids.size() * 4);
    rig_.write(weights_, input.weights.data(), input.weights.size() * 4);
  }
  std::vector<std::byte> result_of(MoeLayer& layer, int32_t* routes, void* weights_ready = nullptr) {
    std::vector<std::byte> rows(static_cast<size_t>(tokens()) * m_.c.row_bytes(), std::byte{0xcc});
    rig_.write(out_, rows.data(), rows.size());
    meet_();
    layer.forward(x_, ids(routes), weights_, out_, {.stream = rig_.stream(), .weights_ready = weights_ready});
    meet_();
    rig_.read(rows.data(), out_, rows.size());
    return rows;
  }
  /// Whether, in the last call, any route of any rank goes to a slot that is empty in `home`.
  std::string uses_replicas(const ExpertMap& home) {
    std::vector<int32_t> slots(static_cast<size_t>(tokens() * m_.c.topk));
    rig_.read(slots.data(), slots_, slots.size() * 4);
    int64_t mine = 0;
    for (const int32_t p : slots) mine += p >= 0 && home.expert_of_slot[static_cast<size_t>(p)] < 0;
    std::vector<int64_t> all(static_cast<size_t>(group_.size()));
    group_.all_gather(&mine, sizeof mine, all.data());
    return std::accumulate(all.begin(), all.end(), int64_t{0}) > 0 ? "" : "no route uses a replica; ";
  }

  Rig& rig_;
  Group& group_;
  const MoeCase m_;
  const int rank_;
  void* const copy_stream_;
  const std::function<void()> meet_;
  void *x_ = nullptr, *out_ = nullptr;
  int32_t *ids_ = nullptr, *slots_ = nullptr;
  float* weights_ = nullptr;
  std::vector<Array> arrays_;
};

}  // namespace switchyard::testing
