"""OrthoAdam's options: their check, and the axes that they rotate."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from clearhead.errors import ClearheadError
from clearhead.optim import sharded
from clearhead.optim.rotations import check_kind, sign_key
from clearhead.ranges import Betas, Length, Natural, NotNegative, Positive, check_value

NONE = "none"
SIDES = {"left": (-2,), "right": (-1,), "both": (-1, -2)}
_HINTS = {
    "eps": Positive,
    "weight_decay": NotNegative,
    "betas": Betas,
    "seed": Natural,
    "limit": Length,
    "sides": Literal["left", "right", "both"],
    "share": Literal["parameter", "size"],
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Draw(NamedTuple):
    """The arguments that determine the rotation of a size."""

    kind: str
    seed: int
    size: int


class Axis(NamedTuple):
    """An axis to rotate, -1 or -2; the rotation of its size; the key of the parameter's signs."""

    dim: int
    draw: Draw
    key: int | None


def rotated_axes(group: Mapping[str, Any], number: int) -> list[tuple[Axis, ...]]:
    """The axes to rotate of each parameter of a group: columns first, which FSDP leaves in place.

    Args:
        number: the group's place, part of the names of parameters that were given none.
    """
    seed, own = group["seed"], group["share"] == "parameter"
    found = []
    for name, parameter in zip(names(group, number), group["params"], strict=True):
        dims = () if group["rotation"] == NONE or parameter.ndim < 2 else SIDES[group["sides"]]
        found.append(
            tuple(
                Axis(
                    dim,
                    Draw(group["rotation"], seed, parameter.shape[dim]),
                    sign_key(seed, name, dim) if own else None,
                )
                for dim in dims
                if 2 <= parameter.shape[dim] <= group["limit"]
            )
        )
    return found


def names(group: Mapping[str, Any], number: int = 0) -> list[str]:
    """The parameters' names where they were given, and else their places."""
    given = group.get("param_names")
    return given or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]


def check_group(group: Mapping[str, Any]) -> None:
    """Check a group's options and parameters.

    Raises:
        ClearheadError: naming what was found and what would work.
    """
    for key, hint in _HINTS.items():
        check_value(key, group[key], hint)
    if group["rotation"] != NONE:
        check_kind(group["rotation"])
    for name, parameter in zip(names(group), group["params"], strict=True):
        if parameter.dtype not in DTYPES:
            raise ClearheadError(f"{name} is {parameter.dtype}: OrthoAdam takes real floats only")
        if parameter.numel() == 0:
            raise ClearheadError(
                f"{name} has shape {list(parameter.shape)}, so there is nothing to train: leave it "
                "out"
            )
        sharded.check(parameter)


def check_rate(rate: Any) -> None:
    """Check the learning rate a group starts with; a schedule may take it to 0 later.

    Raises:
        ClearheadError: where it is not above 0.
    """
    scalar = isinstance(rate, torch.Tensor) and rate.numel() == 1
    check_value("lr", rate.item() if scalar and not rate.is_meta else rate, Positive)
