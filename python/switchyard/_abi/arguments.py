# SPDX-License-Identifier: Apache-2.0
"""Declarations of all arguments of public functions, and the checks derived from them.

:data:`FUNCTIONS` maps each function, by qualified name, to its arguments and their kinds (kinds.py). A test enumerates the
public callables and fails if a parameter has no declaration; another passes wrong values to every declared parameter. Functions
without tensors are decorated with :func:`checked`; functions with tensors use takers that :func:`bind` creates for each object
from the declarations. Symbols in shapes: T tokens on this rank, K experts per token, H hidden size, L experts on this rank, R
rows, W ranks, I intermediate size.
"""
from __future__ import annotations

import difflib
import functools
import inspect
from types import SimpleNamespace
from typing import Any, Callable, Collection, Dict, FrozenSet, Iterable, Optional, TypeVar, cast

from . import names as _names
from .arrays import I32, I64, U8, Taker
from .kinds import (ANY_INT32, ANY_INT64, BYTES, INT32, INT64, ROW_TYPES, Any_, Content, Flag, Foreign, Instance, Integer, Path, Real, RowType,
                    Seconds, Several, Tensor, Text, Word)
from .names import BF16, F16, F32, FP8

Arguments = Dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

_SUMMED = (BF16, F16, F32)
_LAYER_TYPES = (BF16, F16, FP8)
_SCALES = (F32, FP8, U8)
_WORLD = Integer(1, 64)
_NUM_SMS = Integer(0, INT32)
_GROUP = Instance("Group", "sy.Group.threads, .connect, .from_environment or .from_process_group makes one")
_HANDLE = Instance("Handle", "the second result of dispatch")
_RECEIVED = Instance("Received", "the result of LowLatency.dispatch or make_output")
_IDS = Tensor(("T", "K"), (I32, I64))
_WEIGHTS = Tensor(("T", "K"), (F32,), optional=True)
_SUMS = Tensor(("T", "H"), _SUMMED, written=True, optional=True)
_MAP = Instance("ExpertMap", "sy.ExpertMap or ExpertMap.home makes one")
_ROUTES = Tensor(("W", "E"), (I64,), optional=True)
_SELECTOR = Instance("SlotSelector", "SlotSelector(group, expert_map) makes one", optional=True)
_SLOT_WEIGHTS = Instance("SlotWeights", "SlotWeights(group, *arrays) makes one", optional=True)
_OF_GROUP: Arguments = {
    "heap_bytes": BYTES, "timeout": Seconds(optional=True), "rendezvous_timeout": Seconds(), "backend": Word(_names.BACKENDS),
    "device": ANY_INT32, "workers": ANY_INT32, "num_sms": _NUM_SMS, "host": Text(), "network": Word(_names.NETWORKS),
    "silence": Seconds(optional=True)}
_SHAPE: Arguments = {"hidden": ANY_INT64, "num_experts": ANY_INT32, "topk": ANY_INT32, "max_tokens": ANY_INT64, "dtype": RowType()}
_NORMAL: Arguments = {
    **_SHAPE, "layout": Word(_names.LAYOUTS), "expert_alignment": ANY_INT32, "staging": Word(_names.STAGINGS), "pool_bytes": BYTES,
    "ring_num_channels": ANY_INT32, "ring_send_chunk": ANY_INT32, "ring_slots": ANY_INT32, "ring_max_bytes": BYTES,
    "invalid_ids": Word(_names.INVALID_IDS)}
_LOW_LATENCY: Arguments = {
    **_SHAPE, "scales": Word(_names.SCALES), "scale_group": ANY_INT32, "scale_order": Word(_names.SCALE_ORDERS),
    "sending": Word(_names.SENDINGS), "pieces": ANY_INT32, "invalid_ids": Word(_names.INVALID_IDS)}
_LEDGER: Arguments = {**_SHAPE, "max_rows": ANY_INT64, "max_ledgers": ANY_INT32}
_LAYER: Arguments = {
    **_SHAPE, "intermediate": ANY_INT64, "capacity": ANY_INT64, "order": Word(_names.ORDERS), "exchange": Word(_names.MOE_EXCHANGES),
    "form": Word(_names.MOE_FORMS), "overflow": Word(_names.OVERFLOWS), "captured": Flag(),
    "storage": Word(_names.STORAGES, optional=True), "row_scales": Word(_names.SCALES), "weight_scales": Word(_names.SCALES),
    "invalid_ids": Word(_names.INVALID_IDS), "accumulate": Word(_names.ACCUMULATIONS), "scaling": Word(_names.GRANULARITIES),
    "intermediate_scaling": Word(_names.OUTPUT_SCALINGS)}
