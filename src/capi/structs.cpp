// SPDX-License-Identifier: Apache-2.0
#include "capi/structs.hpp"

#include <cstdint>
#include <string>

namespace switchyard::detail {
namespace {

constexpr sy_group_options kGroupOptions = SY_GROUP_OPTIONS_INIT;
constexpr sy_normal_config kNormalConfig = SY_NORMAL_CONFIG_INIT;
constexpr sy_dispatch_options kDispatchOptions = SY_DISPATCH_OPTIONS_INIT;
constexpr sy_combine_options kCombineOptions = SY_COMBINE_OPTIONS_INIT;

// The macros must match the C++ defaults (of groups: tests/abi/group_defaults_test.cpp).
static_assert(kNormalConfig.expert_alignment == NormalConfig{}.expert_alignment &&
              kNormalConfig.pool_bytes == NormalConfig{}.pool_bytes &&
              kNormalConfig.ring_num_channels == RingSettings{}.num_channels &&
              kNormalConfig.ring_send_chunk == RingSettings{}.send_chunk && kNormalConfig.ring_slots == RingSettings{}.slots &&
              kNormalConfig.ring_max_bytes == RingSettings{}.max_bytes);
static_assert(kNormalConfig.layout == static_cast<int>(NormalConfig{}.layout) &&
              kNormalConfig.dtype == static_cast<int>(NormalConfig{}.dtype) &&
              kNormalConfig.staging == static_cast<int>(NormalConfig{}.staging));
static_assert(kDispatchOptions.quantize == static_cast<int>(DispatchOptions{}.quantize) &&
              kDispatchOptions.size == static_cast<int>(DispatchOptions{}.size) &&
              kDispatchOptions.overflow == static_cast<int>(DispatchOptions{}.overflow) &&
              kDispatchOptions.padding == static_cast<int>(DispatchOptions{}.padding) &&
              kDispatchOptions.stream == DispatchOptions{}.stream && kDispatchOptions.num_sms == DispatchOptions{}.num_sms &&
              kDispatchOptions.device_tokens == DispatchOptions{}.device_tokens && !kDispatchOptions.out &&
              !DispatchOptions{}.out);
static_assert(kCombineOptions.order == static_cast<int>(CombineOptions{}.order) &&
              (kCombineOptions.apply_weights != 0) == CombineOptions{}.apply_weights &&
              kCombineOptions.stream == CombineOptions{}.stream && kCombineOptions.num_sms == CombineOptions{}.num_sms);

// Members keep their offsets forever: new ones are appended.
static_assert(offsetof(sy_group_options, heap_bytes) == 8 && offsetof(sy_group_options, num_blocks) == 32 &&
              offsetof(sy_group_options, num_sms) == 44 && offsetof(sy_group_options, backend) == 48 &&
              offsetof(sy_group_options, host) == 56 && offsetof(sy_group_options, network) == 72);
static_assert(offsetof(sy_dispatch_options, capacity) == 24 && offsetof(sy_dispatch_options, stream) == 32 &&
              offsetof(sy_dispatch_options, known_memory) == 52 && offsetof(sy_dispatch_options, out) == 56);
static_assert(offsetof(sy_combine_options, bias) == 24 && offsetof(sy_combine_options, stream) == 40 &&
              offsetof(sy_combine_options, known_memory) == 52);

// Values of the enumerations.
static_assert(SY_BACKEND_CPU == static_cast<int>(Backend::cpu) &&
              SY_BACKEND_CUDA == static_cast<int>(Backend::cuda));
static_assert(SY_NETWORK_SOCKETS == static_cast<int>(HostNetwork::sockets) &&
              SY_NETWORK_MPI == static_cast<int>(HostNetwork::mpi) &&
              SY_NETWORK_NCCL == static_cast<int>(HostNetwork::nccl));
static_assert(SY_SCALE_NONE == static_cast<int>(ScaleKind::none) &&
              SY_SCALE_F32 == static_cast<int>(ScaleKind::f32) &&
              SY_SCALE_UE8M0 == static_cast<int>(ScaleKind::ue8m0));
static_assert(SY_LAYOUT_RANK_MAJOR == static_cast<int>(Layout::rank_major) &&
              SY_LAYOUT_EXPERT_MAJOR == static_cast<int>(Layout::expert_major));
static_assert(SY_STAGING_DIRECT == static_cast<int>(Staging::direct) &&
              SY_STAGING_RING == static_cast<int>(Staging::ring));
static_assert(SY_SIZE_EXACT == static_cast<int>(SizePolicy::exact) &&
              SY_SIZE_CAPACITY == static_cast<int>(SizePolicy::capacity) &&
              SY_SIZE_WORST_CASE == static_cast<int>(SizePolicy::worst_case) &&
              SY_SIZE_AUTOMATIC == static_cast<int>(SizePolicy::automatic));
static_assert(SY_INVALID_IDS_RAISE == static_cast<int>(InvalidIds::raise) &&
              SY_INVALID_IDS_COUNT == static_cast<int>(InvalidIds::count) &&
              kNormalConfig.invalid_ids == static_cast<int>(NormalConfig{}.invalid_ids));
static_assert(SY_OVERFLOW_FAIL == static_cast<int>(Overflow::fail) &&
              SY_OVERFLOW_DROP_AND_REPORT == static_cast<int>(Overflow::drop_and_report));
static_assert(SY_PADDING_ZERO == static_cast<int>(Padding::zero) &&
              SY_PADDING_UNSPECIFIED == static_cast<int>(Padding::unspecified));
static_assert(SY_ORDER_PER_RANK == static_cast<int>(CombineOrder::per_rank) &&
              SY_ORDER_PER_ROUTE == static_cast<int>(CombineOrder::per_route) &&
              SY_ORDER_PER_HOST == static_cast<int>(CombineOrder::per_host));
static_assert(SY_MAX_RANKS == kMaxRanks && SY_MAX_TOPK == kMaxTopk && SY_SCALE_GROUP == kScaleGroup);

std::chrono::milliseconds to_ms(const char* name, int64_t value) {
  require_range(name, value, 1, INT64_MAX);
  return std::chrono::milliseconds(value);
}

}  // namespace

void write_requirement(sy_memory_requirement* to, const MemoryRequirement& from) {
  write_struct(to, sy_memory_requirement{sizeof(sy_memory_requirement), from.control_bytes, from.pool_bytes, from.ring_bytes,
                                         from.total(), from.private_bytes});
}

void write_statistics(sy_call_statistics* to, const CallStatistics& from) {
  sy_call_statistics all = SY_CALL_STATISTICS_INIT;
#define SY_STATISTIC_MOVED(name) all.name = from.name;
#define SY_STATISTIC_TIME(name) all.name = from.name;
#include "switchyard/statistics.def"
  write_struct(to, all);
}

void write_rows(sy_row_view* to, const Rows& from) {
  write_struct(to, sy_row_view{sizeof(sy_row_view), from.data, from.rows, from.cols, static_cast<sy_dtype>(from.dtype),
                               static_cast<sy_scale_kind>(from.scale_kind), from.scales});
}

GroupOptions to_options(const sy_group_options* options) {
  if (!options) return {};
  const sy_group_options o = read_struct(options, kGroupOptions, "options");
  require_range("options->reserved", o.reserved, 0, 0);
  require_range("options->num_sms", o.num_sms, 0, INT32_MAX);
  GroupOptions result;
  result.num_sms = o.num_sms;
  result.heap_bytes = o.heap_bytes;
  result.timeout = to_ms("options->timeout_ms", o.timeout_ms);
  result.rendezvous_timeout = to_ms("options->rendezvous_timeout_ms", o.rendezvous_timeout_ms);
  result.num_blocks = o.num_blocks;
  result.num_warps = o.num_warps;
  result.backend = to_enum<Backend>("options->backend", o.backend);
  require_range("options->device", o.device, -1, INT32_MAX);
  result.device = o.device;
  if (o.host) result.host = o.host;
  require_range("options->silence_ms", o.silence_ms, 0, INT64_MAX);
  result.silence = std::chrono::milliseconds(o.silence_ms);
  result.network = to_enum<HostNetwork>("options->network", o.network);
  require_range("options->reserved2", o.reserved2, 0, 0);
  return result;
}

NormalConfig to_config(const sy_normal_config* config) {
  const sy_normal_config c = read_struct(config, kNormalConfig, "config");
  NormalConfig result;
  result.hidden = c.hidden;
  result.num_experts = c.num_experts;
  result.topk = c.topk;
  result.max_tokens = c.max_tokens;
  result.layout = to_enum<Layout>("config->layout", c.layout);
  result.expert_alignment = c.expert_alignment;
  result.dtype = to_enum<DType>("config->dtype", c.dtype);
  result.staging = to_enum<Staging>("config->staging", c.staging);
  result.ring = {c.ring_num_channels, c.ring_send_chunk, c.ring_slots, c.ring_max_bytes};
  result.pool_bytes = c.pool_bytes;
  result.invalid_ids = to_enum<InvalidIds>("config->invalid_ids", c.invalid_ids);
  return result;
}

DispatchOptions to_options(const sy_dispatch_options* options, Rows& out) {
  if (!options) return {};
  const sy_dispatch_options o = read_struct(options, kDispatchOptions, "options");
  DispatchOptions result;
  result.quantize = to_enum<ScaleKind>("options->quantize", o.quantize);
  result.size = to_enum<SizePolicy>("options->size", o.size);
  result.capacity = o.capacity;
  result.overflow = to_enum<Overflow>("options->overflow", o.overflow);
  result.padding = to_enum<Padding>("options->padding", o.padding);
  result.stream = o.stream;
  result.num_sms = o.num_sms;
  result.known_memory = to_bool("options->known_memory", o.known_memory);
  result.device_tokens = o.device_tokens;
  if (o.out) {
    out = to_rows(o.out, "options->out");
    result.out = &out;
  }
  return result;
}

CombineOptions to_options(const sy_combine_options* options) {
  if (!options) return {};
  const sy_combine_options o = read_struct(options, kCombineOptions, "options");
  CombineOptions result;
  result.order = to_enum<CombineOrder>("options->order", o.order);
  result.weights = o.weights;
  result.apply_weights = to_bool("options->apply_weights", o.apply_weights);
  result.bias[0] = o.bias[0];
  result.bias[1] = o.bias[1];
  result.stream = o.stream;
  result.num_sms = o.num_sms;
  result.known_memory = to_bool("options->known_memory", o.known_memory);
  return result;
}

}  // namespace switchyard::detail
