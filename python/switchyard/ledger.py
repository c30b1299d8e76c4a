# SPDX-License-Identifier: Apache-2.0
"""Combine by an explicit route ledger instead of a handle (docs/concepts/ledger.md)."""
from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Optional, Type

from ._abi import arguments as _arguments, names as _names
from ._abi.arguments import checked, named
from ._abi.arrays import check_apart, written
from ._abi.ffi import Owned, alive, byref, check, check_collective, library, structs
from ._abi.names import CPU, value_of
from ._torch.recorded import refuse_gradient
from .exchange import CallStatistics, MemoryRequirement, statistics_of
from .group import Group, constructs
from .handle import Ledger

__all__ = ["LedgerCombine", "PreparedLedger"]


@checked("LedgerCombine.__init__", called="LedgerCombine")
def _config(*, hidden: int, num_experts: int, topk: int, max_tokens: int, dtype: object = "f16", max_rows: int = 0, max_ledgers: int = 4) \
        -> structs.LedgerConfig:
    """Converts the keywords of :class:`LedgerCombine` to a config struct."""
    return structs.LedgerConfig(hidden=hidden, max_tokens=max_tokens, max_rows=max_rows, num_experts=num_experts, topk=topk,
                                dtype=_names.dtype_of("dtype", dtype), max_ledgers=max_ledgers)


class PreparedLedger:
    """A validated ledger that can be used any number of times with the LedgerCombine that prepared it."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
        sizes = [ctypes.c_int64() for _ in range(3)]
        check(library().functions.sy_prepared_ledger_sizes(owned.pointer, *map(byref, sizes)))
        self.num_tokens: int = sizes[0].value  #: M
        self.rows: int = sizes[1].value  #: minimum number of rows of the expert output
        self.returned_rows: int = sizes[2].value  #: rows that are returned to this rank


class LedgerCombine:
    """Combine by route ledgers over a group. Creation is collective: all ranks pass the same keywords.

    hidden: H, without restrictions. num_experts: E, in total. topk: K, at most 32. max_tokens: maximum number of tokens on any
    rank. dtype: "f16", "bf16" or "f32". max_rows: maximum number of expert output rows in a ledger; 0: no limit. max_ledgers:
    CUDA, maximum number of prepared ledgers that exist at once.
    """

    @constructs
    @named("LedgerCombine.__init__")
    def __init__(self, group: Group, **config: Any) -> None:
        _arguments.check("LedgerCombine.__init__", group=group)
        self.group = group
        self._config = _config(**config)
        self._functions = library().functions
        made = ctypes.c_void_p()
        check_collective(self._functions.sy_ledger_combine_create(group.pointer, byref(self._config), byref(made)))
        self._owned = Owned(made.value, self._functions.sy_ledger_combine_destroy, group._owned, lock=group._lock)
        group._lock.members.add(self._owned)
        c = self._config
        self._combined = _arguments.bind("LedgerCombine.combine", group._backend, H=c.hidden, K=c.topk)
        self._tables = _arguments.bind("Ledger", CPU, W=group.size, Ep=-(-c.num_experts // 16) * 16, L=len(group.experts_of(c.num_experts)))
        self._x, self._options = structs.RowView(), structs.LedgerCombineOptions()

    @staticmethod
    @checked("LedgerCombine.memory_required")
    def memory_required(world: int, *, backend: str = "cpu", **config: Any) -> MemoryRequirement:
        """Returns the symmetric memory that an operator with these keywords allocates on each rank. Requires no group."""
        r, number = structs.MemoryRequirement(), value_of(_names.BACKENDS, "backend", backend)
        check(library().functions.sy_ledger_combine_memory_required(byref(_config(**config)), world, number, byref(r)))
        return MemoryRequirement(*(getattr(r, name) for name in MemoryRequirement._fields))

    @staticmethod
    @checked("LedgerCombine.heap_bytes")
    def heap_bytes(world: int, *, backend: str = "cpu", **config: Any) -> int:
        """Returns ``heap_bytes`` for a group whose only object has these keywords. Requires no group."""
        size, number = ctypes.c_size_t(), value_of(_names.BACKENDS, "backend", backend)
        check(library().functions.sy_ledger_combine_heap_bytes(byref(_config(**config)), world, number, byref(size)))
        return size.value

    @property
    def pointer(self) -> int:
        """The underlying ``sy_ledger_combine*``, for code that calls the C interface."""
        return self._owned.pointer or alive(self._owned, "the operator", self.group)

    @checked("LedgerCombine.prepare")
    def prepare(self, ledger: Ledger) -> PreparedLedger:
        """Local. Checks the int32 tables in host memory, which come from ``Handle.ledger()`` or from the caller, and prepares
        them for calls. CUDA: waits for earlier calls."""
        c, world = self._config, self.group.size
        padded, here = -(-c.num_experts // 16) * 16, len(self.group.experts_of(c.num_experts))
        tables = {name: getattr(self._tables, f"ledger.{name}")(getattr(ledger, name)) for name in ledger._fields}
        routes = tables["expanded_row_idx"].shape[0]
        g = structs.Ledger(world=world, num_experts=c.num_experts, num_experts_padded=padded, num_local_experts=here, num_routes=routes,
                           **{name: table.pointer for name, table in tables.items()})
        made = ctypes.c_void_p()
        with self.group._lock:
            check(self._functions.sy_ledger_combine_prepare(self.pointer, byref(g), byref(made)))
        return PreparedLedger(Owned(made.value, self._functions.sy_prepared_ledger_destroy, self._owned, lock=self.group._lock))

    def combine(self, y: Any, prepared: PreparedLedger, probs: Any = None, *, out: Any = None, num_sms: int = 0) -> Any:
        """Collective. Returns the rows of `y` [at least as many as in the ledger, H] to their owners and writes the sums for
        this rank's tokens to out [M, H]. probs: float32 [M, K]; None: rows are added unweighted. The sum is accumulated in
        float32, k ascending, and rounded once."""
        refuse_gradient("LedgerCombine.combine", "Exchange.combine", y=y, probs=probs)
        c = self._config
        with self.group._call:
            _arguments.check("LedgerCombine.combine", prepared=prepared, num_sms=num_sms)
            takes, tokens = self._combined, prepared.num_tokens
            taken = takes.y(y)
            v, o = self._x, self._options
            v.data, v.rows, v.cols, v.dtype = taken.pointer, taken.shape[0], c.hidden, taken.code
            o.stream, o.num_sms = taken.arrays.stream(taken.array), num_sms
            factors = None if probs is None else takes.probs(probs, tokens)
            if out is None:
                out = taken.arrays.empty((tokens, c.hidden), taken.code, taken.array)
            result = takes.out(out, tokens, (taken.code,))
            check_apart("out", result, y=taken, probs=factors)
            check(self._functions.sy_ledger_combine_run(self.pointer, byref(v), None if factors is None else factors.pointer or None,
                                                        prepared._owned.pointer, result.pointer, byref(o)))
            written(out)
            return out

    def last_call(self) -> CallStatistics:
        """Returns the traffic and time of this rank's last call. CUDA: waits for that call."""
        s = structs.CallStatistics()
        check(self._functions.sy_ledger_combine_last_call(self.pointer, byref(s)))
        return statistics_of(s)

    def close(self) -> None:
        """Releases the operator. May be called twice."""
        self._owned.close()

    def __enter__(self) -> "LedgerCombine":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()
