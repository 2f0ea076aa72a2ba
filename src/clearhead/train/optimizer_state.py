"""An optimizer's state as named tensors and an outline in JSON: whatever it is made of.

PyTorch's own optimizers keep a few tensors a parameter; others also lists of them, numbers, and
counters in their groups. Tensors are named optimizer/PARAMETER/PLACE, and all that is not a tensor
is in the outline, so that nothing needs to be pickled.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from clearhead.errors import ClearheadError

PREFIX = "optimizer/"

# The one entry that optimizers keep in a group and advance themselves; what else is there comes
# from the settings, which a resumed run shares.
COUNTER = "step"

TENSOR = "tensor"


def pack(
    names: Mapping[torch.Tensor, str], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state's tensors by name, and the outline.

    Args:
        names: of every parameter.

    Raises:
        ClearheadError: for a state that holds something else than tensors, numbers and lists.
    """
    tensors: dict[str, torch.Tensor] = {}

    def outlined(value: Any, place: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[place] = value.contiguous()
            return {TENSOR: place}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ClearheadError(
            f"the optimizer keeps a {type(value).__name__} ({place}), which a checkpoint cannot "
            "hold: choose another optimizer"
        )

    parameters = {
        names[parameter]: _each(state, outlined, PREFIX + names[parameter])
        for parameter, state in optimizer.state.items()
    }
    counters = [group.get(COUNTER) for group in optimizer.param_groups]
    return tensors, {"parameters": parameters, "counters": counters}


def unpack(
    names: Mapping[torch.Tensor, str],
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    outline: Mapping[str, Any],
) -> None:
    """Load what `pack` gave into an optimizer made by the same settings."""
    saved = optimizer.state_dict()
    places = [index for group in saved["param_groups"] for index in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def filled(value: Any, place: str) -> Any:
        return tensors[value[TENSOR]] if isinstance(value, dict) else value

    state = {
        place: _each(outline["parameters"][names[parameter]], filled)
        for place, parameter in zip(places, held, strict=True)
        if names[parameter] in outline["parameters"]
    }
    for group, counter in zip(saved["param_groups"], outline["counters"], strict=True):
        if counter is not None:
            group[COUNTER] = counter
    optimizer.load_state_dict({**saved, "state": state})


def _each(value: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """A state or an outline with every number, word and tensor changed, told its place."""
    if isinstance(value, dict) and not isinstance(value.get(TENSOR), str):
        return {key: _each(item, change, f"{place}/{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_each(item, change, f"{place}/{i}") for i, item in enumerate(value)]
    return change(value, place)
