/* SPDX-License-Identifier: Apache-2.0 */
/* Traces, tuned values and maps of experts through the C ABI. */
#include "switchyard/c/trace.h"

#include <stdio.h>
#include <stdlib.h>

#include "c_check.h"
#include "switchyard/c/expert_map.h"
#include "switchyard/c/low_latency.h"
#include "switchyard/c/tuning.h"

enum { kHidden = 8, kTokens = 3, kTopk = 2, kExperts = 4 };

static void dispatch(sy_exchange* exchange) {
  float x[kTokens * kHidden] = {0.0f};
  const int32_t ids[kTokens * kTopk] = {0, 1, 2, 3, 1, 2};
  const sy_const_row_view rows = view_of_rows(x, kTokens, kHidden);
  const sy_expert_ids routing = view_of_ids(ids, kTokens, kTopk);
  sy_dispatched* d = NULL;
  CHECK_OK(sy_exchange_dispatch(exchange, &rows, &routing, NULL, NULL, &d));
  CHECK_OK(sy_dispatched_destroy(d));
}

static const sy_trace_phase* phase_of(const sy_trace_summary* summary, int64_t i) {
  return (const sy_trace_phase*)(const void*)((const char*)summary->phases + (size_t)i * summary->phase_bytes);
}

/* Number of occurrences of `name` on `rank`. */
static uint64_t count_of(const sy_trace* trace, const char* name, int rank) {
  sy_trace_summary summary = SY_TRACE_SUMMARY_INIT;
  CHECK_OK(sy_trace_summary_of(trace, &summary));
  uint64_t count = 0;
  for (int64_t i = 0; i < summary.count; ++i) {
    const sy_trace_phase* phase = phase_of(&summary, i);
    if (strcmp(phase->name, name) == 0 && phase->rank == rank) count += phase->count;
  }
  CHECK_OK(sy_storage_release(summary.storage));
  return count;
}

static int json_has(const sy_trace* trace, const char* word) {
  sy_bytes text = SY_BYTES_INIT;
  CHECK_OK(sy_trace_json(trace, 1, &text));
  char* copy = calloc(text.size + 1, 1);
  if (!copy) abort();
  memcpy(copy, text.data, text.size);
  const int found = strstr(copy, word) != NULL;
  free(copy);
  CHECK_OK(sy_storage_release(text.storage));
  return found;
}

/* Each rank has its own trace; rank 0 receives the records of rank 1. */
static void record(int rank, sy_group* group) {
  sy_normal_config config = SY_NORMAL_CONFIG_INIT;
  config.hidden = kHidden;
  config.num_experts = kExperts;
  config.topk = kTopk;
  config.max_tokens = kTokens;
  config.dtype = SY_DTYPE_F32;
  sy_exchange* exchange = NULL;
  CHECK_OK(sy_exchange_create(group, &config, &exchange));
  sy_trace_options options = SY_TRACE_OPTIONS_INIT;
  options.num_warps = 2;  // same as the group's
  sy_trace *trace = NULL, *wrong = NULL;
  CHECK_OK(sy_trace_create(2, &options, &trace));
  CHECK_OK(sy_trace_create(3, NULL, &wrong));
  CHECK(sy_group_set_trace(group, wrong) == SY_INVALID_ARGUMENT);
  CHECK_OK(sy_trace_destroy(wrong));

  int32_t mine = -1;
  CHECK_OK(sy_trace_event(trace, "my step", "steps", &mine));
  CHECK_OK(sy_group_set_trace(group, trace));
  sy_trace_span* span = NULL;
  CHECK_OK(sy_trace_span_begin(trace, rank, mine, 7, &span));
  dispatch(exchange);
  dispatch(exchange);
  CHECK_OK(sy_trace_span_end(span));
  CHECK_OK(sy_group_set_trace(group, NULL));
  dispatch(exchange);  // not recorded
  CHECK(count_of(trace, "dispatch", rank) == 2 && count_of(trace, "my step", rank) == 1 &&
        count_of(trace, "send_rows", rank) > 0);
  CHECK(count_of(trace, "dispatch", 1 - rank) == 0 && json_has(trace, "my step"));
  uint64_t lost = 1, error = 1;
  CHECK_OK(sy_trace_lost(trace, &lost));
  CHECK_OK(sy_trace_clock_error(trace, &error));
  CHECK(lost == 0 && error == 0);

  // Serializes the trace and merges the bytes into another trace.
  sy_bytes bytes = SY_BYTES_INIT;
  CHECK_OK(sy_trace_serialize(trace, rank, &bytes));
  CHECK_FAILS(sy_trace_merge(trace, bytes.data, bytes.size / 2), SY_INVALID_ARGUMENT, "");
  sy_trace* other = NULL;
  CHECK_OK(sy_trace_create(2, &options, &other));
  CHECK_OK(sy_trace_event(other, "my step", "steps", &mine));
  CHECK_OK(sy_trace_merge(other, bytes.data, bytes.size));
  CHECK_OK(sy_storage_release(bytes.storage));
  CHECK(count_of(other, "dispatch", rank) == 2);
  CHECK_OK(sy_trace_clear(other));
  CHECK(count_of(other, "dispatch", rank) == 0);
  CHECK_OK(sy_trace_destroy(other));

  // A trace destroyed while recording stays valid as long as the group needs it.
  CHECK_OK(sy_group_set_trace(group, trace));
  CHECK_OK(sy_trace_destroy(trace));
  dispatch(exchange);
  CHECK_OK(sy_exchange_destroy(exchange));
}

