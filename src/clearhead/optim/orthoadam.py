"""OrthoAdam: Adam in a fixed random orthogonal basis (arXiv 2410.17174, Algorithm 1)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from clearhead.errors import ClearheadError
from clearhead.optim.rotations import make_rotation, random_signs, sign_key
from clearhead.ranges import Betas, Length, Natural, NotNegative, Positive, check_value

STATE_KEYS = ("step", "first_moment", "second_moment")
NONE = "none"

# One kernel a step, elementwise, so that results do not depend on the order of threads; other
# devices take PyTorch's own default.
FUSED_DEVICES = ("cpu", "cuda")

# Elements rotated at a time: as many as a CPU's cache holds, or as keep another device busy.
CHUNK = {"cpu": 2**20, "cuda": 2**24}

_HINTS = {
    "rotation": Literal["hadamard", "haar", "none"],
    "eps": Positive,
    "weight_decay": NotNegative,
    "betas": Betas,
    "seed": Natural,
    "limit": Length,
    "share": Literal["parameter", "size"],
}


class Turn(NamedTuple):
    """The rotation of a parameter's columns, and the key of the parameter's signs."""

    kind: str
    seed: int
    size: int
    key: int | None


# A parameter with a gradient, and its rotation; None for plain Adam.
Member = tuple[Any, Any]


class OrthoAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay whose moments live in a rotated basis.

    For a matrix G of gradients, Ḡ = G Qᵀ; m and v are Adam's moments of Ḡ, m̂ and v̂ with bias
    correction, and θ ← (1 − lr·weight_decay)·θ − lr·(m̂ / (√v̂ + eps)) Q. Q rotates columns, a
    parameter's last axis: the inputs of a linear layer. Axes longer than `limit` and of size 1 are
    not rotated; vectors and scalars follow plain Adam. Parameters, moments and update are float32.

    Rotations are functions of `seed`, the axis size and the parameter's name, so no state holds
    them. DTensor parameters, as of FSDP2, get the update of one process.

    Args:
        params: parameters, groups, or `model.named_parameters()`. Options may differ by group;
            `rotation="none"` makes one plain AdamW.
        lr: learning rate, a number or a tensor, above 0.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, above 0.
        weight_decay: decoupled, in the parameter's own basis.
        rotation: "hadamard" (O(n log n) a vector) or "haar" (dense).
        share: "parameter": each parameter has a rotation of its own, as in the paper, drawn by the
            parameter's name, or by its index where none was given. "size": all axes of a size
            share one, another method (docs/optimizers.md).
        seed: of the rotations.
        limit: longest axis that is rotated.

    Raises:
        ClearheadError: for settings or parameters that cannot work, or nothing to rotate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rotation: str = "hadamard",
        share: str = "parameter",
        seed: int = 0,
        limit: int = 8192,
    ) -> None:
        self._turns: list[list[Turn | None]] = []
        self._rotation = cache(make_rotation)
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "rotation": rotation, "share": share}
        defaults |= {"seed": seed, "limit": limit}
        super().__init__(params, defaults)
        if not any(map(any, self._turns)):
            raise ClearheadError(
                f"no parameter has an axis to rotate (matrices of 2 to {limit} columns): raise "
                "limit, or use torch.optim.AdamW"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        rate = self.param_groups[-1]["lr"]
        # A schedule may take the rate to 0 later.
        check_value("lr", rate.item() if isinstance(rate, torch.Tensor) else rate, Positive)
        self._turns.append(_turns(self.param_groups[-1], len(self.param_groups) - 1))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rotation = cache(make_rotation)
        self._turns = [_turns(group, i) for i, group in enumerate(self.param_groups)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for every parameter that has a gradient; a ClearheadError, before anything
        changes, for one that is not finite, since a rotation would spread it over the matrix."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        _check_gradients(self.param_groups)
        for group, turns in zip(self.param_groups, self._turns, strict=True):
            stacks: dict[Any, list[Member]] = {}  # stepped together
            for parameter, turn in zip(group["params"], turns, strict=True):
                if parameter.grad is not None:
                    alike = turn and (turn[:3], local(parameter).shape)
                    key = str(parameter.device), alike
                    stacks.setdefault(key, []).append((parameter, turn))
            for members in stacks.values():
                first, turn = members[0]
                size = len(members)
                if turn is not None:
                    room = CHUNK.get(first.device.type, CHUNK["cuda"])
                    size = max(1, room // max(1, first.numel()))
                for start in range(0, len(members), size):
                    self._step(group, members[start : start + size])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; as in PyTorch its options (seed and rotation too) replace this one's. A
        ClearheadError for a state of another optimizer, or of parameters of other shapes."""
        groups = state_dict["param_groups"]
        strange = [set(entry) - {*STATE_KEYS} for entry in state_dict["state"].values()]
        if any(strange) or any("rotation" not in group for group in groups):
            raise ClearheadError(
                "this state is not OrthoAdam's, and squares of gradients cannot be rotated: start "
                "with a fresh state, and a warmup"
            )
        if "param_names" in self.param_groups[0]:
            # Else PyTorch would put today's names in, and with them other rotations.
            groups = [{**group, "param_names": names(group, i)} for i, group in enumerate(groups)]
        super().load_state_dict({**state_dict, "param_groups": groups})
        for parameter, state in self.state.items():
            if state["first_moment"].shape != parameter.shape:  # the kernel would not look
                raise ClearheadError(
                    f"the state of a parameter of shape {list(parameter.shape)} has shape "
                    f"{list(state['first_moment'].shape)}: load it into its own model"
                )
            state["step"] = state["step"].to(parameter.device)

    def _step(self, group: Mapping[str, Any], members: list[Member]) -> None:
        """Plain Adam for parameters without a rotation; for a stack of equal shape and rotation:
        rotate, let Adam step from zero, rotate back."""
        parameters, turn = [parameter for parameter, _ in members], members[0][1]
        values = [local(parameter) for parameter in parameters]
        gradients = [local(parameter.grad) for parameter in parameters]
        if turn is None:
            self._adam(group, parameters, values, gradients, group["weight_decay"])
            return
        kind, seed, size, _ = turn
        rotation = self._rotation(kind, seed=seed, size=size, device=parameters[0].device)
        stack = gradients[0][None] if len(gradients) == 1 else torch.stack(gradients)
        signs = None  # the parameters' own; None where all share Q
        keys = [turn.key for _, turn in members if turn.key is not None]
        if keys:
            signs = random_signs(keys, stack.shape[-1], stack.device)
            signs = signs.view(len(members), *(1,) * (stack.ndim - 2), -1)
        stack = rotation.apply(stack if signs is None else stack * signs)
        update = torch.zeros_like(stack, memory_format=torch.contiguous_format)
        self._adam(group, parameters, update.unbind(), stack.unbind(), 0.0)
        update = rotation.apply(update, inverse=True)
        if signs is not None:
            update = update * signs
        torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(values, list(update.unbind()))

    def _adam(
        self,
        group: Mapping[str, Any],
        parameters: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        weight_decay: float,
    ) -> None:
        """PyTorch's own AdamW on `values`, with the parameters' moments."""
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["first_moment"] = torch.zeros_like(parameter)
                state["second_moment"] = torch.zeros_like(parameter)
        held = [i for i, value in enumerate(values) if value.numel()]
        fused = bool(held) and values[held[0]].device.type in FUSED_DEVICES
        adamw(
            [values[i] for i in held],
            [gradients[i] for i in held],
            [local(states[i]["first_moment"]) for i in held],
            [local(states[i]["second_moment"]) for i in held],
            [],
            [states[i]["step"] for i in held],
            foreach=None,
            capturable=False,
            fused=True if fused else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=False,
        )


