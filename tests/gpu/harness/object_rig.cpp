// SPDX-License-Identifier: Apache-2.0
#include "gpu/harness/object_rig.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "base/index.hpp"
#include "multiproc/fork_ranks.hpp"

namespace harness {

namespace {

using switchyard::detail::idx;
size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

constexpr size_t kArenaBytes = size_t{128} << 20;

/// Kept for each rank until the process ends, because an allocation or a new stream may wait for another rank's kernel.
/// `copies` is shared by all ranks on a GPU: eight ranks with three streams each leave few of the GPU's 32 queues, and no queue
/// may serve two streams.
struct Lasting {
  std::byte* arena = nullptr;
  cudaStream_t streams[Station::kStreams] = {}, copies = nullptr;
  uint32_t* words = nullptr;
};

Lasting& lasting(int rank) {
  static std::mutex mutex;
  static auto* all = new std::map<int, Lasting>;
  static auto* copies = new std::map<int, cudaStream_t>;
  const std::lock_guard lock(mutex);
  Lasting& mine = (*all)[rank];
  if (mine.arena) return mine;
  must(cudaMalloc(reinterpret_cast<void**>(&mine.arena), kArenaBytes), "cudaMalloc");
  for (cudaStream_t& s : mine.streams) must(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate");
  int device = 0;
  must(cudaGetDevice(&device), "cudaGetDevice");
  cudaStream_t& shared = (*copies)[device];
  if (!shared) must(cudaStreamCreateWithFlags(&shared, cudaStreamNonBlocking), "cudaStreamCreate");
  mine.copies = shared;
  must(cudaHostAlloc(reinterpret_cast<void**>(&mine.words), 256, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  for (cudaStream_t s : mine.streams) {  // first launches
    CopyList list;
    list.add(mine.arena, mine.arena + 256, 4);
    launch_copies(list, s);
    launch_busy(1, 32, 1, reinterpret_cast<float*>(mine.arena), s);
    launch_set(reinterpret_cast<int32_t*>(mine.arena), 0, s);
    must(cudaStreamSynchronize(s), "first launches");
  }
  return mine;
}

/// Calls f(span) for every array of a dispatch, always in the same order.
template <class F>
void each_array(Dispatched& d, F&& f) {
  f(d.topk_ids), f(d.topk_weights), f(d.source_token), f(d.row_source), f(d.row_weights), f(d.expert_first_row);
  f(d.tokens_per_expert), f(d.aligned_per_expert), f(d.dropped), f(d.dropped_per_source), f(d.invalid_ids);
}

size_t x_bytes(const Dispatched& d) { return switchyard::dtype_bytes(d.x.dtype, d.x.rows * d.x.cols); }
size_t scale_bytes(const Dispatched& d) {
  return d.x.scales ? idx(d.x.rows) * switchyard::scale_row_bytes(d.x.cols, d.x.scale_kind) : 0;
}

}  // namespace

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

void Meeting::arrive() {
  std::unique_lock lock(mutex_);
  const uint64_t round = round_;
  if (++here_ == ranks_) {
    here_ = 0;
    ++round_;
    changed_.notify_all();
    return;
  }
  const bool in_time = changed_.wait_for(lock, 60s, [&] { return round_ != round || left_; });
  if (round_ != round) return;
  throw std::runtime_error(in_time ? "another rank left the test" : "another rank did not come within a minute");
}

void Meeting::leave() noexcept {
  const std::lock_guard lock(mutex_);
  left_ = true;
  changed_.notify_all();
}

void Gate::close(cudaStream_t stream, std::chrono::nanoseconds limit) const {
  *static_cast<volatile uint32_t*>(opened) = 0;
  *static_cast<volatile uint32_t*>(timed_out) = 0;
  launch_gate(opened, timed_out, static_cast<uint64_t>(limit.count()), stream);
}

Station::Station(Group& g, Failures& failures, Meeting& meeting) : group(g), f(failures), meeting_(meeting) {
  try {
    int devices = 0;
    must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    device_ = group.options().device >= 0 ? group.options().device : rank() % devices;
    must(cudaSetDevice(device_), "cudaSetDevice");
    Lasting& mine = lasting(rank());
    std::copy(mine.streams, mine.streams + kStreams, streams_);
    copies_ = mine.copies;
    arena_ = mine.arena;
    gate_ = {mine.words, mine.words + 32};
    must(cudaMemsetAsync(arena_, 0xEE, kArenaBytes, copies_), "cudaMemset");
    must(cudaStreamSynchronize(copies_), "cudaMemset");
    meet();
  } catch (...) {
    meeting_.leave();
    throw;
  }
}

std::byte* Station::allocate(size_t bytes) {
  if (used_ + aligned(bytes) > kArenaBytes) throw std::runtime_error("the test's device memory is too small");
  std::byte* at = arena_ + used_;
  used_ += aligned(bytes);
  return at;
}

void* Station::upload(const void* host, size_t bytes) {
  std::byte* to = allocate(std::max<size_t>(bytes, 4));
  if (host && bytes > 0) must(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, copies_), "copy to the device");
  must(cudaStreamSynchronize(copies_), "copy to the device");
  return to;
}

Inputs Station::upload(const Case& c, RankData& data) {
  Inputs in;
  in.x = data.x();
  in.ids = data.ids();
  const int64_t tokens = in.ids.num_tokens, topk = in.ids.topk;
  in.x_bytes = switchyard::dtype_bytes(in.x.dtype, tokens * in.x.cols);
  in.ids_bytes = idx(tokens * topk) * (in.ids.is_int64 ? 8 : 4);
  in.out_bytes = switchyard::dtype_bytes(c.scenario.y_type, tokens * in.x.cols);
  in.x.data = upload(in.x.data, in.x_bytes);
  if (in.x.scales) in.x.scales = upload(in.x.scales, idx(tokens) * switchyard::scale_row_bytes(in.x.cols, in.x.scale_kind));
  in.ids.data = upload(in.ids.data, in.ids_bytes);
  if (!c.problem.weights.empty()) {
    in.weights_bytes = idx(tokens * topk) * 4;
    in.weights = static_cast<const float*>(upload(data.weights(), in.weights_bytes));
  }
  in.out = upload(data.out(), in.out_bytes);
  return in;
}

void Station::read(void* host, const void* device, size_t bytes) {
  if (bytes > 0) must(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, copies_), "copy from the device");
  must(cudaStreamSynchronize(copies_), "copy from the device");
}

void Station::synchronize() {
  for (cudaStream_t s : streams_) must(cudaStreamSynchronize(s), "cudaStreamSynchronize");
}

void Station::meet() {
  synchronize();
  meeting_.arrive();
}

Shot Station::shoot(const Dispatched& given, cudaStream_t stream) {
  Shot shot;
  shot.d = given;
  shot.d.block.reset();
  shot.d.handle = Handle();
  size_t total = aligned(x_bytes(given)) + aligned(scale_bytes(given));
  each_array(shot.d, [&](const auto& array) { total += aligned(array.size_bytes()); });
  shot.base = allocate(total);
  std::byte* at = shot.base;
  CopyList list;
  const auto take = [&](const void* from, size_t bytes) {
    list.add(at, from, bytes);
    at += aligned(bytes);
  };
  take(given.x.data, x_bytes(given));
  take(given.x.scales, scale_bytes(given));
  each_array(shot.d, [&](const auto& array) { take(array.data(), array.size_bytes()); });
  launch_copies(list, stream);
  return shot;
}

std::byte* Station::keep(const void* device, size_t bytes, cudaStream_t stream) {
  std::byte* to = allocate(bytes);
  launch_copy(to, device, bytes, stream);
  return to;
}

void Station::check(const Case& c, const RankData& data, const Shot& shot, const Handle& handle) {
  Dispatched d = shot.d;
  const int64_t rows = handle.rows();
  f.check(d.rows == rows || d.rows == -1, "rows is " + std::to_string(d.rows) + ", handle.rows() " + std::to_string(rows));
  d.rows = rows;
  d.handle = handle;
  size_t total = aligned(x_bytes(d)) + aligned(scale_bytes(d));
  each_array(d, [&](const auto& array) { total += aligned(array.size_bytes()); });
  std::vector<uint64_t> raw(total / 8 + 1);
  auto* const bytes = reinterpret_cast<std::byte*>(raw.data());
  read(bytes, shot.base, total);
  size_t at = aligned(x_bytes(d)) + aligned(scale_bytes(d));
  if (d.x.scales) d.x.scales = bytes + aligned(x_bytes(d));
  d.x.data = bytes;
  each_array(d, [&](auto& array) {
    using T = std::remove_reference_t<decltype(array[0])>;
    const size_t size = array.size_bytes();
    array = {reinterpret_cast<T*>(bytes + at), array.size()};
    at += aligned(size);
  });
  if (c.problem.weights.empty()) d.topk_weights = d.row_weights = {};
  const size_t routes = idx(data.ids().num_tokens * data.ids().topk);  // more memory is allocated for a captured call
  if (d.dropped.size() > routes) d.dropped = d.dropped.first(routes);
  data.check_dispatched(d, f);
}

void Station::check_combined(RankData& data, const Inputs& in, const void* out) {
  read(data.out(), out, in.out_bytes);
  data.check_combined(f);
}

DispatchOptions Station::dispatch_options(const Case& c, cudaStream_t stream) const {
  DispatchOptions o = make_dispatch_options(c, rank());
  if (kBackend == switchyard::Backend::cuda && o.size == SizePolicy::worst_case)
    o.size = SizePolicy::automatic;  // the default, with the same meaning
  o.stream = stream;
  return o;
}

CombineOptions Station::combine_options(const Case& c, cudaStream_t stream) const {
  CombineOptions o;
  o.order = c.scenario.order;
  o.apply_weights = c.scenario.apply_weights;
  o.num_sms = c.scenario.num_sms;
  o.stream = stream;
  return o;
}

void Station::round(NormalExchange& exchange, const Case& c, int repetition) {
  RankData data(c, rank(), repetition);
  const Inputs in = upload(c, data);
  meet();
  const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, dispatch_options(c, stream()));
  const Shot shot = shoot(d, stream());
  exchange.combine(d.x, d.handle, in.out, combine_options(c, stream()));
  meet();
  check(c, data, shot, d.handle);
  check_combined(data, in);
  meet();
}

Scenario gpu_scenario(const std::string& name, int world, Layout layout, int64_t tokens, uint64_t seed) {
  Scenario s;
  s.name = name;
  s.problem.world = world;
  s.problem.experts = 2 * world + 1;
  s.problem.topk = 3;
  s.problem.layout = layout;
  s.problem.alignment = layout == Layout::expert_major ? 4 : 1;
  s.problem.size = SizePolicy::worst_case;
  s.problem.max_tokens = tokens;
  s.tokens.assign(idx(world), tokens);
  s.int64_ids = seed % 2 == 0;
  s.x_pattern = Pattern::random_values;
  s.identity = true;
  s.output_memory = OutputMemory::in_place;
  s.seed = seed;
  return s;
}

const char* suffix_of(Width width) { return width == Width::wide ? "_wide" : ""; }

Scenario with_width(Scenario s, Width width) {
  if (width == Width::narrow) return s;
  const int world = s.problem.world;
  if (world > 4) throw std::runtime_error("so many ranks do not fit on a GPU in this width");
  s.name += ", wide";
  s.hidden = 528;
  s.num_sms = world <= 2 ? 48 : world == 3 ? 24 : 16;
  return s;
}

size_t row_bytes_of(const Case& c) { return switchyard::dtype_bytes(c.scenario.x_type, c.scenario.hidden); }

int64_t worst_rows(const Case& c) {
  int64_t rows = 0;
  for (int r = 0; r < c.problem.world; ++r) rows = std::max(rows, oracle::worst_case_rows(c.problem, r));
  return rows;
}

NormalConfig config_with_large_pool(const Case& c, int times) {
  NormalConfig config = make_config(c);
  config.pool_bytes *= idx(times);
  return config;
}

int half_of_a_rank(int world) {
  int devices = 0, all = 0;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  must(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, 0), "device attribute");
  return all / ((world + devices - 1) / devices) / 2;
}

