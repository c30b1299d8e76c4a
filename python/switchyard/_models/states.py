# SPDX-License-Identifier: Apache-2.0
"""State dicts. If the ranks form a process group, a share is stored as a DTensor with placement Shard(0), from which
torch.distributed.checkpoint derives its position. A state dict to be loaded may contain DTensors, whole tensors or shares.
"""
from __future__ import annotations

import re
import sys
import weakref
from typing import Any, Dict, List, Optional, Tuple

from ..errors import InvalidArgument, Mismatch
from .find import share_of

_seen: Any = weakref.WeakSet()  # optimizers with registered state dict hooks
_watching = False


def process_group(group: Any) -> Any:
    """Returns the process group with the same ranks as `group`, or None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    known = getattr(group, "_process_group", None)
    if known is not None:
        return known
    world = dist.group.WORLD
    return world if (dist.get_world_size(world), dist.get_rank(world)) == (group.size, group.rank) else None


def _mesh(share: Any) -> Any:
    """Returns the device mesh of the ranks, or None if they have no process group or there is only one rank."""
    found = getattr(share.group, "_mesh", None)
    if found is None and share.group.size > 1:
        known = process_group(share.group)
        if known is not None:
            from torch.distributed.device_mesh import DeviceMesh

            found = share.group._mesh = DeviceMesh.from_group(known, "cuda" if share.group.backend == "cuda" else "cpu")
    return found


def as_dtensor(share: Any, tensor: Any) -> Any:
    """Returns `tensor`, this rank's part of a tensor of all experts, as a DTensor, or unchanged if there is no process
    group."""
    mesh = _mesh(share)
    if mesh is None:
        return tensor
    if share.experts % share.group.size:
        raise InvalidArgument(f"state_dict: {share.experts} experts on {share.group.size} ranks are shares of different sizes, which a DTensor "
                              "cannot say: save switchyard.full_state_dict(model)")
    from torch.distributed.tensor import DTensor, Shard

    shape = type(tensor.shape)((share.experts, *tensor.shape[1:]))
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return DTensor.from_local(tensor.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=tuple(stride))


def as_share(share: Any, tensor: Any) -> Any:
    """Returns the share of a state dict tensor."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    if getattr(tensor, "dim", lambda: 0)() > 0 and tensor.shape[0] == share.experts != len(share.mine):
        return tensor[share.mine.start:share.mine.stop]
    return tensor


# ---- Models ----


def _saving(module: Any, state: Any, prefix: str, _: Any) -> None:
    share = share_of(module)
    if share is not None and not share.saves_plain:
        for name in share.names:
            if prefix + name in state:
                state[prefix + name] = as_dtensor(share, state[prefix + name])


def _loading(module: Any, state: Any, prefix: str, *_: Any) -> None:
    share = share_of(module)
    if share is not None:
        for name in share.names:
            if prefix + name in state:
                state[prefix + name] = as_share(share, state[prefix + name])


def connect(share: Any, module: Any) -> None:
    """Registers hooks that handle the share in state dicts of the module and of optimizers."""
    global _watching
    module.register_state_dict_post_hook(_saving)
    module.register_load_state_dict_pre_hook(_loading)
    if not _watching:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        _watching = True
        register_optimizer_step_pre_hook(_stepping)


def whole(share: Any, tensor: Any) -> Any:
    """Returns the tensor with all experts on the CPU. Collective."""
    import torch

    world, mine = share.group.size, tensor.detach().to("cpu").contiguous()
    shape, size = mine.shape[1:], mine[:1].numel() * mine.element_size() or None
    each = int(torch.Size(shape).numel()) * mine.element_size()
    assert size is None or size == each
    counts = [len(share.group.experts_of(share.experts, r)) for r in range(world)]
    parts: Any = [[] for _ in range(world)]
    for e in range(max(counts)):
        own = mine[e].reshape(-1).view(torch.uint8).numpy().tobytes() if e < len(share.mine) else bytes(each)
        for r, got in enumerate(share.group.all_gather(own)):
            if e < counts[r]:
                parts[r].append(torch.frombuffer(bytearray(got), dtype=torch.uint8).view(mine.dtype).reshape(shape))
    return torch.stack([one for part in parts for one in part])


def full_state_dict(model: Any) -> Dict[str, Any]:
    """Returns the state dict of the undivided model. Collective."""
    shares = {f"{name}.{each}" if name else each: share for name, module in model.named_modules() if (share := share_of(module)) is not None
              for each in share.names}
    found = dict(model.named_parameters(remove_duplicate=False))
    found = {name: found[name] for name in shares if name in found}
    state = {}
    for share in shares.values():
        share.saves_plain = True
    try:
        entries = model.state_dict()
    finally:
        for share in shares.values():
            share.saves_plain = False
    for name, value in entries.items():
        full = whole(shares[name], value) if name in found else value
        state[name] = full.full_tensor() if hasattr(full, "full_tensor") else full
    return state


def save_pretrained(self: Any, save_directory: Any, *arguments: Any, state_dict: Optional[Dict[str, Any]] = None,
                    is_main_process: Optional[bool] = None, **keywords: Any) -> None:
    """Runs save_pretrained for the undivided model. Collective: all ranks call it, and rank 0 writes the files."""
    group = next(share.group for each in self.modules() if (share := share_of(each)) is not None)
    state = full_state_dict(self) if state_dict is None else state_dict
    main = group.rank == 0 if is_main_process is None else is_main_process
    type(self).save_pretrained(self, save_directory, *arguments, state_dict=state, is_main_process=main, **keywords)
    group.barrier()


# ---- Optimizers ----


def _shares_of(optimizer: Any) -> List[Tuple[int, Any, Any]]:
    """Returns, for each expert parameter, its index among the optimizer's parameters, its share, and the parameter itself."""
    from .gradients import share_of_parameter

    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    shares = [share_of_parameter(each) for each in parameters]
    return [(place, share, parameter) for place, (share, parameter) in enumerate(zip(shares, parameters)) if share is not None]


def _convert(optimizer: Any, state: Any, way: Any) -> Any:
    """Returns the optimizer's state dict, whose keys are numbers or names, with `way` applied to its expert tensors."""
    keys, entries = [key for group in state["param_groups"] for key in group["params"]], dict(state["state"])
    for place, share, parameter in _shares_of(optimizer):
        if keys[place] in entries:
            entries[keys[place]] = {name: way(share, value) if getattr(value, "dim", lambda: 0)() > 0 and value.shape[1:] == parameter.shape[1:]
                                    else value for name, value in entries[keys[place]].items()}
    return {**state, "state": entries}


def _stepping(optimizer: Any, *unused: Any) -> None:
    """Runs before each step of any optimizer. Makes an optimizer save and load its shares in the same form as models."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    shares = _shares_of(optimizer)
    for _, share, parameter in shares:  # loaded before this step
        loaded = optimizer.state.get(parameter, {})
        for name, value in loaded.items():
            loaded[name] = as_share(share, value) if hasattr(value, "to_local") else value
    if shares:
        optimizer.register_state_dict_post_hook(lambda of, state: _convert(of, state, as_dtensor))
        optimizer.register_load_state_dict_pre_hook(lambda of, state: _convert(of, state, as_share))


# ---- Sites ----


def named(error: Mismatch, share: Any) -> Mismatch:
    """Returns the error with module names instead of site numbers."""
    names = share.group._sites
    text = re.sub(r"\(site (\d+)\)", lambda match: f"in {names.get(int(match.group(1)), 'another module')}", str(error))
    return Mismatch(f"{text} (this rank was in {share.name})")
