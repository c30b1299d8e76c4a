# SPDX-License-Identifier: Apache-2.0
"""The routing of a dispatch."""
from __future__ import annotations

import ctypes
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from ._abi import names as _names
from ._abi.arrays import I32, I64, NUMPY, U8, Arrays
from ._abi.arguments import checked
from ._abi.ffi import Owned, _process, alive, byref, check, library, number_from, structs
from ._abi.names import EXPERT_MAJOR, F32, RANK_MAJOR
from ._torch.registry import number_of, torch_for

__all__ = ["Counts", "Handle", "Ledger", "Matrices", "RoutingLayout"]


class Counts(NamedTuple):
    """Row counts of a dispatch. Arrays are int64 in host memory, with one entry per expert of this rank."""

    rows: int  #: M, padding included
    tokens_per_expert: np.ndarray
    aligned_per_expert: np.ndarray  #: rounded up to the alignment
    expert_first_row: Optional[np.ndarray]  #: expert-major; else None


class Matrices(NamedTuple):
    """DeepEP's description of a dispatch, in host memory: int32, except for the bool `is_token_in_rank`. W ranks, C
    channels."""

    rank_prefix_matrix: np.ndarray  #: [W, W] tokens of sources 0..i to rank j
    channel_prefix_matrix: np.ndarray  #: [W, C] this rank's tokens to rank d in channels 0..c
    recv_channel_prefix_matrix: np.ndarray  #: [W, C] exclusive: first row of channel c among source s's rows on this rank
    recv_src_idx: np.ndarray  #: [rows] token index at the source
    is_token_in_rank: np.ndarray  #: [T, W]
    send_head: np.ndarray  #: [T, W] index of token t in the stream (channel of t, rank), -1 if not sent


class Ledger(NamedTuple):
    """The explicit route ledger: int32 arrays in host memory. Ep: E rounded up to a multiple of 16
    (docs/concepts/ledger.md)."""

    peer_token_per_expert: np.ndarray  #: [W, Ep]
    expanded_row_idx: np.ndarray  #: [T * K]
    cumsum_per_expert: np.ndarray  #: [W, Ep]
    dispatch_offset: np.ndarray  #: [local experts]
    prev_sum_before_rank: np.ndarray  #: [W, local experts]


class RoutingLayout(NamedTuple):
    """The counts of DeepEP's ``get_dispatch_layout``, in host memory or, for ids on a GPU, on that GPU."""

    num_tokens_per_rank: np.ndarray  #: int32 [W] distinct tokens
    num_tokens_per_expert: np.ndarray  #: int32 [E] routes
    is_token_in_rank: np.ndarray  #: bool [T, W]


def stored(struct: Any, fields: Sequence[Tuple[str, Tuple[int, ...], int]]) -> Tuple[Any, ...]:
    """Copies the arrays in a filled struct and releases the struct's storage."""
    storage = Owned(struct.storage, library().functions.sy_storage_release)
    arrays = tuple(NUMPY.wrap(getattr(struct, name), shape, element, storage, None).copy() for name, shape, element in fields)
    storage.close()
    return arrays