size_t heap_for(const NormalConfig& config, int world, int objects) {
  return idx(objects) * NormalExchange::heap_bytes(config, world, kBackend);
}

namespace {

/// The failures so far, inside isolated().
std::vector<std::string>* g_found = nullptr;

}  // namespace

void isolated(const std::function<void()>& body, std::chrono::milliseconds limit) {
  const auto ends = switchyard::test::run_ranks(
      1,
      [&](switchyard::test::ChildRank& me) {
        std::vector<std::string> found;
        g_found = &found;
        body();
        for (std::string& text : found) {
          std::replace(text.begin(), text.end(), '\n', ' ');
          me.say(text);
        }
        must(cudaGetLastError(), "an error was left pending");
      },
      limit);
  EXPECT_TRUE(ends[0].ok()) << ends[0];
  EXPECT_EQ(joined(ends[0].said), "");
}

void on_gpus(int world, size_t heap, std::chrono::milliseconds timeout, const StationBody& body) {
  if (!g_found) return isolated([&] { on_gpus(world, heap, timeout, body); });
  Fleet fleet;
  fleet.world = world;
  fleet.options.heap_bytes = heap;
  fleet.options.backend = kBackend;
  fleet.options.timeout = timeout;
  Meeting meeting(world);
  const auto texts = run_threads(fleet, [&](Group& group, Failures& failures) {
    Station station(group, failures, meeting);
    body(station);
  });
  g_found->insert(g_found->end(), texts.begin(), texts.end());
}

ExchangeRig::ExchangeRig(Station& station, const std::shared_ptr<const Case>& given, const NormalConfig& config)
    : me(station),
      c(given),
      exchange(station.group, config),
      data(*given, station.rank(), 0),
      in(station.upload(*given, data)) {
  me.meet();
}

Dispatched ExchangeRig::dispatch(int stream) {
  return exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream(stream)));
}

void ExchangeRig::combine(const switchyard::ConstRows& rows, const Handle& handle, int stream) {
  exchange.combine(rows, handle, in.out, me.combine_options(*c, me.stream(stream)));
}

std::vector<switchyard::RowBuffer> ExchangeRig::fill_pool(const Handle& handle, size_t left) {
  std::vector<switchyard::RowBuffer> all;
  const Outcome full = outcome_of([&] {
    while (all.size() < 1000) all.push_back(exchange.allocate_rows(handle, DType::bf16));
  });
  me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(full.code), "code, " + full.text);
  me.f.check(all.size() > left, "the pool is too small for the test");
  all.resize(all.size() - std::min(left, all.size()));
  return all;
}

}  // namespace harness
