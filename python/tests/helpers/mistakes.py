# SPDX-License-Identifier: Apache-2.0
"""A process that evaluates expressions with usage mistakes, each with its own objects, and reports the exceptions. A mistake
that hangs or crashes ends the process and fails only its own test."""
import gc
import importlib
import multiprocessing
import warnings

import numpy as np

import switchyard as sy

#: Seconds after which a mistake counts as a hang. Groups wait twice as long, so no mistake can end by a deadline of the
#: library.
DEADLINE = 30
SHAPE = {"hidden": 128, "num_experts": 4, "topk": 2, "max_tokens": 8}
OPTIONS = {"heap_bytes": 8 << 20, "timeout": 2 * DEADLINE, "rendezvous_timeout": 2 * DEADLINE}


def _bits(shape, dtype):
    return np.zeros(shape, dtype)


def _forked(make):
    """Re-raises in this process the exception that `make()` raises in a forked child."""
    import os

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            make()
            os.write(writer, b"None|")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}|{error}".encode()[:2000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        line = file.read().decode()
    assert os.waitpid(child, 0)[1] == 0, "the child crashed"
    name, _, text = line.partition("|")
    if name != "None":
        raise getattr(sy, name)(text)


class Wrong:
    """A type that is invalid for every argument."""


def _wrong_array(seed, ndim):
    """An array of an invalid type, or with a number of dimensions other than `ndim`."""
    rng = np.random.default_rng(seed)
    if rng.integers(2):
        kind = rng.choice(["f8", "c8", "?", "u4", "i2", "u8", "U3", "O", "M8[s]", "V6", ">f4", ">i8"])
        return np.zeros(rng.integers(0, 5, ndim), kind)
    other = rng.choice([each for each in range(5) if each != ndim])
    return np.zeros(rng.integers(0, 5, other), rng.choice(["f4", "f2", "u2", "u1", "i4", "i8"]))


def _closed(thing, group):
    with group:
        pass
    return thing


#: Names available in expressions, created when an expression uses them.
MAKERS = {
    "X": lambda e: np.ones((3, 128), np.float32), "IDS": lambda e: np.array([[0, 3], [1, 2], [2, 1]]), "W": lambda e: np.ones((3, 2), np.float32), "ONE": lambda e: np.ones(1, np.float32),
    "X16": lambda e: np.zeros((3, 128), np.uint16), "X8": lambda e: np.zeros((3, 128), np.uint8), "S8": lambda e: np.ones((3, 1), np.float32),
    "SLOTS": lambda e: np.array([0, 1, -1, 2, 3, 0], np.int32), "LOADS": lambda e: np.array([5, 1, 2, 3]), "IDS32": lambda e: e["IDS"].astype(np.int32),
    "SMALL_ROUTES": lambda e: np.array([[9, 9, 9, 9]]), "small_map": lambda e: sy.ExpertMap(np.array([0, 1, 2, 3, 0], np.int32), num_experts=4, world=1),
    "selector": lambda e: sy.SlotSelector(e["group"], e["small_map"]),
    "route_counter": lambda e: sy.RouteCounter(e["group"], num_experts=5), "counted": lambda e: sy.Exchange(e["group"], count_routes=True, **SHAPE),
    "slot_weights": lambda e: sy.SlotWeights(e["group"], np.zeros((5, 2), np.float32)),
    "ROUTES": lambda e: np.array([[9, 9, 9, 9], [9, 9, 9, 9]]), "expert_map": lambda e: sy.ExpertMap(e["SLOTS"], num_experts=4, world=2),
    "group": lambda e: sy.Group.threads(1, **OPTIONS)[0], "other_group": lambda e: sy.Group.threads(1, **OPTIONS)[0],
    "ex": lambda e: sy.Exchange(e["group"], dtype="f32", **SHAPE), "half": lambda e: sy.Exchange(e["group"], dtype="bf16", **SHAPE),
    "em": lambda e: sy.Exchange(e["group"], dtype="f32", layout="expert_major", **SHAPE),
    "pair": lambda e: e["ex"].dispatch(e["X"], e["IDS"]), "rows": lambda e: e["pair"][0], "handle": lambda e: e["pair"][1],
    "em_pair": lambda e: e["em"].dispatch(e["X"], e["IDS"], e["W"]), "em_rows": lambda e: e["em_pair"][0], "em_handle": lambda e: e["em_pair"][1],
    "ll": lambda e: sy.LowLatency(e["group"], dtype="f32", **SHAPE), "ll8": lambda e: sy.LowLatency(e["group"], scales="f32", **SHAPE),
    "ll16": lambda e: sy.LowLatency(e["group"], **SHAPE),
    "received": lambda e: e["ll"].dispatch(e["X"], e["IDS"]), "Y": lambda e: e["received"].x.copy(),
    "ledger": lambda e: sy.LedgerCombine(e["group"], dtype="f32", **SHAPE), "tables": lambda e: e["em_handle"].ledger(),
    "prepared": lambda e: e["ledger"].prepare(e["tables"]), "em_y": lambda e: np.array(e["em_rows"]),
    "W13": lambda e: np.zeros((4, 2 * 64, 128), np.uint16), "W2": lambda e: np.zeros((4, 128, 64), np.uint16),
    "LAYER": lambda e: {"intermediate": 64, **SHAPE}, "layer": lambda e: sy.MoeLayer(e["group"], e["W13"], e["W2"], **e["LAYER"]),
    "trace": lambda e: sy.Trace(e["group"]), "strided": lambda e: np.ones((3, 256), np.float32)[:, ::2],
    "frozen": lambda e: _frozen(), "torch": lambda e: importlib.import_module("torch"),
    "swapped": lambda e: np.ones((3, 128), ">f4"), "SHAPE": lambda e: SHAPE,
}


def _frozen():
    array = np.zeros((3, 128), np.float32)
    array.flags.writeable = False
    return array


class _Names(dict):
    def __missing__(self, name):
        if name not in MAKERS:
            raise KeyError(name)
        self[name] = MAKERS[name](self)
        return self[name]


def _serve(connection):
    warnings.simplefilter("ignore")
    while True:
        expression = connection.recv()
        names = _Names(__name__=__name__, np=np, sy=sy, forked=_forked, closed=_closed, bits=_bits, Wrong=Wrong, wrong_array=_wrong_array)
        try:
            connection.send(("nothing", repr(eval(expression, names))[:200], ()))
        except BaseException as error:
            notes = getattr(error, "__notes__", ())
            connection.send((type(error).__name__, "\n".join([str(error), *notes]), tuple(each.__name__ for each in type(error).__mro__)))
        names.clear()
        gc.collect()


class Judge:
    """The process, started at the first request and restarted after it has ended."""

    _process = _connection = None

    def __init__(self, imports="switchyard"):
        self._imports = imports

    def ask(self, expression):
        """Returns the name, text and base classes of the exception."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._ask(f"__import__({self._imports!r})", 120)  # not subject to the deadline for hangs
        return self._ask(expression, DEADLINE)

    def _ask(self, expression, seconds):
        self._connection.send(expression)
        try:
            assert self._connection.poll(seconds), f"hangs: no answer in {seconds} s"
            return self._connection.recv()
        except (AssertionError, EOFError, OSError) as error:
            self.close()
            raise AssertionError(f"{expression}: {'crashes' if isinstance(error, (EOFError, OSError)) else error}") from None

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None
