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
  bool qualifies = false;  ///< omitted if the option before it differs, too
};

template <class E>
std::string named(int64_t value) {
  return text_of(static_cast<E>(value));
}
std::string yes(int64_t value) { return value != 0 ? "true" : "false"; }
std::string given(int64_t value) { return value != 0 ? "given" : "null"; }
std::string number(int64_t value) { return std::to_string(value); }

#define SY_MAP_VERSION(selector) "map of " selector " (its version + 3 * the selector's number, modulo 8)"
static_assert(kMapVersionBits == 3);
constexpr PackedOption kSelector = {"MoeLayerCall::selector", 1, given};
constexpr PackedOption kMapVersion = {SY_MAP_VERSION("MoeLayerCall::selector"), kMapVersionBits, number, true};

/// In the order of pack_options().
constexpr PackedOption kDispatch[] = {kSelector,
                                      kMapVersion,
                                      {"x.dtype", 3, named<DType>},
                                      {"x.scale_kind", 3, named<ScaleKind>},
                                      {"DispatchOptions::quantize", 3, named<ScaleKind>},
                                      {"DispatchOptions::padding", 3, named<Padding>},
                                      {"DispatchOptions::size", 3, named<SizePolicy>},
                                      {"DispatchOptions::overflow", 3, named<Overflow>}};
constexpr PackedOption kCombine[] = {{"y.dtype", 4, named<DType>},
                                     {"CombineOptions::order", 4, named<CombineOrder>},
                                     {"CombineOptions::apply_weights", 1, yes},
                                     {"CombineOptions::topk_weights", 1, given}};
constexpr PackedOption kLayer[] = {kSelector,
                                   kMapVersion,
                                   {"MoeLayerCall::add", 1, yes},
                                   {"the second product", 1, yes},
                                   {"the set of weights (0: those of the constructor)", 16, number}};
constexpr PackedOption kLowLatencyDispatch[] = {{"LowLatencyDispatchOptions::selector", 1, given}};
constexpr PackedOption kLowLatencyCombine[] = {{"LowLatencyCombineOptions::order", 1, named<CombineOrder>},
                                               {"y.dtype", 2, named<DType>}};
constexpr PackedOption kAllToAll[] = {{"AllToAllOptions::selector", 1, given}, {"x.dtype", 2, named<DType>}};

/// By LowLatencyKind. The options are the bits of a header value (protocol/low_latency/call.hpp) above its detail and kind,
/// `detail` those above the tokens.
struct LowLatencyCall {
  const char* name;
  std::span<const PackedOption> options, detail;
};
constexpr PackedOption kDispatchDetail[] = {{SY_MAP_VERSION("LowLatencyDispatchOptions::selector"), kMapVersionBits, number}};
constexpr PackedOption kAllToAllDetail[] = {{SY_MAP_VERSION("AllToAllOptions::selector"), kMapVersionBits, number}};
constexpr LowLatencyCall kLowLatencyCalls[] = {{"dispatch", kLowLatencyDispatch, kDispatchDetail},
                                               {"combine", kLowLatencyCombine, {}},
                                               {"moe_all_to_all", kAllToAll, kAllToAllDetail},
                                               {"another call", {}, {}}};

struct PackedCall {
  Operation operation;
  std::span<const PackedOption> options;
};
/// Their indices are the lowest bits of the options: ranks may have called different operations of an object.
constexpr PackedCall kCalls[] = {{Operation::layer, kLayer},
                                 {Operation::dispatch, kDispatch},
                                 {Operation::cached_dispatch, std::span(kDispatch, 6)},
                                 {Operation::combine, kCombine}};
constexpr int kCallBits = 2;
static_assert(kMapVersionAt == kCallBits + kSelector.bits);
static_assert(std::size(kCalls) == 1 << kCallBits);
const PackedCall& call_in(uint64_t word) { return kCalls[word & (std::size(kCalls) - 1)]; }

