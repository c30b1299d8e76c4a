#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records the routing of a running Mixture-of-Experts model in the format that Switchyard reads
(docs/routing.md).

    recorder = RoutingRecorder(num_experts=256)
    # arrays or tensors [..., K], any number of times
    recorder.record(layer=3, rank=0, topk_ids=ids, topk_weights=weights)
    recorder.save("routing.safetensors")  # or a folder, for .npy files

Needs numpy; accepts torch tensors of any device and dtype without importing torch. On the command
line:

    record_routing.py info FILE prints the content of a recording
    record_routing.py merge OUT FILE... merges the recordings of several processes
    record_routing.py from_sglang OUT FILE... converts the files that SGLang's expert distribution
        recorder writes in the modes per_pass and per_token, one per rank (needs torch)
"""
import json
import os
import struct
import sys
import threading

try:
    import numpy as np
except ImportError as error:
    if __name__ != "__main__":
        raise
    np, why_no_numpy = None, error  # main() checks the command line first

MAX_TOPK = 32
_DTYPES = {"I8": "|i1", "U8": "|u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "F16": "<f2",
           "F32": "<f4"}


def to_numpy(values):
    """Converts `values` (a torch tensor or anything accepted by numpy) to an array; bfloat16 and float16 become float32."""
    if hasattr(values, "detach"):
        values = values.detach()
        values = (values.float() if values.is_floating_point() else values).cpu().numpy()
    values = np.asarray(values)
    return values.astype(np.float32) if values.dtype.kind not in "biu" else values


def softmax_topk(topk, renormalize=True):
    """Returns an `extract` for RoutingRecorder.hook that reproduces the choice for gates that return only logits [..., E]. For
    a torch tensor, the choice is that of torch.topk over the float32 softmax, as computed by models. This also holds for ties
    between logits, which are frequent in bfloat16."""
    def extract(output):
        logits = output[0] if isinstance(output, (tuple, list)) else output
        if hasattr(logits, "softmax"):
            scores = logits.detach().reshape(-1, logits.shape[-1]).float().softmax(-1)
            weights, ids = scores.topk(topk, dim=-1)
            return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights
        logits = to_numpy(logits)
        logits = logits.reshape(-1, logits.shape[-1])
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :topk]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        total = np.take_along_axis(weights, ids, 1) if renormalize else weights
        return ids, np.take_along_axis(weights, ids, 1) / total.sum(axis=1, keepdims=True)
    return extract


def ids_and_weights(output):
    """The default `extract`. Among the values returned by a gate, the ids are the only integer tensor, and the weights are the
    only float tensor of the same shape. Supports (ids, weights), (weights, ids), (logits, weights, ids) and named tuples of
    these."""
    parts = [to_numpy(part) for part in (output if isinstance(output, (tuple, list)) else [output]) if hasattr(part, "shape")]
    ids = [part for part in parts if part.dtype.kind in "iu" and part.ndim >= 2]
    if len(ids) != 1:
        raise ValueError(f"the gate returned {len(ids)} integer tensors, not one; pass `extract`, for example softmax_topk(K)")
    weights = [part for part in parts if part.dtype.kind == "f" and part.shape == ids[0].shape]
    if len(weights) > 1:
        raise ValueError("the gate returned several float tensors of the ids' shape; pass `extract`")
    return ids[0], weights[0] if weights else None


class RoutingRecorder:
    """Collects the gates' choices by (layer, rank). `max_tokens`: keep only the first `max_tokens` tokens of each; `metadata`:
    strings to save in addition to `num_experts`. record() may be called from several threads."""

    def __init__(self, num_experts, max_tokens=None, metadata=None):
        if not 1 <= int(num_experts) < 2**31:
            raise ValueError(f"num_experts is {num_experts}; allowed: 1 to 2147483647")
        self.num_experts = int(num_experts)
        self.max_tokens = max_tokens
        self.metadata = dict(metadata or {})
        self.rank = 0  # for hooks without a rank
        self._parts = {}  # (layer, rank) -> [(ids, weights or None)]
        self._lock = threading.Lock()

    def tokens(self, layer, rank):
        """Number of tokens recorded so far."""
        return sum(len(ids) for ids, _ in self._parts.get((layer, rank), []))

    def record(self, layer, rank, topk_ids, topk_weights=None):
        """Appends tokens. Ids [..., K] are integers; those outside [0, num_experts) are dropped. Weights have the same shape or
        are None, consistently within a layer. If `layer` is None, the model has only one layer."""
        ids = to_numpy(topk_ids)
        if ids.dtype.kind not in "iu" or ids.ndim < 2 or not 1 <= ids.shape[-1] <= MAX_TOPK:
            raise ValueError(f"topk_ids is {ids.dtype} {list(ids.shape)}; allowed: integers [..., K], K from 1 to {MAX_TOPK}")
        shape = ids.shape
        ids = ids.reshape(-1, shape[-1])
        ids = np.where((ids < 0) | (ids >= self.num_experts), -1, ids).astype("<i4")
        weights = None
        if topk_weights is not None:
            weights = to_numpy(topk_weights)
            if weights.shape != shape:
                raise ValueError(f"topk_weights is {list(weights.shape)}; allowed: {list(shape)}, as topk_ids")
            weights = weights.reshape(ids.shape).astype("<f4")
        with self._lock:
            self._append(layer, rank, ids, weights)

    def _append(self, layer, rank, ids, weights):
        for (other_layer, _), parts in self._parts.items():
            if other_layer != layer or not parts:
                continue
            if parts[0][0].shape[1] != ids.shape[1]:
                raise ValueError(f"K is {ids.shape[1]}; allowed: {parts[0][0].shape[1]}, as before in layer {layer}")
            if (parts[0][1] is None) != (weights is None):
                raise ValueError(f"layer {layer} got weights in some calls and none in others")
        if self.max_tokens is not None:
            left = max(self.max_tokens - self.tokens(layer, rank), 0)
            ids, weights = ids[:left], weights if weights is None else weights[:left]
        if len(ids) > 0:
            self._parts.setdefault((layer, rank), []).append((ids, weights))

    def record_dense(self, layer, rank, probs, routing_map):
        """Appends tokens from [T, E] arrays (Megatron Core's router). A token's chosen experts are those whose boolean in
        `routing_map` is set, in order of descending probability. Tokens with fewer choices than the maximum are padded with ids
        of -1."""
        probs, chosen = to_numpy(probs), to_numpy(routing_map).astype(bool)
        if probs.ndim != 2 or probs.shape != chosen.shape:
            raise ValueError(f"probs is {list(probs.shape)}, routing_map {list(chosen.shape)}; allowed: both [T, E]")
        topk = max(int(chosen.sum(axis=1).max(initial=0)), 1)
        ids = np.argsort(np.where(chosen, -probs, np.inf), axis=1, kind="stable")[:, :topk]
        kept = np.take_along_axis(chosen, ids, 1)
        self.record(layer, rank, np.where(kept, ids, -1), np.where(kept, np.take_along_axis(probs, ids, 1), 0))

    def hook(self, layer, rank=None, extract=ids_and_weights):
        """A forward hook: `gate.register_forward_hook(recorder.hook(layer))`. If `rank` is None, recorder.rank at the time of
        the call is used. `extract` converts the module's return value to (ids, weights), where weights may be None."""
        def forward_hook(_module, _args, output):
            ids, weights = extract(output)
            self.record(layer, self.rank if rank is None else rank, ids, weights)
        return forward_hook

    def tensors(self):
        """Maps names to arrays, as saved."""
        found = {}
        order = sorted(self._parts, key=lambda key: (-1 if key[0] is None else key[0], key[1]))
        for layer, rank in order:
            parts = self._parts[layer, rank]
            name = ("" if layer is None else f"layer{layer}.") + f"rank{rank}."
            found[name + "topk_ids"] = np.concatenate([ids for ids, _ in parts])
            if parts[0][1] is not None:
                found[name + "topk_weights"] = np.concatenate([weights for _, weights in parts])
        return found

    def save(self, path):
        """Writes a `.safetensors` file or, if `path` has another extension, a folder of `.npy` files (without metadata)."""
        if not self._parts:
            raise ValueError("nothing was recorded")
        if str(path).endswith(".safetensors"):
            save_safetensors(path, self.tensors(), {**self.metadata, "num_experts": str(self.num_experts)})
            return
        os.makedirs(path, exist_ok=True)
        for name, array in self.tensors().items():
            np.save(os.path.join(path, name + ".npy"), array)


def save_safetensors(path, tensors, metadata):
    """Writes int32 and float32 arrays. The file appears either complete or not at all."""
    header, offset = {"__metadata__": {str(key): str(value) for key, value in metadata.items()}}, 0
    for name, array in tensors.items():
        kind = "F32" if array.dtype.kind == "f" else "I32"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for array in tensors.values():
                file.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _header(path, start, size):
    """Header length of a safetensors file of `size` bytes that begins with `start`."""
    kinds = {b"version https://git-lfs": "a Git LFS pointer (git lfs pull fetches the file)", b"\x1f\x8b": "a gzip file (gunzip it)",
             b"PK": "a zip archive (.npz, or of torch.save)", b"\x93NUMPY": "a .npy file (this script reads .safetensors)"}
    found = next((kind for mark, kind in kinds.items() if start.startswith(mark)), "another kind of file")
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    if not 2 <= length <= size - 8:
        raise ValueError(f"{path}: expected a .safetensors file, found {found}")
    return length


def _array(path, name, entry, data):
    """Array of one header entry: ids as int32, others as float32; ids that do not fit become -1 (no expert)."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{path}: tensor {name}: expected entries dtype, shape and data_offsets")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: tensor {name}: expected one of {', '.join(_DTYPES)}, found {entry['dtype']}")
    try:
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: tensor {name}: shape {entry['shape']} and data_offsets {entry['data_offsets']}: {error}") from error
    if values.dtype.kind == "f":
        return values.astype("<f4")
    wide = values > np.iinfo(np.int32).max if values.dtype.kind == "u" else values != values.astype("<i4")
    return np.where(wide, -1, values.astype("<i4"))


def load_safetensors(path):
    """Returns (tensors, metadata) of a recording. Raises a ValueError that names the file if it is not a recording."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(64)
        length = _header(path, start, size)
        file.seek(8)
        text = file.read(length)
        data = file.read()
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON in the header: {error}") from error
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: expected a JSON object as header, and as its entry __metadata__")
    return {name: _array(path, name, entry, data) for name, entry in header.items()}, metadata


def experts_of(path, metadata):
    """E from a recording's metadata, or 0 if it is missing."""
    text = str(metadata.get("num_experts", "0"))
    if not text.isdecimal():
        raise ValueError(f"{path}: num_experts is '{text}'; allowed: an integer")
    return int(text)


def merge(output, inputs):
    """Joins recordings from several processes into one. Each tensor may occur only once, and num_experts must agree."""
    tensors, metadata = {}, {}
    for path in inputs:
        more, about = load_safetensors(path)
        twice = sorted(tensors.keys() & more.keys())
        if twice:
            raise ValueError(f"{path}: {twice[0]} was already recorded in another file")
        if metadata.get("num_experts", about.get("num_experts")) != about.get("num_experts"):
            raise ValueError(f"{path}: num_experts is {about.get('num_experts')}, before {metadata['num_experts']}")
        tensors.update(more)
        metadata = {**about, **metadata}
    save_safetensors(output, tensors, metadata)


def load_sglang(path):
    """Returns the records and the map [layers, physical experts] of logical experts in a file of SGLang's recorder. Only tensors
    and plain values are unpickled."""
    import pickle

    import torch  # here, because only this command needs it

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path}: expected a file of torch.save with tensors and plain values: {error}") from error
    if isinstance(content, dict) and "logical_count" in content:
        raise ValueError(f"{path}: counts of the recorder's mode stat, without routes; switchyard.engines.expert_location.load_counts reads them")
    if not isinstance(content, dict) or not {"records", "last_physical_to_logical_map"} <= content.keys():
        raise ValueError(f"{path}: expected the entries records and last_physical_to_logical_map")
    return content["records"], to_numpy(content["last_physical_to_logical_map"])


