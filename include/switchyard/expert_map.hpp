// SPDX-License-Identifier: Apache-2.0
/// \file
/// Replicated experts: the assignment of experts to ranks, the division of an expert's routes among its replicas, a planner
/// that chooses the replicas from past loads, SlotSelector, which replaces the ids of each call, RouteCounter, which counts
/// routes, and move_weights() and SlotWeights, which load the weights. All functions are deterministic: equal arguments yield
/// equal results on every rank. Those without a Group among their arguments run on the host and may be called from any thread.
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
class SlotWeightsImpl;
struct SelectorAccess;
inline constexpr char kSlotWeightsObject[] = "SlotWeights";
}  // namespace detail

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

/// Variant of plan_experts() that only adds and replaces replicas: each expert keeps one of its slots, so vacate() accepts the
/// result, and SlotWeights can move the weights in the background. \throws Error(invalid_argument)
ExpertMap plan_replicas(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double tolerance = 0.02);

/// The number of sets of weights to move: for each rank, the experts that it holds in `to` and not in `from`.
/// \throws Error(invalid_argument) if the sizes of the maps differ
int count_moved(const ExpertMap& from, const ExpertMap& to);

/// Returns a copy of `from` in which every slot whose expert differs in `to` is empty. With this map in force, no call uses
/// these slots, so SlotWeights::move() can load them in the background. \throws Error(invalid_argument) if the sizes of the
/// maps differ, or if an expert would be left without a slot: such a change requires move_weights()
ExpertMap vacate(const ExpertMap& from, const ExpertMap& to);

/// Rates for plan_step(); equal on all ranks. The defaults are for bf16 experts of hidden 7168 and intermediate 2048 on H200s:
/// seconds_per_row was measured; the others are estimates, and measure_step_rates() measures them. On other devices, measure
/// all of them.
struct StepOptions {
  int64_t tile = 128;                ///< a load of up to this many rows above the mean counts as level; in [1, 2^40]
  double link_bytes_per_s = 300e9;   ///< at which a rank sends or receives weights
  double seconds_per_row = 0.14e-6;  ///< of the experts
  double seconds_per_move = 0.5e-3;  ///< fixed costs of moving any weights
};

/// The result of plan_step().
struct StepPlan {
  ExpertMap map;                 ///< for this call
  SlotLoads loads;               ///< divide_routes() for this map: the rows of the call per slot and rank
  int64_t max_before = 0;        ///< rows of the busiest rank with the current map
  int64_t mean = 0;              ///< ceil(rows of all ranks / W)
  std::vector<int32_t> fetched;  ///< slots, ascending, with experts that their rank does not hold in the current map
  /// The rows of the busiest rank above the mean.
  int64_t remainder() const noexcept { return loads.max() - mean; }
};

/// The number of spare slots per rank with which plan_step() levels any load: ceil(n * (W - 1) / W), where n = ceil(E / W) is
/// the number of experts of a rank. If W divides E, fewer do not suffice: a rank whose experts have no rows needs this many
/// replicas if all other experts have equally many rows. \throws Error(invalid_argument)
int spare_slots_to_level(int num_experts, int world);

/// Chooses replicas for one call from its own routes, `routes_per_expert`, [E], at most 2^40 each. One slot of each expert
/// keeps its weights: that of home_map() if it holds the expert, else the first slot that does. All other slots are spare.
/// Returns the map with the lowest predicted time of all maps that the search finds; `current` if none is faster. The predicted
/// time is seconds_per_row times the rows of the busiest rank, but at least mean + tile, plus, if weights are fetched,
/// seconds_per_move and the transfer time of the rank that fetches or sends most. `expert_bytes`: weights and scales of one
/// expert. The search prefers experts that a rank already holds.
///
/// remainder() <= tile if fetches cost nothing, seconds_per_row > 0, each rank has spare_slots_to_level() spare slots, and all
/// experts are in their slots of home_map(). Takes about 0.2 ms for 256 experts on 32 ranks.
/// \throws Error(invalid_argument)
StepPlan plan_step(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double expert_bytes,
                   const StepOptions& options = {});

/// The weights or scales of this rank's C slots: one contiguous array in slot order. GPUs: memory of this rank's GPU.
struct SlotArray {
  void* data = nullptr;
  size_t slot_bytes = 0;  ///< the same on all ranks
};