std::string describe_calls(const std::string& mine, const std::string& theirs, int my_rank, int their_rank) {
  return "rank " + std::to_string(my_rank) + " called " + mine + " and rank " + std::to_string(their_rank) + " " + theirs;
}

std::string describe_option(const char* name, const std::string& mine, const std::string& theirs, int my_rank, int their_rank) {
  return std::string(name) + " = " + mine + " on rank " + std::to_string(my_rank) + " and " + theirs + " on rank " +
         std::to_string(their_rank);
}

/// `mine` and `theirs`: the options from bit 0.
std::string describe_options(std::span<const PackedOption> options, uint64_t mine, uint64_t theirs, int my_rank,
                             int their_rank) {
  std::string text;
  bool differed = false;
  for (const PackedOption& option : options) {
    const uint64_t mask = (uint64_t{1} << option.bits) - 1;
    const auto here = static_cast<int64_t>(mine & mask), there = static_cast<int64_t>(theirs & mask);
    mine >>= option.bits;
    theirs >>= option.bits;
    const bool omitted = option.qualifies && differed;
    differed = here != there;
    if (!differed || omitted) continue;
    text +=
        (text.empty() ? "" : ", ") + describe_option(option.name, option.text(here), option.text(there), my_rank, their_rank);
  }
  return text;
}

std::string describe_headers(uint64_t mine, uint64_t theirs, int my_rank, int their_rank) {
  const uint64_t my_kind = mine >> kHeaderDetailBits, their_kind = theirs >> kHeaderDetailBits;
  const LowLatencyCall &my_call = kLowLatencyCalls[my_kind & 3], &their_call = kLowLatencyCalls[their_kind & 3];
  if (&my_call != &their_call) return describe_calls(my_call.name, their_call.name, my_rank, their_rank);
  if (my_kind == their_kind && my_call.detail.empty())
    return mine == theirs ? "" : "the rows to sum are of different dispatches";
  if (my_kind == their_kind)
    return describe_options(my_call.detail, mine >> kHeaderTokenBits, theirs >> kHeaderTokenBits, my_rank, their_rank);
  return describe_options(my_call.options, my_kind >> 2, their_kind >> 2, my_rank, their_rank);
}

std::string describe_signatures(uint64_t mine, uint64_t theirs, int my_rank, int their_rank) {
  const PackedCall &my_call = call_in(mine), &their_call = call_in(theirs);
  if (&my_call != &their_call)
    return describe_calls(operation_name(my_call.operation), operation_name(their_call.operation), my_rank, their_rank);
  std::string text = describe_options(my_call.options, mine >> kCallBits, theirs >> kCallBits, my_rank, their_rank);
  if (text.empty() && (my_call.operation == Operation::cached_dispatch || my_call.operation == Operation::combine))
    return "the handles are of different dispatches, or the calls have different sites";
  return text;
}

}  // namespace

uint64_t pack_options(Operation operation, std::initializer_list<int64_t> values) {
  const PackedCall* const call = std::ranges::find(kCalls, operation, &PackedCall::operation);
  assert(call != std::end(kCalls) && call->options.size() == values.size());
  auto word = static_cast<uint64_t>(call - kCalls);
  int at = kCallBits;
  for (size_t i = 0; i < std::min(call->options.size(), values.size()); at += call->options[i++].bits)
    word |= (static_cast<uint64_t>(values.begin()[i]) & ((uint64_t{1} << call->options[i].bits) - 1)) << at;
  assert(at <= kSignatureOptionBits);
  return word;
}

std::string describe_difference(const CallDifference& d, int my_rank, int their_rank) {
  switch (d.site) {
    case Site::none:
    case Site::ledger_rows: return "";
    case Site::call_header: return describe_headers(d.mine, d.theirs, my_rank, their_rank);
    default: break;
  }
  if (d.mine == d.theirs)
    return d.site == Site::counts && d.mine != 0 ? "some ranks passed topk_weights and others did not" : "";
  return describe_signatures(d.mine, d.theirs, my_rank, their_rank);
}

}  // namespace switchyard::detail