def from_sglang(output, inputs):
    """Joins the passes of each (layer, rank). SGLang records physical experts; the last map of the file converts them to logical
    experts."""
    recorder = None
    for path in inputs:
        records, logical = load_sglang(path)
        experts = int(logical.max()) + 1
        recorder = recorder or RoutingRecorder(experts, metadata={"source": "SGLang expert distribution recorder"})
        if experts != recorder.num_experts:
            raise ValueError(f"{path}: {experts} experts, before {recorder.num_experts}")
        for record in sorted(records, key=lambda each: each["forward_pass_id"]):
            if "topk_ids_of_layer" not in record:
                raise ValueError(f"{path}: expected topk_ids_of_layer, which the recorder's modes per_pass and per_token write")
            slots = to_numpy(record["topk_ids_of_layer"])
            if slots.ndim != 3 or logical.ndim != 2 or len(slots) > len(logical) or "rank" not in record:
                raise ValueError(f"{path}: expected topk_ids_of_layer [layers, T, K], a rank, and a map [layers, physical experts]")
            for layer, ids in enumerate(slots):
                valid = (ids >= 0) & (ids < logical.shape[1])
                recorder.record(layer, int(record["rank"]), np.where(valid, logical[layer][np.where(valid, ids, 0)], -1))
    recorder.save(output)


