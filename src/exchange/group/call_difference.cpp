// SPDX-License-Identifier: Apache-2.0
#include "exchange/group/call_difference.hpp"

#include <algorithm>
#include <cassert>
#include <span>

#include "base/call_signature.hpp"
#include "base/enum_text.hpp"
#include "protocol/low_latency/call.hpp"

namespace switchyard::detail {

namespace {

/// An option in a word; the options of an operation follow each other from bit 0.
struct PackedOption {
  const char* name;
  int bits;
  std::string (*text)(int64_t value);
};

template <class E>
std::string named(int64_t value) {
  return text_of(static_cast<E>(value));
}
std::string yes(int64_t value) { return value != 0 ? "true" : "false"; }
std::string given(int64_t value) { return value != 0 ? "given" : "null"; }
std::string number(int64_t value) { return std::to_string(value); }
std::string low_latency_call(int64_t value) {
  constexpr const char* kNames[] = {"dispatch", "combine", "moe_all_to_all"};
  return value < std::ssize(kNames) ? kNames[value] : number(value);
}

constexpr PackedOption kDispatch[] = {{"x.dtype", 4, named<DType>},
                                      {"DispatchOptions::quantize", 4, named<ScaleKind>},
                                      {"DispatchOptions::padding", 4, named<Padding>},
                                      {"DispatchOptions::size", 4, named<SizePolicy>},
                                      {"DispatchOptions::overflow", 4, named<Overflow>}};
constexpr std::span<const PackedOption> kCachedDispatch(kDispatch, 3);
constexpr PackedOption kCombine[] = {{"y.dtype", 4, named<DType>},
                                     {"CombineOptions::order", 4, named<CombineOrder>},
                                     {"CombineOptions::apply_weights", 1, yes},
                                     {"CombineOptions::topk_weights", 1, given}};
constexpr PackedOption kLayer[] = {
    {"MoeLayerCall::add", 1, yes}, {"the second product", 1, yes}, {"MoeLayerCall::weight_set", 22, number}};
/// Of a header value (protocol/low_latency/call.hpp), above its detail.
constexpr PackedOption kLowLatency[] = {{"the call", 2, low_latency_call},
                                        {"LowLatencyCombineOptions::order", 1, named<CombineOrder>},
                                        {"y.dtype", 2, named<DType>}};

std::span<const PackedOption> options_of(Operation operation) {
  switch (operation) {
    case Operation::dispatch: return kDispatch;
    case Operation::cached_dispatch: return kCachedDispatch;
    case Operation::combine: return kCombine;
    case Operation::layer: return kLayer;
    default: return {};
  }
}

std::string describe_options(std::span<const PackedOption> options, uint64_t mine, uint64_t theirs, int my_rank,
                             int their_rank) {
  std::string text;
  int at = 0;
  for (const PackedOption& option : options) {
    const auto value_in = [&](uint64_t word) { return static_cast<int64_t>(word >> at & ((uint64_t{1} << option.bits) - 1)); };
    const int64_t here = value_in(mine), there = value_in(theirs);
    at += option.bits;
    if (here == there) continue;
    text += (text.empty() ? "" : ", ") + std::string(option.name) + " = " + option.text(here) + " on rank " +
            std::to_string(my_rank) + " and " + option.text(there) + " on rank " + std::to_string(their_rank);
  }
  return text;
}

}  // namespace

uint64_t pack_options(Operation operation, std::initializer_list<int64_t> values) {
  const std::span<const PackedOption> options = options_of(operation);
  assert(options.size() == values.size());
  uint64_t word = 0;
  int at = 0;
  for (size_t i = 0; i < std::min(options.size(), values.size()); at += options[i++].bits)
    word |= (static_cast<uint64_t>(values.begin()[i]) & ((uint64_t{1} << options[i].bits) - 1)) << at;
  assert(at <= kSignatureOptionBits);
  return word;
}

std::string describe_difference(const CallDifference& d, int my_rank, int their_rank) {
  switch (d.site) {
    case Site::none: return "";
    case Site::call_header: {
      const uint64_t mine = d.mine >> kHeaderDetailBits, theirs = d.theirs >> kHeaderDetailBits;
      if (mine == theirs && d.mine != d.theirs) return "the rows to sum are of different dispatches";
      return describe_options(kLowLatency, mine, theirs, my_rank, their_rank);
    }
    case Site::ledger_rows: return "";
    default: break;
  }
  if (d.mine == d.theirs)
    return d.site == Site::counts && d.mine != 0 ? "some ranks passed topk_weights and others did not" : "";
  std::string text = describe_options(options_of(d.operation), d.mine, d.theirs, my_rank, their_rank);
  if (text.empty() && (d.operation == Operation::cached_dispatch || d.operation == Operation::combine))
    return "the handles are of different dispatches, or the calls have different sites";
  return text;
}

}  // namespace switchyard::detail
