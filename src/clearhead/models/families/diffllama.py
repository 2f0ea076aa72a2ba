"""Differential attention V1 to and from transformers' DiffLlama, with equal logits.

Both are the same function in another order of heads: DiffLlama pairs head i with head i + H/2, here
neighbours are a pair. DiffLlama's per-head norm has no gain; on the way there a gain is multiplied
into the output projection, which reads the normed heads.
"""

from typing import Any

from torch import Tensor
from transformers import DiffLlamaForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.family import Family, State

_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _settings(ours: ClearheadConfig) -> dict[str, Any]:
    if ours.head_norm == "none":
        raise ClearheadError("DiffLlama has no head_norm='none': only a normed head is exported")
    return {}


def _read(state: State, theirs: Any) -> State:
    width = theirs.head_dim
    return {
        name: _swapped(weight, 2, -1, width) if name.endswith(_PROJECTIONS) else weight
        for name, weight in state.items()
    }


def _write(state: State, ours: ClearheadConfig) -> State:
    made = dict(state)
    for name, weight in state.items():
        if name.endswith(_PROJECTIONS):
            assert ours.head_dim is not None
            made[name] = _swapped(weight, -1, 2, ours.head_dim)
        elif name.endswith("maps.norm_weight"):
            output = name.replace("maps.norm_weight", "o_proj.weight")
            gain = made.pop(name)
            made[output] = (made[output].unflatten(1, (-1, len(gain))) * gain).flatten(1)
    return made


def _swapped(weight: Tensor, first: int, second: int, head_dim: int) -> Tensor:
    """[H · D, C]: (2, −1) pairs head i + H/2 with i in place of neighbours; (−1, 2) the reverse."""
    return weight.unflatten(0, (first, second, head_dim)).transpose(0, 1).reshape(weight.shape)


DIFFLLAMA = Family(
    name="DiffLlama",
    model=DiffLlamaForCausalLM,
    needs={"attention_bias": False, "hidden_act": "silu"},
    axes=lambda theirs: {"maps": "differential", "head_norm": "plain"},
    settings=_settings,
    suits=lambda ours: ours.maps == "differential",
    names={".lambda_": ".maps.lambda_"},
    read=_read,
    write=_write,
    but=("head_norm",),
)