_SIZES: Arguments = {"world": _WORLD, "backend": Word(_names.BACKENDS)}
_LAYER_WEIGHTS: Arguments = {
    "w13": Tensor(("L", "2I", "H"), ROW_TYPES, by_dtype=_LAYER_TYPES), "w2": Tensor(("L", "H", "I"), ROW_TYPES, by_dtype=_LAYER_TYPES),
    "w13_scales": Tensor(("L", "S13", "G13"), _SCALES, optional=True), "w2_scales": Tensor(("L", "S2", "G2"), _SCALES, optional=True),
    "intermediate_scale": Tensor((1,), (F32,), optional=True)}
_LL_DISPATCH: Arguments = {
    "x": Tensor(("T", "H"), ROW_TYPES, pair=True, by_dtype=_SUMMED), "topk_ids": _IDS, "topk_weights": _WEIGHTS,
    "output": Instance("Received", "what make_output or an earlier dispatch returned", optional=True), "num_sms": _NUM_SMS,
    "selector": _SELECTOR}
_LL_COMBINE: Arguments = {
    "y": Tensor(("L", "R", "H"), _SUMMED, by_dtype=_SUMMED), "received": _RECEIVED, "topk_weights": _WEIGHTS,
    "expert_scale": Tensor(("L",), (F32,), optional=True), "order": Word(_names.ORDERS), "out": _SUMS, "num_sms": _NUM_SMS}
_MODEL = Foreign("a torch module", "named_modules")
_PARALLEL: Arguments = {"model": _MODEL, "max_tokens": Integer(1, INT64), "topk": Integer(1, INT32, optional=True),
                        "experts": Word({"automatic": 0, "module": 1, "grouped": 2, "layer": 3}), "replicas": Any_()}

