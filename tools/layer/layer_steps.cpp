// SPDX-License-Identifier: Apache-2.0
#include "layer/layer_steps.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "layer/layer_times.hpp"
#include "switchyard/status.hpp"

namespace switchyard::tool {
namespace {

/// Maximum number of calls in one recording.
constexpr int64_t kCallsAtOnce = 16;

struct Step {
  const char* span;  ///< name of its spans
  double LayerSteps::*seconds;
};
constexpr Step kSteps[] = {{"dispatch", &LayerSteps::dispatch},
                           {"expert_up", &LayerSteps::up},
                           {"expert_down", &LayerSteps::down},
                           {"expert_mlp", &LayerSteps::experts},
                           {"combine", &LayerSteps::combine}};

const Step* step_of(const TraceSlice& s) {
  if (s.track >= 0) return nullptr;
  const Step* const found =
      std::find_if(std::begin(kSteps), std::end(kSteps), [&](const Step& step) { return s.name == step.span; });
  return found == std::end(kSteps) ? nullptr : found;
}

struct Key {
  const char* name;
  double LayerSteps::*seconds;
  bool of_a_part;
};
constexpr Key kKeys[] = {{"dispatch", &LayerSteps::dispatch, false}, {"up", &LayerSteps::up, true},
                         {"down", &LayerSteps::down, true},          {"experts", &LayerSteps::experts, false},
                         {"combine", &LayerSteps::combine, false},   {"recorded_layer", &LayerSteps::layer, false}};

/// Collective. Returns whether `mine` is true on any rank.
bool any_rank(Group& group, bool mine) {
  std::vector<uint8_t> all(static_cast<size_t>(group.size()));
  const auto answer = static_cast<uint8_t>(mine);
  group.all_gather(&answer, 1, all.data());
  return std::find(all.begin(), all.end(), 1) != all.end();
}

}  // namespace

std::vector<LayerSteps> layer_steps(const std::vector<TraceSlice>& slices, int rank) {
  std::vector<const TraceSlice*> spans;
  for (const TraceSlice& s : slices)
    if (s.rank == rank && step_of(s)) spans.push_back(&s);
  std::stable_sort(spans.begin(), spans.end(), [](const auto* a, const auto* b) { return a->begin_us < b->begin_us; });
  std::vector<LayerSteps> calls;
  double begin_us = 0;
  for (const TraceSlice* s : spans) {
    const Step& step = *step_of(*s);
    if (step.seconds == &LayerSteps::dispatch) {
      calls.emplace_back();
      begin_us = s->begin_us;
    }
    if (calls.empty()) continue;  // the end of a call that began before the recording
    LayerSteps& call = calls.back();
    call.*step.seconds += s->duration_us * 1e-6;
    call.layer = std::max(call.layer, (s->begin_us + s->duration_us - begin_us) * 1e-6);
  }
  for (LayerSteps& call : calls) call.experts += call.up + call.down;
  return calls;
}

std::vector<LayerSteps> record_steps(Group& group, Clock& clock, const TraceOptions& options, int64_t calls,
                                     const std::function<void()>& layer) {
  const RankDevice& device = clock.device();
  Trace trace(group.size(), options);
  std::vector<LayerSteps> all;
  int64_t at_once = kCallsAtOnce;
  while (static_cast<int64_t>(all.size()) < calls) {
    const int64_t count = std::min(at_once, calls - static_cast<int64_t>(all.size()));
    trace.clear();
    const std::vector<TraceSlice> slices = recorded(group, device, trace, [&] { (void)clock.time(layer, 1, count); });
    // On the host, a call's spans have a track of their own. On a GPU, the end of a call is that of its last worker's span.
    if (at_once > 1 && any_rank(group, !device.on_host() && trace.lost() > 0)) {
      at_once /= 2;
      continue;
    }
    const std::vector<LayerSteps> some = layer_steps(slices, group.rank());
    if (static_cast<int64_t>(some.size()) != count + 1)
      throw Error(ErrorCode::system, fmt::format("trace: {} calls of a layer recorded, {} made", some.size(), count + 1));
    all.insert(all.end(), some.begin() + 1, some.end());  // the first one takes longer
  }
  return all;
}

std::vector<const char*> step_keys() {
  std::vector<const char*> keys;
  for (const Key& key : kKeys) keys.push_back(key.name);
  return keys;
}

void add_steps(nlohmann::json& out, const std::vector<LayerSteps>& steps, bool in_parts) {
  for (const Key& key : kKeys)
    if (in_parts || !key.of_a_part)
      for (const LayerSteps& one : steps) out[key.name].push_back(one.*key.seconds);
}

}  // namespace switchyard::tool
