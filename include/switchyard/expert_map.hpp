// SPDX-License-Identifier: Apache-2.0
/// \file
/// Replicated experts: the assignment of experts to ranks, the division of an expert's routes among its replicas, a planner
/// that chooses the replicas from past loads, SlotSelector, which replaces the ids of each call, and move_weights(). All
/// functions are deterministic: equal arguments yield equal results on every rank. Those without a Group among their arguments
/// run on the host and may be called from any thread.
///
/// The slots of a map are numbered like experts: slot p is expert p of an exchange with num_experts = num_slots(), in which
/// each rank holds slots_per_rank consecutive experts. SlotSelector, or divide_source() and replace_by_slots(), replace each id
/// of a routing with a slot of that expert; move_weights() loads the weights by slot. combine then sums the same rows in the
/// same order as without replicas. See docs/how_to/replicate_experts.md.
///
/// Notation: W ranks, E experts, C slots per rank.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/detail/held.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

class Group;
namespace detail {
class SlotSelectorImpl;
}

/// The expert of each slot. Slot p belongs to rank p / slots_per_rank.
struct ExpertMap {
  int num_experts = 0;
  int world = 0;                        ///< at most 64
  int slots_per_rank = 0;               ///< the same on all ranks
  std::vector<int32_t> expert_of_slot;  ///< [W * C]; -1: an empty slot

  int num_slots() const noexcept { return world * slots_per_rank; }
  bool operator==(const ExpertMap&) const = default;
};

/// Validates a map. Several slots of a rank may hold the same expert; only the first of them is used.
/// \throws Error(invalid_argument) if a size is out of range, the value of a slot is neither -1 nor an expert of the map, or an
/// expert has no slot
void check_expert_map(const ExpertMap& map);

/// The map without replicas: each rank holds the experts that first_expert() (normal.hpp) assigns to it, in order, followed by
/// empty slots. \throws Error(invalid_argument) if there are too few slots
ExpertMap home_map(int num_experts, int world, int slots_per_rank);

/// Route counts.
struct SlotLoads {
  std::vector<int64_t> of_slot;  ///< [W * C]
  std::vector<int64_t> of_rank;  ///< [W]
  /// The load of the busiest rank.
  int64_t max() const noexcept;
};

/// Divides the routes of each expert among its slots so that the maximum rank load is the lowest possible.
/// `routes_per_expert`: [E], summed over all ranks, at most 2^40 each. \throws Error(invalid_argument)
SlotLoads divide_routes(const ExpertMap& map, std::span<const int64_t> routes_per_expert);

/// The slots of one rank's routes: the routes to expert e, in routing order (token, then k), use the slots of runs[begin[e]] to
/// runs[begin[e + 1] - 1], each for `count` routes.
struct SlotRuns {
  struct Run {
    int32_t slot;
    int64_t count;
  };
  std::vector<size_t> begin;  ///< [E + 1]
  std::vector<Run> runs;
};

/// The slots of the routes of rank `source` in the division by divide_routes(): the routes of each rank use its own slots
/// first; the remaining routes fill the remaining shares in the order of ranks and slots, so a rank's routes to an expert form
/// only a few runs. `routes`: [W, E], the number of routes from each rank to each expert. \throws Error(invalid_argument)
SlotRuns divide_source(const ExpertMap& map, std::span<const int64_t> routes, int source);

/// Replaces the ids of a rank's routing, in routing order, with the slots of its runs; -1 is kept.
/// \throws Error(invalid_argument) if an id is neither -1 nor an expert, or an expert has more routes than its runs cover; some
/// elements of `ids` may then already be replaced
void replace_by_slots(std::span<int32_t> ids, const SlotRuns& runs);

/// Chooses replicas for the given expert loads, such as route counts of past calls. The result has the sizes of `current` and
/// may use all slots. Considers several maps. Among those whose maximum rank load exceeds that of the best by at most
/// `tolerance` times the mean rank load, returns the one with the fewest weights to move (count_moved):
///
/// - `current`, which is returned at once if it is good enough,
/// - `current` with further replicas in empty slots,
/// - `current` without replicas, with new ones,
/// - a new placement of all experts, considered only if none of the others is good enough.
///
/// In all but the first, up to 32 experts of the busiest rank are exchanged with experts of other ranks.
/// `routes_per_expert`: [E], at most 2^40 each. The time is roughly quadratic in the number of slots.
/// \throws Error(invalid_argument)
ExpertMap plan_experts(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double tolerance = 0.02);

/// The number of sets of weights to move: for each rank, the experts that it holds in `to` and not in `from`.
/// \throws Error(invalid_argument) if the sizes of the maps differ
int count_moved(const ExpertMap& from, const ExpertMap& to);

/// The weights or scales of this rank's C slots: one contiguous array in slot order. GPUs: memory of this rank's GPU.
struct SlotArray {
  void* data = nullptr;
  size_t slot_bytes = 0;  ///< the same on all ranks
};