def names(group: Mapping[str, Any], number: int = 0) -> list[str]:
    """The parameters' names, or their indices in the group if they were given without names."""
    given = group.get("param_names")
    return given or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]


def _turns(group: Mapping[str, Any], number: int) -> list[Turn | None]:
    """The rotation of each parameter of the group of that number; None for plain Adam."""
    for key, hint in _HINTS.items():
        check_value(key, group[key], hint)
    for name, parameter in zip(names(group, number), group["params"], strict=True):
        if parameter.dtype != torch.float32:
            raise ClearheadError(f"{name} is {parameter.dtype}: OrthoAdam takes float32")
        placed = parameter.placements if isinstance(parameter, DTensor) else ()
        if any(one.is_partial() or one.is_shard(max(1, parameter.ndim - 1)) for one in placed):
            raise ClearheadError(
                f"{name} is placed as {placed}, and OrthoAdam rotates whole columns: place it as "
                "Replicate, or as Shard of rows"
            )
    kind, seed, own = group["rotation"], group["seed"], group["share"] == "parameter"
    return [
        Turn(kind, seed, parameter.shape[-1], sign_key(seed, name, -1) if own else None)
        if kind != NONE and parameter.ndim > 1 and 2 <= parameter.shape[-1] <= group["limit"]
        else None
        for name, parameter in zip(names(group, number), group["params"], strict=True)
    ]


def _check_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ClearheadError for the first gradient that is not finite."""
    named = [
        (name, parameter)
        for number, group in enumerate(groups)
        for name, parameter in zip(names(group, number), group["params"], strict=True)
        if parameter.grad is not None
    ]
    if not named:
        return
    # One pass that any NaN or infinity comes through, and at float32 only the absurd overflows.
    sums = [local(parameter.grad).sum() for _, parameter in named]
    unfit = (~torch.stack([each.to(sums[0].device) for each in sums]).isfinite()).float()
    for mesh in dict.fromkeys(p.device_mesh for _, p in named if isinstance(p, DTensor)):
        # All or none: a process that stopped alone would leave the others waiting.
        unfit = unfit.to(mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(unfit, dist.ReduceOp.MAX, group=group)
    if not isinstance(unfit, FakeTensor) and unfit.any():  # `plan` steps without data
        raise ClearheadError(
            f"the gradient of {named[int(unfit.argmax())][0]} is not finite, or too large for "
            "float32 to sum: nothing was changed; lower the learning rate, or skip this step"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
