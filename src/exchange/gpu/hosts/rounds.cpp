// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/hosts/rounds.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "carrier/nccl/carrier.hpp"
#include "exchange/gpu/check.hpp"
#include "exchange/gpu/memory.hpp"
#include "heap/gpu/device_guard.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

constexpr const char* kSubject = "connecting the hosts";
constexpr std::chrono::milliseconds kLook{1}, kIdleLook{5};
/// What the round of a replay may last longer: a kernel before it that waits for a rank names that rank at its own deadline.
constexpr std::chrono::milliseconds kReplayGrace{200};
/// The first round: bytes of a leg.
constexpr size_t kFirstBytes = 128;

class Marks final : public StreamMarks {
 public:
  Marks(std::shared_ptr<StreamPoints> points, int device) : points_(std::move(points)), device_(device) {}
  std::shared_ptr<const void> mark(void* stream) override {
    auto* const on = static_cast<gpu::Stream>(stream);
    return capture_of(on).active ? nullptr : points_->mark(on, 0);
  }
  bool reached(const void* mark) noexcept override try {
    const DeviceGuard guard(device_);  // threads that end communicators ask, too
    return StreamPoints::reached(*static_cast<const StreamPoint*>(mark));
  } catch (const std::exception&) {
    return false;
  }
  void order(void* stream, const void* mark) override {
    check_cuda(gpu::order_after(static_cast<gpu::Stream>(stream), static_cast<const StreamPoint*>(mark)->event),
               "cudaStreamWaitEvent");
  }

 private:
  std::shared_ptr<StreamPoints> points_;
  int device_;
};

/// What a rank tells the others of its NCCL.
struct Claim {
  StepReport report;
  int version = 0;
  GinClaim gin;
};

std::vector<Claim> share(Bootstrap& link, const Deadline& deadline, const Claim& mine) {
  std::vector<Claim> all(static_cast<size_t>(link.world()));
  link.all_gather(&mine, sizeof mine, all.data(), deadline.remaining());
  for (size_t r = 0; r < all.size(); ++r) raise_if_failed(all[r].report, kSubject, r);
  return all;
}

/// As agree_on_gin of the claims: all ranks throw alike.
bool agree(const std::vector<Claim>& all) try {
  std::vector<GinClaim> claims;
  for (const Claim& claim : all) claims.push_back(claim.gin);
  return agree_on_gin(claims);
} catch (const Error& error) {
  throw AgreedError(error.code(), error.what());
}

void check_versions(const std::vector<Claim>& all) {
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r].version != all[0].version)
      throw AgreedError(ErrorCode::mismatch, "NCCL is version " + nccl_version_text(all[0].version) + " on rank 0 and " +
                                                 nccl_version_text(all[r].version) + " on rank " + std::to_string(r) +
                                                 ": all ranks need the same (SWITCHYARD_NCCL may name the file)");
}

/// The id of each rail, drawn by its lowest rank.
std::vector<NcclId> share_ids(Bootstrap& link, const Deadline& deadline) {
  const HostMap& map = link.host_map();
  const auto rails = static_cast<size_t>(map.rails());
  const auto lowest = [&](size_t rail) {
    const std::vector<int> ranks = map.rail_ranks(static_cast<int>(rail));
    return *std::min_element(ranks.begin(), ranks.end());
  };
  std::vector<NcclId> mine(rails), all(rails * static_cast<size_t>(link.world()));
  run_step(link, deadline, kSubject, [&] {
    for (size_t rail = 0; rail < rails; ++rail) {
      if (lowest(rail) != link.rank()) continue;
      if (const int result = nccl().get_id(&mine[rail]); result != kNcclSuccess)
        throw Error(ErrorCode::system, std::string("NCCL: ncclGetUniqueId: ") + nccl().error_text(result));
    }
  });
  link.all_gather(mine.data(), rails * sizeof(NcclId), all.data(), deadline.remaining());
  std::vector<NcclId> ids;
  for (size_t rail = 0; rail < rails; ++rail) ids.push_back(all[static_cast<size_t>(lowest(rail)) * rails + rail]);
  return ids;
}

}  // namespace

