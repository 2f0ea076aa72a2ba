"""An optimizer's state as named tensors and an outline in JSON: whatever it is made of.

PyTorch's own optimizers keep a few tensors a parameter; others also lists of them, numbers, and
counters in their groups. Tensors go to safetensors under optimizer/PARAMETER/PLACE, and all that is
not a tensor into the outline, so that nothing needs to be pickled.
"""

from collections.abc import Mapping
from typing import Any

import torch

from clearhead.errors import ClearheadError

PREFIX = "optimizer"

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
    parameters = {
        names[parameter]: _pack(state, f"{PREFIX}/{names[parameter]}", tensors)
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
    state = {
        place: _unpack(outline["parameters"][names[parameter]], tensors)
        for place, parameter in zip(places, held, strict=True)
        if names[parameter] in outline["parameters"]
    }
    for group, counter in zip(saved["param_groups"], outline["counters"], strict=True):
        if counter is not None:
            group[COUNTER] = counter
    optimizer.load_state_dict({**saved, "state": state})


def places(outline: Any) -> list[str]:
    """The names of the tensors in an outline."""
    if isinstance(outline, list):
        return [place for item in outline for place in places(item)]
    if not isinstance(outline, dict):
        return []
    if set(outline) == {TENSOR} and isinstance(outline[TENSOR], str):
        return [outline[TENSOR]]
    return places(list(outline.values()))


def _pack(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[place] = value.contiguous()
        return {TENSOR: place}
    if isinstance(value, dict):
        return {key: _pack(item, f"{place}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_pack(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ClearheadError(
        f"the optimizer keeps a {type(value).__name__} ({place}), which a checkpoint cannot hold: "
        "choose another optimizer"
    )


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {TENSOR} and isinstance(value[TENSOR], str):
        # A copy: the tensors of load_file may lie in the file's own mapped pages.
        return tensors[value[TENSOR]].clone()
    return {key: _unpack(item, tensors) for key, item in value.items()}
