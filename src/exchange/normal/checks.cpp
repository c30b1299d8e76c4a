// SPDX-License-Identifier: Apache-2.0
// Host-side checks of normal mode's contracts. Error messages state the argument, its value and the allowed values.
#include <string>

#include "exchange/group/enum_checks.hpp"
#include "exchange/normal/impl.hpp"
#include "plan/hosts.hpp"
#include "protocol/normal/dispatch_ring.hpp"

namespace switchyard::detail {

void check_config(const NormalConfig& c, int world) {
  check_range("world", world, 1, kMaxRanks);
  check_range("NormalConfig::hidden", c.hidden, 1, int64_t{1} << 24);
  check_range("NormalConfig::num_experts", c.num_experts, 1, 1 << 20);
  check_range("NormalConfig::topk", c.topk, 1, kMaxTopk);
  check_range("NormalConfig::max_tokens", c.max_tokens, 0, int64_t{1} << 26);
  check_range("NormalConfig::expert_alignment", c.expert_alignment, 1, 1 << 16);
  check_enum("NormalConfig::dtype", c.dtype);
  check_enum("NormalConfig::invalid_ids", c.invalid_ids);
  if (c.layout == Layout::expert_major)  // `rows` contains the number of a source's arrived records, one per token
    check_range("NormalConfig::max_tokens (expert-major)", c.max_tokens, 0, static_cast<int64_t>(kMaxFlagValue));
  checked_row_bytes("NormalConfig::hidden", c.hidden, c.dtype);
  check_range("max_tokens * topk * world (received rows)", c.max_tokens * c.topk * world, 0,
              (int64_t{1} << 31) - (int64_t{1} << 28));
  if (c.staging != Staging::ring) return;
  check_range("RingSettings::num_channels", c.ring.num_channels, 0, 256);
  if (c.ring.slots != 0) check_range("RingSettings::slots", c.ring.slots, c.topk, 1 << 20);
  check_range("RingSettings::send_chunk", c.ring.send_chunk, 1, c.ring.slots != 0 ? c.ring.slots : 1 << 20);
  check_range("RingSettings::num_channels * world", static_cast<int64_t>(c.ring.num_channels) * world, 0, kMaxStreams);
  check_range("max_tokens * topk (rows of one ring stream)", c.max_tokens * c.topk, 0, static_cast<int64_t>(kRingEnd) - 1);
}

namespace {

void check_options(const DispatchOptions& o) {
  check_enum("DispatchOptions::quantize", o.quantize);
  check_enum("DispatchOptions::size", o.size);
  check_enum("DispatchOptions::overflow", o.overflow);
  if (o.overflow == Overflow::split)
    invalid_value("DispatchOptions::overflow", "split",
                  "fail or drop_and_report: only MoeLayer in the fused form splits calls");
  check_enum("DispatchOptions::padding", o.padding);
  if (o.size == SizePolicy::capacity) check_range("DispatchOptions::capacity", o.capacity, 0, int64_t{1} << 31);
}

}  // namespace

RowFormat NormalImpl::check_rows(const ConstRows& x, const DispatchOptions& o, int64_t tokens) const {
  check_options(o);
  if (x.rows != tokens)
    invalid("x.rows", " = " + std::to_string(x.rows) + ": must equal the number of tokens, " + std::to_string(tokens));
  if (x.cols != config.hidden)
    invalid("x.cols", " = " + std::to_string(x.cols) + ": must equal NormalConfig::hidden, " + std::to_string(config.hidden));
  if (!x.data && tokens > 0) invalid("x.data", " is null");
  check_enum("x.dtype", x.dtype);
  const bool fp8 = dtype_has_scales(x.dtype);
  if (fp8 && o.quantize != ScaleKind::none)
    invalid("DispatchOptions::quantize",
            ": rows are fp8 already; quantize only " + names_where<DType>(dtype_quantises) + " rows");
  if (fp8 && x.scale_kind == ScaleKind::none) invalid("x.scale_kind", " = none: fp8 rows need scales (f32 or ue8m0)");
  if (fp8 && !x.scales && tokens > 0) invalid("x.scales", " is null: fp8 rows need scales");
  if (!fp8 && x.scale_kind != ScaleKind::none)
    invalid("x.scale_kind", std::string(": ") + to_string(x.dtype) + " rows have no scales");
  RowFormat f{};
  f.src_type = x.dtype;
  f.quantize = o.quantize != ScaleKind::none;
  f.type = f.quantize ? DType::fp8_e4m3 : x.dtype;
  f.scales = f.quantize ? o.quantize : x.scale_kind;
  f.src_row_bytes = checked_row_bytes("x.cols", config.hidden, x.dtype);
  f.row_bytes = checked_row_bytes("x.cols", config.hidden, f.type, f.quantize ? "a quantized row" : "a row");
  f.scale_bytes = static_cast<int64_t>(scale_row_bytes(config.hidden, f.scales));
  if (config.staging == Staging::ring && f.row_bytes + f.scale_bytes > rings_.record_at())
    invalid("x.dtype", std::string(" = ") + to_string(x.dtype) + ": wider than NormalConfig::dtype, which sizes the rings");
  return f;
}

void NormalImpl::check_out(const DispatchOptions& o, const RowFormat& f, int64_t rows) const {
  if (!o.out) return;
  const Rows& out = *o.out;
  if (out.cols != config.hidden)
    invalid("DispatchOptions::out->cols",
            " = " + std::to_string(out.cols) + ": must equal NormalConfig::hidden, " + std::to_string(config.hidden));
  if (out.rows < rows)
    invalid("DispatchOptions::out->rows",
            " = " + std::to_string(out.rows) + ": the dispatch allocates " + std::to_string(rows) + " rows");
  if (out.dtype != f.type)
    invalid("DispatchOptions::out->dtype",
            std::string(" = ") + to_string(out.dtype) + ": rows are delivered as " + to_string(f.type));
  if (out.scale_kind != f.scales)
    invalid("DispatchOptions::out->scale_kind",
            std::string(" = ") + to_string(out.scale_kind) + ": rows are delivered with " + to_string(f.scales));
  if (!out.data && out.rows > 0) invalid("DispatchOptions::out->data", " is null");
  if (!out.scales && out.rows > 0 && f.scale_bytes > 0)
    invalid("DispatchOptions::out->scales", " is null: the rows have scales");
}

void NormalImpl::check_selector(SlotSelector* selector) const {
  if (selector != nullptr) SelectorAccess::impl(*selector).check_joined("MoeLayerCall::selector", group_, config.num_experts);
}

void NormalImpl::check_ids(const ExpertIds& ids) const {
  if (ids.topk != config.topk)
    invalid("topk_ids.topk",
            " = " + std::to_string(ids.topk) + ": must equal NormalConfig::topk, " + std::to_string(config.topk));
  check_num_tokens(ids.num_tokens, config.max_tokens);
  if (!ids.data && ids.num_tokens > 0) invalid("topk_ids.data", " is null");
}

void NormalImpl::check_handle(const Handle& handle) const {
  if (!handle) invalid("handle", " is empty");
  const HandleData& h = handle.data();
  if (h.counts.world != world() || h.rank != rank())
    invalid("handle was made by rank " + std::to_string(h.rank) + " of " + std::to_string(h.counts.world) + ", this is rank " +
            std::to_string(rank()) + " of " + std::to_string(world()));
  if (h.map.experts != config.num_experts || h.topk != config.topk || h.layout != config.layout ||
      h.alignment != config.expert_alignment)
    invalid("handle was made by an object with other num_experts, topk, layout or expert_alignment");
  check_range("tokens of handle", h.tokens, 0, config.max_tokens);
  if (!spans_hosts()) return;
  // For a dispatch on GPUs, the host knows the hosts of the ranks, but only the GPU knows which tokens crossed.
  if (!h.hosts || (counts_at_ == CountsAt::host && h.hosts->leaving.empty()))
    throw Error(
        ErrorCode::unsupported,
        "handle was made from bytes, or by a group of one host: bytes do not say what crossed between hosts; dispatch again");
  for (int r = 0; r < world(); ++r)
    if (h.hosts->host_of[static_cast<size_t>(r)] != group_.host_map().host_of(r))
      invalid("handle was made by a group in which rank " + std::to_string(r) + " was on host " +
              std::to_string(h.hosts->host_of[static_cast<size_t>(r)]) + "; here it is on host " +
              std::to_string(group_.host_map().host_of(r)));
}

void NormalImpl::check_combine(const ConstRows& y, const Handle& handle, const void* out, const CombineOptions& o,
                               const float* out_weights) const {
  check_handle(handle);
  const HandleData& h = handle.data();
  const int64_t rows = h.rows >= 0 ? h.rows : h.rows_allocated;
  const bool expert_major = h.layout == Layout::expert_major;
  check_combined_rows("y.dtype", y.dtype);
  if (y.rows < rows)
    invalid("y.rows", " = " + std::to_string(y.rows) + ": the handle's dispatch delivered " + std::to_string(rows) + " rows");
  if (y.cols != config.hidden)
    invalid("y.cols", " = " + std::to_string(y.cols) + ": must equal NormalConfig::hidden, " + std::to_string(config.hidden));
  if (!y.data && rows > 0) invalid("y.data", " is null");
  if (!out && h.tokens > 0) invalid("out", " is null");
  const int64_t bytes = checked_row_bytes("y.cols", config.hidden, y.dtype);
  if (config.staging == Staging::ring && bytes > rings_.scale_at())
    invalid("y.dtype", std::string(" = ") + to_string(y.dtype) + ": wider than NormalConfig::dtype, which sizes the rings");
  check_enum("CombineOptions::order", o.order);
  if (o.order == CombineOrder::per_route && !expert_major)
    throw Error(ErrorCode::unsupported,
                "CombineOptions::order = per_route: rank-major rows are one per (token, rank) already; use per_rank");
  if (expert_major && o.topk_weights && o.order != CombineOrder::per_route)
    throw Error(ErrorCode::unsupported,
                std::string("CombineOptions::topk_weights with ") + to_string(o.order) +
                    ": expert ranks multiply by the weights that dispatch carried; pass them to dispatch or use per_route");
  if (expert_major && o.topk_weights && !o.apply_weights)
    invalid("CombineOptions::topk_weights", " is given, but apply_weights is false: rows would not be multiplied by them");
  if (out_weights && (expert_major || (!o.topk_weights && rows > 0)))
    invalid("out_weights", ": only for rank-major combine with CombineOptions::topk_weights");
  if (!expert_major && o.topk_weights && !out_weights && h.tokens > 0)
    invalid("out_weights", " is null, but CombineOptions::topk_weights is given");
  if (o.bias[1] && !o.bias[0]) invalid("CombineOptions::bias[1]", " without bias[0]");
}

}  // namespace switchyard::detail
