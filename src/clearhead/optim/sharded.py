"""Rotating an axis that is spread over processes: DTensor parameters, as FSDP2 makes them.

An axis can be rotated where every process holds it whole. FSDP2 shards rows, so columns (the right
side) are rotated where they lie; for rows (the left side) the gradient is first dealt out again by
columns, an all-to-all, and the update dealt back by rows, another. Each sends a process's own shard
once, float32: the pair moves 2·4·numel/W bytes a process, W processes, 2/(3W) of what FSDP's two
gatherings and one reduction move in float32. The moments stay by columns: they never travel. gloo
has no all-to-all, and PyTorch gathers there instead.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import zeros as sharded_zeros

from clearhead.errors import ClearheadError

Placements = tuple[Placement, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(tensor: torch.Tensor) -> None:
    """Refuse placements that cannot be redistributed.

    Raises:
        ClearheadError: for anything but whole copies and even shards.
    """
    if isinstance(tensor, DTensor) and not all(
        type(placement) in (Shard, Replicate) for placement in tensor.placements
    ):
        raise ClearheadError(
            f"OrthoAdam cannot move parts placed as {tensor.placements}: "
            "place parameters as Shard or Replicate"
        )


def layouts(tensor: torch.Tensor, dims: Sequence[int]) -> list[Placements]:
    """The placements at first, and with each of `dims` (-1, -2) in turn whole everywhere."""
    if not isinstance(tensor, DTensor):
        return [()] * (len(dims) + 1)
    found: list[Placements] = [tensor.placements]
    for dim in dims:
        whole = dim % tensor.ndim
        other = (-3 - dim) % tensor.ndim
        found.append(tuple(Shard(other) if p.is_shard(whole) else p for p in found[-1]))
    return found


def zeros(tensor: torch.Tensor, placements: Placements) -> torch.Tensor:
    """Float32 zeros of the shape of `tensor`, under `placements`."""
    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor, dtype=torch.float32)
    return sharded_zeros(
        tensor.shape,
        dtype=torch.float32,
        device_mesh=tensor.device_mesh,
        placements=placements,
    )


def move(
    stack: torch.Tensor, like: torch.Tensor, source: Placements, target: Placements
) -> torch.Tensor:
    """Redistribute a stack [B, …] of local parts, in one collective for all B tensors."""
    if source == target:
        return stack
    assert isinstance(like, DTensor)
    shape = torch.Size((stack.shape[0], *like.shape))
    whole = DTensor.from_local(
        stack.contiguous(),
        like.device_mesh,
        _behind_stack(source),
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return whole.redistribute(placements=_behind_stack(target)).to_local()


def meshes(tensors: Sequence[torch.Tensor]) -> list[DeviceMesh]:
    """The meshes over which `tensors` are spread, each once."""
    return list(dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor)))


def _behind_stack(placements: Placements) -> Placements:
    return tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in placements)