GpuRounds::GpuRounds(Group::Impl& group, CudaRank& gpu)
    : group_(group), gpu_(gpu), marks_(std::make_shared<Marks>(gpu.shared_points(), gpu.device())) {
  const Milliseconds deadline = group.deadline_of(Operation::construction);
  carrier_ = connect(deadline);
  run_step(*group.bootstrap, Deadline(deadline), kSubject, [&] { send_first_round(deadline * 3 / 4); });
  watcher_ = std::thread([this] { watch(); });
}

std::shared_ptr<GpuRounds> GpuRounds::of(Group::Impl& group, CudaRank& gpu) {
  if (!gpu.rounds()) gpu.rounds() = std::make_shared<GpuRounds>(group, gpu);
  return gpu.rounds();
}

GpuRounds::~GpuRounds() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  carrier_.reset();
  if (first_stream_ != nullptr) gpu::destroy_stream(first_stream_);
}

std::unique_ptr<Carrier> GpuRounds::connect(Milliseconds budget) {
  const Deadline deadline(budget);
  Bootstrap& link = *group_.bootstrap;
  Claim mine;
  mine.report = attempt([&] {
    mine.version = nccl().version;
    const GinChoice choice = gin_choice();
    if (choice != GinChoice::off) gin_ = make_gpu_gin(gpu_);
    mine.gin = make_gin_claim(choice, why_no_gin(nccl(), gin_.get(), gpu_.ranks_here()));
  });
  const std::vector<Claim> all = share(link, deadline, mine);
  check_versions(all);
  bool by_kernels = agree(all);
  const std::vector<NcclId> ids = share_ids(link, deadline);
  std::unique_ptr<NcclComms> comms;
  run_step(link, deadline, kSubject, [&] { comms = std::make_unique<NcclComms>(nccl(), spec_of(ids, budget)); });
  if (by_kernels) {
    mine.report = attempt([&] { mine.gin = make_gin_claim(mine.gin.choice, why_no_gin(*comms)); });
    by_kernels = agree(share(link, deadline, mine));
  }
  if (!by_kernels) {
    gin_ = nullptr;
    return make_nccl_carrier(std::move(comms));
  }
  std::unique_ptr<Carrier> made;
  const auto slot = static_cast<size_t>(group_.round_bytes);
  run_step(link, deadline, kSubject, [&] { made = make_gin_carrier(std::move(comms), gin_, slot); });
  return made;
}

NcclCarrierSpec GpuRounds::spec_of(const std::vector<NcclId>& ids, Milliseconds budget) {
  const HostMap& map = group_.host_map();
  const int self = group_.bootstrap->rank();
  NcclCarrierSpec spec;
  spec.rank = self;
  std::vector<int> index(ids.size(), -1);  // of a rail in the spec
  for (int rail = 0; rail < map.rails(); ++rail) {
    std::vector<int> ranks = map.rail_ranks(rail);
    if (std::find(ranks.begin(), ranks.end(), self) == ranks.end()) continue;
    index[static_cast<size_t>(rail)] = static_cast<int>(spec.rails.size());
    spec.rails.push_back({std::move(ranks), ids[static_cast<size_t>(rail)]});
  }
  spec.rail_to = [index, &map, self](int peer) {
    const int rail = map.rail_between(self, peer);
    return rail < 0 ? -1 : index[static_cast<size_t>(rail)];
  };
  spec.deadline = budget * 3 / 4;  // its error has still to be told
  spec.interrupted = [this] { return group_.abort_word() != 0; };
  spec.marks = marks_;
  return spec;
}

void GpuRounds::send_first_round(Milliseconds budget) {
  const Deadline deadline(budget);
  const std::vector<int> peers = group_.host_map().rail_peers(group_.bootstrap->rank());
  check_cuda(gpu::make_stream(&first_stream_), "cudaStreamCreate");
  DeviceMemory memory(2 * kFirstBytes * (peers.size() + 1), gpu_.copy_stream());
  std::vector<Leg> legs;
  for (size_t i = 0; i < peers.size(); ++i) {
    auto* const at = memory.as<std::byte>(2 * kFirstBytes * i);
    legs.push_back({peers[i], {at, kFirstBytes}, {at + kFirstBytes, kFirstBytes}});
  }
  const uint64_t round = next_round_++;
  if (gin_) gin_->set_call(Operation::none, budget * 2);  // this thread ends it before
  carrier_->post(round, legs, first_stream_);
  RoundLook look = carrier_->advance(round);
  while (look.state == RoundState::under_way && !deadline.passed() && group_.abort_word() == 0) {
    std::this_thread::sleep_for(kLook);
    look = carrier_->advance(round);
  }
  if (look.state == RoundState::done) return;
  carrier_->abort();
  memory.end_after(gpu_.until_end());
  throw Error(look.state == RoundState::under_way ? ErrorCode::rendezvous : ErrorCode::system,
              "NCCL: the first round with the ranks of other hosts did not come to an end (NCCL_DEBUG=WARN says more)");
}