struct MoveOptions {
  /// Upper limit of the symmetric memory that the call allocates from the group's heap_bytes and frees on return; at least 512
  /// bytes for each expert that one rank sends. Equal on all ranks.
  size_t staging_bytes = size_t{64} << 20;
  void* stream = nullptr;  ///< CUDA: cudaStream_t of the copies
};

/// Collective. Copies weights between ranks, and between the slots of a rank, so that slot p of every array contains the
/// weights of expert to.expert_of_slot[p]. Before the call, it must contain those of from.expert_of_slot[p]. Slots that are
/// empty in `to` or have the same expert in both maps are not written; a slot may be both source and destination. The source of
/// an expert is a slot of the same rank if possible, else a slot of the rank that has been chosen as a source least often so
/// far. Arrays must not overlap. Returns the number of bytes received from other ranks.
///
/// Returns after the copies have completed, and therefore, on a GPU, after earlier work on the stream. No other call may use
/// the arrays concurrently; on GPUs, no work on other streams may use them either. Throws on all ranks, before any copy:
/// Error(invalid_argument); Error(mismatch) if an argument other than the addresses and the stream differs by rank;
/// Error(heap_exhausted); Error(unsupported) on GPUs of several hosts. CPU ranks on several hosts gather the weights of all
/// senders on every rank, over the group's connections. If a rank terminates during the copies, the other ranks throw
/// PeerFailed, and the contents of the destination slots are undefined.
/// Between move_weights() and set_map(), the weights do not match the map in force: make no call that uses them.
int64_t move_weights(Group& group, const ExpertMap& from, const ExpertMap& to, std::span<const SlotArray> arrays,
                     const MoveOptions& options = {});

/// Replaces the expert ids of each call on a rank with slots of a map, in the memory of the group's backend, and counts the
/// routes to each expert. The map can be replaced between calls. Movable. Construction, select(), set_map() and gather_routes()
/// are collective: all ranks call them in the same order, and the same number of times between two maps.
///
/// The slot of a route depends only on the map, the expected routes, the rank, the expert and the token's index. The routes to
/// an expert are divided among its slots in the proportions of divide_source(), the rank's own slots first. Runs of 8
/// consecutive tokens use the same slots; any longer range of tokens is divided in nearly the same proportions. The balance of
/// a call therefore depends on the accuracy of the expected routes.
///
/// GPUs: select() enqueues one kernel, which graphs can capture. A replay uses the map in force when it runs; the caller orders
/// set_map() relative to replays, by stream or with events.
class SlotSelector {
 public:
  /// Collective. `routes`: [W, E], the expected number of routes from each rank to each expert, at most 2^40 per expert in
  /// total; if empty, all are equal. Throws on all ranks: Error(invalid_argument) for an invalid map or invalid routes,
  /// Error(mismatch) if map or routes differ by rank.
  SlotSelector(Group& group, const ExpertMap& map, std::span<const int64_t> routes = {});
  SlotSelector(SlotSelector&&) noexcept;
  SlotSelector& operator=(SlotSelector&&) noexcept;
  /// Local; does not wait. Graphs that contain a select() may still be replayed.
  ~SlotSelector();

  /// Writes the slot of each id to `slots`, [T, K], with the element type of `topk_ids.data`; `slots` may be the same array as
  /// the ids. The id -1 is kept. Any other id that is not an expert is replaced with num_slots(), which the exchange reports as
  /// invalid. GPUs: both arrays are memory of this rank's GPU; the call does not wait. A call without tokens counts as a
  /// call, a replay does not. `stream`: a cudaStream_t; ignored on the CPU.
  /// \throws Error(invalid_argument)
  void select(const ExpertIds& topk_ids, void* slots, void* stream = nullptr);

  /// Collective. Later calls of select() use `map`, which must have the sizes of the map in force. Waits for the other ranks'
  /// hosts, not for enqueued GPU work: the new table is copied on `stream`, after all earlier calls of select(). Before the
  /// call, load the weights of the new slots on all ranks, or enqueue the loads on the streams that use them. On an error, all
  /// ranks throw and the previous map stays in force: Error(invalid_argument), also during stream capture; Error(mismatch) if
  /// map, routes, selector or the number of earlier select() calls differ by rank.
  void set_map(const ExpertMap& map, std::span<const int64_t> routes = {}, void* stream = nullptr);

  /// Collective. Returns [W, E], the number of routes from each rank to each expert in the calls of select() since construction
  /// or the last gather_routes(), and resets the counters to 0. GPUs: waits for these calls within the group's timeout;
  /// meanwhile, no graph that contains a select() may run.
  std::vector<int64_t> gather_routes();

  /// This rank's counters, [E], in the memory of the backend. The pointer is valid until destruction.
  const int64_t* routes() const;
  const ExpertMap& map() const;
  /// Number of maps that have been in force: 1 after construction.
  int64_t version() const;

 private:
  detail::Held<std::unique_ptr<detail::SlotSelectorImpl>, detail::kSlotSelectorObject> impl_;
};

}  // namespace switchyard
