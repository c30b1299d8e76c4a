// SPDX-License-Identifier: Apache-2.0
// The calls of low-latency mode for all backends: checks, kernel parameters, split calls, and values derived from a
// configuration.

#include <algorithm>
#include <utility>

#include "base/carver.hpp"
#include "exchange/low_latency/impl.hpp"

namespace switchyard::detail {

namespace {

constexpr int64_t kColumnUnit = 128;  // pieces begin at multiples of a scale group and of 16 bytes

int64_t element_bytes_of_scale(ScaleKind kind) { return kind == ScaleKind::ue8m0 ? 1 : 4; }

}  // namespace

LowLatencyLayout low_latency_layout(const LowLatencyConfig& c, int world, uint64_t base) {
  LowLatencyLayout l;
  l.base = base;
  l.map = ExpertRanges{c.num_experts, world};
  l.topk = c.topk;
  l.entries = c.sending == Sending::per_rank ? c.topk : 1;
  l.max_tokens = static_cast<int>(c.max_tokens);
  l.hidden = static_cast<int>(c.hidden);
  l.payload_bytes = static_cast<int>(dtype_bytes(sent_type(c), l.hidden));
  if (c.scales != ScaleKind::none)
    l.scale_bytes = static_cast<int>(num_scales(c.hidden, c.scale_group) * element_bytes_of_scale(c.scales));
  l.return_bytes = static_cast<int>(dtype_bytes(c.dtype, l.hidden));
  const int64_t wanted = c.pieces > 0 ? c.pieces : default_pieces(c, world);
  l.piece_columns = static_cast<int>(round_up((c.hidden + wanted - 1) / wanted, kColumnUnit));
  l.pieces = (l.hidden + l.piece_columns - 1) / l.piece_columns;
  l.place();
  return l;
}

ScalePlace scale_place(const LowLatencyConfig& c, int world) {
  ScalePlace s;
  s.rows_per_expert = c.max_tokens * world;
  if (c.scales == ScaleKind::none) return s;  // the order is irrelevant, so these rows use the kernels for row order
  s.column_major = c.scale_order == ScaleOrder::column_major;
  s.element_bytes = static_cast<int>(element_bytes_of_scale(c.scales));
  s.groups = num_scales(c.hidden, c.scale_group);
  s.row_bytes = static_cast<int64_t>(scale_row_bytes(c.hidden, c.scales, c.scale_group));
  return s;
}

AgreedFields agreed_fields(const LowLatencyConfig& c) {
  return {agreed("LowLatencyConfig::hidden", c.hidden),
          agreed("LowLatencyConfig::num_experts", c.num_experts),
          agreed("LowLatencyConfig::topk", c.topk),
          agreed("LowLatencyConfig::max_tokens", c.max_tokens),
          agreed("LowLatencyConfig::dtype", c.dtype),
          agreed("LowLatencyConfig::scales", c.scales),
          agreed("LowLatencyConfig::scale_group", c.scale_group),
          agreed("LowLatencyConfig::scale_order", c.scale_order),
          agreed("LowLatencyConfig::sending", c.sending),
          agreed("LowLatencyConfig::pieces", c.pieces)};
}

LowLatencyTables carve_output(std::byte* base, const LowLatencyLayout& l, const ScalePlace& scales, int rank,
                              const Rows* given) {
  LowLatencyTables t;
  const int64_t experts = l.map.count(rank), rows = experts * l.rows_per_expert();
  Carver carver(base, 256);
  if (given) {
    t.rows = static_cast<std::byte*>(given->data);
    t.scales = static_cast<std::byte*>(given->scales);
  } else {
    carver.take(t.rows, rows * l.payload_bytes);
    carver.take(t.scales, experts * scales.bytes_per_expert());
  }
  carver.take(t.rows_of_expert, experts);
  carver.take(t.source_range, experts * l.world());
  carver.take(t.row_source, rows);
  carver.take(t.routes, int64_t{l.world()} * l.max_tokens * l.topk);
  carver.take(t.source_tokens, l.world());
  carver.take(t.own_ids, int64_t{l.max_tokens} * l.topk);
  carver.take(t.own_weights, int64_t{l.max_tokens} * l.topk);
  carver.take(t.own, 1);
  t.bytes = carver.bytes();
  return t;
}

LowLatencyImpl::LowLatencyImpl(Group& group, const LowLatencyConfig& c) : ExchangeBase(group), config(c) {}

void LowLatencyImpl::construct(const std::function<void()>& build) {
  ExchangeBase::construct("LowLatencyExchange", "LowLatencyExchange::heap_bytes(...)", [&] {
    choose_shape();
    // All of it survives sleep because a sent call may not have been received yet.
    layout_.base = take_heap(LowLatencyExchange::memory_required(config, world()).total());
    build();
    AgreedFields fields = agreed_fields(config);
    fields.push_back(agreed("LowLatencyConfig::pieces as tuned (columns of a piece)", layout_.piece_columns));
    return fields;
  });
}

void LowLatencyImpl::choose_shape() {
  check_config(config, world());
  tuned_ = group_.tuned(TuningMode::low_latency, config.hidden, config.max_tokens);
  const TuningValues flat = group_.tuned(TuningMode::flat, config.hidden, config.max_tokens);
  tuned_.sms = flat.sms;
  tuned_.warps = flat.warps;
  cut_rows(config.pieces > 0 ? config.pieces : tuned_.pieces);
  scales_ = scale_place(config, world());
}

void LowLatencyImpl::cut_rows(int pieces) {
  LowLatencyConfig cut = config;
  cut.pieces = pieces;
  layout_ = low_latency_layout(cut, world(), 0);
}

LowLatencyImpl::Senders LowLatencyImpl::senders(int max, int warps) const {
  const auto hidden = static_cast<int>(config.hidden);
  Senders s;
  s.part_columns = static_cast<int>(round_up((hidden + max - 1) / max, kColumnUnit));
  s.parts = (hidden + s.part_columns - 1) / s.part_columns;
  s.teams = sending_teams(warps, s.parts);
  return s;
}

int64_t LowLatencyImpl::scratch_bytes() const {
  const int64_t columns = std::max(layout_.piece_columns, dispatch_senders_.part_columns);
  const int64_t row = round_up(static_cast<int64_t>(dtype_bytes(config.dtype, columns)), 128) +
                      round_up(columns / config.scale_group * 4 + 16, 128);
  const int64_t places = round_up(layout_.topk * 8, 128);
  return row > places ? row : places;
}

LowLatencyOutput LowLatencyImpl::make_output(const Rows* given) {
  if (given) check_output_memory(*given);
  auto block = allocate_output(given);
  block->config_hash = hash();
  block->rank = rank();
  block->world = world();
  const LowLatencyTables& t = block->tables;
  LowLatencyOutput o;
  o.rows_per_expert = layout_.rows_per_expert();
  o.scale_rows = config.scale_order == ScaleOrder::column_major ? scales_.column_rows() : o.rows_per_expert;
  o.scale_order = config.scale_order;
  o.scale_group = config.scale_group;
  const bool scaled = config.scales != ScaleKind::none;
  o.x = Rows{t.rows,
             layout_.map.count(rank()) * o.rows_per_expert,
             config.hidden,
             sent_type(config),
             scaled ? t.scales : nullptr,
             config.scales};
  o.rows_of_expert = t.rows_of_expert;
  o.source_range = t.source_range;
  o.row_source = t.row_source;
  o.block = std::move(block);
  return o;
}

LowLatencyRows LowLatencyImpl::make_rows(DType type) {
  check_combined(type, "dtype");
  LowLatencyRows r;
  r.rows = layout_.map.count(rank()) * layout_.rows_per_expert();
  r.cols = config.hidden;
  r.dtype = type;
  r.memory = allocate(std::max<size_t>(1, static_cast<size_t>(r.rows) * dtype_bytes(type, r.cols)));
  r.data = r.memory.get();
  return r;
}

LowLatencyDispatchParams LowLatencyImpl::sent(const ConstRows& x, const ExpertIds& ids, const Senders& s) const {
  LowLatencyDispatchParams p;
  p.layout = layout_;
  p.x = static_cast<const std::byte*>(x.data);
  p.scales = static_cast<const std::byte*>(x.scales);
  p.tokens = static_cast<int>(ids.num_tokens);
  p.src_row_bytes = static_cast<int>(dtype_bytes(x.dtype, layout_.hidden));
  p.src_scale_bytes = static_cast<int>(scales_.row_bytes);
  p.src_type = x.dtype;
  p.quantize = x.dtype == DType::fp8_e4m3 ? ScaleKind::none : config.scales;
  p.scale_group = config.scale_group;
  p.scale_element_bytes = scales_.element_bytes;
  p.ids = IdReader{ids.data, ids.is_int64, config.num_experts};
  p.parts = s.parts;
  p.part_columns = s.part_columns;
  p.teams = s.teams;
  return p;
}

void LowLatencyImpl::dispatch(const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output,
                              const LowLatencyDispatchOptions& o, bool known_memory, bool split) {
  group_.check_usable("dispatch");
  check_dispatch(x, ids, output, o, known_memory);
  const LowLatencyTables& t = output.block->tables;
  LowLatencyDispatchParams p = sent(x, ids, dispatch_senders_);
  p.selects = o.selector != nullptr;
  p.weights = o.topk_weights;
  p.own_ids = t.own_ids;
  p.own_weights = t.own_weights;
  p.own = t.own;
  p.rows = t.rows;
  p.out_scales = t.scales;
  p.scale_place = scales_;
  p.rows_of_expert = t.rows_of_expert;
  p.source_range = t.source_range;
  p.row_source = t.row_source;
  p.routes = t.routes;
  p.source_tokens = t.source_tokens;
  output.block->tokens = ids.num_tokens;
  if (o.selector) SelectorAccess::impl(*o.selector).count_call();
  run(p, o, *output.block, split ? Halves::send : Halves::both);
  if (!split) return;
  keep_pending(Pending::dispatch, output, o.stream);
  pending_dispatch_ = p;
  dispatch_options_ = o;
}

void LowLatencyImpl::combine(const ConstRows& y, const LowLatencyOutput& output, void* out, const LowLatencyCombineOptions& o,
                             bool known_memory, bool split) {
  group_.check_usable("combine");
  check_combine(y, output, out, o, known_memory);
  const LowLatencyTables& t = output.block->tables;
  LowLatencyCombineParams p;
  p.layout = layout_;
  p.order = o.order;
  p.type = y.dtype;
  p.row_bytes = static_cast<int64_t>(dtype_bytes(y.dtype, config.hidden));
  p.y = static_cast<const std::byte*>(y.data);
  p.expert_scale = o.expert_scale;
  p.rows_of_expert = t.rows_of_expert;
  p.row_source = t.row_source;
  p.routes = t.routes;
  p.source_tokens = t.source_tokens;
  p.own = t.own;
  p.own_ids = t.own_ids;
  p.weights = o.topk_weights ? o.topk_weights : t.own_weights;
  p.out = static_cast<std::byte*>(out);
  run(p, o, *output.block, split ? Halves::send : Halves::both);
  if (!split) return;
  keep_pending(Pending::combine, output, o.stream);
  pending_combine_ = p;
  combine_options_ = o;
}

void LowLatencyImpl::all_to_all(const ConstRows& x, const ExpertIds& ids, void* out, const AllToAllOptions& o) {
  group_.check_usable("moe_all_to_all");
  check_all_to_all(x, ids, out, o);
  FlatParams p;
  p.d = sent(x, ids, flat_senders_);
  p.d.with_places = false;
  p.d.selects = o.selector != nullptr;
  p.c.layout = layout_;
  p.c.type = x.dtype;
  p.c.row_bytes = p.d.src_row_bytes;
  p.c.expert_scale = o.expert_scale;
  p.c.weights = o.topk_weights;
  p.c.out = static_cast<std::byte*>(out);
  if (o.selector) SelectorAccess::impl(*o.selector).count_call();
  run(p, o);
}

void LowLatencyImpl::keep_pending(Pending what, const LowLatencyOutput& output, void* stream) {
  pending_ = what;
  pending_capture_ = capture_id(stream);
  pending_block_ = output.block;
  pending_block_->pending = true;
}

ReceiveHook LowLatencyImpl::receive_hook() {
  return [this, call = ++split_calls_] { collective_call("receive", [&] { receive(call); }); };
}

void LowLatencyImpl::receive(uint64_t call) {
  group_.check_usable("receive");
  if (pending_ == Pending::none || call != split_calls_) invalid("receive hook: its call has been received already");
  void* const stream = pending_ == Pending::dispatch ? dispatch_options_.stream : combine_options_.stream;
  if (capture_id(stream) != pending_capture_)
    invalid(pending_capture_ != 0
                ? "receive hook: its call was sent while the stream was captured, and must be received in the "
                  "same capture: replays would send and never receive"
                : "receive hook: its call was sent outside of the capture of its stream: replays would "
                  "receive what was sent once");
  const Pending what = std::exchange(pending_, Pending::none);
  const auto block = std::exchange(pending_block_, nullptr);  // its memory must live until the second half is enqueued
  block->pending = false;
  if (what == Pending::dispatch)
    run(pending_dispatch_, dispatch_options_, *block, Halves::receive);
  else
    run(pending_combine_, combine_options_, *block, Halves::receive);
}

}  // namespace switchyard::detail