namespace {

/// One of those that have a leg in a round.
int a_peer_of(std::span<const Leg> legs) {
  const auto leg = std::find_if(legs.begin(), legs.end(), [](const Leg& l) { return !l.receive.empty(); });
  return leg == legs.end() ? legs.front().peer : leg->peer;
}

}  // namespace

class GpuRounds::Replays {
 public:
  explicit Replays(CudaRank& gpu) : gpu_(gpu), token_(gpu.token()), words_(gpu.take_host_words()) {}
  ~Replays() {
    if (!token_.expired()) gpu_.give_host_words(words_);
  }
  Replays(const Replays&) = delete;
  Replays& operator=(const Replays&) = delete;

  const HostWords& words() const { return words_; }
  uint64_t word(int i) const { return std::atomic_ref(words_.host[i]).load(std::memory_order_acquire); }

  std::optional<Pending> captured;  // guarded by GpuRounds::mutex_: what the last captured round has for all
  // Of the watching thread: the round of a replay that is under way.
  uint64_t seen = 0;
  std::optional<Clock::time_point> since;

 private:
  CudaRank& gpu_;
  const std::weak_ptr<CudaRank*> token_;
  const HostWords words_;
};

std::shared_ptr<GpuRounds::Replays> GpuRounds::watch_replays() {
  if (gin_)
    throw Error(
        ErrorCode::unsupported,
        "rounds of device-initiated networking cannot be replayed; set SWITCHYARD_NCCL_GIN=0 on all ranks to capture calls");
  auto replays = std::make_shared<Replays>(gpu_);
  if (replays->words().host == nullptr)
    throw Error(ErrorCode::unsupported, "too many exchanges of this rank have captured calls between hosts (" +
                                            std::to_string(HostWords::kMost) + "): nobody could end the rounds of another");
  const std::lock_guard lock(mutex_);
  replays_.push_back(replays);
  return replays;
}

RoundWatch GpuRounds::words_of(const Replays& replays) { return {replays.words().device, replays.words().device + 1}; }

void GpuRounds::post_captured(Replays& replays, std::span<const Leg> legs, gpu::Stream stream, Operation operation,
                              std::chrono::nanoseconds timeout) {
  if (over_) return;
  Pending pending{next_round_++, operation, timeout + kReplayGrace, a_peer_of(legs), nullptr};
  carrier_->post(pending.round, legs, stream);
  if (carrier_->advance(pending.round).state == RoundState::broken) return give_up(pending);
  const std::lock_guard lock(mutex_);
  replays.captured = std::move(pending);
}

void GpuRounds::post(std::span<const Leg> legs, gpu::Stream stream, Operation operation, std::chrono::nanoseconds timeout) {
  if (over_) return;
  const bool any = std::any_of(legs.begin(), legs.end(), [](const Leg& l) { return !l.send.empty() || !l.receive.empty(); });
  if (!any) return;
  const uint64_t round = next_round_++;
  const int peer = a_peer_of(legs);
  Pending pending{round, operation, timeout, peer, marks_->mark(stream)};
  if (gin_) gin_->set_call(operation, timeout);
  carrier_->post(round, legs, stream);
  if (carrier_->advance(round).state == RoundState::broken) return give_up(pending);
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back(std::move(pending));
  }
  wake_.notify_all();
}

void GpuRounds::give_up(const Pending& round) {
  const Clock::time_point until = Clock::now() + std::chrono::nanoseconds(kUnderWayNs);
  while (group_.abort_word() == 0 && Clock::now() < until) std::this_thread::sleep_for(kLook);
  if (group_.abort_word() == 0) {
    record(round, round.peer, true, 0);
    group_.post_abort(static_cast<int>(ErrorCode::system), 255);
  }
  end();
}