FUNCTIONS: Dict[str, Arguments] = {
    "Exchange.__init__": {"group": _GROUP, "routing_gradients": Flag(), "count_routes": Flag(), **_NORMAL},
    "Exchange.memory_required": {**_SIZES, **_NORMAL},
    "Exchange.heap_bytes": {**_SIZES, "routing_gradients": Flag(), **_NORMAL},
    "Exchange.dispatch": {
        "x": Tensor(("T", "H"), ROW_TYPES, pair=True, by_dtype=_SUMMED), "topk_ids": Tensor(("T", "K"), (I32, I64), optional=True), "topk_weights": _WEIGHTS,
        "handle": Instance("Handle", "the second result of dispatch", optional=True), "quantize": Word(_names.SCALES),
        "size": Word(_names.SIZES), "capacity": Integer(0, INT64, optional=True), "overflow": Word(_names.OVERFLOWS),
        "padding": Word(_names.PADDINGS), "out": Tensor(("R", "H"), ROW_TYPES, written=True, optional=True, pair=True), "num_sms": _NUM_SMS},
    "Exchange.allocate_rows": {"handle": _HANDLE, "dtype": RowType(optional=True)},
    "Exchange.combine": {
        "y": Tensor(("R", "H"), _SUMMED, by_dtype=_SUMMED), "handle": _HANDLE, "topk_weights": Tensor(("T", "K"), (F32,), optional=True),
        "apply_weights": Flag(), "order": Word(_names.ORDERS), "bias": Several(Tensor(("T", "H"), _SUMMED), 2), "out": _SUMS,
        "num_sms": _NUM_SMS},
    "Exchange.make_graph_memory": {},
    "Exchange.use_graph_memory": {"memory": Instance("GraphMemory", "what make_graph_memory returned", optional=True)},
    "Exchange.handle_from_bytes": {"content": Content()},
    "Exchange.last_call": {}, "Exchange.close": {},
    "LowLatency.__init__": {"group": _GROUP, **_LOW_LATENCY},
    "LowLatency.memory_required": {"world": _WORLD, **_LOW_LATENCY},
    "LowLatency.heap_bytes": {"world": _WORLD, **_LOW_LATENCY},
    "LowLatency.make_output": {"like": Tensor(("T", "H"), ROW_TYPES, optional=True),
                               "memory": Tensor(("L", "R", "H"), ROW_TYPES, written=True, optional=True, pair=True)},
    "LowLatency.make_rows": {"received": _RECEIVED, "dtype": RowType(optional=True)},
    "LowLatency.dispatch": _LL_DISPATCH, "LowLatency.dispatch_async": _LL_DISPATCH,
    "LowLatency.combine": _LL_COMBINE, "LowLatency.combine_async": _LL_COMBINE,
    "LowLatency.all_to_all": {"x": Tensor(("T", "H"), _SUMMED, by_dtype=_SUMMED), "topk_ids": _IDS, "topk_weights": _WEIGHTS,
                              "expert_scale": Tensor(("L",), (F32,), optional=True), "out": _SUMS, "num_sms": _NUM_SMS,
                              "selector": _SELECTOR},
    "LowLatency.last_call": {}, "LowLatency.close": {}, "Pending.wait": {},
    "LedgerCombine.__init__": {"group": _GROUP, **_LEDGER},
    "LedgerCombine.memory_required": {**_SIZES, **_LEDGER}, "LedgerCombine.heap_bytes": {**_SIZES, **_LEDGER},
    "LedgerCombine.prepare": {"ledger": Instance("Ledger", "Handle.ledger() returns one")},
    "LedgerCombine.combine": {"y": Tensor(("R", "H"), _SUMMED, by_dtype=_SUMMED), "prepared": Instance("PreparedLedger", "what prepare returned"),
                              "probs": Tensor(("M", "K"), (F32,), optional=True), "out": Tensor(("M", "H"), _SUMMED, True, optional=True),
                              "num_sms": _NUM_SMS},
    "LedgerCombine.last_call": {}, "LedgerCombine.close": {},
    # Ledger tables: members of the LedgerCombine.prepare argument.
    "Ledger": {"ledger.peer_token_per_expert": Tensor(("W", "Ep"), (I32,)), "ledger.expanded_row_idx": Tensor(("routes",), (I32,)),
               "ledger.cumsum_per_expert": Tensor(("W", "Ep"), (I32,)), "ledger.dispatch_offset": Tensor(("L",), (I32,)),
               "ledger.prev_sum_before_rank": Tensor(("W", "L"), (I32,))},
    "MoeLayer.__init__": {"group": _GROUP, **_LAYER_WEIGHTS, **_LAYER},
    "MoeLayer.with_weights": _LAYER_WEIGHTS,
    "MoeLayer.memory_required": {**_SIZES, **_LAYER}, "MoeLayer.heap_bytes": {**_SIZES, **_LAYER},
    "MoeLayer.forward": {"x": Tensor(("T", "H"), ROW_TYPES, by_dtype=_LAYER_TYPES), "topk_ids": _IDS, "topk_weights": _WEIGHTS,
                         "out": Tensor(("T", "H"), ROW_TYPES, written=True, optional=True), "add": Flag(),
                         "device_tokens": Tensor((1,), (I32,), optional=True), "num_sms": _NUM_SMS, "selector": _SELECTOR,
                         "weights_ready": _SLOT_WEIGHTS},
    "MoeLayer.dropped": {}, "MoeLayer.close": {},
    "GroupedGemm.__init__": {
        "weights": Tensor(("L", "N", "K"), (BF16, F16, FP8)), "scales": Tensor(("L", "S", "G"), _SCALES, optional=True),
        "order": Word(_names.WEIGHT_ORDERS), "epilogue": Word(_names.EPILOGUES), "quantize": Word(_names.SCALES), "limit": Real(),
        "alpha": Real(), "up_shift": Real(), "accumulate": Word(_names.ACCUMULATIONS), "scaling": Word(_names.GRANULARITIES),
        "output_scaling": Word(_names.OUTPUT_SCALINGS)},
    "GroupedGemm.__call__": {
        "x": Tensor(("R", "K"), (BF16, F16, FP8), pair=True), "rows": Foreign("a Handle or a Received", "_view"),
        "out": Tensor(("R", "N"), (BF16, F16, F32, FP8), written=True, optional=True, pair=True), "num_sms": _NUM_SMS,
        "output_scale": Tensor((1,), (F32,), optional=True)},
    "GroupedGemm.close": {},
    "ExpertMap.__init__": {"expert_of_slot": Tensor(("P",), (I32,)), "num_experts": Integer(1, INT32), "world": _WORLD},
    "ExpertMap.home": {"num_experts": Integer(1, INT32), "world": _WORLD, "slots_per_rank": Integer(1, 1 << 20)},
    "ExpertMap.plan": {"routes_per_expert": Tensor(("E",), (I64,)), "tolerance": Real()},
    "ExpertMap.divide": {"routes_per_expert": Tensor(("E",), (I64,))},
    "ExpertMap.replace": {"topk_ids": Tensor(("T", "K"), (I32,), written=True), "routes": Tensor(("W", "E"), (I64,)), "rank": ANY_INT32},
    "ExpertMap.plan_replicas": {"routes_per_expert": Tensor(("E",), (I64,)), "tolerance": Real()},
    "ExpertMap.vacate": {"to": _MAP}, "ExpertMap.count_moved": {"to": _MAP},
    "move_weights": {"group": _GROUP, "before": _MAP, "after": _MAP, "arrays": Any_(), "staging_bytes": BYTES},
    "SlotWeights.__init__": {"group": _GROUP, "arrays": Any_(), "staging_bytes": BYTES}, "SlotWeights.wait": {}, "SlotWeights.close": {},
    "SlotWeights.move": {"before": _MAP, "after": _MAP},
    "SlotSelector.__init__": {"group": _GROUP, "expert_map": _MAP, "routes": _ROUTES}, "SlotSelector.close": {},
    "SlotSelector.select": {"topk_ids": _IDS, "out": Tensor(("T", "K"), (I32, I64), written=True, optional=True)},
    "SlotSelector.balance": {"topk_ids": _IDS, "arrays": Any_(), "out": Tensor(("T", "K"), (I32, I64), written=True, optional=True),
                             "tile": Integer(1, INT64), "link_bytes_per_s": Real(), "seconds_per_row": Real(), "seconds_per_move": Real(),
                             "staging_bytes": BYTES},
    "SlotSelector.set_map": {"expert_map": _MAP, "routes": _ROUTES}, "SlotSelector.gather_routes": {},
    "agree_on_step_rates": {"group": _GROUP, "link_bytes_per_s": Real(), "seconds_per_row": Real(), "seconds_per_move": Real()},
    "measure_step_rates": {"group": _GROUP, "seconds_per_row": Real(), "staging_bytes": BYTES},
    "RouteCounter.__init__": {"group": _GROUP, "num_experts": Integer(1, 1 << 20)}, "RouteCounter.count": {"topk_ids": _IDS},
    "RouteCounter.load": {"selector": _SELECTOR}, "Exchange.load": {"selector": _SELECTOR}, "RouteCounter.close": {},
    "RowMemory.__init__": {"group": _GROUP, "size": BYTES, "device": Integer(0, INT32, optional=True), "segment": BYTES},
    "RowMemory.use": {}, "RowMemory.close": {},
    "Group.from_environment": _OF_GROUP,
    "Group.connect": {"rank": ANY_INT32, "world": ANY_INT32, "store": Text(), "token": Text(), **_OF_GROUP},
    "Group.threads": {"world": _WORLD, **_OF_GROUP},
    "Group.from_process_group": {"process_group": Any_(), **_OF_GROUP},
    "Group.from_mpi4py": {"communicator": Foreign("an mpi4py communicator", "Get_rank"), **_OF_GROUP},
    "Group.experts_of": {"num_experts": ANY_INT32, "rank": Integer(-INT32, INT32, optional=True)},
    "Group.host_of": {"rank": ANY_INT32}, "Group.barrier": {}, "Group.record_stream": {"tensor": Foreign("a tensor", "data_ptr"), "stream": Foreign("a stream of torch.cuda", "cuda_stream", optional=True)}, "Group.all_gather": {"mine": Content()}, "Group.check": {},
    "Group.abort": {"reason": Integer(1, 255)}, "Group.set_timeout": {"seconds": Seconds(optional=True)}, "Group.wait_statistics": {},
    "Group.sleep": {}, "Group.wake": {}, "Group.close": {},
    "Handle.counts": {}, "Handle.matrices": {"num_channels": Integer(1, INT32)}, "Handle.ledger": {}, "Handle.to_bytes": {}, "Handle.twin": {},
    "Trace.__init__": {"group": _GROUP, "events_per_track": Integer(1, INT64), "num_blocks": ANY_INT32, "num_warps": ANY_INT32},
    "Trace.start": {}, "Trace.stop": {}, "Trace.gather": {}, "Trace.to_bytes": {}, "Trace.summary": {}, "Trace.clear": {},
    "Trace.span": {"name": Text(), "arg": ANY_INT64, "unit": Text()}, "Trace.merge": {"content": Content()},
    "Trace.json": {"flows": Flag()}, "Trace.write_json": {"path": Path(), "flows": Flag()},
    "first_expert": {"num_experts": ANY_INT32, "world": ANY_INT32, "rank": ANY_INT32},
    "keep_plans": {}, "library_path": {}, "library_version": {},
    "moe_heap_bytes": {"world": _WORLD, "backend": Word(_names.BACKENDS), "hosts": Integer(1, INT32), **_PARALLEL},
    "parallelize_moe": {"group": _GROUP, "gradients": Word({"sum": 0, "mean": 1}), **_PARALLEL},
    "expert_parameters": {"model": _MODEL}, "full_state_dict": {"model": _MODEL}, "keep_out_of_ddp": {"model": _MODEL},
    "set_replicas": {"model": _MODEL, "replicas": Any_()},
    "routing_layout": {"topk_ids": _IDS, "num_experts": Integer(1, INT32), "world": _WORLD},
    "run_ranks": {"function": Foreign("a function of a group: run_ranks(function, world)", "__call__"), "world": _WORLD, "arguments": Any_(),
                  **_OF_GROUP},
    "tuned_values": {"device": Text(), "mode": Word(_names.TUNING_MODES), "ranks": ANY_INT32, "hidden": ANY_INT64, "max_tokens": ANY_INT64,
                     "path": Path(optional=True)},
}


