// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI of replicated experts. switchyard/expert_map.hpp specifies the division, the planner and the choice of slots. The
/// functions of sy_expert_map run on the host, are deterministic, require no group and may be called from any thread. The
/// caller owns all arrays. In collective functions, a NULL argument or a map with sizes out of range is an error of this rank
/// alone: the peers' calls fail with peer_failed.
///
/// Notation: W ranks, E experts, C slots per rank. Errors: invalid_argument, which names the argument.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The expert of each slot. Slot p belongs to rank p / slots_per_rank and is expert p of an exchange with W * C experts.
typedef struct sy_expert_map {
  size_t struct_size;
  int32_t num_experts;      ///< E >= 1
  int32_t world;            ///< W, in [1, 64]
  int32_t slots_per_rank;   ///< C, the same on all ranks: at least the experts of a rank; W * C <= 2^20
  int32_t reserved;         ///< must be 0
  int32_t* expert_of_slot;  ///< [W * C]; -1: an empty slot
} sy_expert_map;

/// Returns invalid_argument if the value of a slot is neither -1 nor an expert, or an expert has no slot.
sy_code sy_expert_map_check(const sy_expert_map* map);

/// Writes map->expert_of_slot: each rank holds the experts of sy_first_expert, in order, followed by empty slots.
sy_code sy_expert_map_home(const sy_expert_map* map);

/// Chooses replicas for the loads `routes_per_expert` [E], at most 2^40 each, and writes the map to `expert_of_slot` [W * C],
/// which may be current->expert_of_slot. Among the maps whose maximum rank load exceeds that of the best by at most `tolerance`
/// times the mean rank load, chooses the one with the fewest weights to move.
sy_code sy_expert_map_plan(const sy_expert_map* current, const int64_t* routes_per_expert, double tolerance,
                           int32_t* expert_of_slot);

/// Variant of sy_expert_map_plan that only adds and replaces replicas: each expert keeps one of its slots, so
/// sy_expert_map_vacate accepts the map, and sy_slot_weights_move can load its weights in the background.
sy_code sy_expert_map_plan_replicas(const sy_expert_map* current, const int64_t* routes_per_expert, double tolerance,
                                    int32_t* expert_of_slot);

/// Divides the routes of each expert, `routes_per_expert` [E], among its slots so that the maximum rank load is the lowest
/// possible. Writes the route counts to `of_slot` [W * C] and `of_rank` [W]; either may be NULL.
sy_code sy_expert_map_divide(const sy_expert_map* map, const int64_t* routes_per_expert, int64_t* of_slot, int64_t* of_rank);

/// Replaces the `num_ids` ids of rank `source`, in routing order, with slots; -1 is kept. `routes` [W, E]: number of routes
/// from each rank to each expert. After an error, some ids may already be replaced.
sy_code sy_expert_map_replace(const sy_expert_map* map, const int64_t* routes, int32_t source, int32_t* ids, int64_t num_ids);

/// Writes the map `from` to `expert_of_slot` [W * C] and empties every slot whose expert differs in `to`. With this map in
/// force, no call uses these slots, so sy_slot_weights_move can load them. Error: invalid_argument if an expert would be left
/// without a slot.
sy_code sy_expert_map_vacate(const sy_expert_map* from, const sy_expert_map* to, int32_t* expert_of_slot);

/// Writes to `moved` the number of sets of weights to move: for each rank, the experts that it holds in `to` and not in `from`.
sy_code sy_expert_map_count_moved(const sy_expert_map* from, const sy_expert_map* to, int32_t* moved);

/// Collective. Copies weights so that slot p of each of `num_arrays` arrays contains the weights of expert
/// to->expert_of_slot[p]. Before the call, it must contain those of from->expert_of_slot[p]. arrays[i]: the slots of this rank,
/// C * slot_bytes[i] bytes; GPUs: memory of this rank's GPU. Arrays must not overlap. `staging_bytes`: upper limit of the
/// memory that the call allocates and frees; see MoveOptions in switchyard/expert_map.hpp. The copies run on `stream` (a
/// cudaStream_t); the call waits for them. `received`: number of bytes received from other ranks; may be NULL. Errors, on all
/// ranks and before any copy: invalid_argument; mismatch if an argument other than the addresses and the stream differs by
/// rank; heap_exhausted.
sy_code sy_move_weights(sy_group* group, const sy_expert_map* from, const sy_expert_map* to, void* const* arrays,
                        const size_t* slot_bytes, int32_t num_arrays, size_t staging_bytes, void* stream, int64_t* received);

/// The weights of a rank's slots, for moves in the background of other calls; see SlotWeights in switchyard/expert_map.hpp.
typedef struct sy_slot_weights sy_slot_weights;

