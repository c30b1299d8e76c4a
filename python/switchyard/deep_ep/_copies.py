# SPDX-License-Identifier: Apache-2.0
"""Exchanges that deliver rows into torch memory.

A dispatch delivers rows into the library's pool. DeepEP callers expect memory from torch's allocator: training keeps the
received rows of every layer, and ``Tensor.record_stream`` must work on them. Rows are therefore copied out on the call's
stream, with one read and one write per row. The pool contains the rows of only one call at a time and the tables of handles. A
pool that is too small is replaced by a larger one in a separate group, because a group's symmetric memory cannot grow; the old
pool is released with its last handle.
"""
from __future__ import annotations

import os
import struct
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from .._abi.arrays import Taken, code_of_rows
from .._abi.ffi import check, structs
from .._abi.names import BF16, F16, F32
from .._abi.repeated import NormalDispatch
from ..errors import InvalidArgument
from ..exchange import Exchange
from ..group import Construction, Group
from ..handle import Handle
from ..row_memory import RowMemory

_PLAIN = (BF16, F16, F32)
#: Value of ``size`` for ``Exchange.dispatch(size="exact")``.
_EXACT = 0
#: Initial capacity of a pool, in handles.
_HANDLES = 64
#: Environment variable that sets the size of the symmetric memory in which torch may allocate delivered rows.
_ROW_MEMORY = "SWITCHYARD_DEEP_EP_ROW_MEMORY"
#: Granularity of torch's tensor memory allocation.
_SEGMENT = 2 << 20
#: Memory that torch allocates on each of two streams for rows smaller than half of it.
_SMALL_ROWS = 2 * _SEGMENT
#: Maximum number of tokens per rank; an exchange reserves handle tables for this many tokens.
_MOST_TOKENS = 65536