static void arguments(void) {
  sy_trace* trace = NULL;
  CHECK_FAILS(sy_trace_create(0, NULL, &trace), SY_INVALID_ARGUMENT, "world");
  CHECK(trace == NULL);
  CHECK_FAILS(sy_trace_create(1, NULL, NULL), SY_INVALID_ARGUMENT, "trace");
  CHECK_OK(sy_trace_create(1, NULL, &trace));
  CHECK_FAILS(sy_group_set_trace(NULL, trace), SY_INVALID_ARGUMENT, "group");
  sy_trace_span* span = NULL;
  CHECK_FAILS(sy_trace_span_begin(trace, 1, 0, 0, &span), SY_INVALID_ARGUMENT, "rank = 1");
  CHECK_FAILS(sy_trace_write_json(trace, "/nowhere/trace.json", 1), SY_IO, "/nowhere/trace.json");
  CHECK_FAILS(sy_trace_json(NULL, 1, NULL), SY_INVALID_ARGUMENT, "bytes");
  CHECK_OK(sy_trace_span_end(NULL));
  CHECK_OK(sy_trace_destroy(trace));
  CHECK_OK(sy_trace_destroy(NULL));
}

/* Four experts, of which the first has 6 of 9 routes, on two ranks with a spare slot each. */
static void expert_maps(void) {
  enum { kSlots = 3, kRanks = 2 };
  int32_t slots[kRanks * kSlots], moved = -1;
  const int64_t loads[kExperts] = {6, 1, 1, 1};
  const int64_t routes[kRanks * kExperts] = {4, 1, 0, 0, 2, 0, 1, 1};
  int64_t of_slot[kRanks * kSlots], of_rank[kRanks];
  sy_expert_map map = SY_EXPERT_MAP_INIT;
  map.num_experts = kExperts;
  map.world = kRanks;
  map.slots_per_rank = kSlots;
  CHECK_FAILS(sy_expert_map_home(&map), SY_INVALID_ARGUMENT, "map->expert_of_slot is NULL");
  map.expert_of_slot = slots;
  CHECK_OK(sy_expert_map_home(&map));
  CHECK(slots[0] == 0 && slots[1] == 1 && slots[2] == -1 && slots[3] == 2 && slots[4] == 3 && slots[5] == -1);
  CHECK_OK(sy_expert_map_divide(&map, loads, of_slot, of_rank));
  CHECK(of_rank[0] == 7 && of_rank[1] == 2 && of_slot[0] == 6 && of_slot[5] == 0);

  int32_t planned_slots[kRanks * kSlots];
  CHECK_OK(sy_expert_map_plan(&map, loads, 0.0, planned_slots));
  sy_expert_map planned = map;
  planned.expert_of_slot = planned_slots;
  CHECK_OK(sy_expert_map_check(&planned));
  CHECK_OK(sy_expert_map_divide(&planned, loads, NULL, of_rank));
  CHECK(of_rank[0] + of_rank[1] == 9 && of_rank[0] >= 4 && of_rank[1] >= 4);
  CHECK_OK(sy_expert_map_count_moved(&map, &planned, &moved));
  CHECK(moved == 1);

  int32_t ids[] = {0, 1, 0, -1, 0, 0};
  CHECK_OK(sy_expert_map_replace(&planned, routes, 0, ids, 6));
  for (int i = 0; i < 6; ++i) {
    const int32_t want[] = {0, 1, 0, -1, 0, 0};
    CHECK(ids[i] < 0 ? want[i] < 0 : planned_slots[ids[i]] == want[i]);
  }
  CHECK_FAILS(sy_expert_map_replace(&planned, routes, 2, ids, 6), SY_INVALID_ARGUMENT, "source = 2");
  CHECK_FAILS(sy_expert_map_replace(&planned, NULL, 0, ids, 6), SY_INVALID_ARGUMENT, "routes is NULL");
  CHECK_FAILS(sy_expert_map_plan(&map, loads, -1.0, planned_slots), SY_INVALID_ARGUMENT, "tolerance");
  slots[3] = 4;
  CHECK_FAILS(sy_expert_map_check(&map), SY_INVALID_ARGUMENT, "4");
  map.world = 65;
  CHECK_FAILS(sy_expert_map_check(&map), SY_INVALID_ARGUMENT, "map->world = 65");
  map.reserved = 1;
  CHECK_FAILS(sy_expert_map_check(&map), SY_INVALID_ARGUMENT, "map->reserved = 1");
}

