# SPDX-License-Identifier: Apache-2.0
"""Every parameter of every public function is declared in _abi/arguments.py, and every declaration is enforced: each function
is called with wrong values for each of its parameters in turn, and correct values for the others."""
import inspect
import re
import sys

import pytest

import switchyard as sy
from mistakes import Judge
from switchyard._abi.arguments import FUNCTIONS
from switchyard._abi.kinds import Any_, Integer, Several, Tensor
from switchyard.exchange import normal_config
from switchyard.group import _options
from switchyard.layer import _config as layer_config
from switchyard.ledger import _config as ledger_config
from switchyard.low_latency import _config as low_latency_config

judge = Judge()

#: The functions whose keywords ``**config`` and ``**options`` represent.
KEYWORDS = {"Exchange": normal_config, "LowLatency": low_latency_config, "LedgerCombine": ledger_config, "MoeLayer": layer_config,
            "Group": _options, "run_ranks": _options}
#: Not called by users: constructors of objects that other functions return, and methods with arguments of a Python protocol.
RETURNED = {"Group", "Handle", "Received", "Pending", "PreparedLedger", "GraphMemory"}
CONFIG = "hidden=128, num_experts=4, topk=2, max_tokens=8"
LAYER = f"intermediate=64, {CONFIG}"
LL = {"x": "X", "topk_ids": "IDS"}
LL_COMBINE = {"y": "Y", "received": "received"}
SIZES = {"world": "2", **{each.split("=")[0]: each.split("=")[1] for each in CONFIG.split(", ")}}
PLAN = {"ranks": "2", "hidden": "128", "max_tokens": "8"}

