"""OrthoAdam's options: their check, and the axes that they rotate."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from clearhead.errors import ClearheadError, choose
from clearhead.optim import sharded
from clearhead.optim.rotations import check_kind, sign_key

NONE = "none"
SIDES = {"left": (-2,), "right": (-1,), "both": (-1, -2)}
SHARES = ("parameter", "size")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Draw(NamedTuple):
    """All that the rotation of a size is a function of."""

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
    decay, betas, eps = (group[key] for key in ("weight_decay", "betas", "eps"))
    _require(_number(eps) and eps > 0, "eps", eps, "a number above 0")
    _require(_number(decay) and decay >= 0, "weight_decay", decay, "a number of at least 0")
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    pair = pair and all(_number(beta) and 0 <= beta < 1 for beta in betas)
    _require(pair, "betas", betas, "two numbers from 0 to below 1, such as 0.9 0.999")
    for key, least in (("seed", 0), ("limit", 2)):
        whole = isinstance(group[key], int) and not isinstance(group[key], bool)
        wanted = f"a whole number of at least {least}"
        _require(whole and group[key] >= least, key, group[key], wanted)
    if group["rotation"] != NONE:
        check_kind(group["rotation"])
    choose("sides", group["sides"], SIDES)
    choose("share", group["share"], SHARES)
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
    number = rate.item() if scalar and not rate.is_meta else rate
    _require(_number(number) and number > 0, "lr", rate, "a number above 0")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(valid: bool, name: str, value: Any, wanted: str) -> None:
    if not valid:
        raise ClearheadError(f"{name} is {value!r}: give {wanted}")