/// Collective. Arguments as for sy_move_weights, with `slots_per_rank` slots per array. The arrays must stay valid until all
/// ranks have destroyed their objects. GPUs of one host: memory of the kinds that sy_group_register_memory accepts. `stream`:
/// the stream of the copies, on which no call of the library runs.
sy_code sy_slot_weights_create(sy_group* group, int32_t slots_per_rank, void* const* arrays, const size_t* slot_bytes,
                               int32_t num_arrays, size_t staging_bytes, void* stream, sy_slot_weights** weights);
/// Local. Waits for this rank's copies.
sy_code sy_slot_weights_destroy(sy_slot_weights* weights);

/// Collective. Starts to copy the weights of each expert that `to` assigns to an empty slot of `from`. All other slots that
/// differ must be empty in `to`. On the host, waits for the other ranks and for earlier work on the stream `after`, which must
/// include all calls that use these slots, but not for the copies (CPUs, and GPUs of several hosts: copies as sy_move_weights
/// does). `received`: number of bytes that this rank receives from other ranks; may be NULL. Errors, on all ranks and before
/// any copy: invalid_argument; mismatch if the maps differ by rank.
sy_code sy_slot_weights_move(sy_slot_weights* weights, const sy_expert_map* from, const sy_expert_map* to, void* after,
                             int64_t* received);
/// Local. Orders later work on `stream` after the copies of the last move. CPU: no effect.
sy_code sy_slot_weights_wait(const sy_slot_weights* weights, void* stream);
/// Local. `done`: 1 if the copies of the last move have completed on this rank. `event`: the cudaEvent_t recorded after them,
/// valid until the next move, or NULL if there is nothing to wait for. Either may be NULL.
sy_code sy_slot_weights_ready(const sy_slot_weights* weights, sy_bool* done, void** event);

/// Replaces the expert ids of each call on a rank with slots of a map, in the memory of the group's backend, and counts the
/// routes to each expert. Collective. `routes`: [W, E], the expected number of routes from each rank to each expert, at most
/// 2^40 per expert in total; NULL: all are equal. Error: mismatch if the map or the routes differ by rank.
sy_code sy_slot_selector_create(sy_group* group, const sy_expert_map* map, const int64_t* routes, sy_slot_selector** selector);
sy_code sy_slot_selector_destroy(sy_slot_selector* selector);

/// Collective. Writes the slot of each id to `slots`, [T, K], with the element type of the ids; `slots` may be the same array
/// as the ids. The id -1 is kept. Any other id that is not an expert is replaced with a number that every exchange treats as
/// invalid; on the CPU, errors name the id. GPUs: both arrays are memory of this rank's GPU; enqueues one kernel on `stream` (a
/// cudaStream_t), which graphs can capture, and does not wait.
sy_code sy_slot_selector_select(sy_slot_selector* selector, const sy_expert_ids* topk_ids, void* slots, void* stream);

/// Options of sy_slot_selector_balance; see StepOptions and MoveOptions in switchyard/expert_map.hpp. Equal on all ranks.
typedef struct sy_balance_options {
  size_t struct_size;
  int64_t tile SY_DEFAULT(128);                ///< a load of up to this many rows above the mean counts as level; >= 1
  double link_bytes_per_s SY_DEFAULT(300e9);   ///< at which a rank sends or receives weights, > 0
  double seconds_per_row SY_DEFAULT(0.14e-6);  ///< of the experts, >= 0
  double seconds_per_move SY_DEFAULT(0.5e-3);  ///< fixed costs of moving any weights, >= 0
  size_t staging_bytes SY_DEFAULT(67108864);   ///< as for sy_move_weights
} sy_balance_options;

/// Result of sy_slot_selector_balance, equal on all ranks except for received_bytes.
typedef struct sy_balance_report {
  size_t struct_size;
  int64_t max_before;      ///< rows of the busiest rank with the map before the call
  int64_t max_after;       ///< rows of the busiest rank in this call
  int64_t mean;            ///< ceil(rows of all ranks / W)
  int64_t fetched;         ///< sets of weights that ranks have fetched
  int64_t received_bytes;  ///< by this rank
} sy_balance_report;

/// Collective. Variant of sy_slot_selector_select that balances a large call by its own routes: counts the routes on all ranks
/// and plans replicas; if the planned map differs from the map in force, moves the weights of the arrays (as sy_move_weights
/// does) and sets the planned map with these routes. Each rank receives exactly the planned number of rows. `options` and
/// `report` may be NULL. Waits for the other ranks; on GPUs, also for earlier work on the stream, and cannot be captured.
/// Errors, on all ranks, before any copy of weights: invalid_argument; mismatch if arguments other than ids, addresses and
/// stream, or the numbers of earlier calls, differ by rank; heap_exhausted. After an error, the previous map stays in force,
/// and the contents of `slots` and, if a rank has terminated, of spare slots are undefined.
sy_code sy_slot_selector_balance(sy_slot_selector* selector, const sy_expert_ids* topk_ids, void* slots, void* const* arrays,
                                 const size_t* slot_bytes, int32_t num_arrays, const sy_balance_options* options, void* stream,
                                 sy_balance_report* report);
