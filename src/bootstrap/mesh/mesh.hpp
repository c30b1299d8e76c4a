// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <list>
#include <optional>
#include <vector>

#include "bootstrap/net/connection.hpp"
#include "bootstrap/store/store.hpp"

namespace switchyard::detail {

/// Connects this rank to every other one over Unix sockets: to lower ranks it goes, higher ranks come.
class MeshBuilder final : public Party {
 public:
  MeshBuilder(Listener listener, const Member& me, const Roster& roster);

  void prepare(std::vector<pollfd>& polls) const override;
  Milliseconds until_wake() const override;
  /// Throws PeerFailed if a rank of the roster no longer listens.
  void step() override;

  bool complete() const { return missing().empty(); }
  std::vector<int> missing() const;
  /// Once complete: by rank, empty for this one.
  std::vector<std::optional<Connection>> take() { return std::move(links_); }

 private:
  struct Pending {
    Connection connection;
    Deadline deadline;
  };
  void connect_to(int rank);
  void accept_higher();
  bool serve(Pending& pending);

  Listener listener_;
  Member me_;
  Roster roster_;
  std::vector<std::optional<Connection>> links_;
  std::list<Pending> pending_;
};

}  // namespace switchyard::detail