def _refuse_unknown(called: str, keywords: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError for the first keyword that is not in `known`, with the most similar one, as Python 3.13 and later do."""
    for unknown in keywords:
        if unknown not in known:
            similar = difflib.get_close_matches(unknown, known, 1) or [each for each in sorted(known) if each.startswith(unknown)]
            raise TypeError(f"{called}() got an unexpected keyword argument '{unknown}'" + (f". Did you mean '{similar[0]}'?" if similar else ""))


def _keywords_of(name: str, function: Callable[..., Any]) -> FrozenSet[str]:
    """Returns the keywords of a function declared as `name`."""
    return frozenset(FUNCTIONS[name]) | {each.name for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD}


def named(name: str) -> Callable[[Function], Function]:
    """Decorates a function that checks its values itself, to name the most similar keyword in the TypeError for an unknown one.
    Not for calls of the hot path: there, Python 3.13 and later name it."""

    def decorate(function: Function) -> Function:
        known, called = _keywords_of(name, function), function.__qualname__.replace(".__init__", "")

        @functools.wraps(function)
        def call(*given: Any, **keywords: Any) -> Any:
            if not keywords.keys() <= known:
                _refuse_unknown(called, keywords, known)
            return function(*given, **keywords)

        return cast(Function, call)

    return decorate


def checked(name: str, called: Optional[str] = None) -> Callable[[Function], Function]:
    """Decorates a function to check its arguments against the declarations of `name` in :data:`FUNCTIONS`. The function itself
    checks its tensors. Use only for functions where a few extra microseconds do not matter. `called`: the function name used in
    TypeErrors for missing and unknown keywords."""
    declared = {argument: kind for argument, kind in FUNCTIONS[name].items() if hasattr(kind, "check")}

    def decorate(function: Function) -> Function:
        if called is not None:
            function.__qualname__ = called
        parameters = inspect.signature(function).parameters.values()
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        known, shown = _keywords_of(name, function), function.__qualname__.replace(".__init__", "")

        @functools.wraps(function)
        def call(*given: Any, **keywords: Any) -> Any:
            if not keywords.keys() <= known:
                _refuse_unknown(shown, keywords, known)
            values = list(given)
            for index, argument in enumerate(positional[:len(values)]):
                if argument in declared:
                    values[index] = declared[argument].check(argument, values[index])
            for argument in keywords.keys() & declared.keys():
                keywords[argument] = declared[argument].check(argument, keywords[argument])
            return function(*values, **keywords)

        return cast(Function, call)

    return decorate


def check(name: str, **values: Any) -> None:
    """Checks the arguments of an undecorated function outside its fast path."""
    declared = FUNCTIONS[name]
    for argument, value in values.items():
        declared[argument].check(argument, value)


def bind(function: str, backend: int, **sizes: int) -> SimpleNamespace:
    """Creates takers for the tensor arguments of `function`, for an object with the given backend and shape sizes."""
    found = SimpleNamespace()
    for name, kind in FUNCTIONS[function].items():
        declared = kind.each if isinstance(kind, Several) else kind
        if isinstance(declared, Tensor):
            shape = tuple(each if isinstance(each, int) else sizes.get(each, each) for each in declared.shape)
            setattr(found, name, Taker(name, shape, declared.types, backend, declared.strided, declared.written, declared.by_dtype, function.split(".")[0]))
    return found


__all__ = ["FUNCTIONS", "bind", "check", "checked", "named"]
