// SPDX-License-Identifier: Apache-2.0
#include "bench/points.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "cli/build_info.hpp"
#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "cli/words.hpp"
#include "device/clock.hpp"
#include "measure/figures.hpp"

namespace switchyard::tool {
namespace {

/// An option that a sweep may vary.
struct Axis {
  const char* name;
  int64_t BenchOptions::*target;
  int64_t min, max;
};
constexpr Axis kAxes[] = {
    {"tokens", &BenchOptions::tokens, 0, 1 << 20},
    {"ranks", &BenchOptions::ranks, 1, 64},
    {"warps", &BenchOptions::warps, 1, 256},
    {"blocks", &BenchOptions::blocks, 1, 256},
    {"hidden", &BenchOptions::hidden, 8, 1 << 20},
    {"sms", &BenchOptions::sms, 1, 1024},
    {"topk", &BenchOptions::topk, 1, kMaxTopk},
    {"experts", &BenchOptions::experts, 1, 1 << 16},
    {"intermediate", &BenchOptions::intermediate, 1, 1 << 17},
    {"pieces", &BenchOptions::pieces, 1, 16},
    {"late-us", &BenchOptions::late_us, 0, kMaxLateUs},
    {"capacity", &BenchOptions::capacity, 1, kMaxCapacity},
    {"spare-slots", &BenchOptions::spare_slots, 0, kMaxSpareSlots},
};

/// A sweepable option whose value is a word. If `allowed` is empty, it is validated like the flag.
struct WordAxis {
  const char* name;
  std::string BenchOptions::*target;
  std::vector<std::string> allowed;
};
const std::vector<WordAxis>& word_axes() {
  static const std::vector<WordAxis> axes{{"dtype", &BenchOptions::dtype, kRowTypes},
                                          {"quantize", &BenchOptions::quantize, kQuantize},
                                          {"accumulate", &BenchOptions::accumulate, kAccumulate},
                                          {"scaling", &BenchOptions::scaling, kScalings},
                                          {"intermediate-scaling", &BenchOptions::intermediate_scaling, kOutputScalings},
                                          {"layout", &BenchOptions::layout, kLayouts},
                                          {"order", &BenchOptions::order, kOrders},
                                          {"sending", &BenchOptions::sending, kSendings},
                                          {"scale-order", &BenchOptions::scale_order, kScaleOrders},
                                          {"routing", &BenchOptions::routing, {}}};
  return axes;
}

std::vector<std::string> axis_names() {
  std::vector<std::string> names;
  for (const Axis& axis : kAxes) names.emplace_back(axis.name);
  for (const WordAxis& axis : word_axes()) names.emplace_back(axis.name);
  return names;
}

const Axis* axis_named(const std::string& name) {
  const Axis* axis = std::find_if(std::begin(kAxes), std::end(kAxes), [&](const Axis& a) { return name == a.name; });
  return axis == std::end(kAxes) ? nullptr : axis;
}
const WordAxis* word_axis_named(const std::string& name) {
  for (const WordAxis& axis : word_axes())
    if (name == axis.name) return &axis;
  return nullptr;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string value_of(const BenchOptions& point, const std::string& name) {
  const Axis* const axis = axis_named(name);
  return axis ? std::to_string(point.*(axis->target)) : point.*(word_axis_named(name)->target);
}

/// Swept options other than `known`.
std::vector<std::string> other_swept_options(const BenchOptions& point, const std::vector<std::string>& known) {
  std::vector<std::string> names = point.swept;
  std::erase_if(names, [&](const std::string& name) { return contains(known, name); });
  return names;
}

std::vector<std::string> behind(std::vector<std::string> first, const std::vector<std::string>& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

/// The words of a sweep. \throws UsageError
std::vector<std::string> parse_words(const WordAxis& axis, const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (word.empty() || (!axis.allowed.empty() && !contains(axis.allowed, word)))
      throw UsageError(
          fmt::format("--sweep {}: '{}' given; allowed: {}{}", axis.name, word,
                      axis.allowed.empty() ? "what --" + std::string(axis.name) + " takes" : joined(axis.allowed, ", "),
                      did_you_mean(word, axis.allowed)));
    words.push_back(word);
    begin = end + 1;
  }
  return words;
}

/// Replaces every point with one point per value of `sweep`, "NAME=N,N,...".
void vary(std::vector<BenchOptions>& points, const std::string& sweep) {
  const size_t equals = sweep.find('=');
  const std::string name = sweep.substr(0, equals);
  const Axis* axis = axis_named(name);
  const WordAxis* words = word_axis_named(name);
  if (equals == std::string::npos || (axis == nullptr && words == nullptr)) {
    throw UsageError(fmt::format("--sweep: '{}' given; allowed: NAME=N,N,... with NAME one of {}.{}", sweep,
                                 joined(axis_names(), ", "), did_you_mean(name, axis_names())));
  }
  if (contains(points.front().swept, name))
    throw UsageError(fmt::format("--sweep: '{}' given after another of {}; allowed: one list for each name", sweep, name));
  std::vector<BenchOptions> next;
  const auto add = [&](const BenchOptions& point, auto BenchOptions::*target, const auto& value) {
    next.push_back(point);
    next.back().*target = value;
    next.back().swept.push_back(name);
  };
  const std::string values = sweep.substr(equals + 1);
  for (const BenchOptions& point : points) {
    if (words)
      for (const std::string& word : parse_words(*words, values)) add(point, words->target, word);
    else
      for (const int64_t value : parse_integers("--sweep " + name, values, axis->min, axis->max))
        add(point, axis->target, value);
  }
  points = std::move(next);
}

/// Whether a flag has an effect here, which given option prevents the effect, and where the flag belongs instead.
struct Place {
  bool here;
  std::string given, why;
};
struct Places {
  Place gpus, cpu, normal, ordered, decode, late, layer, low_latency, ring, shape;
};
Places places_of(const BenchOptions& o) {
  const Mode& mode = mode_named(o.mode);
  const bool cuda = backend_named(o.backend) == Backend::cuda;
  const std::string named = "--mode " + o.mode;
  return {
      .gpus = {cuda, "--backend cpu", "; it belongs to --backend cuda"},
      .cpu = {!cuda, "--backend cuda", "; it belongs to --backend cpu"},
      .normal = {mode.has_layouts, named, "; it belongs to --mode normal"},
      .ordered = {mode.has_layouts || mode.has_experts, named, "; it belongs to --mode normal and layer"},
      .decode = {!mode.has_layouts && !mode.has_experts, named, "; it belongs to --mode low_latency and flat"},
      .late = {!mode.has_experts && (!mode.has_layouts || cuda), mode.has_layouts ? named + " --backend cpu" : named,
               "; it belongs to --mode low_latency and flat, and to --mode normal on GPUs"},
      .layer = {mode.has_experts, named, "; it belongs to --mode layer"},
      .low_latency = {&mode == &kLowLatency, named, "; it belongs to --mode low_latency"},
      .ring = {staging_named(o.staging) == Staging::ring, "--staging direct", "; it belongs to --staging ring"},
      .shape = {!o.contest, "--contest", ", which sets the shapes"},
  };
}

/// Throws on flags and sweeps that have no effect in this mode on this backend.
void refuse_without_effect(const BenchOptions& o, const std::vector<std::string>& swept) {
  const BenchOptions defaults;
  const auto [gpus, cpu, normal, ordered, decode, late, layer, low_latency, ring, shape] = places_of(o);
  const struct {
    std::string name;
    bool changed;
    const Place& place;
  } flags[] = {
      {"sms", o.sms != defaults.sms, gpus},
      {"blocks", o.blocks != defaults.blocks, cpu},
      {"warps", o.warps != defaults.warps, cpu},
      {"layout", o.layout != defaults.layout, normal},
      {"staging", o.staging != defaults.staging, normal},
      {"order", o.order != defaults.order, ordered},
      {"alignment", o.alignment != defaults.alignment, normal},
      {"exchange", o.exchange != defaults.exchange, layer},
      {"intermediate", o.intermediate != defaults.intermediate, layer},
      {"capacity", o.capacity != defaults.capacity, layer},
      {"spare-slots", o.spare_slots != defaults.spare_slots, layer},
      {"accumulate", o.accumulate != defaults.accumulate, layer},
      {"scaling", o.scaling != defaults.scaling, layer},
      {"intermediate-scaling", o.intermediate_scaling != defaults.intermediate_scaling, layer},
      {"balance", o.balance, layer},
      {"cached", o.cached, normal},
      {"cached", o.cached, cpu},  // on GPUs both kinds of dispatch are always measured
      {"sets", o.sets != defaults.sets, normal},
      {"sets", o.sets != defaults.sets, cpu},
      {"limit-ms", o.limit_ms != defaults.limit_ms, normal},
      {"limit-ms", o.limit_ms != defaults.limit_ms, cpu},
      {"pin", o.pin != defaults.pin, normal},
      {"pin", o.pin != defaults.pin, cpu},
      {"pieces", o.pieces != defaults.pieces, decode},
      {"sending", o.sending != defaults.sending, decode},
      {"late-us", o.late_us != defaults.late_us, late},
      {"compute", o.compute != defaults.compute, low_latency},
      {"scale-order", o.scale_order != defaults.scale_order, low_latency},
      {"channels", o.channels != defaults.channels, ring},
      {"send-chunk", o.send_chunk != defaults.send_chunk, ring},
      {"slots", o.slots != defaults.slots, ring},
      {"tokens", o.tokens != defaults.tokens, shape},
      {"hidden", o.hidden != defaults.hidden, shape},
      {"experts", o.experts != defaults.experts, shape},
      {"topk", o.topk != defaults.topk, shape},
      {"dtype", o.dtype != defaults.dtype, shape},
      {"routing", o.routing != defaults.routing, shape},
      {"seed", o.seed != defaults.seed, shape},
  };
  for (const auto& flag : flags) {
    if (flag.place.here) continue;
    const bool is_swept = contains(swept, flag.name);
    if (!flag.changed && !is_swept) continue;
    throw UsageError(
        fmt::format("--{}{}: given with {}{}", is_swept ? "sweep " : "", flag.name, flag.place.given, flag.place.why));
  }
}

}  // namespace

std::vector<BenchOptions> contest_points(const BenchOptions& options) {
  struct Shape {
    int64_t experts, topk, hidden, tokens, seed;
  };
  constexpr Shape kShapes[] = {{8, 2, 6144, 16, 6635},
                               {64, 6, 2048, 32, 1234},
                               {128, 4, 2880, 128, 51},
                               {128, 8, 4096, 256, 175},
                               {256, 8, 7168, 256, 4}};
  std::vector<BenchOptions> points;
  for (const Shape& shape : kShapes) {
    BenchOptions& o = points.emplace_back(options);
    o.dtype = "f16";
    o.routing = "uniform";
    o.experts = shape.experts;
    o.topk = shape.topk;
    o.hidden = shape.hidden;
    o.tokens = shape.tokens;
    o.seed = shape.seed;
    o.swept = {"hidden"};  // it differs between all shapes
  }
  return points;
}

std::vector<BenchOptions> bench_points(const BenchOptions& options) {
  if (options.contest && &mode_named(options.mode) != &kFlat)
    throw UsageError("--contest: given with --mode " + options.mode + "; it belongs to --mode flat");
  std::vector<BenchOptions> points{options};
  if (options.contest && !options.sweep.empty()) throw UsageError("--sweep: given with --contest, which sets the shapes");
  for (BenchOptions& point : points)
    if (point.iterations == 0) point.iterations = backend_named(point.backend) == Backend::cuda ? 200 : 40;
  for (const std::string& sweep : options.sweep) vary(points, sweep);
  refuse_without_effect(options, points.front().swept);
  return options.contest ? contest_points(points.front()) : points;
}

void check_point_memory(const BenchOptions& point, double bytes, const measure::Machine& machine) {
  const auto available = static_cast<double>(machine.memory_available);
  if (bytes <= available) return;
  throw UsageError(
      fmt::format("--ranks {} --tokens {} --hidden {} need about {} of memory, {} are available; make one of them smaller",
                  point.ranks, point.tokens, point.hidden, binary_size(bytes), binary_size(available)));
}

double expected_mean_ranks(int world, int experts, int topk) {
  double miss = 1;
  const double others = experts - experts / static_cast<double>(world);
  for (int k = 0; k < topk; ++k) miss *= (others - k) / (experts - k);
  return world * (1 - miss);
}

void check_mean_ranks(double mean, int world, int experts, int topk, int64_t seed) {
  const double expected = expected_mean_ranks(world, experts, topk);
  if (experts % world != 0 || std::abs(mean / expected - 1) <= 0.01) return;
  throw UsageError(fmt::format("--seed: {} gives {:.3f} ranks per token, more than 1 % from the expected {:.3f}; use another",
                               seed, mean, expected));
}

std::string point_title(const BenchOptions& point) {
  std::string title = counted(point.ranks, "rank") + ", " + counted(point.tokens, "token");
  for (const std::string& name : other_swept_options(point, {"ranks", "tokens"}))
    title += fmt::format(", {} {}", name, value_of(point, name));
  return title;
}

std::string common_hidden(const BenchOptions& point) {
  return contains(point.swept, "hidden") ? "" : fmt::format(", hidden {}", point.hidden);
}

std::string common(const BenchOptions& point, const std::string& name) {
  return contains(point.swept, name) ? "(see below)" : value_of(point, name);
}

void print_tail(const BenchOptions& any) {
  if (any.iterations < 100) fmt::print("  max: of {} iterations; p99 needs 100 or more.\n", any.iterations);
}

void print_late(const BenchOptions& any) {
  const bool swept = std::find(any.swept.begin(), any.swept.end(), "late-us") != any.swept.end();
  if (!swept && any.late_us == 0) return;
  fmt::print("  Rank 0 enters each call {} after the other ranks; all times start at its entry.\n",
             swept ? "late-us microseconds" : fmt::format("{} us", any.late_us));
}

PointTable::PointTable(const BenchOptions& any, const std::vector<std::string>& shown, const std::vector<std::string>& header)
    : swept_(other_swept_options(any, shown)), table_(behind(swept_, header)) {}

void PointTable::row(const BenchOptions& point, const std::vector<std::string>& cells) {
  std::vector<std::string> values;
  for (const std::string& name : swept_) values.push_back(value_of(point, name));
  table_.row(behind(std::move(values), cells));
}

}  // namespace switchyard::tool
