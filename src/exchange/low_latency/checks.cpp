// SPDX-License-Identifier: Apache-2.0
// Host-side checks of low-latency mode's contracts. Error messages state the argument, its value and the allowed values.
#include <string>

#include "exchange/group/enum_checks.hpp"
#include "exchange/low_latency/impl.hpp"

namespace switchyard::detail {

namespace {

/// `out` of a call. Checks that it overlaps no other memory of the call, because tokens are summed while other memory is still
/// being read. Empty memory and null pointers overlap nothing.
struct OutOfCall {
  const void* out;
  int64_t bytes;

  void check_no_overlap(const char* name, const void* given, int64_t given_bytes) const {
    const auto to = reinterpret_cast<uintptr_t>(out), from = reinterpret_cast<uintptr_t>(given);
    if (given == nullptr || bytes <= 0 || given_bytes <= 0) return;
    if (from < to + static_cast<uintptr_t>(bytes) && to < from + static_cast<uintptr_t>(given_bytes))
      invalid(std::string("out overlaps ") + name + ": its " + std::to_string(bytes) +
              " bytes must lie elsewhere, tokens are summed while others are still sent");
  }
};

}  // namespace

void check_config(const LowLatencyConfig& c, int world) {
  check_range("world", world, 1, kMaxRanks);
  check_range("LowLatencyConfig::hidden", c.hidden, 1, kMaxHidden);
  check_range("LowLatencyConfig::num_experts", c.num_experts, 1, 1 << 20);
  check_range("LowLatencyConfig::topk", c.topk, 1, kMaxTopk);
  check_range("LowLatencyConfig::max_tokens", c.max_tokens, 1, kMaxLowLatencyTokens);
  check_combining_type("LowLatencyConfig::dtype", c.dtype);
  check_enum("LowLatencyConfig::scales", c.scales);
  check_enum("LowLatencyConfig::scale_order", c.scale_order);
  check_enum("LowLatencyConfig::sending", c.sending);
  check_enum("LowLatencyConfig::invalid_ids", c.invalid_ids);
  check_range("LowLatencyConfig::pieces", c.pieces, 0, kMaxPieces);
  if (c.scale_group != 32 && c.scale_group != 64 && c.scale_group != 128)
    invalid("LowLatencyConfig::scale_group", " = " + std::to_string(c.scale_group) + ": must be 32, 64 or 128");
  if (c.scales != ScaleKind::none) checked_row_bytes("LowLatencyConfig::hidden", c.hidden, sent_type(c), "a row as it is sent");
  const int64_t rows = c.max_tokens * world * ExpertRanges{c.num_experts, world}.max_count();
  check_range("experts per rank * world * max_tokens (rows of an output)", rows, 1, int64_t{1} << 30);
}

void LowLatencyImpl::check_combined(DType type, const char* name) const {
  check_combined_rows(name, type);
  if (dtype_bits(type) > dtype_bits(config.dtype))
    invalid(std::string(name) + " = " + to_string(type) + ": wider than LowLatencyConfig::dtype, " + to_string(config.dtype) +
            ", which sizes the memory");
}

void LowLatencyImpl::check_idle(const char* operation) const {
  if (pending_ == Pending::none) return;
  invalid(std::string(operation) + ": the " + (pending_ == Pending::dispatch ? "dispatch" : "combine") +
          " sent before has not been received; call its hook first");
}

void LowLatencyImpl::check_output(const LowLatencyOutput& o) const {
  if (!o.block) invalid("output", " is empty: make it with make_output()");
  if (o.block->config_hash != hash() || o.block->rank != rank() || o.block->world != world())
    invalid("output was made by rank " + std::to_string(o.block->rank) + " of " + std::to_string(o.block->world) +
            " with its own LowLatencyConfig; this is rank " + std::to_string(rank()) + " of " + std::to_string(world()) +
            (o.block->config_hash == hash() ? "" : ", with another one"));
  if (o.block->pending)
    invalid("output belongs to a split call of another object that has not been received; call its hook first");
}

void LowLatencyImpl::check_output_memory(const Rows& memory) const {
  const int64_t rows = layout_.map.count(rank()) * layout_.rows_per_expert();
  if (memory.rows != rows)
    invalid("memory.rows", " = " + std::to_string(memory.rows) + ": an output has " + std::to_string(rows) + " rows");
  if (memory.cols != config.hidden)
    invalid("memory.cols",
            " = " + std::to_string(memory.cols) + ": must equal LowLatencyConfig::hidden, " + std::to_string(config.hidden));
  if (memory.dtype != sent_type(config))
    invalid("memory.dtype",
            std::string(" = ") + to_string(memory.dtype) + ": rows are delivered as " + to_string(sent_type(config)));
  if (memory.scale_kind != config.scales)
    invalid("memory.scale_kind",
            " = " + text_of(memory.scale_kind) + ": must be LowLatencyConfig::scales, " + to_string(config.scales));
  if (!memory.data && rows > 0) invalid("memory.data", " is null");
  if (!memory.scales && rows > 0 && config.scales != ScaleKind::none)
    invalid("memory.scales", " is null: the rows have scales");
  check_pointer("memory.data", memory.data, row_alignment(memory.dtype), false);
  check_pointer("memory.scales", memory.scales, 16, false);
}

void LowLatencyImpl::check_tokens(const ConstRows& x, const ExpertIds& ids, bool known_memory) const {
  if (ids.topk != config.topk)
    invalid("topk_ids.topk",
            " = " + std::to_string(ids.topk) + ": must equal LowLatencyConfig::topk, " + std::to_string(config.topk));
  check_num_tokens(ids.num_tokens, config.max_tokens);
  if (!ids.data && ids.num_tokens > 0) invalid("topk_ids.data", " is null");
  if (x.rows != ids.num_tokens)
    invalid("x.rows", " = " + std::to_string(x.rows) + ": must equal the number of tokens, " + std::to_string(ids.num_tokens));
  if (x.cols != config.hidden)
    invalid("x.cols",
            " = " + std::to_string(x.cols) + ": must equal LowLatencyConfig::hidden, " + std::to_string(config.hidden));
  if (!x.data && x.rows > 0) invalid("x.data", " is null");
  const bool fp8 = dtype_has_scales(x.dtype) && config.scales != ScaleKind::none;
  if (x.dtype != config.dtype && !fp8)
    invalid("x.dtype", std::string(" = ") + to_string(x.dtype) + ": must be LowLatencyConfig::dtype, " +
                           to_string(config.dtype) + (config.scales != ScaleKind::none ? ", or fp8_e4m3 with scales" : ""));
  if (fp8 && x.scale_kind != config.scales)
    invalid("x.scale_kind", " = " + text_of(x.scale_kind) + ": must be LowLatencyConfig::scales, " + to_string(config.scales));
  if (fp8 && !x.scales && x.rows > 0) invalid("x.scales", " is null: fp8 rows need scales");
  if (!fp8 && x.scale_kind != ScaleKind::none)
    invalid("x.scale_kind", std::string(": ") + to_string(x.dtype) + " rows have no scales");
  check_pointer("x.data", x.data, row_alignment(x.dtype), known_memory);
  check_pointer("x.scales", x.scales, 16, known_memory);
  check_pointer("topk_ids.data", ids.data, ids.is_int64 ? 8 : 4, known_memory);
}

void LowLatencyImpl::check_selector(const char* name, SlotSelector* selector) const {
  if (selector != nullptr) SelectorAccess::impl(*selector).check_joined(name, group_, config.num_experts);
}

void LowLatencyImpl::check_dispatch(const ConstRows& x, const ExpertIds& ids, const LowLatencyOutput& output,
                                    const LowLatencyDispatchOptions& o, bool known_memory) const {
  check_idle("dispatch");
  check_output(output);
  check_tokens(x, ids, known_memory);
  check_sms("LowLatencyDispatchOptions", o.num_sms);
  check_pointer("LowLatencyDispatchOptions::topk_weights", o.topk_weights, 4, known_memory);
  check_pointer("LowLatencyDispatchOptions::device_tokens", o.device_tokens, 4, known_memory);
  check_selector("LowLatencyDispatchOptions::selector", o.selector);
}

void LowLatencyImpl::check_combine(const ConstRows& y, const LowLatencyOutput& output, const void* out,
                                   const LowLatencyCombineOptions& o, bool known_memory) const {
  check_idle("combine");
  check_output(output);
  if (output.block->tokens < 0) invalid("output", ": no dispatch has filled it");
  check_combined(y.dtype, "y.dtype");
  if (y.rows != output.x.rows)
    invalid("y.rows", " = " + std::to_string(y.rows) + ": must be the rows of the output, " + std::to_string(output.x.rows));
  if (y.cols != config.hidden)
    invalid("y.cols",
            " = " + std::to_string(y.cols) + ": must equal LowLatencyConfig::hidden, " + std::to_string(config.hidden));
  if (!y.data && y.rows > 0) invalid("y.data", " is null");
  if (!out && output.block->tokens > 0) invalid("out", " is null");
  check_enum("LowLatencyCombineOptions::order", o.order);
  if (o.order == CombineOrder::per_host)
    throw Error(ErrorCode::unsupported,
                "LowLatencyCombineOptions::order = per_host: in low latency all rows, or the sums of ranks, come back; use "
                "per_route or "
                "per_rank");
  if (o.topk_weights && o.order == CombineOrder::per_rank)
    throw Error(
        ErrorCode::unsupported,
        "LowLatencyCombineOptions::topk_weights with per_rank: expert ranks multiply by the weights that dispatch carried; "
        "pass them to dispatch or use per_route");
  check_sms("LowLatencyCombineOptions", o.num_sms);
  if (o.expert_scale && o.order == CombineOrder::per_rank)
    throw Error(ErrorCode::unsupported,
                "LowLatencyCombineOptions::expert_scale with per_rank: rows are summed before they go back");
  check_pointer("y.data", y.data, row_alignment(y.dtype), known_memory);
  check_pointer("out", out, row_alignment(y.dtype), known_memory);
  check_pointer("LowLatencyCombineOptions::topk_weights", o.topk_weights, 4, known_memory);
  check_pointer("LowLatencyCombineOptions::expert_scale", o.expert_scale, 4, known_memory);
  const int64_t row = static_cast<int64_t>(dtype_bytes(y.dtype, y.cols)), tokens = output.block->tokens;
  const OutOfCall sums{out, tokens * row};
  sums.check_no_overlap("y.data", y.data, y.rows * row);
  sums.check_no_overlap("LowLatencyCombineOptions::topk_weights", o.topk_weights, tokens * config.topk * 4);
  sums.check_no_overlap("LowLatencyCombineOptions::expert_scale", o.expert_scale, int64_t{layout_.experts_of(rank())} * 4);
}

void LowLatencyImpl::check_row_function(const AllToAllOptions& o) const {
  if (o.row_function == nullptr) return;
  if (o.expert_scale != nullptr)
    invalid("AllToAllOptions::row_function and expert_scale are both given: a row function does the scaling itself");
  if (!*o.row_function) invalid("AllToAllOptions::row_function", " is empty: give a function, or null for none");
  const Backend backend = group_.options.backend;
  if (o.row_function->impl()->backend != backend)
    invalid("AllToAllOptions::row_function", std::string(" is made for the other backend: this group takes ") +
                                                 (backend == Backend::cpu ? "RowFunction::on_cpu" : "row_function_on_gpu"));
  check_row_function(*o.row_function->impl());
}

void LowLatencyImpl::check_all_to_all(const ConstRows& x, const ExpertIds& ids, const void* out,
                                      const AllToAllOptions& o) const {
  check_idle("moe_all_to_all");
  group_.require_one_host("moe_all_to_all", "use dispatch and combine");
  if (config.scales != ScaleKind::none)
    throw Error(ErrorCode::unsupported, "moe_all_to_all: LowLatencyConfig::scales must be none, rows travel as they are");
  check_tokens(x, ids, false);
  if (!out && ids.num_tokens > 0) invalid("out", " is null");
  const OutOfCall sums{out, ids.num_tokens * layout_.return_bytes};
  sums.check_no_overlap("x.data", x.data, sums.bytes);
  sums.check_no_overlap("topk_ids.data", ids.data, ids.num_tokens * ids.topk * (ids.is_int64 ? 8 : 4));
  sums.check_no_overlap("AllToAllOptions::topk_weights", o.topk_weights, ids.num_tokens * ids.topk * 4);
  sums.check_no_overlap("AllToAllOptions::expert_scale", o.expert_scale, int64_t{layout_.experts_of(rank())} * 4);
  sums.check_no_overlap("AllToAllOptions::device_tokens", o.device_tokens, 4);
  check_sms("AllToAllOptions", o.num_sms);
  check_pointer("out", out, row_alignment(x.dtype), false);
  check_pointer("AllToAllOptions::topk_weights", o.topk_weights, 4, false);
  check_pointer("AllToAllOptions::expert_scale", o.expert_scale, 4, false);
  check_pointer("AllToAllOptions::device_tokens", o.device_tokens, 4, false);
  check_selector("AllToAllOptions::selector", o.selector);
  check_row_function(o);
}

}  // namespace switchyard::detail