/* A map of one rank with five slots. */
static sy_expert_map map_of(int32_t* slots) {
  sy_expert_map map = SY_EXPERT_MAP_INIT;
  map.num_experts = kExperts;
  map.world = 1;
  map.slots_per_rank = 5;
  map.expert_of_slot = slots;
  return map;
}

/* Slots of four experts in a group of one rank. */
static void route_counters(sy_group* group, sy_slot_selector* selector) {
  const int32_t slots[] = {0, 4, 4, -1};
  sy_expert_ids given = SY_EXPERT_IDS_INIT;
  given.data = slots;
  given.num_tokens = 4;
  given.topk = 1;
  sy_route_counter* counter = NULL;
  CHECK_OK(sy_route_counter_create(group, 5, &counter));
  CHECK_OK(sy_route_counter_count(counter, &given, NULL));
  int64_t of_expert[5] = {0}, of_rank[1];
  const int64_t* counters = NULL;
  CHECK_OK(sy_route_counter_load(counter, NULL, of_expert, of_rank));
  CHECK_OK(sy_route_counter_routes(counter, &counters));
  CHECK(of_rank[0] == 3 && of_expert[0] == 1 && of_expert[4] == 2 && counters[4] == 2);
  CHECK_OK(sy_route_counter_load(counter, selector, of_expert, NULL));
  CHECK(of_expert[0] == 2 && of_expert[1] == 0 && of_expert[3] == 2); /* the selector's routes */
  CHECK_FAILS(sy_route_counter_count(NULL, &given, NULL), SY_INVALID_ARGUMENT, "counter is NULL");
  CHECK_FAILS(sy_route_counter_routes(counter, NULL), SY_INVALID_ARGUMENT, "routes is NULL");
  CHECK_OK(sy_route_counter_destroy(counter));
  CHECK_OK(sy_route_counter_destroy(NULL));
}