/// Collective. Replaces the rates in `options`, for example the measurements of each rank, with those of the slowest rank: the
/// lowest link_bytes_per_s, and the highest seconds_per_row and seconds_per_move. Error: mismatch if the tiles differ by rank.
sy_code sy_agree_on_step_rates(sy_group* group, sy_balance_options* options);
/// Collective. Like sy_agree_on_step_rates, but measures link_bytes_per_s and seconds_per_move, with moves of temporary weights
/// on `stream` within options->staging_bytes; see measure_step_rates in switchyard/expert_map.hpp.
sy_code sy_measure_step_rates(sy_group* group, sy_balance_options* options, void* stream);

/// Collective. Variant of sy_slot_selector_balance that moves the weights in the background (sy_slot_weights_move): it does not
/// wait for the copies, so they can overlap with the dispatch of `slots`. Order the experts after the copies
/// (sy_moe_layer_call::weights_ready or sy_slot_weights_wait). Ignores options->staging_bytes.
sy_code sy_slot_selector_balance_in_background(sy_slot_selector* selector, const sy_expert_ids* topk_ids, void* slots,
                                               sy_slot_weights* weights, const sy_balance_options* options, void* stream,
                                               sy_balance_report* report);

/// Collective. Later calls of sy_slot_selector_select, and replays of captured ones, use `map`, which must have the sizes of
/// the map in force. Waits for the other ranks' hosts, not for enqueued GPU work; the new table is copied on `stream`: order it
/// before or after replays by the stream or with events. Load the weights of the new slots before. After an
/// error that all ranks report, the previous map stays in force: invalid_argument; mismatch if map, routes or the number of
/// sy_slot_selector_select calls since the last comparison differ by rank. If these numbers differ, they are reset to 0.
sy_code sy_slot_selector_set_map(sy_slot_selector* selector, const sy_expert_map* map, const int64_t* routes, void* stream);

/// Collective. Writes to `routes`, [W, E], the number of routes from each rank to each expert in the calls since creation or
/// the last sy_slot_selector_gather_routes, and resets the counters to 0. GPUs: waits for these calls; meanwhile, no graph that
/// contains one may run.
sy_code sy_slot_selector_gather_routes(sy_slot_selector* selector, int64_t* routes);

/// Returns the map in force (`expert_of_slot`, [W * C]), the number of maps so far (`version`, 1 after creation) and this
/// rank's counters (`routes`, [E], in the memory of the backend, valid until the selector is destroyed). Each output may be
/// NULL.
sy_code sy_slot_selector_state(const sy_slot_selector* selector, int32_t* expert_of_slot, int64_t* version,
                               const int64_t** routes);

/// Counts the routes of a rank to each expert of an exchange or a layer, in the memory of the group's backend.
typedef struct sy_route_counter sy_route_counter;

/// Collective. `num_experts`: E of the exchange, equal on all ranks.
sy_code sy_route_counter_create(sy_group* group, int32_t num_experts, sy_route_counter** counter);
sy_code sy_route_counter_destroy(sy_route_counter* counter);
/// Local. Adds the routes of a call. Ids that are not experts are not counted. GPUs: the ids must be in memory of this rank's
/// GPU; enqueues one kernel on `stream` (a cudaStream_t), which graphs can capture, and does not wait.
sy_code sy_route_counter_count(sy_route_counter* counter, const sy_expert_ids* topk_ids, void* stream);
/// Collective. Writes the counts of all ranks since creation, without resetting them: `of_expert`, [W, E], the routes from each
/// rank to each expert, and `of_rank`, [W], the routes to the experts of each rank. If the counted ids are slots that
/// `selector` has selected, `of_expert` receives the counts of the selector, by the experts of its map. `selector`, `of_expert`
/// and `of_rank` may be NULL. GPUs: waits for the counted calls; meanwhile, no graph that contains such a call may run.
sy_code sy_route_counter_load(sy_route_counter* counter, sy_slot_selector* selector, int64_t* of_expert, int64_t* of_rank);
/// Local. This rank's counters, [E], in the memory of the backend, valid until the counter is destroyed.
sy_code sy_route_counter_routes(const sy_route_counter* counter, const int64_t** routes);

#ifdef __cplusplus
}
#endif
