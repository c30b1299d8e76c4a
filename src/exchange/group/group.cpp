// SPDX-License-Identifier: Apache-2.0
#include "switchyard/group.hpp"

#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include "base/enum_text.hpp"
#include "base/forked.hpp"
#include "exchange/group/enum_checks.hpp"
#include "exchange/group/exchange_base.hpp"
#include "exchange/group/impl.hpp"
#include "switchyard/status.hpp"
#include "switchyard/trace.hpp"

namespace switchyard {

using namespace detail;

bool detail::is_known_to_peers(ErrorCode code) {
  return code == ErrorCode::peer_timeout || code == ErrorCode::peer_failed || code == ErrorCode::mismatch;
}

namespace {

/// Describes the call made by a rank, for error messages.
std::string describe_call(uint64_t word) {
  std::string text = operation_name(static_cast<Operation>(called_operation(word)));
  const auto object = static_cast<uint64_t>(called_object(word));
  if ((object & detail::kSiteOfCall) != 0) return text + " (site " + std::to_string(object & (detail::kSiteOfCall - 1)) + ")";
  if (called_object(word) != 0) text += " of object " + std::to_string(called_object(word));
  return text;
}

/// Throws the AgreedError of the lowest rank that failed, if any, or AgreedError(mismatch) if only some ranks take heap memory.
void check_step(const char* subject, const std::vector<ConstructionReport>& shares) {
  for (size_t r = 0; r < shares.size(); ++r) raise_if_failed(shares[r].report, subject, r);
  for (size_t r = 1; r < shares.size(); ++r) {
    if (shares[r].is_placed == shares[0].is_placed) continue;
    const auto differs =
        find_difference({}, shares.size(), [&](size_t i) -> const AgreedProposal& { return shares[i].agreed; });
    if (!differs.text.empty()) throw AgreedError(ErrorCode::mismatch, differs.text);
    throw AgreedError(ErrorCode::mismatch, std::string(subject) + ": one of rank 0 and rank " + std::to_string(r) +
                                               " takes memory of the symmetric heap and the other does not");
  }
}

/// Throws AgreedError(mismatch) if the ranks construct different kinds of objects or objects with different settings.
void check_agreed(const AgreedFields& fields, const std::vector<ConstructionReport>& shares) {
  const auto differs =
      find_difference(fields, shares.size(), [&](size_t r) -> const AgreedProposal& { return shares[r].agreed; });
  if (differs.field != nullptr) throw AgreedError(ErrorCode::mismatch, differs.text, differs.field);
  if (!differs.text.empty()) throw AgreedError(ErrorCode::mismatch, differs.text);
}

void check_gathered(const char* call, const void* mine, size_t bytes, const void* all) {
  if (bytes > 0 && (!mine || !all))
    throw Error(ErrorCode::invalid_argument, std::string(call) + ": " + (mine ? "all" : "mine") + " is null, with bytes = " +
                                                 std::to_string(bytes) + ": null is for 0 bytes only");
}

uint64_t peek_word(const uint64_t* word) {
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

}  // namespace

Group::Impl::Impl(std::unique_ptr<Bootstrap> link, std::unique_ptr<SymmetricHeap> memory, const GroupOptions& opts,
                  TuningInForce in_force)
    : bootstrap(std::move(link)),
      heap(std::move(memory)),
      options(opts),
      tuning(std::move(in_force)),
      pool(opts.num_blocks, opts.num_warps),
      waits(static_cast<size_t>(pool.total()) * static_cast<size_t>(bootstrap->world())),
      moved(static_cast<size_t>(pool.total())) {
  find_headers(*heap);
}

Group::Impl::Impl(std::unique_ptr<Bootstrap> link, DeviceParts parts, const GroupOptions& opts, TuningInForce in_force)
    : bootstrap(std::move(link)),
      heap(std::move(parts.heap)),
      control(std::move(parts.control)),
      device(std::move(parts.rank)),
      options(opts),
      tuning(std::move(in_force)),
      pool(1, 1) {
  find_headers(*control);
}

void Group::Impl::find_headers(const SymmetricHeap& memory) {
  const int self = bootstrap->rank();
  for (int r = 0; r < bootstrap->world(); ++r) {
    HeapHeader*& theirs = headers_[static_cast<size_t>(r)];
    theirs = memory.header(r);
    if (theirs) continue;
    if (!remote) remote = std::make_unique<RemoteHeaders>(memory.header(self), bootstrap->world());
    theirs = remote->of(r);
  }
}

void Group::Impl::set_silence() {
  constexpr std::chrono::milliseconds kSecond{1000};
  bootstrap->set_silence(options.silence.count() > 0 ? options.silence : bounded(options.timeout) + kSecond);
}

Group::Impl::~Impl() {
  if (device) {
    device->drain();
    device->end_rounds();
  }
  leave();
  if (device) end_device({std::move(heap), std::move(control), std::move(device)});
}

void Group::Impl::leave() noexcept {
  if (std::exchange(left_, true)) return;
  std::atomic_ref(header(bootstrap->rank())->left_ns).store(Cpu::now_ns(), std::memory_order_release);
  for (int r = 0; r < bootstrap->world(); ++r)
    std::atomic_ref(header(r)->left_ranks).fetch_or(uint64_t{1} << bootstrap->rank(), std::memory_order_acq_rel);
  bootstrap->leave();  // its threads access headers
}

void Group::Impl::check_member(const char* context) const {
  if (!home.here())
    invalid(std::string(context) +
            ": this process was forked by a rank of the group and is no rank itself; form a group in it");
  if (left_) invalid(std::string(context) + ": this rank has left the group");
}

TuningValues Group::Impl::tuned(TuningMode mode, int64_t hidden, int64_t tokens) const {
  return tuning->find({device ? device->name() : "cpu", mode, bootstrap->world(), hidden, tokens});
}

void Group::Impl::require_one_host(const char* what, const char* instead) const {
  if (host_map().one_host()) return;
  throw AgreedError(ErrorCode::unsupported, std::string(what) + ": needs the memory of all ranks, and this group has " +
                                                std::to_string(host_map().hosts()) + " hosts (" + host_map().text() +
                                                "): " + instead);
}

uint64_t Group::Impl::abort_word() const noexcept {
  return std::atomic_ref(header(bootstrap->rank())->abort_word).load(std::memory_order_acquire);
}

bool Group::Impl::has_left(int rank) const noexcept {
  return (std::atomic_ref(header(bootstrap->rank())->left_ranks).load(std::memory_order_acquire) >> rank & 1) != 0;
}

void Group::Impl::post_abort(int reason, int awaited) noexcept {
  post_word(make_abort_word(bootstrap->rank(), reason, awaited));
}

void Group::Impl::post_word(uint64_t word) noexcept {
  if (left_) return;
  for (int r = 0; r < bootstrap->world(); ++r) {
    uint64_t none = 0;
    std::atomic_ref(header(r)->abort_word).compare_exchange_strong(none, word, std::memory_order_acq_rel);
  }
  if (remote) bootstrap->announce_abort(word);
}

void Group::Impl::pass_on() {
  for (SentCall* const call : std::exchange(sent_calls, {})) call->pass_on();
}

void Group::Impl::enter(Operation operation, uint64_t object, bool waiting) {
  if (waiting) pass_on();
  HeapHeader* const mine = header(bootstrap->rank());
  const uint64_t number = mine->num_calls + 1, last = mine->calls[mine->num_calls % HeapHeader::kCallsKept];
  std::atomic_ref(mine->calls[number % HeapHeader::kCallsKept])
      .store(next_call_word(last, number, object, static_cast<int>(operation)), std::memory_order_release);
  std::atomic_ref(mine->num_calls).store(number, std::memory_order_release);
}

int Group::Impl::find_other_call() const noexcept {
  for (int r = 0; r < bootstrap->world(); ++r)
    if (calls_of_both(*header(bootstrap->rank()), *header(r), peek_word).differ()) return r;
  return -1;
}

std::string Group::Impl::describe_mismatch(int a, int b) const {
  CallPair first;  // the earliest call on record
  for (uint64_t back = 0; back < HeapHeader::kCallsKept; ++back) {
    const CallPair pair = calls_of_both(*header(a), *header(b), peek_word, back);
    if (!pair.differ()) break;
    first = pair;
  }
  if (!first.differ()) return "";
  return "rank " + std::to_string(a) + " called " + describe_call(first.mine) + " and rank " + std::to_string(b) + " " +
         describe_call(first.theirs) + " (objects count from 1 as they were made)";
}

std::string Group::Impl::explain_mismatch(int a, int b) const {
  // The calls of ranks on other hosts are announced with their pulse and may arrive after the word that ended the call. A GPU
  // ends the peers' calls before its host writes what differs.
  const Deadline deadline(remote || device ? kExplanationTime : Milliseconds{0});
  while (true) {
    std::string text = describe_mismatch(a, b);
    if (text.empty()) text = describe_difference(difference_found_by(a), a, b);
    if (!text.empty()) return text;
    if (deadline.passed()) return "mode, row type, sizes, options, registered memory, outputs or ledgers differ";
    std::this_thread::sleep_for(Milliseconds{10});
  }
}

CallDifference Group::Impl::difference_found_by(int r) const noexcept {
  const HeapHeader& theirs = *header(r);
  const uint64_t site = std::atomic_ref(theirs.difference[0]).load(std::memory_order_acquire);
  return {static_cast<Site>(site), peek_word(&theirs.difference[1]), peek_word(&theirs.difference[2])};
}

void Group::Impl::throw_mismatch(const std::string& context, int rank, const CallDifference& difference) {
  const int self = bootstrap->rank();
  if (auto& mine = header(self)->difference; !left_ && peek_word(mine) == 0) {
    std::atomic_ref(mine[1]).store(difference.mine, std::memory_order_relaxed);
    std::atomic_ref(mine[2]).store(difference.theirs, std::memory_order_relaxed);
    std::atomic_ref(mine[0]).store(static_cast<uint64_t>(difference.site), std::memory_order_release);
  }
  post_abort(static_cast<int>(ErrorCode::mismatch), rank);
  const std::string ranks_text = rank == self ? "rank " + std::to_string(self) + " and others"
                                              : "rank " + std::to_string(rank) + " and rank " + std::to_string(self);
  throw Error(ErrorCode::mismatch, context + ": " + ranks_text + " made different calls: " + explain_mismatch(self, rank) +
                                       "; the group cannot be used any more");
}

void Group::Impl::throw_abort(uint64_t word, const char* context) const {
  const auto reason = static_cast<ErrorCode>(abort_reason(word));
  std::string text = context;
  if (reason == ErrorCode::mismatch) {
    text += ": rank " + std::to_string(abort_rank(word)) + " found that ";
    if (const int other = abort_awaited(word); other < bootstrap->world() && other != abort_rank(word))
      text += "it and rank " + std::to_string(other) + " made different calls: " + explain_mismatch(abort_rank(word), other);
    else
      text += "the ranks made different calls";
    throw Error(ErrorCode::mismatch, text + "; the group cannot be used any more");
  }
  if (reason == ErrorCode::peer_timeout && abort_awaited(word) != 255)
    text += " (it waited for rank " + std::to_string(abort_awaited(word)) + ")";
  const Milliseconds silent = bootstrap->silence(abort_rank(word));
  if (reason == ErrorCode::system && silent >= Milliseconds{500})
    text += " (its host has been silent for " + std::to_string(silent.count()) + " ms)";
  throw PeerFailed(abort_rank(word), reason, text, abort_is_left(word));
}

void Group::Impl::check_alive(const char* context) {
  check_member(context);
  if (device && device->fault()) {
    fault = *device->fault();
    raise_fault(operation_name(fault.operation), fault.epoch);
  }
  if (const uint64_t word = abort_word()) throw_abort(word, context);
}

CallContext Group::Impl::begin_call(Operation operation) {
  fault = FaultRecord{};
  fault_claims = 0;
  for (MoveCounter& m : moved) m = MoveCounter{};
  CallContext call;
  call.heap = heap->view();
  call.operation = operation;
  call.timeout_ns = bounded_ns(options.timeout);
  call.abort_word = &header(bootstrap->rank())->abort_word;
  call.left_ranks = &header(bootstrap->rank())->left_ranks;
  call.headers = headers_.data();
  call.fault = &fault;
  call.fault_claims = &fault_claims;
  call.waits = waits.data();
  call.moved = moved.data();
  call.tracer = tracer;
  registered_in_call = registered_slots();
  call.registered = &registered_in_call;
  return call;
}

void Group::Impl::raise_fault(const char* operation, uint64_t call) {
  if (fault.ready == 0) return;
  if (fault.mismatch)
    throw_mismatch(std::string(operation) + " (call " + std::to_string(call) + ")", fault.awaited_rank,
                   {fault.site, fault.expected, fault.seen});
  // A GPU may have observed the failure before this host did.
  const uint64_t word = fault.seen_abort ? fault.seen_abort : abort_word();
  const bool timed_out = fault.aborted && abort_reason(word) == static_cast<int>(ErrorCode::peer_timeout);
  // With several hosts, a rank may wait, through proxies, for a rank that itself waits for the missing rank.
  if (const int missing = abort_awaited(word);
      timed_out && !host_map().one_host() && missing < bootstrap->world() && missing != bootstrap->rank())
    fault.awaited_rank = missing;
  if (!fault.aborted && !device) fault.awaited_rank = bootstrap->cause_of_wait(fault.awaited_rank);
  const bool same_story = timed_out && abort_awaited(word) == fault.awaited_rank;
  if (fault.aborted && !same_story) {
    if (abort_is_left(word) || abort_word() == 0) post_word(word);  // departed ranks, or failures known only to GPUs
    throw_abort(word, operation);
  }
  // The deadline of this rank or of another rank has passed while both waited for the same third rank.
  post_abort(static_cast<int>(ErrorCode::peer_timeout), fault.awaited_rank);
  WaitReport report;
  report.operation = operation;
  report.site = site_name(fault.site);
  report.call = call;
  report.waiting_rank = bootstrap->rank();
  report.awaited_rank = fault.awaited_rank;
  report.expected = fault.expected;
  report.seen = fault.seen;
  report.waited_ms = static_cast<double>(fault.waited_ns) * 1e-6;
  report.silent_ms = static_cast<double>(bootstrap->silence(fault.awaited_rank).count());
  if (device) report.advice = device->advice();
  throw PeerTimeout(report);
}

Milliseconds Group::Impl::deadline_of(Operation operation) const {
  switch (operation) {
    case Operation::construction:
    case Operation::register_memory:
    case Operation::sleep:
    case Operation::wake: return options.rendezvous_timeout;
    case Operation::none:
    case Operation::dispatch:
    case Operation::cached_dispatch:
    case Operation::combine:
    case Operation::ledger_combine:
    case Operation::all_to_all:
    case Operation::layer:
    case Operation::all_gather:
    case Operation::barrier: break;
  }
  return options.timeout;
}

void Group::Impl::all_gather(const void* mine, size_t bytes, void* all, const char* name, Operation operation,
                             uint64_t object) {
  check_alive(name);
  enter(operation, object);
  collectively(name, [&] { bootstrap->all_gather(mine, bytes, all, deadline_of(operation)); });
}

std::vector<ConstructionReport> Group::Impl::gather_reports(const char* subject, const AgreedFields& fields,
                                                            const ConstructionReport& mine, const Deadline& deadline) {
  ConstructionReport proposal = mine;
  proposal.agreed = AgreedProposal(subject, fields);
  std::vector<ConstructionReport> shares = bootstrap->gather(proposal, deadline.remaining());
  check_step(subject, shares);
  return shares;
}

void Group::Impl::agree(const char* subject, const AgreedFields& fields, const ConstructionReport& mine, const void* data,
                        size_t bytes, void* all) {
  check_usable(subject);
  enter(Operation::construction, objects + 1);
  collectively(subject, [&] {
    const Deadline deadline(deadline_of(Operation::construction));
    check_agreed(fields, gather_reports(subject, fields, mine, deadline));
    if (bytes > 0) bootstrap->all_gather(data, bytes, all, deadline.remaining());
  });
}

std::pair<uint64_t, bool> Group::Impl::highest_offset(const char* subject, uint64_t mine) {
  std::pair<uint64_t, bool> highest{mine, true};
  check_usable(subject);
  enter(Operation::construction, objects + 1);
  collectively(subject, [&] {
    ConstructionReport report;
    report.is_placed = false;
    report.heap_offset = mine;
    const Deadline deadline(deadline_of(Operation::construction));
    for (const ConstructionReport& share : gather_reports(subject, {}, report, deadline)) {
      highest.second &= share.heap_offset == mine;
      highest.first = std::max(highest.first, share.heap_offset);
    }
  });
  return highest;
}

void Group::Impl::raise_missing(const char* operation, int rank, uint64_t start_ns) {
  if (const int other = find_other_call(); other >= 0 && abort_word() == 0) throw_mismatch(operation, other);
  fault = FaultRecord{};
  fault.ready = 1;
  fault.site = host_map().together(rank, bootstrap->rank()) ? Site::barrier : Site::network;
  fault.awaited_rank = rank;
  fault.seen_abort = abort_word();
  fault.aborted = fault.seen_abort != 0;
  fault.expected = flag_word(1);
  fault.waited_ns = Cpu::now_ns() - start_ns;
  raise_fault(operation, 0);
}

Group::Group(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Group::Group(Group&&) noexcept = default;
Group& Group::operator=(Group&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
Group::~Group() { replace_at_home(impl_.pointer(), {}); }

int Group::rank() const { return impl_->bootstrap->rank(); }
int Group::size() const { return impl_->bootstrap->world(); }
int Group::hosts() const { return impl_->host_map().hosts(); }
int Group::host() const { return impl_->host_map().host_of(rank()); }
int Group::host_of(int rank) const {
  detail::check_range("host_of: rank", rank, 0, size() - 1);
  return impl_->host_map().host_of(rank);
}
const GroupOptions& Group::options() const { return impl_->options; }

void Group::set_timeout(std::chrono::milliseconds timeout) {
  check_duration("timeout", timeout);
  impl_->options.timeout = timeout;
  impl_->set_silence();
}

void Group::barrier() {
  const detail::TraceSpan span(impl_->tracer, detail::kHostTrack, detail::Event::barrier, -1);
  char mine = 0, all[kMaxRanks];
  impl_->all_gather(&mine, 1, all, "barrier", Operation::barrier);
}

void Group::all_gather(const void* mine, size_t bytes, void* all) {
  impl_->collective_call("all_gather", [&] {
    check_gathered("all_gather", mine, bytes, all);
    impl_->all_gather(mine, bytes, all, "all_gather", Operation::all_gather);
  });
}

void Group::agree(const char* subject, const std::function<void()>& share, const void* mine, size_t bytes, void* all) {
  impl_->collective_call(subject, [&] {
    ConstructionReport own;
    own.report = attempt([&] {
      check_gathered(subject, mine, bytes, all);
      share();
    });
    impl_->agree(subject, {}, own, mine, bytes, all);
  });
}

void Group::check() const {
  impl_->check_alive("check");
  if (!impl_->device) return;
  impl_->device->raise_soft_fault("check");
  impl_->device->raise_invalid_ids("check");
}
void Group::abort(int32_t reason) noexcept {
  if (Impl* impl = impl_.pointer().get(); impl && impl->home.here()) impl->post_abort(reason, 255);
}
void Group::leave() noexcept {
  Impl* const impl = impl_.pointer().get();
  if (!impl || !impl->home.here()) return;
  if (impl->device) impl->device->finish();
  impl->leave();
}

void Group::set_trace(Trace* trace) {
  if (impl_->device && impl_->tracer) impl_->device->stop_trace(*impl_->tracer);
  if (impl_->tracer) impl_->tracer->add_anchor();
  impl_->tracer = nullptr;
  if (!trace) return;
  const TraceOptions& o = trace->options();
  if (trace->world() != size())
    throw Error(ErrorCode::invalid_argument,
                "trace: made for " + std::to_string(trace->world()) + " ranks, the group has " + std::to_string(size()));
  if (impl_->device) {
    impl_->device->start_trace(o.num_blocks, o.num_warps, o.events_per_track);
  } else if (o.num_blocks != impl_->options.num_blocks || o.num_warps != impl_->options.num_warps) {
    throw Error(ErrorCode::invalid_argument, "trace: made for ranks of " + std::to_string(o.num_blocks) + " x " +
                                                 std::to_string(o.num_warps) + " workers, the group has " +
                                                 std::to_string(impl_->options.num_blocks) + " x " +
                                                 std::to_string(impl_->options.num_warps));
  }
  impl_->tracer = trace->tracer(rank());
  impl_->tracer->add_anchor();
}

std::vector<WaitStatistics> Group::wait_statistics() const {
  const size_t world = static_cast<size_t>(size());
  std::vector<WaitStatistics> result(world);
  const std::vector<WaitCounter> waits = impl_->device ? impl_->device->wait_counters() : impl_->waits;
  for (size_t i = 0; i < waits.size(); ++i) {
    const WaitCounter& c = waits[i];
    WaitStatistics& s = result[i % world];
    s.total_ms = std::max(s.total_ms, static_cast<double>(c.total_ns) * 1e-6);
    s.max_ms = std::max(s.max_ms, static_cast<double>(c.max_ns) * 1e-6);
    s.waits += c.waits;
  }
  return result;
}

size_t Group::heap_used() const { return impl_->heap->used(); }
size_t Group::heap_size() const { return impl_->heap->size(); }

}  // namespace switchyard
