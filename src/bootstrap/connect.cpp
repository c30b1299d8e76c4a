// SPDX-License-Identifier: Apache-2.0
// Implements connect_processes(), the poll loop that connects the ranks.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "bootstrap/mesh/mesh.hpp"
#include "bootstrap/mesh/processes.hpp"
#include "bootstrap/store/store.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {
namespace {

void check(const JoinSpec& spec) {
  const auto fail = [](const std::string& text) { throw Error(ErrorCode::invalid_argument, text); };
  if (spec.world < 1 || spec.world > kMaxRanks) {
    fail("world = " + std::to_string(spec.world) + ": must be from 1 to " + std::to_string(kMaxRanks));
  }
  if (spec.rank < 0 || spec.rank >= spec.world) {
    fail("rank = " + std::to_string(spec.rank) + ": must be from 0 to " + std::to_string(spec.world - 1));
  }
  if (spec.world > 1 && spec.token.empty()) fail("token is empty: it must be some text, the same on all ranks");
}

void make_private_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    throw RendezvousError("rank 0 cannot make the folder " + folder + ": " + describe_errno(errno) + "; set SWITCHYARD_STORE");
  if (!is_private_folder(folder))
    throw RendezvousError("rank 0 cannot listen in the folder " + folder +
                          ": it must belong to this user and be closed to others (mode 0700); set SWITCHYARD_STORE");
}

/// Drives the store and the mesh until both are complete.
class Rendezvous {
 public:
  Rendezvous(const Member& me, Listener mesh_listener, const Deadline& deadline)
      : me_(me),
        deadline_(deadline),
        mesh_listener_(std::move(mesh_listener)),
        store_(me.rank == 0 ? make_store_server(me, deadline) : make_store_client(me, deadline)) {}

  Formed run() {
    while (true) {
      store_->step();
      if (mesh_) step_mesh();
      if (!mesh_ && store_->roster() != nullptr) {
        meet(*store_->roster());
        continue;
      }
      if (mesh_ && mesh_->complete() && !reported_) {
        reported_ = true;
        store_->report_ready();
        continue;
      }
      if (store_->finished()) return {me_, *hosts_, mesh_->take(), peer_addresses_, own_address_};
      if (deadline_.passed())
        store_->throw_timeout(mesh_ ? mesh_->missing() : std::vector<int>(), mesh_ ? mesh_->describe_network() : "");
      wait();
    }
  }

 private:
  void meet(const Roster& roster) {
    hosts_ = hosts_in(roster);
    peer_addresses_ = store_->peer_addresses();
    Listener network = store_->take_network();
    if (network) own_address_ = local_address(network.fd());
    if (hosts_->one_host()) network.close();
    mesh_.emplace(Listeners{std::move(mesh_listener_), std::move(network)}, me_, roster, peer_addresses_, all_ranks(me_.world));
  }

  void step_mesh() {
    try {
      mesh_->step();
    } catch (const PeerFailed& error) {
      store_->give_up(error.rank(), error.what());
      await_verdict();
      throw;
    } catch (const Error& error) {
      store_->give_up(me_.rank, error.what());
      throw;
    }
  }

  /// Waits for rank 0's verdict when a peer no longer listens, because a third rank may have caused that peer to end. Rank 0
  /// has a report of the failure and announces the rank to blame, or its connection ends; step() throws in both cases. Returns
  /// at the deadline.
  void await_verdict() {
    do {
      store_->step();
      polls_.clear();
      store_->prepare(polls_);
      ::poll(polls_.data(), static_cast<nfds_t>(polls_.size()), deadline_.poll_ms());
    } while (!deadline_.passed());
  }

  void wait() {
    polls_.clear();
    store_->prepare(polls_);
    Milliseconds wake = store_->until_wake();
    if (mesh_) {
      mesh_->prepare(polls_);
      wake = std::min(wake, mesh_->until_wake());
    }
    const auto max = static_cast<int>(std::min<Milliseconds::rep>(wake.count(), 3'600'000));
    ::poll(polls_.data(), static_cast<nfds_t>(polls_.size()), deadline_.poll_ms(max));
  }

  Member me_;
  Deadline deadline_;
  Listener mesh_listener_;
  std::unique_ptr<Store> store_;
  std::optional<HostMap> hosts_;
  std::vector<std::optional<SocketAddress>> peer_addresses_;
  SocketAddress own_address_;
  std::optional<MeshBuilder> mesh_;
  bool reported_ = false;
  std::vector<pollfd> polls_;
};

}  // namespace

std::unique_ptr<Bootstrap> connect_processes(const JoinSpec& spec, Milliseconds budget) {
  const Deadline deadline(budget);
  check(spec);
  if (spec.world == 1)
    return std::make_unique<ProcessBootstrap>(
        Formed{Member{0, 1, {}, {}, {}, {}}, HostMap(1), std::vector<std::optional<Connection>>(1)});
  if (spec.rank == 0 && !spec.private_folder.empty()) make_private_folder(spec.private_folder);
  Member me = {spec.rank, spec.world, spec.token, parse_endpoint(spec.store), this_host(), "switchyard-" + random_token()};
  me.host.place = spec.host;
  Listener mesh_listener = listen_at(abstract_endpoint(me.mesh_name), deadline);
  Rendezvous rendezvous(me, std::move(mesh_listener), deadline);
  return std::make_unique<ProcessBootstrap>(rendezvous.run());
}

}  // namespace switchyard::detail