#: A correct call of each function with parameters: an expression, and arguments.
CALLS = {
    "Exchange.__init__": ("sy.Exchange", {"group": "group", **{k: v for k, v in SIZES.items() if k != "world"}}),
    "Exchange.memory_required": ("sy.Exchange.memory_required", SIZES), "Exchange.heap_bytes": ("sy.Exchange.heap_bytes", SIZES),
    "Exchange.dispatch": ("ex.dispatch", LL), "Exchange.allocate_rows": ("ex.allocate_rows", {"handle": "handle"}),
    "Exchange.combine": ("ex.combine", {"y": "rows", "handle": "handle"}), "Exchange.use_graph_memory": ("ex.use_graph_memory", {}),
    "Exchange.handle_from_bytes": ("ex.handle_from_bytes", {}),
    "LowLatency.__init__": ("sy.LowLatency", {"group": "group", **{k: v for k, v in SIZES.items() if k != "world"}}),
    "LowLatency.memory_required": ("sy.LowLatency.memory_required", SIZES), "LowLatency.heap_bytes": ("sy.LowLatency.heap_bytes", SIZES),
    "LowLatency.make_output": ("ll.make_output", {}), "LowLatency.make_rows": ("ll.make_rows", {"received": "received"}),
    "LowLatency.dispatch": ("ll.dispatch", LL), "LowLatency.dispatch_async": ("ll.dispatch_async", LL),
    "LowLatency.combine": ("ll.combine", LL_COMBINE), "LowLatency.combine_async": ("ll.combine_async", LL_COMBINE),
    "LowLatency.all_to_all": ("ll.all_to_all", LL),
    "LedgerCombine.__init__": ("sy.LedgerCombine", {"group": "group", **{k: v for k, v in SIZES.items() if k != "world"}}),
    "LedgerCombine.memory_required": ("sy.LedgerCombine.memory_required", SIZES),
    "LedgerCombine.heap_bytes": ("sy.LedgerCombine.heap_bytes", SIZES), "LedgerCombine.prepare": ("ledger.prepare", {"ledger": "tables"}),
    "LedgerCombine.combine": ("ledger.combine", {"y": "em_y", "prepared": "prepared"}),
    "MoeLayer.__init__": ("sy.MoeLayer", {"group": "group", "w13": "W13", "w2": "W2", "intermediate": "64",
                                          **{k: v for k, v in SIZES.items() if k != "world"}}),
    "MoeLayer.with_weights": ("layer.with_weights", {"w13": "W13", "w2": "W2"}),
    "MoeLayer.memory_required": ("sy.MoeLayer.memory_required", {**SIZES, "intermediate": "64"}),
    "MoeLayer.heap_bytes": ("sy.MoeLayer.heap_bytes", {**SIZES, "intermediate": "64"}),
    "MoeLayer.forward": ("layer.forward", {"x": "X16", "topk_ids": "IDS"}),
    "RowMemory.__init__": ("sy.RowMemory", {"group": "group", "size": "4096"}),
    "Group.from_environment": ("sy.Group.from_environment", {}), "Group.connect": ("sy.Group.connect", {"rank": "0", "world": "1", "store": "'unix:@a'"}),
    "Group.threads": ("sy.Group.threads", {"world": "1"}), "Group.from_mpi4py": ("sy.Group.from_mpi4py", {}),
    "Group.experts_of": ("group.experts_of", {"num_experts": "4"}), "Group.host_of": ("group.host_of", {}), "Group.all_gather": ("group.all_gather", {}),
    "Group.abort": ("group.abort", {}), "Group.set_timeout": ("group.set_timeout", {}), "Handle.matrices": ("handle.matrices", {}),
    "Trace.__init__": ("sy.Trace", {"group": "group"}), "Trace.span": ("trace.span", {"name": "'a'"}), "Trace.merge": ("trace.merge", {}),
    "Trace.json": ("trace.json", {}), "Trace.write_json": ("trace.write_json", {"path": "'/dev/null'"}),
    "ExpertMap.__init__": ("sy.ExpertMap", {"expert_of_slot": "SLOTS", "num_experts": "4", "world": "2"}),
    "ExpertMap.home": ("sy.ExpertMap.home", {"num_experts": "4", "world": "2", "slots_per_rank": "3"}),
    "ExpertMap.plan": ("expert_map.plan", {"routes_per_expert": "LOADS"}), "ExpertMap.divide": ("expert_map.divide", {"routes_per_expert": "LOADS"}),
    "ExpertMap.replace": ("expert_map.replace", {"topk_ids": "IDS32.copy()", "routes": "ROUTES", "rank": "0"}),
    "ExpertMap.count_moved": ("expert_map.count_moved", {"to": "expert_map"}), "ExpertMap.vacate": ("expert_map.vacate", {"to": "expert_map"}),
    "ExpertMap.plan_replicas": ("expert_map.plan_replicas", {"routes_per_expert": "LOADS"}),
    "SlotWeights.__init__": ("sy.SlotWeights", {"group": "group"}),
    "SlotWeights.move": ("slot_weights.move", {"before": "small_map", "after": "small_map"}),
    "move_weights": ("sy.move_weights", {"group": "group", "before": "small_map", "after": "small_map"}),
    "SlotSelector.__init__": ("sy.SlotSelector", {"group": "group", "expert_map": "small_map", "routes": "SMALL_ROUTES"}),
    "SlotSelector.select": ("selector.select", {"topk_ids": "IDS", "out": "IDS.copy()"}),
    "SlotSelector.balance": ("selector.balance", {"topk_ids": "IDS", "out": "IDS.copy()"}),
    "SlotSelector.set_map": ("selector.set_map", {"expert_map": "small_map", "routes": "SMALL_ROUTES"}),
    "agree_on_step_rates": ("sy.agree_on_step_rates", {"group": "group"}), "measure_step_rates": ("sy.measure_step_rates", {"group": "group"}),
    "RouteCounter.__init__": ("sy.RouteCounter", {"group": "group", "num_experts": "4"}),
    "RouteCounter.count": ("route_counter.count", {"topk_ids": "IDS"}), "RouteCounter.load": ("route_counter.load", {"selector": "selector"}),
    "Exchange.load": ("counted.load", {}),
    "first_expert": ("sy.first_expert", {"num_experts": "4", "world": "2", "rank": "0"}),
    "routing_layout": ("sy.routing_layout", {"topk_ids": "IDS", "num_experts": "4", "world": "2"}),
    "run_ranks": ("sy.run_ranks", {"function": "len", "world": "1"}),
    "tuned_values": ("sy.tuned_values", {"device": "'cpu'", "mode": "'normal'", **PLAN}),
}
#: Not callable here, because they need a GPU, torch or a process group; with_torch/test_mistakes_with_torch.py covers the
#: others.
ELSEWHERE = {"GroupedGemm.__init__", "GroupedGemm.__call__", "Group.from_process_group", "moe_heap_bytes", "parallelize_moe", "Ledger",
             "expert_parameters", "full_state_dict", "keep_out_of_ddp", "set_replicas", "Group.record_stream"}

