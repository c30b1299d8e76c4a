// SPDX-License-Identifier: Apache-2.0
// Sockets between ranks on different hosts, used only for rows.
#include <algorithm>

#include "bootstrap/mesh/mesh.hpp"
#include "bootstrap/mesh/processes.hpp"
#include "bootstrap/rank_list.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

struct Proposal {
  Nonce session;
  uint64_t port;
};

}  // namespace

int ProcessBootstrap::find_lost_rank(bool& left) {
  const std::lock_guard lock(mutex_);
  int lost = -1;
  for (int r = 0; r < world(); ++r) {
    const State state = peers_[static_cast<size_t>(r)].state;
    if (state == State::present || (lost >= 0 && state == State::left)) continue;
    lost = r;
    left = state == State::left;
  }
  return lost;
}

std::vector<UniqueFd> ProcessBootstrap::connect_rails(Milliseconds budget) {
  const Deadline deadline(budget);
  check_member("connect_rails");
  std::vector<UniqueFd> rails(static_cast<size_t>(world()));
  if (host_map().one_host()) return rails;
  const std::string context = "connecting the hosts, on rank " + std::to_string(rank());
  Listener listener = listen_on_same_address(own_address_);
  Proposal mine = {{}, port_of(listener)};
  fill_random(mine.session);
  const std::vector<Proposal> all = gather(mine, deadline.remaining());
  Roster roster;
  roster.session = all[0].session;
  std::vector<std::optional<SocketAddress>> peer_addresses(rails.size());
  uint64_t wanted = 0;
  for (const int r : host_map().rail_peers(rank())) {
    const auto i = static_cast<size_t>(r);
    if (all[i].port == 0) throw Error(ErrorCode::system, context + ": rank " + std::to_string(r) + " cannot listen");
    peer_addresses[i] = numeric_address(numeric_host(*peer_addresses_[i]), static_cast<uint16_t>(all[i].port));
    wanted |= uint64_t{1} << r;
  }
  MeshBuilder builder({Listener(), std::move(listener)}, me_, roster, std::move(peer_addresses), wanted);
  for (builder.step(); !builder.complete(); builder.step()) {
    bool left = false;
    if (const int lost = find_lost_rank(left); lost >= 0) throw PeerFailed(lost, ErrorCode::system, context, left);
    if (deadline.passed() || (interrupt() && interrupt()()))
      throw RendezvousError(context + ": " + describe_ranks(builder.missing()) + " did not connect within " +
                                std::to_string(deadline.budget().count()) + " ms" + builder.describe_network(),
                            builder.missing());
    std::vector<pollfd> polls;
    builder.prepare(polls);
    const auto wake = std::min({builder.until_wake(), deadline.remaining(), Milliseconds{10}});
    ::poll(polls.data(), static_cast<nfds_t>(polls.size()), static_cast<int>(wake.count()));
  }
  auto links = builder.take();
  for (size_t r = 0; r < rails.size(); ++r)
    if (links[r]) rails[r] = links[r]->take_fd();
  barrier(deadline.remaining());  // no rank may send rows to a rank that is still reading its greeting
  return rails;
}

}  // namespace switchyard::detail
