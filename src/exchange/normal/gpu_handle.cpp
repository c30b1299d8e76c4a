// SPDX-License-Identifier: Apache-2.0
// A handle's tables in host memory, computed from ids, counts and records by the same host code as on the CPU.
#include <algorithm>
#include <cstring>

#include "exchange/normal/gpu.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

template <class T>
std::vector<T> download(const T* from, int64_t count, gpu::Stream stream) {
  std::vector<T> out(static_cast<size_t>(count));
  if (count > 0) check_cuda(gpu::copy_to_host(out.data(), from, out.size() * sizeof(T), stream), "copy of a handle");
  check_cuda(gpu::wait_for_stream(stream), "copy of a handle");
  return out;
}

void read_counts_rows(const std::vector<std::byte>& rows, int64_t row_bytes, GatheredCounts& counts) {
  const auto world = static_cast<size_t>(counts.world), experts = static_cast<size_t>(counts.experts);
  counts.touching.resize(world * world);
  counts.routes.resize(world * experts);
  counts.tokens.resize(world);
  counts.capacity.resize(world);
  for (size_t r = 0; r < world; ++r) {
    CountsHead head;
    const std::byte* row = rows.data() + static_cast<int64_t>(r) * row_bytes;
    std::memcpy(&head, row, sizeof head);
    counts.tokens[r] = head.tokens;
    counts.capacity[r] = head.capacity;
    std::memcpy(&counts.touching[r * world], row + sizeof head, 4 * world);
    std::memcpy(&counts.routes[r * experts], row + sizeof head + 4 * world, 4 * experts);
  }
}

}  // namespace

namespace {

template <class T>
void upload(T* to, const std::vector<T>& from, gpu::Stream stream) {
  if (!from.empty()) check_cuda(gpu::copy_to_device(to, from.data(), from.size() * sizeof(T), stream), "copy of a handle");
}

std::vector<SendEntry> strided_sends(const HandleData& h, int stride) {
  std::vector<SendEntry> sends(static_cast<size_t>(h.tokens * stride), SendEntry{-1, -1, -1});
  for (int64_t t = 0; t < h.tokens; ++t) {
    const auto begin = h.sends.begin() + h.send_begin[static_cast<size_t>(t)],
               end = h.sends.begin() + h.send_begin[static_cast<size_t>(t) + 1];
    std::copy(begin, end, sends.begin() + t * stride);
  }
  return sends;
}

std::vector<std::byte> counts_rows(const HandleData& h) {
  const auto world = static_cast<size_t>(h.counts.world), experts = static_cast<size_t>(h.counts.experts);
  const auto row_bytes = static_cast<size_t>(ControlLayout{0, h.counts.world, h.counts.experts}.counts_row_bytes());
  std::vector<std::byte> rows(world * row_bytes);
  for (size_t r = 0; r < world; ++r) {
    const CountsHead head{0, h.counts.tokens[r], h.counts.capacity[r], 0};
    std::byte* row = rows.data() + r * row_bytes;
    std::memcpy(row, &head, sizeof head);
    std::memcpy(row + sizeof head, &h.counts.touching[r * world], 4 * world);
    std::memcpy(row + sizeof head + 4 * world, &h.counts.routes[r * experts], 4 * experts);
  }
  return rows;
}

}  // namespace

void upload_handle(const HandleData& h, const Tables& t, const Received& r, gpu::Stream stream) {
  TablesHeader header{};
  header.tokens = h.tokens;
  header.rows = h.rows;
  header.num_records = h.num_records;
  header.moved = 1;
  header.identity = h.identity;
  header.invalid_ids = h.invalid_ids;
  header.any_weights = !h.record_weight.empty() || !h.weights.empty();
  const std::vector<int64_t> records = record_ranges(h);
  std::copy(records.begin(), records.end(), header.record_begin);
  std::copy(h.counts.tokens.begin(), h.counts.tokens.end(), header.tokens_of);
  const std::vector<int32_t> by_chunk = records_by_chunk(h);
  std::copy(by_chunk.begin(), by_chunk.end(), header.chunk_records);
  upload(t.header, std::vector<TablesHeader>{header}, stream);
  upload(t.counts, counts_rows(h), stream);
  upload(t.ids, h.ids, stream);
  if (h.layout == Layout::expert_major) upload(t.route_row, h.route_row, stream);
  upload(t.sends, strided_sends(h, t.stride), stream);
  upload(t.weights, h.weights, stream);
  upload(t.dropped, h.dropped, stream);
  upload(t.first_row, h.first_row, stream);
  upload(t.kept, h.kept_per_expert, stream);
  upload(t.aligned, h.aligned_per_expert, stream);
  upload(t.padding, padding_ranges(h), stream);
  upload(t.local_dropped, h.local_dropped, stream);
  upload(reinterpret_cast<int32_t*>(r.records + r.layout.token_at()), h.record_token, stream);
  upload(reinterpret_cast<int32_t*>(r.records + r.layout.route_at()), h.record_route, stream);
  upload(reinterpret_cast<float*>(r.records + r.layout.weight_at()), h.record_weight, stream);
  upload(r.row_source, h.row_source, stream);
  upload(r.row_weight, h.row_weight, stream);
  check_cuda(gpu::wait_for_stream(stream), "copy of a handle");
}