static void slot_selectors(void) {
  const sy_group_options options = patient_options(1 << 20);
  sy_group* group = NULL;
  CHECK_OK(sy_group_in_process(1, &options, &group));
  int32_t slots[] = {3, 1, 2, 0, -1}, other_slots[] = {0, 1, 2, 3, 0}, in_force[5];
  sy_expert_map map = map_of(slots);
  sy_slot_selector* selector = NULL;
  CHECK_OK(sy_slot_selector_create(group, &map, NULL, &selector));
  const int32_t ids[] = {0, 3, -1, 9};
  int32_t out[4];
  sy_expert_ids given = SY_EXPERT_IDS_INIT;
  given.data = ids;
  given.num_tokens = 2;
  given.topk = 2;
  CHECK_OK(sy_slot_selector_select(selector, &given, out, NULL));
  CHECK(out[0] == 3 && out[1] == 0 && out[2] == -1 && out[3] == INT32_MIN + 9);
  map.expert_of_slot = other_slots;
  const int64_t expected[kExperts] = {2, 1, 1, 1};
  CHECK_OK(sy_slot_selector_set_map(selector, &map, expected, NULL));
  CHECK_OK(sy_slot_selector_select(selector, &given, out, NULL));
  CHECK(out[0] == 0 && out[1] == 3 && out[2] == -1 && out[3] == INT32_MIN + 9);
  int64_t version = 0, all[kExperts];
  const int64_t* counters = NULL;
  CHECK_OK(sy_slot_selector_state(selector, in_force, &version, &counters));
  CHECK(version == 2 && in_force[4] == 0 && counters[0] == 2 && counters[1] == 0 && counters[3] == 2);
  CHECK_OK(sy_slot_selector_gather_routes(selector, all));
  CHECK(all[0] == 2 && all[1] == 0 && all[2] == 0 && all[3] == 2 && counters[0] == 0);
  CHECK_FAILS(sy_slot_selector_select(NULL, &given, out, NULL), SY_INVALID_ARGUMENT, "selector is NULL");
  route_counters(group, selector);
  sy_balance_options rates = SY_BALANCE_OPTIONS_INIT;
  rates.seconds_per_row = 1;
  CHECK_OK(sy_agree_on_step_rates(group, &rates));
  CHECK_OK(sy_measure_step_rates(group, &rates, NULL)); /* nothing moves on one rank */
  sy_balance_options older = SY_BALANCE_OPTIONS_INIT;   /* of a program whose struct ends before the rates */
  older.struct_size = 2 * sizeof(size_t);
  older.seconds_per_row = -7;
  CHECK_OK(sy_agree_on_step_rates(group, &older));
  CHECK(older.seconds_per_row == -7);
  CHECK(rates.seconds_per_row == 1 && rates.link_bytes_per_s == 300e9 && rates.seconds_per_move == 0.5e-3);
  CHECK_FAILS(sy_slot_selector_state(NULL, NULL, NULL, NULL), SY_INVALID_ARGUMENT, "selector is NULL");
  char weights[5][4] = {"aaa", "bbb", "ccc", "ddd", "eee"};
  void* const arrays[] = {weights};
  const size_t slot_bytes[] = {4};
  int64_t received = -1;
  sy_expert_map from = map;
  from.expert_of_slot = slots;
  CHECK_OK(sy_move_weights(group, &from, &map, arrays, slot_bytes, 1, 1 << 12, NULL, &received));
  CHECK(received == 0 && weights[0][0] == 'd' && weights[1][0] == 'b' && weights[3][0] == 'a' && weights[4][0] == 'd');
  CHECK_FAILS(sy_agree_on_step_rates(group, NULL), SY_INVALID_ARGUMENT, "options is NULL"); /* ends the group */
  CHECK_OK(sy_group_destroy(group)); /* objects may be destroyed in any order */
  CHECK_OK(sy_slot_selector_destroy(selector));
  CHECK_OK(sy_slot_selector_destroy(NULL));
}

/* A low-latency call selects slots. `selector` has the map {-1, 1, 2, 3, 0}. */
static void selecting_calls(sy_group* group, const sy_low_latency_config* config, sy_slot_selector* selector,
                            const sy_expert_ids* given) {
  sy_low_latency* exchange = NULL;
  sy_low_latency_output* output = NULL;
  CHECK_OK(sy_low_latency_create(group, config, &exchange));
  CHECK_OK(sy_low_latency_make_output(exchange, &output));
  uint16_t x[32] = {0};
  float sums[32];
  sy_const_row_view rows = SY_CONST_ROW_VIEW_INIT;
  rows.data = x;
  rows.rows = 2;
  rows.cols = 16;
  rows.dtype = SY_DTYPE_BF16;
  sy_low_latency_dispatch_options call = SY_LOW_LATENCY_DISPATCH_OPTIONS_INIT;
  call.selector = selector;
  CHECK_OK(sy_low_latency_dispatch(exchange, &rows, given, output, &call));
  sy_low_latency_view view = SY_LOW_LATENCY_VIEW_INIT;
  CHECK_OK(sy_low_latency_output_get(output, &view));
  CHECK(view.rows_of_expert[0] == 0 && view.rows_of_expert[3] == 2 && view.rows_of_expert[4] == 1);
  sy_all_to_all_options flat = SY_ALL_TO_ALL_OPTIONS_INIT;
  flat.selector = selector;
  CHECK_OK(sy_low_latency_all_to_all(exchange, &rows, given, sums, &flat));
  CHECK_OK(sy_low_latency_output_destroy(output));
  CHECK_OK(sy_low_latency_destroy(exchange));
}