#: Calls that are not decorated, because that would take a tenth of their time: Python names the similar keyword from 3.13 on.
HOT = {"Exchange.dispatch", "Exchange.combine", "LowLatency.dispatch", "LowLatency.dispatch_async", "LowLatency.combine",
       "LowLatency.combine_async", "LowLatency.all_to_all", "LedgerCombine.combine", "MoeLayer.forward", "SlotSelector.select"}


def public_functions():
    """Yields qualified names and signatures."""
    for name in sy.__all__:
        thing = getattr(sy, name)
        if not inspect.isclass(thing):
            if callable(thing):
                yield name, inspect.signature(thing)
            continue
        if issubclass(thing, (tuple, BaseException, int)):
            continue
        for member, found in vars(thing).items():
            function = getattr(found, "__func__", found)
            if not inspect.isfunction(function) or (member.startswith("_") and member not in ("__init__", "__call__")):
                continue
            if member == "__init__" and name in RETURNED:
                continue
            if member == "__call__" and function is vars(thing).get("forward"):
                continue
            yield f"{name}.{member}", inspect.signature(function)


def parameters_of(name, signature):
    found = []
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD:
            found += [key for key in inspect.signature(KEYWORDS[name.split(".")[0]]).parameters if key not in found]
        elif each.name not in ("self", "cls"):
            found.append(each.name)
    return [each for each in found if not (name.startswith("MoeLayer") and each == "backend" and "__init__" in name)]


def test_every_parameter_is_declared():
    there = {name: parameters_of(name, signature) for name, signature in public_functions()}
    assert len(there) > 60
    assert {name: sorted(FUNCTIONS.get(name, {"(function)": 0})) for name in there} == {name: sorted(each) for name, each in there.items()}
    assert set(FUNCTIONS) - set(there) == {"Ledger"}


def test_every_function_is_called_here():
    assert {name for name, declared in FUNCTIONS.items() if declared} - ELSEWHERE == set(CALLS)


def _mistakes():
    """Yields function, parameter and wrong value."""
    for name, (_, right) in CALLS.items():
        for parameter, kind in FUNCTIONS[name].items():
            declared = kind.each if isinstance(kind, Several) else kind
            if isinstance(declared, Any_):
                continue
            yield name, parameter, "Wrong()"
            if isinstance(declared, Integer):
                yield name, parameter, "1 << 70"
            if isinstance(declared, Tensor):
                for seed in range(3):
                    yield name, parameter, f"wrong_array({seed + 10 * len(parameter)}, {len(declared.shape)})"
                if declared.written:
                    yield name, parameter, "frozen"


@pytest.fixture(scope="module", autouse=True)
def _judge():
    yield
    judge.close()


@pytest.mark.parametrize("function", CALLS)
def test_every_declaration_is_enforced(function):
    call, right = CALLS[function]
    wrong = [(parameter, value) for name, parameter, value in _mistakes() if name == function]
    assert wrong
    for parameter, value in wrong:
        arguments = {**right, parameter: value}
        expression = f"{call}({', '.join(f'{name}={given}' for name, given in arguments.items())})"
        name, text, bases = judge.ask(expression)
        if name == "LibraryNotFound":
            pytest.skip(text)
        assert "InvalidArgument" in bases, f"{expression}: {name}: {text}"
        assert re.search(rf"\b{parameter}\b", text), f"{expression}: {text}"


@pytest.mark.parametrize("function", [name for name in CALLS if FUNCTIONS[name]])
def test_a_similar_keyword_is_named(function):
    call, right = CALLS[function]
    for parameter in FUNCTIONS[function]:
        if len(parameter) < 3:
            continue
        wrong = parameter.replace("_", "") if "_" in parameter else parameter[:2] + "_" + parameter[2:]
        arguments = {name: given for name, given in right.items() if name != parameter}
        name, text, _ = judge.ask(f"{call}({', '.join(f'{key}={value}' for key, value in {**arguments, wrong: 1}.items())})")
        if name == "LibraryNotFound":
            pytest.skip(text)
        assert name == "TypeError" and f"'{wrong}'" in text, text
        if function not in HOT or sys.version_info >= (3, 13):
            assert f"Did you mean '{parameter}'?" in text, text