class CopyingExchange(Exchange):
    """An exchange that copies the rows of a dispatch to new tensors and immediately releases the pool memory."""

    def __init__(self, group: Group, row_bytes: int = 0, device: Optional[int] = None, **config: Any) -> None:
        super().__init__(group, **config)
        #: Memory used for delivered rows until it is full; None: only ordinary torch memory.
        self.row_memory: Optional[RowMemory] = RowMemory(group, row_bytes, device, (row_bytes - _SMALL_ROWS) // 2) if row_bytes else None
        self._seen: Dict[Tuple[Any, ...], Any] = {}
        # Calls of a Buffer run one after another. Later calls read data left in this memory only through handles, which are
        # kept alive.
        self.use_graph_memory(self.make_graph_memory())

    def dispatch_again(self, x: Any, handle: Handle, num_sms: int) -> Tuple[Any, Any]:
        """Runs a cached dispatch; returns rows, and scales or None. Rows without scales are delivered directly into a new
        tensor."""
        again = self._dispatch_again
        rows = None if again is None else again(x, handle, num_sms)
        if rows is not None:
            return rows, None
        if type(x) is torch.Tensor and x.shape[0] == handle._tokens and code_of_rows(x, self.hidden, _PLAIN, self._backend) is not None:
            with self._call:
                if again is None or not self.pointer:  # raises if it is closed
                    again = self._dispatch_again = NormalDispatch(self)
                again.learn(x)
                return again(x, handle, num_sms), None
        return self._dispatch(x, None, None, handle, (0, _EXACT, 0, 0, 0, num_sms))[:2]

    def _deliver(self, x: Taken, handle: Optional[Handle], out: Any = None, weighted: bool = False) -> Tuple[Any, Any, Handle]:
        functions, view, delivered = self._functions, self._view, self._out.value
        try:
            check(functions.sy_dispatched_get(delivered, self._by_view))
            rows = self._fresh(self._pool_rows(view, x).clone) if out is None else out[:view.x_rows]
            scales = None
            if view.x_scale_kind:
                scales = self._scales(view, self._owned, x.arrays, x.array).clone(memory_format=torch.contiguous_format)
            if handle is None:
                check(functions.sy_handle_retain(view.handle))
                handle = Handle(view.handle, self._layout, self._owned)
                handle._set(structs.DispatchedView.from_buffer_copy(view), x.arrays, x.arrays.empty((0,), x.code, x.array), weighted)
            return rows, scales, handle
        finally:
            functions.sy_dispatched_destroy(delivered)

    def room_for(self, x: Any, number: int) -> Optional[Any]:
        """Returns a new tensor for `number` rows into which the library writes only the delivered rows; or None for rows with
        scales, which :meth:`_deliver` copies."""
        return None if isinstance(x, tuple) else self._fresh(lambda: x.new_empty((min(number, self._most_rows), self.hidden)))

    def _fresh(self, make: Callable[[], Any]) -> Any:
        """Returns the rows created by `make`, allocated in row memory if there is any."""
        if self.row_memory is None:
            return make()
        with self.row_memory.use():
            return make()

    def close(self) -> None:
        if self.row_memory is not None:
            self.row_memory.close()
        super().close()

    def _pool_rows(self, view: structs.DispatchedView, x: Taken) -> Any:
        """Returns the delivered rows in place. Their tensors are cached, because the pool reuses the same addresses and
        creating a tensor takes longer than the rest of the call."""
        key = (view.x, view.x_rows, view.x_dtype)
        found = self._seen.get(key)
        if found is None:
            if len(self._seen) >= 64:
                self._seen.clear()
            found = x.arrays.wrap(view.x, (view.x_rows, self.hidden), view.x_dtype, None, x.array)
            self._seen[key] = found
        return found


class Shape(NamedTuple):
    """Parameters that distinguish exchanges."""

    hidden: int
    num_experts: int
    topk: int


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def handle_bytes(shape: Shape, world: int, tokens: int, rows: int) -> int:
    """Returns an upper bound on the pool memory for the tables of a handle with `tokens` tokens and `rows` delivered rows."""
    counts = world * _up(32 + 4 * (world + shape.num_experts), 64)
    per_token = shape.topk * 9 + 12 * min(shape.topk, world)
    here = -(-shape.num_experts // world)
    return 8192 + counts + tokens * per_token + here * 8 * (5 + world) + rows * (4 + 8 * shape.topk)


class Generation:
    """An exchange in a separate group. It supports any call that receives at most `rows` rows, as long as the live handles need
    at most `room` bytes."""

    def __init__(self, group: Group, exchange: CopyingExchange, rows: int, handles: int, room: int) -> None:
        self.group, self.exchange, self.rows, self.handles, self.room = group, exchange, rows, handles, room
        self.used = 0
        self.calls_left = 0  # to Generations.sized_by_caller with room for their handles; identical on all ranks


class Kept:
    """Reserves memory for one handle as long as this object is alive."""

    __slots__ = ("_generation", "_bytes")

    def __init__(self, generation: Generation, size: int) -> None:
        self._generation, self._bytes = generation, size
        generation.used += size

    def __del__(self) -> None:
        self._generation.used -= self._bytes


class Generations:
    """Exchanges by shape. Ranks use `group` to agree on new exchanges; `least_bytes` is the minimum symmetric memory of an
    exchange; `options` are passed to new groups."""

    def __init__(self, group: Group, least_bytes: int, options: Dict[str, Any]) -> None:
        self._group, self._least, self._options = group, least_bytes, options
        self._most_tokens = _MOST_TOKENS
        if group.backend == "cuda":  # the plan's blocks take 4096 each, at least if all ranks share the GPU
            of_gpu = torch.cuda.get_device_properties(options["device"]).multi_processor_count
            self._most_tokens = min(_MOST_TOKENS, 4096 * max(of_gpu // group.size, 1))
        self._made: Dict[Shape, Generation] = {}

    def sized_by_counts(self, shape: Shape, tokens: int) -> Generation:
        """Collective. Returns the exchange for a dispatch of `tokens` tokens on this rank whose size depends on the counts.
        Synchronizes the host threads of all ranks."""
        made = self._made.get(shape)
        full = made is not None and made.used + handle_bytes(shape, self._group.size, tokens, made.rows) > made.room
        told = [struct.unpack("<qq", each) for each in self._group.all_gather(struct.pack("<qq", tokens, full))]
        if max(told)[0] > self._most_tokens:
            raise InvalidArgument(f"dispatch: x has {max(told)[0]} tokens on a rank: at most {self._most_tokens} are taken")
        rows = sum(each[0] for each in told)
        if made is None or rows > made.rows:
            return self._make(shape, rows, _HANDLES if made is None else made.handles)
        if any(each[1] for each in told):
            return self._make(shape, rows, 2 * made.handles)
        made.calls_left = max(made.calls_left - 1, 0)
        return made

    def sized_by_caller(self, shape: Shape, rows: int) -> Generation:
        """Returns the exchange for a dispatch of at most `rows` rows on this rank; `rows` is identical on every rank. Ranks
        synchronize only if there may be no room for the rows or for another handle; every rank computes how many calls fit in
        the free memory of all ranks."""
        made = self._made.get(shape)
        if made is None or rows > made.rows:
            return self._make(shape, rows, _HANDLES if made is None else made.handles)
        if made.calls_left == 0:
            made = self._with_room(shape, made)
        made.calls_left -= 1
        return made

    def _with_room(self, shape: Shape, made: Generation) -> Generation:
        """Collective. Returns `made` if a quarter of its handle memory is free on every rank, otherwise a new one with room for
        twice as many handles."""
        used = max(struct.unpack("<q", each)[0] for each in self._group.all_gather(struct.pack("<q", made.used)))
        made.calls_left = max(made.room - used, 0) // self._largest_handle(shape, made.rows)
        if made.calls_left == 0 or made.room - used < made.room // 4:
            return self._make(shape, made.rows, 2 * made.handles)
        return made

    def _largest_handle(self, shape: Shape, rows: int) -> int:
        """Returns the handle memory of a call that receives at most `rows` rows."""
        return handle_bytes(shape, self._group.size, min(self._most_tokens, rows), rows)

    def keep(self, generation: Generation, shape: Shape, tokens: int, rows: int) -> Kept:
        """Reserves memory for a newly created handle."""
        return Kept(generation, handle_bytes(shape, self._group.size, tokens, rows))

    def _make(self, shape: Shape, rows: int, handles: int) -> Generation:
        """Collective. Creates an exchange for this shape; a previous one is kept until its handles are released."""
        with Construction(self._group, "Buffer"):
            before, world = self._made.get(shape), self._group.size
            rows = max(rows, self._rows_of(shape, self._least, handles), 128)
            if before is not None:
                rows = max(rows, 2 * before.rows if rows > before.rows else before.rows)
            tokens = min(self._most_tokens, rows)
            room = handles * handle_bytes(shape, world, min(tokens, _up(rows, world) // world), rows)
            pool = 2 * self._call_bytes(shape, rows) + room + handle_bytes(shape, world, self._most_tokens, 0) + (1 << 20)
            config = dict(shape._asdict(), max_tokens=self._most_tokens, dtype="bf16", pool_bytes=_up(pool, 4096))
            heap = Exchange.heap_bytes(world, backend=self._group.backend, **config)
            row_bytes = self._row_bytes(shape, rows)
            group = self._group_of(heap + row_bytes + (1 << 20))
            made = Generation(group, CopyingExchange(group, row_bytes, self._options.get("device"), **config), rows, handles, room)
            made.calls_left = max(room // self._largest_handle(shape, rows) - 1, 0)
            self._made[shape] = made
            return made

    @property
    def _row_memory_given(self) -> Optional[str]:
        return os.environ.get(_ROW_MEMORY)

    def _row_bytes(self, shape: Shape, rows: int) -> int:
        """Returns the number of bytes of symmetric memory in which torch allocates delivered rows. It is set by the
        environment; the default suffices for two calls with `rows` rows."""
        if self._group.backend != "cuda":
            return 0
        given = self._row_memory_given
        if given is None:
            return 2 * _up(2 * shape.hidden * rows, _SEGMENT) + _SMALL_ROWS
        if not given.isdecimal():
            raise InvalidArgument(f"{_ROW_MEMORY} = {given!r}: must be a number of bytes, the same on all ranks; 0: none")
        return _up(int(given), 2 * _SEGMENT) + _SMALL_ROWS if int(given) else 0

    @staticmethod
    def _call_bytes(shape: Shape, rows: int) -> int:
        """Returns the pool memory that one call needs for received rows with scales, or for rows copied by combine with
        weights."""
        row = 2 * shape.hidden
        return rows * (row + max(_up(4 * -(-shape.hidden // 128), 16), 4 * shape.topk)) + 1024

    def _rows_of(self, shape: Shape, size: int, handles: int) -> int:
        """Returns the number of rows that fit into `size` bytes, including row memory."""
        per_row = 2 * self._call_bytes(shape, 1) - 2 * self._call_bytes(shape, 0) + handles * (4 + 8 * shape.topk)
        if self._group.backend == "cuda" and self._row_memory_given is None:
            per_row += 4 * shape.hidden
            size -= _SMALL_ROWS
        return max(size - handle_bytes(shape, self._group.size, self._most_tokens, 0), 0) // per_row

    def _group_of(self, heap: int) -> Group:
        """Collective. Forms another group of the same ranks with a separate heap."""
        return self._group._once_more(heap, self._options)

    def groups(self) -> List[Group]:
        """Returns the groups of the newest exchange of each shape."""
        return [each.group for each in self._made.values()]

    def close(self) -> None:
        for each in self._made.values():
            each.exchange.close()
            each.group.close()
        self._made.clear()

