// SPDX-License-Identifier: Apache-2.0
// How ranks form a group: as threads of one process, or as processes that rendezvous.
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>

#include "base/enum_text.hpp"
#include "exchange/group/enum_checks.hpp"
#include "exchange/group/exchange_base.hpp"
#include "exchange/group/impl.hpp"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

using namespace detail;

namespace {

/// Sets the options that the caller left unset.
GroupOptions completed(GroupOptions options) {
  if (const char* const host = std::getenv("SWITCHYARD_HOST"); options.host.empty() && host != nullptr) options.host = host;
  if (const char* const name = std::getenv("SWITCHYARD_NETWORK"); name != nullptr && options.network == HostNetwork::sockets) {
    const auto known = from_string<HostNetwork>(name);
    if (!known)
      throw Error(ErrorCode::invalid_argument, std::string("SWITCHYARD_NETWORK = \"") + name + "\": must be " +
                                                   detail::names_where<HostNetwork>([](HostNetwork) { return true; }));
    options.network = *known;
  } else if (options.backend == Backend::cuda && options.network == HostNetwork::sockets) {
    options.network = HostNetwork::nccl;
  }
  const char* const text = std::getenv("SWITCHYARD_NUM_SMS");
  if (options.num_sms != 0 || text == nullptr || *text == '\0') return options;
  const char* const end = text + std::char_traits<char>::length(text);
  const auto [stop, error] = std::from_chars(text, end, options.num_sms);
  if (error != std::errc{} || stop != end || options.num_sms < 1)
    throw Error(ErrorCode::invalid_argument,
                std::string("SWITCHYARD_NUM_SMS = \"") + text + "\": must be a number of multiprocessors, at least 1");
  return options;
}

void check_options(const GroupOptions& o) {
  detail::check_range("GroupOptions::num_blocks", o.num_blocks, 1, 1024);
  detail::check_range("GroupOptions::num_warps", o.num_warps, 1, 1024);
  if (o.num_sms < 0) detail::invalid("GroupOptions::num_sms", " = " + std::to_string(o.num_sms) + ": must be at least 0");
  detail::check_enum("GroupOptions::network", o.network);
  check_duration("GroupOptions::timeout", o.timeout);
  check_duration("GroupOptions::rendezvous_timeout", o.rendezvous_timeout);
  if (o.silence.count() != 0) check_duration("GroupOptions::silence", o.silence);
}

uint64_t random_word() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

/// Message that ranks exchange once they have connected.
struct Greeting {
  uint64_t nonce = random_word();
  HostNetwork network = HostNetwork::sockets;
};

/// Throws Error(unsupported) on all ranks if a rank selects a network that is not available for this backend. `all`: indexed by
/// rank.
void check_networks(const HostMap& hosts, Backend backend, const std::vector<Greeting>& all) {
  if (hosts.one_host()) return;
  const bool on_gpus = backend == Backend::cuda;
  for (size_t r = 0; r < all.size(); ++r) {
    if ((all[r].network == HostNetwork::nccl) == on_gpus) continue;
    throw AgreedError(ErrorCode::unsupported,
                      std::string("GroupOptions::network = ") + to_string(all[r].network) + " on rank " + std::to_string(r) +
                          (on_gpus ? ": between hosts, rows on GPUs travel by nccl"
                                   : ": nccl moves the memory of GPUs; between hosts, ranks on CPUs have sockets or mpi"),
                      "GroupOptions::network");
  }
}

template <class Memory>
Group form(std::unique_ptr<Bootstrap> bootstrap, Memory memory, const GroupOptions& options,
           const Group::Impl::TuningInForce& tuning, uint64_t nonce) {
  auto impl = std::make_unique<Group::Impl>(std::move(bootstrap), std::move(memory), options, tuning);
  impl->nonce = nonce;
  Group::Impl* raw = impl.get();
  raw->set_silence();
  if (raw->remote) raw->bootstrap->watch_remote(raw->remote.get());
  raw->bootstrap->watch([raw](int rank) noexcept {
    if (raw->has_left(rank)) return;  // an orderly departure, though the end of its connection was noticed first
    uint64_t none = 0;
    std::atomic_ref(raw->header(raw->bootstrap->rank())->abort_word)
        .compare_exchange_strong(none, make_abort_word(rank, static_cast<int>(ErrorCode::system)));
  });
  raw->bootstrap->set_interrupt([raw] { return raw->abort_word() != 0 || raw->find_other_call() >= 0; });
  return Group(std::move(impl));
}

}  // namespace

std::vector<Group> Group::in_process(int world, const GroupOptions& given) {
  const GroupOptions options = completed(given);
  if (world < 1 || world > kMaxRanks)
    throw Error(ErrorCode::invalid_argument,
                "world = " + std::to_string(world) + ": must be in [1, " + std::to_string(kMaxRanks) + "]");
  check_options(options);
  const auto tuning = std::make_shared<const Tuning>(Tuning::from_environment());
  const uint64_t nonce = random_word();
  auto links = make_thread_bootstraps(world, options.host);
  std::vector<Group> groups;
  check_networks(links[0]->host_map(), options.backend, {Greeting{nonce, options.network}});
  if (options.backend == Backend::cuda) {
    auto parts = devices_in_process(links[0]->host_map(), options);
    for (size_t r = 0; r < links.size(); ++r)
      groups.push_back(form(std::move(links[r]), std::move(parts[r]), options, tuning, nonce));
    return groups;
  }
  auto heaps = SymmetricHeap::create_in_process(links[0]->host_map(), options.heap_bytes);
  for (size_t r = 0; r < links.size(); ++r)
    groups.push_back(form(std::move(links[r]), std::move(heaps[r]), options, tuning, nonce));
  return groups;
}

namespace {

JoinSpec spec_of_environment() {
  return join_spec_from_environment([](const char* name) -> const char* { return std::getenv(name); });
}

Group join(const JoinSpec& spec, const GroupOptions& given) {
  const GroupOptions options = completed(given);
  check_options(options);
  const auto tuning = std::make_shared<const Tuning>(Tuning::from_environment());
  JoinSpec placed = spec;
  placed.host = place_of_rank(options.host, spec.rank);
  auto link = connect_processes(placed, options.rendezvous_timeout);
  Greeting mine;
  mine.network = options.network;
  const std::vector<Greeting> all = link->gather(mine, options.rendezvous_timeout);
  check_networks(link->host_map(), options.backend, all);
  if (options.backend == Backend::cuda) {
    auto parts = join_device(*link, options);
    return form(std::move(link), std::move(parts), options, tuning, all[0].nonce);
  }
  auto heap = SymmetricHeap::create(*link, options.heap_bytes, options.rendezvous_timeout);
  return form(std::move(link), std::move(heap), options, tuning, all[0].nonce);
}

}  // namespace

Group Group::from_environment(const GroupOptions& options) { return join(spec_of_environment(), options); }

Membership Group::find_in_environment() {
  const JoinSpec spec = spec_of_environment();
  return {spec.rank, spec.world, spec.store};
}

Group Group::connect(int rank, int world, const std::string& store, const std::string& token, const GroupOptions& options) {
  return join(JoinSpec{rank, world, store, token}, options);
}

}  // namespace switchyard
