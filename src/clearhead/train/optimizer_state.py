"""An optimizer's state as named tensors and an outline in JSON.

Optimizers keep a few tensors and numbers a parameter, and counters in their groups. Tensors are
named optimizer/PARAMETER/KEY, and all else is in the outline, so that nothing needs to be pickled.
"""

from collections.abc import Mapping
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
        ClearheadError: for a state that holds something else than tensors and numbers.
    """
    tensors: dict[str, torch.Tensor] = {}
    parameters: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        outline = parameters[names[parameter]] = {}
        for key, value in state.items():
            place = f"{PREFIX}{names[parameter]}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[place] = value.contiguous()
                outline[key] = {TENSOR: place}
            elif value is None or isinstance(value, (bool, int, float, str)):
                outline[key] = value
            else:
                raise ClearheadError(
                    f"the optimizer keeps a {type(value).__name__} ({place}), which a checkpoint "
                    "cannot hold: choose another optimizer"
                )
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

    outlines = outline["parameters"]
    state = {
        place: {
            key: tensors[value[TENSOR]] if isinstance(value, dict) else value
            for key, value in outlines[names[parameter]].items()
        }
        for place, parameter in zip(places, held, strict=True)
        if names[parameter] in outlines
    }
    for group, counter in zip(saved["param_groups"], outline["counters"], strict=True):
        if counter is not None:
            group[COUNTER] = counter
    optimizer.load_state_dict({**saved, "state": state})