struct MoveOptions {
  /// Upper limit of the memory that the call allocates and frees on return: symmetric memory of the group's heap_bytes and, if
  /// weights move between hosts, memory of the backend for sending and receiving. At least 256 bytes for each copy of a slot in
  /// the formula of docs/how_to/replicate_experts.md. Equal on all ranks.
  size_t staging_bytes = size_t{64} << 20;
  void* stream = nullptr;  ///< CUDA: cudaStream_t of the copies
};

/// Collective. Copies weights between ranks, and between the slots of a rank, so that slot p of every array contains the
/// weights of expert to.expert_of_slot[p]. Before the call, it must contain those of from.expert_of_slot[p]. Slots that are
/// empty in `to` or have the same expert in both maps are not written; a slot may be both source and destination. The source of
/// an expert is a slot of the same rank if possible, else one on the same host; of several ranks, the one that has been chosen
/// least often so far. Arrays must not overlap. Returns the number of bytes received from other ranks.
///
/// Between hosts, weights are sent like rows: through GroupOptions::network, and once for all ranks of a host that lack them.
///
/// Returns after the copies have completed, and therefore, on a GPU, after earlier work on the stream. No other call may use
/// the arrays concurrently; on GPUs, no work on other streams may use them either. Throws on all ranks, before any copy:
/// Error(invalid_argument); Error(mismatch) if an argument other than the addresses and the stream differs by rank;
/// Error(heap_exhausted), or the error of a rank that cannot connect to other hosts. If a rank terminates during the copies,
/// the other ranks throw PeerFailed, and the contents of the destination slots are undefined. Between move_weights() and
/// set_map(), the weights do not match the map in force: make no call that uses them.
int64_t move_weights(Group& group, const ExpertMap& from, const ExpertMap& to, std::span<const SlotArray> arrays,
                     const MoveOptions& options = {});

/// Collective. Returns `mine` with the rates of the slowest rank: the lowest link_bytes_per_s, and the highest seconds_per_row
/// and seconds_per_move. Ranks that measure their own rates thus compute the same plans. Throws on all ranks:
/// Error(invalid_argument); Error(mismatch) if the tiles differ by rank.
StepOptions agree_on_step_rates(Group& group, const StepOptions& mine);

/// Collective. Measures link_bytes_per_s and seconds_per_move with calls of move_weights() in which every rank receives
/// temporary weights, of 256 bytes and of up to 64 MiB, from another rank; returns them with the other options of `mine` as
/// agree_on_step_rates() does. In a group of one rank, measures nothing. Takes milliseconds within a host, more over slow
/// networks, and allocates memory for two such sets of weights, in addition to that of the moves. Background moves
/// (SlotWeights) delay calls less than these. Throws the errors of move_weights() and agree_on_step_rates().
StepOptions measure_step_rates(Group& group, const StepOptions& mine = {}, const MoveOptions& options = {});

/// The weights of a rank's slots, for moves in the background of other calls. Movable. Construction and move() are collective;
/// all ranks must call them in the same order.
///
/// GPUs of one host: every rank reads the weights of other ranks directly from their arrays, without staging memory and without
/// kernels. The copies wait only for work enqueued before move(), never for another rank, so they cannot deadlock
/// with calls on other streams, regardless of the multiprocessors that these calls occupy. The ranks synchronize on the host,
/// once per move. CPUs, and GPUs of several hosts: move() is move_weights().
class SlotWeights {
 public:
  /// Collective. `arrays`: as for move_weights(), each with `slots_per_rank` slots; they must stay valid until all ranks have
  /// destroyed their objects (Group::barrier). GPUs of one host: memory of the kinds that Group::register_memory accepts.
  /// `options.stream`: the stream of the copies, on which no call of the library runs; on the legacy default stream, copies do
  /// not overlap with other work. Throws on all ranks:
  /// Error(invalid_argument), Error(unsupported), Error(mismatch).
  SlotWeights(Group& group, int slots_per_rank, std::span<const SlotArray> arrays, const MoveOptions& options = {});
  SlotWeights(SlotWeights&&) noexcept;
  SlotWeights& operator=(SlotWeights&&) noexcept;
  /// Local. Waits for this rank's copies.
  ~SlotWeights();