std::shared_ptr<const HandleData> CudaNormal::use_handle(Call& on, const Handle& handle) {
  auto& call = static_cast<CudaCall&>(on);
  const HandleData& given = handle.data();
  if (given.device) {
    const std::shared_ptr<CudaRank*> maker = tables_of(given).gpu.lock();
    if (maker && *maker == &gpu_) {
      use(tables_of(given).tables_block, call);
      use(tables_of(given).received_block, call);
      return {std::shared_ptr<void>(), &given};
    }
  }
  const HandleData& h = host_data(given);
  if (call.captured)
    throw Error(ErrorCode::unsupported, "a handle from the host (deserialized) cannot be used while its stream is captured");
  auto copy = std::make_shared<HandleData>(h);
  auto device = std::make_shared<CudaHandle>();
  const TablesShape shape = shape_of(h.tokens);
  const RecordLayout records{h.records_allocated, h.topk};
  const bool expert_major = h.layout == Layout::expert_major;
  device->tables_block = take(static_cast<size_t>(carve_tables(nullptr, shape).bytes), Content::handle, call.at);
  device->tables = carve_tables(device->tables_block->data, shape);
  device->received_block = take(static_cast<size_t>(carve_received(nullptr, records, h.rows_allocated, expert_major).bytes),
                                Content::handle, call.at);
  device->received = carve_received(device->received_block->data, records, h.rows_allocated, expert_major);
  device->gpu = gpu_.token();
  device->group = &group_;
  device->made = call.at;
  device->with_weights = !h.record_weight.empty();
  device->shape = h;
  upload_handle(h, device->tables, device->received, call.stream());
  device->until = gpu_.points().mark(call.stream(), call.at.id);
  copy->device = std::move(device);
  return copy;
}

const HandleData& CudaHandle::host() const {
  const std::lock_guard lock(mutex_);
  if (host_ && until) return *host_;
  const std::shared_ptr<CudaRank*> alive = gpu.lock();
  if (!alive) throw Error(ErrorCode::invalid_argument, "handle: the group that made it is gone, and its tables with it");
  CudaRank& rank = **alive;
  const DeviceGuard guard(rank.device());
  if (capture_of(made.stream).active)
    throw Error(ErrorCode::unsupported,
                "counts() and other host copies of a handle wait for the GPU: not while a stream is captured");
  {
    const RelaxedCapture relaxed;  // another stream of this thread may be captured
    check_cuda(until ? gpu::wait_for_event(until->event) : gpu::wait_for_device(), "wait for a dispatch");
  }
  group->check_usable("dispatch");

  const gpu::Stream copies = rank.copy_stream();
  const TablesHeader header = download(tables.header, 1, copies)[0];
  if (header.moved != 1) {
    rank.raise_soft_fault("counts");
    throw Error(
        header.status ? static_cast<ErrorCode>(header.status) : ErrorCode::pool_exhausted,
        "counts: the dispatch that made this handle moved nothing, because a rank had no room for its rows; the group can "
        "be used");
  }
  auto h = std::make_unique<HandleData>(shape);
  h->identity = header.identity;
  h->invalid_ids = header.invalid_ids;
  const int64_t row_bytes = ControlLayout{0, h->counts.world, h->counts.experts}.counts_row_bytes();
  read_counts_rows(download(tables.counts, row_bytes * h->counts.world, copies), row_bytes, h->counts);
  std::vector<int32_t> ids = download(tables.ids, header.tokens * h->topk, copies);
  for (int32_t& id : ids)
    if (id < -1) id = -2 - id;  // dropped at capacity; the plan drops it again
  LocalPlan local;
  local.build(ExpertIds::of(ids.data(), header.tokens, h->topk), h->map.experts, h->map.world);
  build_owner_side(local, *h);
  if (header.any_weights) h->weights = download(tables.weights, header.tokens * h->topk, copies);
  const int64_t records = h->records_allocated;
  h->record_token = download(reinterpret_cast<const int32_t*>(received.records + received.layout.token_at()), records, copies);
  h->record_route =
      download(reinterpret_cast<const int32_t*>(received.records + received.layout.route_at()), records * h->topk, copies);
  if (header.any_weights)
    h->record_weight =
        download(reinterpret_cast<const float*>(received.records + received.layout.weight_at()), records * h->topk, copies);
  for (int64_t i = h->num_records; i < records; ++i) h->record_token[static_cast<size_t>(i)] = -1;
  for (int64_t i = h->num_records * h->topk; i < records * h->topk; ++i) {
    h->record_route[static_cast<size_t>(i)] = -1;
    if (header.any_weights) h->record_weight[static_cast<size_t>(i)] = 0.0f;
  }
  build_receiver_side(*h);
  host_ = std::move(h);
  return *host_;
}

}  // namespace switchyard::detail
