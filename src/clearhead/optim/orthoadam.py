"""OrthoAdam: Adam in a fixed random orthogonal basis (arXiv 2410.17174, Algorithm 1)."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, overload

import torch
from torch.distributed.tensor import DTensor

from clearhead.errors import ClearheadError
from clearhead.optim import sharded, update
from clearhead.optim.options import Axis, Draw, check_group, check_rate, names, rotated_axes
from clearhead.optim.rotations import Rotation, make_rotation
from clearhead.optim.update import check_gradients

STATE_KEYS = ("step", "first_moment", "second_moment")
SIGNS = "hashed"  # in each group: tells a saved state's rotations by parameter from older ones


class OrthoAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay whose moments live in a rotated basis.

    For a matrix G of gradients, Ḡ = Q_L G Q_Rᵀ (either Q is the identity where its side is not
    rotated); m and v are Adam's moments of Ḡ, m̂ and v̂ with bias
    correction, and θ ← (1 − lr·weight_decay)·θ − lr·Q_Lᵀ (m̂ / (√v̂ + eps)) Q_R. The last two axes of
    a parameter are rotated; axes longer than `limit` and of size 1 are not; vectors and scalars
    follow plain Adam. Moments are float32 whatever the parameter's dtype, and so is the update,
    which is rounded once, when it is added.

    Rotations depend on `seed`, the axis size and, where each parameter has its own, its name, so
    neither state nor checkpoints hold them (`clearhead.optim.rotations` says how they are made and
    how exactly they agree elsewhere). Parameters of one shape are rotated together. Beyond AdamW's
    state stays n signs an axis size (hadamard) or n² numbers (haar), each once per size and device.

    DTensor parameters get the update of one process; what rotating the rows costs there is said in
    `clearhead.optim.sharded`. A step can be captured by torch.compile. float32 products must be
    float32: under `torch.set_float32_matmul_precision("high")` rotations are as coarse as TF32.

    Args:
        params: parameters, groups, or `model.named_parameters()`. Every option but `lr` and
            the like may differ by group; `rotation="none"` makes a group plain AdamW.
        lr: learning rate, a number or a tensor, above 0.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, above 0.
        weight_decay: decoupled, in the parameter's own basis.
        rotation: "hadamard" (O(n log n) a vector) or "haar" (dense).
        sides: "right" rotates columns, the inputs of a linear layer and the width of an embedding;
            "left" rows; "both" both. Measured, columns alone cost the loss least and take the
            outliers away (docs/log.md).
        share: "parameter": each axis of each parameter has a rotation of its own, as in the paper,
            drawn by the parameter's name (wrappers' prefixes aside), or by its place where none was
            given. "size": all axes of a size share one, another method: see docs/optimizers.md.
        seed: which rotations.
        limit: longest axis that is rotated.

    Raises:
        ClearheadError: for settings or parameters that cannot work, and where nothing would be
            rotated at all.
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
        sides: str = "right",
        share: str = "parameter",
        seed: int = 0,
        limit: int = 8192,
    ) -> None:
        self._axes: list[list[tuple[Axis, ...]]] = []
        self._rotations: dict[tuple[Draw, str], Rotation] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rotation": rotation,
            "sides": sides,
            "share": share,
            "seed": seed,
            "limit": limit,
            "signs": SIGNS,
        }
        super().__init__(params, defaults)
        if not any(axes for group in self._axes for axes in group):
            raise ClearheadError(
                f"no parameter has an axis to rotate (matrices, of sizes 2 to {limit}): raise "
                "limit, or use torch.optim.AdamW"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_rate(self.param_groups[-1]["lr"])
            check_group(self.param_groups[-1])
            number = len(self.param_groups) - 1
            self._axes.append(rotated_axes(self.param_groups[-1], number))
            # Made now, so that a bad one is an error here and not in the first step.
            self._make_rotations(self.param_groups[-1]["params"], self._axes[-1])
        except ClearheadError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            check_group(group)
            group["signs"] = SIGNS
        self._axes = [rotated_axes(group, i) for i, group in enumerate(self.param_groups)]
        self._rotations = {}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step for every parameter that has a gradient.

        Raises:
            ClearheadError: before anything changes, for a sparse gradient or one that is not
                finite (a rotation would spread one NaN over the whole matrix). Captured steps
                cannot look, and hand NaN on as AdamW does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not _captured():
            check_gradients(self.param_groups)
        for group, axes in zip(self.param_groups, self._axes, strict=True):
            lists: tuple[list[Any], ...] = ([], [], [], [], [], [])
            self._init_group(group, *lists)
            for device, rotated, members in update.buckets(lists, axes):
                rotations = [(dim, self._rotations[draw, device]) for dim, draw in rotated]
                update.apply(group, members, rotations)
        return loss

    def rotation_numel(self) -> int:
        """Float32 numbers that the rotations hold: all the memory kept beyond AdamW's state."""
        return sum(rotation.numel() for rotation in self._rotations.values())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; as in PyTorch its options (seed and rotation too) replace this one's.

        Raises:
            ClearheadError: for a state of another optimizer, or of parameters of other shapes.
        """
        groups = state_dict["param_groups"]
        if any("rotation" not in group for group in groups):
            raise _foreign("it has no rotation")
        if any(group["share"] == "parameter" and "signs" not in group for group in groups):
            raise ClearheadError(
                "this state has share='parameter' and was saved before signs were hashed, so that "
                "its rotations were others: start with a fresh state"
            )
        pairs = [
            (parameter, state_dict["state"].get(index, {}))
            for saved, group in zip(groups, self.param_groups, strict=False)
            for index, parameter in zip(saved["params"], group["params"], strict=False)
        ]
        for parameter, entry in pairs:
            if not entry:
                continue
            if set(entry) != set(STATE_KEYS):
                raise _foreign(f"its entries are {', '.join(map(str, entry))}")
            found = entry["first_moment"].shape, entry["second_moment"].shape
            if found != (parameter.shape, parameter.shape):
                raise ClearheadError(
                    f"the state of a parameter of shape {list(parameter.shape)} has shape "
                    f"{list(found[0])}: load it into the model it was saved from"
                )
        if "param_names" in self.param_groups[0]:
            # Else PyTorch would put today's names in, and with them other rotations.
            groups = [{**group, "param_names": names(group, i)} for i, group in enumerate(groups)]
        super().load_state_dict({**state_dict, "param_groups": groups})
        for (parameter, entry), axes in zip(pairs, chain.from_iterable(self._axes), strict=True):
            # Again: PyTorch has just rounded the moments to the parameter's dtype.
            for key, value in entry.items():
                tensor = value.to(device=parameter.device, dtype=torch.float32)
                if isinstance(tensor, DTensor):
                    target = sharded.layouts(parameter, [axis.dim for axis in axes])[-1]
                    tensor = tensor.redistribute(placements=target)
                self.state[parameter][key] = tensor

    def _init_group(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        first_moments: list[torch.Tensor],
        second_moments: list[torch.Tensor],
        steps: list[torch.Tensor],
        places: list[int],
    ) -> None:
        """Fill the lists. Under this name torch.compile runs it as it is, outside the graph."""
        number = next(i for i, other in enumerate(self.param_groups) if other is group)
        self._make_rotations(group["params"], self._axes[number])
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                dims = [axis.dim for axis in self._axes[number][place]]
                layout = sharded.layouts(parameter, dims)[-1]
                state["step"] = torch.zeros((), device=parameter.device)
                state["first_moment"] = sharded.zeros(parameter, layout)
                state["second_moment"] = sharded.zeros(parameter, layout)
            parameters.append(parameter)
            gradients.append(parameter.grad)
            first_moments.append(state["first_moment"])
            second_moments.append(state["second_moment"])
            steps.append(state["step"])
            places.append(place)

    def _make_rotations(self, parameters: list[torch.Tensor], axes: list[tuple[Axis, ...]]) -> None:
        for parameter, rotated in zip(parameters, axes, strict=True):
            for _, draw, _ in rotated:
                key = (draw, str(parameter.device))
                if key not in self._rotations and not parameter.is_meta:
                    made = make_rotation(**draw._asdict())
                    self._rotations[key] = made.to(parameter.device)


def _captured() -> bool:
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _foreign(found: str) -> ClearheadError:
    return ClearheadError(
        f"this state is not OrthoAdam's ({found}), and squares of gradients cannot be turned into "
        "another basis: start with a fresh state, and a warmup"
    )