def info(path):
    """Prints a recording's contents: shape, weights and skew of each ids tensor."""
    tensors, metadata = load_safetensors(path)
    for key, value in metadata.items():
        print(f"{key}: {value}")
    experts = experts_of(path, metadata)
    for name, ids in tensors.items():
        if not name.endswith("topk_ids"):
            continue
        kept = ids[(ids >= 0) & ((ids < experts) | (experts == 0))]
        if kept.dtype.kind not in "iu":
            raise ValueError(f"{path}: tensor {name}: expected integers, found floating point")
        load = np.unique(kept, return_counts=True)[1]  # counts only experts chosen at least once
        num_local_experts = max(experts, int(kept.max(initial=0)) + 1)
        weighted = name.replace("topk_ids", "topk_weights") in tensors
        skew = load.max() * num_local_experts / kept.size if kept.size else 0
        print(f"{name}: {list(ids.shape)}, {'with' if weighted else 'without'} weights, busiest expert / mean {skew:.2f}, "
              f"dropped {1 - kept.size / max(ids.size, 1):.1%}")


def main(arguments):
    verb = arguments[0] if arguments else ""
    asked = {"-h", "--help"} & set(arguments)
    if asked or not (verb == "info" and len(arguments) == 2 or verb in ("merge", "from_sglang") and len(arguments) >= 3):
        print(__doc__.strip(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if np is None:
        print(f"record_routing: {why_no_numpy}; it is needed: pip install numpy", file=sys.stderr)
        return 1
    try:
        if verb == "info":
            info(arguments[1])
        else:
            {"merge": merge, "from_sglang": from_sglang}[verb](arguments[1], arguments[2:])
        sys.stdout.flush()
    except (OSError, ValueError, MemoryError, ImportError) as error:
        if not isinstance(error, BrokenPipeError):  # the reader, for example head, closed the pipe
            print(f"record_routing: {error or 'no memory'}", file=sys.stderr)
        if isinstance(error, OSError):  # the rest of the output cannot be written either
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        print("record_routing: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
