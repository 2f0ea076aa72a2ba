"""The arithmetic of a step, for parameters of one kind at a time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw

from clearhead.errors import ClearheadError
from clearhead.optim import sharded
from clearhead.optim.options import Axis, Draw, names
from clearhead.optim.rotations import Rotation, random_signs

# PyTorch's single-kernel Adam, the elementwise part of ours.
FUSED_DEVICES = ("cpu", "cuda")

# Elements rotated at a time: as many as a CPU's cache holds, or as keep another device busy; in any
# case what a step allocates and frees again does not grow with the model.
CHUNK = {"cpu": 2**20}
OTHER_CHUNK = 2**24


class Member(NamedTuple):
    """A parameter in its turn; `keys` are those of its own signs, one an axis, or none."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor
    step: torch.Tensor
    keys: tuple[int, ...]


def buckets(
    lists: Sequence[list[Any]], axes: Sequence[tuple[Axis, ...]]
) -> Iterator[tuple[str, tuple[tuple[int, Draw], ...], list[Member]]]:
    """Group members that can be stepped together: (device, axes and rotations, members).

    Args:
        lists: a list for each field of `Member`, but for the last the places in the group.
        axes: those of each parameter of the group, by its place.
    """
    found: dict[Any, list[Member]] = {}
    for fields in zip(*lists, strict=True):
        place = fields[-1]
        keys = tuple(axis.key for axis in axes[place] if axis.key is not None)
        member = Member(*(*fields[:-1], keys))
        parameter, rotated = member.parameter, tuple((a.dim, a.draw) for a in axes[place])
        key: tuple[Any, ...] = (str(parameter.device), rotated, parameter.dtype)
        if rotated or not _plain(member):
            placements = sharded.layouts(parameter, ())[0]
            key = (*key, parameter.shape, placements, *sharded.meshes([parameter]))
        found.setdefault(key, []).append(member)
    for key, members in found.items():
        yield key[0], key[1], members


def apply(
    group: Mapping[str, Any], members: list[Member], rotations: list[tuple[int, Rotation]]
) -> None:
    """Step the members of a bucket, rotating along each (axis, rotation)."""
    if not rotations and _plain(members[0]):
        _elementwise(
            group,
            members,
            [sharded.local(member.parameter) for member in members],
            [sharded.local(member.gradient) for member in members],
            weight_decay=group["weight_decay"],
        )
        return
    first = members[0].parameter
    size = max(1, CHUNK.get(first.device.type, OTHER_CHUNK) // first.numel())
    for start in range(0, len(members), size):
        _rotated(group, members[start : start + size], rotations)


def _plain(member: Member) -> bool:
    """True if PyTorch's AdamW can work on the parameter itself."""
    return member.parameter.dtype == member.gradient.dtype == torch.float32


def _rotated(
    group: Mapping[str, Any], members: list[Member], rotations: list[tuple[int, Rotation]]
) -> None:
    """One stack of parameters of equal shape: rotate, let Adam step from zero, rotate back."""
    parameters = [sharded.local(member.parameter) for member in members]
    gradients = [sharded.local(member.gradient).float() for member in members]
    first = members[0].parameter
    layouts = sharded.layouts(first, [dim for dim, _ in rotations])
    stack = gradients[0][None] if len(gradients) == 1 else torch.stack(gradients)
    signs = [_signs(members, i, stack, dim) for i, (dim, _) in enumerate(rotations)]
    for i, (dim, rotation) in enumerate(rotations):
        stack = sharded.move(stack, first, layouts[i], layouts[i + 1])
        own = signs[i]
        stack = rotation.apply(stack if own is None else stack * own, dim)
    update = torch.zeros_like(stack, memory_format=torch.contiguous_format)
    _elementwise(group, members, list(update.unbind()), list(stack.unbind()), weight_decay=0.0)
    for i, (dim, rotation) in reversed(list(enumerate(rotations))):
        update = rotation.apply(update, dim, inverse=True)
        own = signs[i]
        update = update if own is None else update * own
        update = sharded.move(update, first, layouts[i + 1], layouts[i])
    kept = 1 - group["lr"] * group["weight_decay"]
    if first.dtype in (torch.float32, torch.float64):
        torch._foreach_mul_(parameters, kept)
        torch._foreach_add_(parameters, list(update.unbind()))
    else:
        for parameter, change in zip(parameters, update.unbind(), strict=True):
            parameter.copy_(parameter.float() * kept + change)


def _signs(members: list[Member], axis: int, stack: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The members' own signs along `dim`, broadcastable to the stack; None where all share Q."""
    if not members[0].keys:
        return None
    keys = [member.keys[axis] for member in members]
    shape = [len(keys)] + [1] * (stack.ndim - 1)
    shape[dim] = members[0].parameter.shape[dim]
    return random_signs(keys, shape[dim], stack.device).view(shape)


def _elementwise(
    group: Mapping[str, Any],
    members: list[Member],
    values: list[torch.Tensor],
    gradients: list[torch.Tensor],
    *,
    weight_decay: float,
) -> None:
    """PyTorch's own AdamW on `values`, with the members' moments."""
    held = [i for i, value in enumerate(values) if value.numel()]
    members = [members[i] for i in held]
    values = [values[i] for i in held]
    compiling = torch.compiler.is_compiling()  # which fuses, but not what already is
    fused = not compiling and bool(values) and values[0].device.type in FUSED_DEVICES
    adamw(
        values,
        [gradients[i] for i in held],
        [sharded.local(member.first_moment) for member in members],
        [sharded.local(member.second_moment) for member in members],
        [],
        [member.step for member in members],
        foreach=True if compiling else None,
        capturable=compiling,
        fused=True if fused else None,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=False,
    )


def check_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check every gradient before anything is changed.

    Raises:
        ClearheadError: naming the first that is sparse or not finite.
    """
    named = [
        (name, parameter)
        for number, group in enumerate(groups)
        for name, parameter in zip(names(group, number), group["params"], strict=True)
        if parameter.grad is not None
    ]
    for name, parameter in named:
        if parameter.grad.layout != torch.strided:
            raise ClearheadError(
                f"the gradient of {name} is sparse, and a rotation makes it dense: use "
                "nn.Embedding(sparse=False)"
            )
    parts = [sharded.local(parameter.grad) for _, parameter in named]
    filled = [part for part in parts if part.numel()]
    bad = torch.zeros(1)
    if filled:
        # One pass that any NaN or infinity comes through, and at float32 only the absurd overflows.
        sums = [part.sum(dtype=torch.float32).to(filled[0].device) for part in filled]
        bad = (~torch.stack(sums).isfinite().all()).float().reshape(1)
    for mesh in sharded.meshes([parameter for _, parameter in named]):
        # All or none: a process that stopped alone would leave the others waiting.
        bad = bad.to(mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
    if not isinstance(bad, FakeTensor) and bad.item():
        raise ClearheadError(
            f"the gradient of {_unfit([name for name, _ in named], parts)}: "
            "nothing was changed; lower the learning rate, or skip this step"
        )


def _unfit(names: Sequence[str], gradients: Sequence[torch.Tensor]) -> str:
    """Name of the gradient that float32 cannot hold or sum, and the reason."""
    for name, gradient in zip(names, gradients, strict=True):
        if not gradient.isfinite().all():
            return f"{name} is not finite"
    for name, gradient in zip(names, gradients, strict=True):
        if not gradient.sum(dtype=torch.float32).isfinite():
            largest = gradient.abs().max().item()
            return f"{name} is too large for float32 to sum (up to {largest:.1e})"
    return "a shard elsewhere is not finite or too large"
