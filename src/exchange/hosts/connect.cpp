// SPDX-License-Identifier: Apache-2.0
#include "exchange/hosts/connect.hpp"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "carrier/mpi.hpp"
#include "carrier/sockets.hpp"

namespace switchyard::detail {

namespace {

constexpr const char* kSubject = "connecting the hosts";

/// A rank's announcement of its connection to the others.
struct Proposal {
  HostNetwork network = HostNetwork::sockets;
  int process = -1;  ///< HostNetwork::mpi
  uint64_t nonce = 0;
};

std::unique_ptr<Carrier> over_sockets(Group::Impl& group, Milliseconds deadline) {
  std::vector<UniqueFd> fds = group.bootstrap->connect_rails(deadline);
  std::vector<CarrierSocket> sockets;
  for (size_t r = 0; r < fds.size(); ++r)
    if (fds[r]) sockets.push_back({static_cast<int>(r), std::move(fds[r])});
  return make_socket_carrier(std::move(sockets));
}

std::unique_ptr<Carrier> connect(Group::Impl& group) {
  const Milliseconds deadline = group.deadline_of(Operation::construction);
  Bootstrap& link = *group.bootstrap;
  const HostNetwork network = group.options.network;
  const std::vector<Proposal> all = propose_step(link, Deadline(deadline), kSubject, [&] {
    std::random_device source;
    return Proposal{network, network == HostNetwork::mpi ? mpi_process(deadline) : -1, uint64_t{source()} << 32 | source()};
  });
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r].network != all[0].network)
      throw AgreedError(ErrorCode::mismatch,
                        std::string("GroupOptions::network is ") + to_string(all[0].network) + " on rank 0 and " +
                            to_string(all[r].network) + " on rank " + std::to_string(r),
                        "GroupOptions::network");
  if (network == HostNetwork::sockets) return over_sockets(group, deadline);
  MpiCarrierSpec spec;
  spec.rank = link.rank();
  spec.nonce = all[0].nonce;
  for (const Proposal& proposal : all) spec.processes.push_back(proposal.process);
  std::unique_ptr<Carrier> made;
  run_step(link, Deadline(deadline), kSubject, [&] { made = make_mpi_carrier(spec); });
  return made;
}

}  // namespace

std::unique_ptr<Carrier> connect_hosts(Group::Impl& group) {
  std::unique_ptr<Carrier> carrier = connect(group);
  return group.wrap_carrier ? group.wrap_carrier(std::move(carrier)) : std::move(carrier);
}

}  // namespace switchyard::detail
