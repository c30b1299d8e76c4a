# SPDX-License-Identifier: Apache-2.0
# Generated from include/switchyard/c by scripts/interface/generate.py; change the headers and run it.
"""The functions of include/switchyard/c that return an sy_code, with a letter for each argument: `p` a pointer, `s` a string, `i` an
int32_t, `u` a uint32_t, `l` an int64_t, `z` a size_t, `d` a double.
"""
from __future__ import annotations

#: Functions of libswitchyard.
EXCHANGE = {
    "sy_struct_bytes": "sp", "sy_expert_map_check": "p", "sy_expert_map_home": "p", "sy_expert_map_plan": "ppdp",
    "sy_expert_map_plan_replicas": "ppdp", "sy_expert_map_divide": "pppp", "sy_expert_map_replace": "ppipl", "sy_expert_map_vacate": "ppp",
    "sy_expert_map_count_moved": "ppp", "sy_move_weights": "pppppizpp", "sy_slot_weights_create": "pippizpp",
    "sy_slot_weights_destroy": "p", "sy_slot_weights_move": "ppppp", "sy_slot_weights_wait": "pp", "sy_slot_weights_ready": "ppp",
    "sy_slot_selector_create": "pppp", "sy_slot_selector_destroy": "p", "sy_slot_selector_select": "pppp",
    "sy_slot_selector_balance": "pppppippp", "sy_agree_on_step_rates": "pp", "sy_measure_step_rates": "ppp",
    "sy_slot_selector_balance_in_background": "ppppppp", "sy_slot_selector_set_map": "pppp", "sy_slot_selector_gather_routes": "pp",
    "sy_slot_selector_state": "pppp", "sy_route_counter_create": "pip", "sy_route_counter_destroy": "p", "sy_route_counter_count": "ppp",
    "sy_route_counter_load": "pppp", "sy_route_counter_routes": "pp", "sy_exchange_make_graph_memory": "pp",
    "sy_exchange_use_graph_memory": "pp", "sy_graph_memory_destroy": "p", "sy_ledger_check": "ppii", "sy_ledger_format_of": "piip",
    "sy_ledger_pack": "ppiip", "sy_ledger_unpack": "pzpiilp", "sy_ledger_combine_memory_required": "piip",
    "sy_ledger_combine_heap_bytes": "piip", "sy_ledger_combine_create": "ppp", "sy_ledger_combine_destroy": "p",
    "sy_ledger_combine_prepare": "ppp", "sy_prepared_ledger_destroy": "p", "sy_prepared_ledger_sizes": "pppp",
    "sy_ledger_combine_run": "pppppp", "sy_combine_by_ledger": "pppzplpp", "sy_ledger_combine_returned": "pp",
    "sy_ledger_combine_last_call": "pp", "sy_low_latency_memory_required": "pip", "sy_low_latency_heap_bytes": "pip",
    "sy_low_latency_scale_row_bytes": "pp", "sy_low_latency_create": "ppp", "sy_low_latency_destroy": "p",
    "sy_low_latency_make_output": "pp", "sy_low_latency_make_output_in": "ppp", "sy_low_latency_output_destroy": "p",
    "sy_low_latency_output_get": "pp", "sy_low_latency_make_rows": "pip", "sy_low_latency_rows_get": "pp",
    "sy_low_latency_rows_destroy": "p", "sy_low_latency_dispatch": "ppppp", "sy_low_latency_combine": "ppppp",
    "sy_low_latency_dispatch_send": "ppppp", "sy_low_latency_combine_send": "ppppp", "sy_low_latency_receive": "p",
    "sy_low_latency_all_to_all": "ppppp", "sy_low_latency_last_call": "pp", "sy_low_latency_invalid_ids": "pp",
    "sy_row_memory_create": "pzp", "sy_row_memory_destroy": "p", "sy_row_memory_use": "p", "sy_group_used_by": "ppp", "sy_version": "ppp",
    "sy_last_wait_report": "p", "sy_last_peer_failure": "pp", "sy_last_missing_ranks": "p", "sy_group_in_process": "ipp",
    "sy_group_connect": "iisspp", "sy_group_from_environment": "pp", "sy_group_destroy": "p", "sy_group_rank": "pp", "sy_group_size": "pp",
    "sy_group_hosts": "ppp", "sy_group_host_of": "pip", "sy_group_set_timeout": "pl", "sy_group_barrier": "p",
    "sy_group_all_gather": "ppzp", "sy_group_agree": "psispzp", "sy_group_check": "p", "sy_group_abort": "pi", "sy_group_leave": "p",
    "sy_group_heap": "ppp", "sy_group_register_memory": "ppzp", "sy_registered_destroy": "p", "sy_group_sleep": "p", "sy_group_wake": "p",
    "sy_scale_row_bytes": "lip", "sy_first_expert": "iiip", "sy_exchange_memory_required": "piip", "sy_exchange_heap_bytes": "piip",
    "sy_exchange_max_rows": "pip", "sy_exchange_create": "ppp", "sy_exchange_destroy": "p", "sy_exchange_set_site": "pu",
    "sy_exchange_dispatch": "pppppp", "sy_exchange_dispatch_cached": "ppppp", "sy_dispatched_get": "pp", "sy_dispatched_used_by": "pp",
    "sy_dispatched_destroy": "p", "sy_exchange_allocate_rows": "ppipp", "sy_rows_get": "pp", "sy_rows_used_by": "pp",
    "sy_rows_destroy": "p", "sy_exchange_combine": "pppppp", "sy_exchange_last_call": "pp", "sy_exchange_invalid_ids": "pp",
    "sy_handle_retain": "p", "sy_handle_release": "p", "sy_handle_num_tokens": "pp", "sy_handle_rows": "pp", "sy_handle_invalid_ids": "pp",
    "sy_storage_release": "p", "sy_handle_counts": "pp", "sy_handle_serialize": "pp", "sy_handle_deserialize": "pzp",
    "sy_handle_matrices": "pip", "sy_handle_ledger": "pp", "sy_routing_layout_of": "piip", "sy_routing_layout_enqueue": "piipppp",
    "sy_trace_create": "ipp", "sy_trace_destroy": "p", "sy_group_set_trace": "pp", "sy_trace_event": "pssp",
    "sy_trace_span_begin": "piilp", "sy_trace_span_end": "p", "sy_trace_clear": "p", "sy_trace_lost": "pp", "sy_trace_clock_error": "pp",
    "sy_trace_write_json": "psi", "sy_trace_json": "pip", "sy_trace_serialize": "pip", "sy_trace_merge": "ppz",
    "sy_trace_summary_of": "pp", "sy_group_wait_statistics": "pip", "sy_tuning_find": "spp"
}
#: Functions of libswitchyard_layer.
LAYER = {
    "sy_expert_mlp_memory_required": "ppp", "sy_expert_mlp_create": "ppppp", "sy_expert_mlp_destroy": "p",
    "sy_expert_mlp_forward": "ppppp", "sy_expert_mlp_forward_rank_major": "ppppp", "sy_expert_mlp_memory": "pp",
    "sy_expert_mlp_implementation": "pp", "sy_grouped_gemm_output": "ppp", "sy_expert_rows_of_dispatched": "pp",
    "sy_expert_rows_of_low_latency": "pp", "sy_grouped_gemm_create": "pppp", "sy_grouped_gemm_destroy": "p",
    "sy_grouped_gemm_run": "ppppp", "sy_weight_gradient_create": "pp", "sy_weight_gradient_destroy": "p",
    "sy_weight_gradient_run": "pppppp", "sy_swiglu_gradient_create": "pp", "sy_swiglu_gradient_destroy": "p",
    "sy_swiglu_gradient_run": "ppppppp", "sy_routing_gradient_create": "pp", "sy_routing_gradient_destroy": "p",
    "sy_routing_gradient_run": "pppppp", "sy_moe_layer_memory_required": "piip", "sy_moe_layer_heap_bytes": "piip",
    "sy_moe_layer_create": "pppppp", "sy_moe_layer_with_weights": "ppppppp", "sy_moe_layer_with_scaled_weights": "pppppppp",
    "sy_moe_layer_destroy": "p", "sy_moe_layer_forward": "pppppp", "sy_moe_layer_dropped": "ppp", "sy_moe_layer_invalid_ids": "pp",
    "sy_moe_layer_implementation": "pp"
}