/* Weights that move in the background, by a plan of replicas and by a balanced call. */
static void slot_weights(void) {
  sy_low_latency_config config = SY_LOW_LATENCY_CONFIG_INIT;
  config.hidden = 16;
  config.num_experts = 5;
  config.topk = 2;
  config.max_tokens = 2;
  config.scales = SY_SCALE_NONE;
  size_t heap = 0;
  CHECK_OK(sy_low_latency_heap_bytes(&config, 1, &heap));
  const sy_group_options options = patient_options(heap + (1 << 20));
  sy_group* group = NULL;
  CHECK_OK(sy_group_in_process(1, &options, &group));
  int32_t home[] = {0, 1, 2, 3, -1}, replica[] = {0, 1, 2, 3, 2}, vacated[5];
  const sy_expert_map map = map_of(home), from = map_of(vacated), to = map_of(replica);
  CHECK_OK(sy_expert_map_vacate(&to, &map, vacated));
  CHECK(vacated[2] == 2 && vacated[4] == -1);
  CHECK_FAILS(sy_expert_map_vacate(&to, NULL, vacated), SY_INVALID_ARGUMENT, "to is NULL");
  const int64_t loads[kExperts] = {2, 1, 1, 1};
  int32_t planned[5];
  CHECK_OK(sy_expert_map_plan_replicas(&map, loads, 0.0, planned));
  CHECK(planned[0] == 0 && planned[3] == 3);

  char weights[5][4] = {"aaa", "bbb", "ccc", "ddd", "eee"};
  void* const arrays[] = {weights};
  const size_t slot_bytes[] = {4};
  sy_slot_weights* moving = NULL;
  CHECK_OK(sy_slot_weights_create(group, 5, arrays, slot_bytes, 1, 1 << 12, NULL, &moving));
  int64_t received = -1;
  sy_bool done = 0;
  void* event = weights;
  CHECK_OK(sy_slot_weights_move(moving, &from, &to, NULL, &received));
  CHECK_OK(sy_slot_weights_wait(moving, NULL));
  CHECK_OK(sy_slot_weights_ready(moving, &done, &event));
  CHECK(received == 0 && weights[4][0] == 'c' && done == 1 && event == NULL);
  CHECK_FAILS(sy_slot_weights_ready(NULL, &done, NULL), SY_INVALID_ARGUMENT, "weights is NULL");

  sy_slot_selector* selector = NULL;
  CHECK_OK(sy_slot_selector_create(group, &map, NULL, &selector));
  const int32_t ids[] = {3, 0, 1, 3};
  int32_t slots[4];
  sy_expert_ids given = SY_EXPERT_IDS_INIT;
  given.data = ids;
  given.num_tokens = 2;
  given.topk = 2;
  sy_balance_report report = SY_BALANCE_REPORT_INIT;
  CHECK_OK(sy_slot_selector_balance_in_background(selector, &given, slots, moving, NULL, NULL, &report));
  CHECK(slots[0] == 3 && slots[1] == 0 && report.max_after == 4 && report.fetched == 0);
  replica[0] = -1;
  replica[4] = 0;
  CHECK_OK(sy_slot_selector_set_map(selector, &to, NULL, NULL));

  selecting_calls(group, &config, selector, &given);
  int64_t all[kExperts];
  CHECK_OK(sy_slot_selector_gather_routes(selector, all));
  CHECK(all[0] == 3 && all[1] == 3 && all[2] == 0 && all[3] == 6);
  CHECK_OK(sy_group_destroy(group));
  CHECK_OK(sy_slot_weights_destroy(moving));
  CHECK_OK(sy_slot_selector_destroy(selector));
}

/* Tuned values: with a file, and without. */
static void tuned_values(void) {
  sy_tuning_key key = SY_TUNING_KEY_INIT;
  sy_tuning_values values = SY_TUNING_VALUES_INIT;
  CHECK_FAILS(sy_tuning_find(NULL, &key, &values), SY_INVALID_ARGUMENT, "key->device");
  key.device = "cpu";
  CHECK_OK(sy_tuning_find(NULL, &key, &values));
  CHECK(values.pieces == 0 && values.dispatch_sms == 0);
  key.mode = 5;
  CHECK_FAILS(sy_tuning_find(NULL, &key, &values), SY_INVALID_ARGUMENT, "key->mode = 5");
  key.mode = SY_TUNING_FLAT;
  CHECK_FAILS(sy_tuning_find("/nowhere/a.tuning", &key, &values), SY_INVALID_ARGUMENT, "/nowhere/a.tuning");
  CHECK_FAILS(sy_tuning_find(NULL, &key, NULL), SY_INVALID_ARGUMENT, "values");
}

void run_trace_tests(void) {
  const sy_group_options options = patient_options(1 << 22);
  run_two_ranks(record, &options);
  arguments();
  tuned_values();
  expert_maps();
  slot_selectors();
  slot_weights();
}