  /// Collective. Starts to copy the weights of each expert that `to` assigns to an empty slot of `from`. All other slots that
  /// differ must be empty in `to`: vacate() returns such a map `from`. Returns the number of bytes that this rank receives from
  /// other ranks.
  ///
  /// `group`: that of the constructor. Waits on the host for the other ranks and for earlier work on the stream `after`,
  /// which must include all calls that use the slots to be written and all writes to the weights of `from`; does not wait for
  /// the copies. Until they are complete on all ranks, the weights of `from` must not change. Each rank's later work that uses
  /// the new weights must be ordered after its copies: with wait(), or MoeLayerCall::weights_ready. Then set_map() may put `to`
  /// in force. Throws on all ranks, before any copy: Error(invalid_argument), also during stream capture; Error(mismatch) if
  /// the maps differ by rank.
  int64_t move(Group& group, const ExpertMap& from, const ExpertMap& to, void* after = nullptr);
  /// Local. Orders later work on `stream` after the copies of the last move(). Does not wait on the host. CPU: no effect.
  void wait(void* stream) const;
  /// Local. Returns true if the copies of the last move() have completed on this rank; after an error of the GPU, never.
  bool ready() const;
  /// cudaEvent_t recorded after the copies, valid until the next move(); null before the first, and if move() waits for them.
  void* ready_event() const;

 private:
  friend struct detail::SelectorAccess;
  detail::Held<std::unique_ptr<detail::SlotWeightsImpl>, detail::kSlotWeightsObject> impl_;
};

struct BalanceOptions {
  StepOptions plan;
  MoveOptions move;  ///< `stream` is that of the whole call
};

/// The result of SlotSelector::balance(), equal on all ranks except for received_bytes.
struct BalanceReport {
  int64_t max_before = 0;      ///< rows of the busiest rank with the map before the call
  int64_t max_after = 0;       ///< rows of the busiest rank in this call
  int64_t mean = 0;            ///< ceil(rows of all ranks / W)
  int64_t fetched = 0;         ///< sets of weights that ranks have fetched
  int64_t received_bytes = 0;  ///< by this rank
};

/// Replaces the expert ids of each call on a rank with slots of a map, in the memory of the group's backend, and counts the
/// routes to each expert. The map can be replaced between calls. Movable. Construction, select(), balance(), set_map() and
/// gather_routes() are collective: all ranks call them in the same order, and the same number of times between two maps.
///
/// The slot of a route depends only on the map, the expected routes, the rank, the expert and the token's index. The routes to
/// an expert are divided among its slots in the proportions of divide_source(), the rank's own slots first. Runs of 8
/// consecutive tokens use the same slots; any longer range of tokens is divided in nearly the same proportions. The balance of
/// a call therefore depends on the accuracy of the expected routes.
///
/// GPUs: select() enqueues one kernel, which graphs can capture. A replay uses the map in force when it runs; the caller orders
/// set_map() relative to replays, by stream or with events. Low-latency calls can select the slots themselves
/// (LowLatencyDispatchOptions::selector); such a call counts as a call of select().
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
  /// the ids. The id -1 is kept. Any other id that is not an expert is replaced with a number that every exchange treats as
  /// invalid; on the CPU, errors name the id. GPUs: both arrays are memory of this rank's GPU; the call does not wait. A call
  /// without tokens counts as a call, a replay does not. `stream`: a cudaStream_t; ignored on the CPU.
  /// \throws Error(invalid_argument)
  void select(const ExpertIds& topk_ids, void* slots, void* stream = nullptr);

  /// Collective. Later calls of select() use `map`, which must have the sizes of the map in force. Waits for the other ranks'
  /// hosts, not for enqueued GPU work: the new table is copied on `stream`, after all earlier calls of select(). Before the
  /// call, load the weights of the new slots on all ranks, or enqueue the loads on the streams that use them. On an error, all
  /// ranks throw and the previous map stays in force: Error(invalid_argument), also during stream capture; Error(mismatch) if
  /// map, routes, selector or the number of select() calls since the last comparison (set_map() or balance()) differ by rank.
  /// After an error that names the number of calls, all ranks count them from 0 again.
  void set_map(const ExpertMap& map, std::span<const int64_t> routes = {}, void* stream = nullptr);

  /// Collective. Variant of select() that balances a large call, such as a prefill or a training step, by its own routes:
  /// counts the routes on all ranks and calls plan_step(); if the planned map differs from the map in force, moves the weights
  /// of `arrays` (move_weights) and sets the planned map with these routes (set_map). Writes the slots of divide_source(), so
  /// each rank receives exactly the planned number of rows. All ranks pass the same numbers of bytes per slot; without arrays,
  /// the predicted transfer time is 0.
  ///
  /// Waits for the other ranks. GPUs: copies the ids to the host and the slots back, waits for earlier work on the stream, and
  /// cannot be captured. Layers that pack their weights, or copy their scales (fused, fp8), need with_weights() if `fetched` >
  /// 0. Errors, on all ranks, before any copy of weights: Error(invalid_argument), also for `group` if it is not the
  /// selector's; Error(mismatch) if arguments other than ids, addresses and stream, or the numbers of earlier calls, differ by
  /// rank; Error(heap_exhausted). If a rank terminates, the other ranks throw PeerFailed, and the contents of spare slots are
  /// undefined. After an error, the previous map stays in force, and the contents of `slots` are undefined.
  BalanceReport balance(Group& group, const ExpertIds& topk_ids, void* slots, std::span<const SlotArray> arrays,
                        const BalanceOptions& options = {});
  /// Collective. As above, but the weights move in the background (SlotWeights::move): the call does not wait for the copies,
  /// so they can overlap with the dispatch of `slots`. Order the experts after the copies (MoeLayerCall::weights_ready
  /// or SlotWeights::wait). Earlier calls that use a changing slot must have been enqueued on the stream of the call.
  /// Only `options.move.stream` is used, as the stream of the call; the other members must be equal on all ranks.
  BalanceReport balance(Group& group, const ExpertIds& topk_ids, void* slots, SlotWeights& weights,
                        const BalanceOptions& options = {});

  /// Collective. Returns [W, E], the number of routes from each rank to each expert in the calls of select() and balance()
  /// since construction or the last gather_routes(), and resets the counters to 0. GPUs: waits for these calls within the
  /// group's timeout; meanwhile, no graph that contains a select() may run.
  std::vector<int64_t> gather_routes();

  /// This rank's counters, [E], in the memory of the backend. The pointer is valid until destruction.
  const int64_t* routes() const;
  const ExpertMap& map() const;
  /// Number of maps that have been in force: 1 after construction. Calls of other objects that use the selector compare it
  /// between ranks.
  int64_t version() const;

 private:
  friend struct detail::SelectorAccess;
  detail::Held<std::unique_ptr<detail::SlotSelectorImpl>, detail::kSlotSelectorObject> impl_;
};