class Handle:
    """The routing of one dispatch, used by its combine and by dispatches of other rows with the same routing. A handle is
    immutable and may be used by any thread, any number of times. It stays valid after the rows of its dispatch are dropped.

    The arrays below are in library memory, are of the same kind (numpy, torch, device) as the dispatched ``x``, and stay valid
    as long as they are referenced. Arrays that do not apply to the layout are None. R: allocated rows; K: topk; L: experts on
    this rank.
    """

    _at: Optional[ctypes.c_void_p] = None  # pointer that repeated calls pass; set only in real handles
    _unread_weights = False  # rank-major: whether this rank's weights were sent with the rows and those of its rows have not been read

    def __init__(self, pointer: int, layout: int, keeps: Any) -> None:
        self._owned = Owned(pointer, library().functions.sy_handle_release, keeps)
        self._at = ctypes.c_void_p(pointer)
        self._layout = layout
        self._view: Optional[structs.DispatchedView] = None
        self._arrays: Arrays = NUMPY
        self._like: Any = None
        self._cache: Dict[str, Any] = {}
        self._rows_allocated: Any = None  # R; R and T are set by a dispatch
        self._tokens: Any = None
        self._number = number_of(self)

    def twin(self) -> "Handle":
        """Returns another object for the same routing without tensors that refer to a graph, because objects kept by a graph
        must not keep the graph alive."""
        twin = Handle.__new__(Handle)
        twin.__dict__.update(self.__dict__)
        twin._cache = {}
        twin._number = number_of(twin)
        return twin

    def _of_experts(self, part: Any) -> "Handle":
        """For expert-major handles of tensors: returns a handle of the same rows for GroupedGemm only. Its experts are those of this
        rank in `part`: a slice, or an int64 tensor on the device of the rows, in which -1 is an expert without rows. With a tensor,
        enqueues work on the current stream."""
        other, view = self.twin(), structs.DispatchedView.from_buffer_copy(self._view)  # type: ignore[arg-type]
        for name in ("expert_first_row", "tokens_per_expert", "aligned_per_expert"):
            array = getattr(self, name)
            if not isinstance(part, slice):  # -1 selects the appended 0
                array = torch_for("Handle._of_experts").nn.functional.pad(array, (0, 1))
            other._cache[name] = array[part]
            setattr(view, name, other._cache[name].data_ptr())
        view.num_local_experts, other._view = other._cache["tokens_per_expert"].shape[0], view
        return other

    def _set(self, view: structs.DispatchedView, arrays: Arrays, like: Any, weighted: bool) -> None:
        """Stores the results of the dispatch, including `view`; `like` determines the kind of arrays. `weighted`: whether this
        rank passed weights. Without tokens, it may pass none where the other ranks do, and then always finds an array."""
        self._view, self._arrays, self._like = view, arrays, like
        self._rows_allocated, self._tokens = view.x_rows, view.num_tokens
        self._unread_weights = weighted and self._layout == RANK_MAJOR and view.x_rows > 0

    @property
    def pointer(self) -> int:
        """The underlying ``sy_handle*``, for code that calls the C interface."""
        owned = self._owned
        return owned.pointer if owned._made_in == _process[0] and owned.pointer else alive(owned, "the handle")

    def __reduce__(self) -> Any:
        raise TypeError("a Handle belongs to its process: Handle.to_bytes() and Exchange.handle_from_bytes() carry it elsewhere")

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens in this rank's dispatch."""
        return number_from(library().functions.sy_handle_num_tokens, self.pointer)

    @property
    def invalid_ids(self) -> int:
        """Number of ids in this rank's dispatch that are neither -1 nor a valid expert; their routes are ignored. 0 for a
        handle created from bytes. CUDA: waits for the dispatch."""
        return number_from(library().functions.sy_handle_invalid_ids, self.pointer)

    @property
    def rows(self) -> int:
        """M, the number of rows delivered to this rank, including padding. CUDA: waits for the dispatch."""
        if self._view is not None and self._view.rows >= 0:
            return self._view.rows
        return number_from(library().functions.sy_handle_rows, self.pointer)

    @property
    def layout(self) -> str:
        """"rank_major" or "expert_major"."""
        return _names.name_of(_names.LAYOUTS, self._layout)

    def _array(self, name: str, element: int, *shape: Union[str, int], layout: Optional[int] = None) -> Any:
        """Returns an array of the view, created on first use. `shape` contains numbers and names of view members."""
        if name in self._cache:
            return self._cache[name]
        view = self._view
        if view is None:
            _names.invalid(f"this handle was made from bytes: {name} is not in them; dispatch with it first, or use counts()")
        sizes = tuple(size if isinstance(size, int) else getattr(view, size) for size in shape)
        pointer = getattr(view, name.replace("device_", ""))  # distinguishes the array from the number of the same name
        absent = (layout is not None and layout != self._layout) or (not pointer and 0 not in sizes)
        self._cache[name] = None if absent else self._arrays.wrap(pointer, sizes, element, self._owned, self._like)
        return self._cache[name]

    @property
    def topk_ids(self) -> Any:
        """Rank-major: int32 [R, K] local expert ids, or -1 if the route leads to another rank or was dropped."""
        return self._array("topk_ids", I32, "x_rows", "topk", layout=RANK_MAJOR)

    @property
    def topk_ids_int64(self) -> Any:
        """``topk_ids`` as int64, for indexing; created on first use."""
        if "topk_ids_int64" not in self._cache:
            ids = self.topk_ids
            self._cache["topk_ids_int64"] = None if ids is None else ids.astype(np.int64) if isinstance(ids, np.ndarray) else ids.long()
        return self._cache["topk_ids_int64"]

    @property
    def topk_weights(self) -> Any:
        """Rank-major: float32 [R, K] weights, 0 where the id is -1; None if dispatch had no weights."""
        self._unread_weights = False
        return self._array("topk_weights", F32, "x_rows", "topk", layout=RANK_MAJOR)

    @property
    def source_token(self) -> Any:
        """Rank-major: int32 [R] token index at the source, or -1 after the delivered rows."""
        return self._array("source_token", I32, "x_rows", layout=RANK_MAJOR)

    @property
    def row_source(self) -> Any:
        """Expert-major: int64 [R] ``source rank << 48 | k << 32 | token``; -1 for padding."""
        return self._array("row_source", I64, "x_rows", layout=EXPERT_MAJOR)

    @property
    def row_weights(self) -> Any:
        """Expert-major: float32 [R] weights; None if dispatch had no weights."""
        return self._array("row_weights", F32, "x_rows", layout=EXPERT_MAJOR)

    @property
    def _carried(self) -> Any:
        """Expert-major: the rows' weights if they belong to a gradient graph, else None."""
        return self._cache.get("row_weights")

    @property
    def expert_first_row(self) -> Any:
        """Expert-major: int64 [L]."""
        return self._array("expert_first_row", I64, "num_local_experts", layout=EXPERT_MAJOR)

    @property
    def tokens_per_expert(self) -> Any:
        """int64 [L] number of kept routes from all sources to each of this rank's experts."""
        return self._array("tokens_per_expert", I64, "num_local_experts")

    @property
    def aligned_per_expert(self) -> Any:
        """int64 [L] ``tokens_per_expert``, rounded up to the exchange's `expert_alignment`."""
        return self._array("aligned_per_expert", I64, "num_local_experts")

    @property
    def offsets(self) -> Any:
        """Expert-major: int32 [L] end of each expert's rows, including padding, on the device of the rows; usable as ``offs``
        of ``torch.nn.functional.grouped_mm``."""
        if "offsets" not in self._cache:
            if self._layout != EXPERT_MAJOR:
                _names.invalid("offsets: rank-major rows are not grouped by experts")
            ends = self.aligned_per_expert
            ends = np.cumsum(ends) if isinstance(ends, np.ndarray) else ends.cumsum(0)
            self._cache["offsets"] = ends.astype(np.int32) if isinstance(ends, np.ndarray) else ends.int()
        return self._cache["offsets"]

    @property
    def dropped(self) -> Any:
        """uint8 [T, K], 1 if this rank's route was dropped due to capacity; None with ``overflow="fail"``."""
        return self._array("dropped", U8, "num_tokens", "topk")

    @property
    def dropped_per_source(self) -> Any:
        """int64 [W, L] number of routes dropped on this rank; None with ``overflow="fail"``."""
        return self._array("dropped_per_source", I64, "world", "num_local_experts")

    @property
    def device_invalid_ids(self) -> Any:
        """int64 [1], :attr:`invalid_ids` on the device of the ids; reading it requires no host wait."""
        return self._array("device_invalid_ids", I64, 1)

    # ---- Queries. CUDA: these wait for the dispatch ----

    def counts(self) -> Counts:
        """Returns the row counts of all local experts, in host memory."""
        c = structs.Counts()
        check(library().functions.sy_handle_counts(self.pointer, byref(c)))
        rows, shape, first = c.rows, (c.num_local_experts,), bool(c.expert_first_row)
        names = ["tokens_per_expert", "aligned_per_expert"] + (["expert_first_row"] if first else [])
        arrays = stored(c, [(name, shape, I64) for name in names])
        return Counts(rows, arrays[0], arrays[1], arrays[2] if first else None)

    @checked("Handle.matrices")
    def matrices(self, num_channels: int) -> Matrices:
        """Returns a description of the dispatch in the form of DeepEP's handle, for `num_channels` >= 1 channels."""
        m = structs.Matrices()
        check(library().functions.sy_handle_matrices(self.pointer, num_channels, byref(m)))
        w, c, t = m.world, m.num_channels, m.num_tokens
        arrays = stored(m, [("rank_prefix_matrix", (w, w), I32), ("channel_prefix_matrix", (w, c), I32),
                            ("recv_channel_prefix_matrix", (w, c), I32), ("recv_src_idx", (m.num_recv,), I32),
                            ("is_token_in_rank", (t, w), U8), ("send_head", (t, w), I32)])
        return Matrices(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4].astype(bool), arrays[5])

    def ledger(self) -> Ledger:
        """Returns the explicit route ledger."""
        g = structs.Ledger()
        check(library().functions.sy_handle_ledger(self.pointer, byref(g)))
        per_expert, here = (g.world, g.num_experts_padded), g.num_local_experts
        return Ledger(*stored(g, [("peer_token_per_expert", per_expert, I32), ("expanded_row_idx", (g.num_routes,), I32),
                                  ("cumsum_per_expert", per_expert, I32), ("dispatch_offset", (here,), I32),
                                  ("prev_sum_before_rank", (g.world, here), I32)]))

    def to_bytes(self) -> bytes:
        """Returns portable bytes; ``Exchange.handle_from_bytes`` is the inverse."""
        b = structs.Bytes()
        check(library().functions.sy_handle_serialize(self.pointer, byref(b)))
        storage = Owned(b.storage, library().functions.sy_storage_release)
        content = ctypes.string_at(b.data, b.size)
        storage.close()
        return content

    def __repr__(self) -> str:
        return f"<switchyard.Handle {self.layout}, {self.num_tokens} tokens>"