void GpuRounds::watch() try {
  const DeviceGuard guard(gpu_.device());  // events are asked for
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, pending_.empty() && replays_.empty() ? kIdleLook : kLook);
    lock.unlock();
    if (!over_) look();
    lock.lock();
  }
} catch (const std::exception&) {  // without memory or a context nobody would end a round
  group_.post_abort(static_cast<int>(ErrorCode::system), 255);
  end();
}

void GpuRounds::look() {
  if (group_.abort_word() != 0) return end();
  if (const FaultRecord* const fault = gpu_.fault()) {
    // A kernel found it. The other hosts hear of it now, and not when this rank's thread asks.
    if (!fault->aborted)
      group_.post_abort(static_cast<int>(fault->mismatch ? ErrorCode::mismatch : ErrorCode::peer_timeout), fault->awaited_rank);
    return end();
  }
  look_at_replays();
  while (!over_) {
    std::optional<Pending> front;
    {
      const std::lock_guard lock(mutex_);
      if (pending_.empty()) return;
      Pending& first = pending_.front();
      if (!first.since && marks_->reached(first.before.get())) first.since = Clock::now();
      front = first;
    }
    const RoundLook now = carrier_->advance(front->round);
    if (now.state != RoundState::done) return look_at(*front, now);
    const std::lock_guard lock(mutex_);
    pending_.pop_front();
  }
}

void GpuRounds::look_at_replays() {
  std::vector<std::shared_ptr<Replays>> all;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(replays_, [](const auto& each) { return each.expired(); });
    for (const auto& each : replays_)
      if (auto held = each.lock()) all.push_back(std::move(held));
  }
  for (const auto& each : all) look_at_replay(*each);
}

void GpuRounds::look_at_replay(Replays& replays) {
  std::optional<Pending> round;
  {
    const std::lock_guard lock(mutex_);
    round = replays.captured;
  }
  if (!round || over_) return;
  const uint64_t ended = replays.word(1), begun = replays.word(0);
  if (begun == ended || begun != replays.seen) replays.since.reset();
  replays.seen = begun;
  const RoundLook now = carrier_->advance(0);
  if (begun == ended && now.state != RoundState::broken) return;
  if (!replays.since) replays.since = Clock::now();
  round->since = replays.since;
  if (begun != ended) {
    round->round = begun >> kRoundOperationBits;
    round->operation = static_cast<Operation>(begun & ((uint64_t{1} << kRoundOperationBits) - 1));
  }
  look_at(*round, now.state == RoundState::broken ? now : RoundLook{RoundState::under_way, -1});
}

void GpuRounds::look_at(const Pending& front, const RoundLook& look) {
  const int peer = look.peer >= 0 ? look.peer : front.peer;
  const auto since = front.since.value_or(Clock::now());
  const auto waited = Clock::now() - since;
  const auto waited_ns = static_cast<uint64_t>(std::chrono::nanoseconds(waited).count());
  if (look.state != RoundState::under_way) {
    // The end of a connection is no news of a death. Who watches the peer says who it was, within a moment.
    if (!broken_since_) broken_since_ = Clock::now();
    if (Clock::now() - *broken_since_ < std::chrono::nanoseconds(kUnderWayNs)) return;
    record(front, peer, true, waited_ns);
    group_.post_abort(static_cast<int>(ErrorCode::system), 255);
    return end();
  }
  if (!front.since || waited < front.timeout) return;
  record(front, peer, false, waited_ns);
  group_.post_abort(static_cast<int>(ErrorCode::peer_timeout), peer);
  end();
}

void GpuRounds::record(const Pending& round, int peer, bool aborted, uint64_t waited_ns) {
  FaultRecord fault;
  fault.site = Site::network;
  fault.operation = round.operation;
  fault.aborted = aborted;
  fault.seen_abort = aborted ? make_abort_word(peer, static_cast<int>(ErrorCode::system)) : 0;
  fault.epoch = round.round;
  fault.awaited_rank = peer;
  fault.waited_ns = waited_ns;
  gpu_.record(fault);
}

void GpuRounds::end() {
  over_ = true;
  carrier_->abort();
}

}  // namespace switchyard::detail