/// The routes of all ranks since the construction of their counters.
struct RouteLoad {
  std::vector<int64_t> of_expert;  ///< [W, E] from each rank to each expert
  std::vector<int64_t> of_rank;    ///< [W] to the experts of each rank
};

/// Counts the routes of a rank to each expert of an exchange or a layer, in the memory of the group's backend. Movable.
class RouteCounter {
 public:
  /// Collective. `num_experts`: of the exchange. Throws on all ranks: Error(invalid_argument), Error(mismatch).
  RouteCounter(Group& group, int num_experts);
  RouteCounter(RouteCounter&&) noexcept;
  RouteCounter& operator=(RouteCounter&&) noexcept;
  /// Local; does not wait. Graphs that contain a count() may still be replayed.
  ~RouteCounter();

  /// Local. Adds the routes of a call. Ids that are not experts are not counted. GPUs: `topk_ids` must be in memory of this
  /// rank's GPU; enqueues one kernel on `stream` (a cudaStream_t), which graphs can capture, and does not wait.
  /// \throws Error(invalid_argument)
  void count(const ExpertIds& topk_ids, void* stream = nullptr);

  /// Collective. Returns the counts of all ranks and does not reset them. If the counted ids are slots that `selector` has
  /// selected, of_expert contains the counts of the selector, by the experts of its map: all routes since its construction,
  /// including those that gather_routes() has returned. GPUs: waits, within the group's timeout, for the counted calls;
  /// meanwhile, no graph that contains such a call may run. Throws on all ranks: Error(invalid_argument) if the experts of the
  /// counter are not the slots of `selector`; Error(mismatch) if the selectors differ or only some pass one.
  RouteLoad load(SlotSelector* selector = nullptr);

  /// This rank's counters, [E], in the memory of the backend. The pointer is valid until destruction.
  const int64_t* routes() const;

 private:
  detail::Held<std::unique_ptr<detail::SlotSelectorImpl>, detail::kRouteCounterObject> impl_;
};

}  // namespace switchyard
