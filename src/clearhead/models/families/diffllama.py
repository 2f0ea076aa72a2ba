"""Differential attention V1 to and from transformers' DiffLlama, with equal logits.

Both are the same function in another order of heads: DiffLlama pairs head i with head i + H/2, here
neighbours are a pair. DiffLlama's per-head norm has no gain; on the way there a gain is multiplied
into the output projection, which reads the normed heads.
"""

from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.llama import check_export, copied, filled, require_settings

_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def from_diffllama(model: DiffLlamaForCausalLM) -> ClearheadForCausalLM:
    """The same function as a clearhead model, with copies of the weights in their dtype.

    Raises:
        ClearheadError: where the model has attention biases or another activation than silu.
    """
    require_settings("DiffLlama", model.config, attention_bias=False, hidden_act="silu")
    config = _imported(model.config)
    state = {}
    for name, weight in model.state_dict().items():
        if name.endswith(_PROJECTIONS):
            weight = _neighbours(weight, config.head_dim)  # type: ignore[arg-type]
        state[name.replace(".lambda_", ".maps.lambda_")] = weight
    return filled(ClearheadForCausalLM, config, state, model)


def to_diffllama(model: ClearheadForCausalLM) -> DiffLlamaForCausalLM:
    """The same function as transformers' DiffLlama, with copies of the weights in their dtype.

    Raises:
        ClearheadError: where the model is on another point of the axes, naming the first.
    """
    ours = model.config
    if ours.head_norm == "none":
        raise ClearheadError("DiffLlama has no head_norm='none': only a normed head is exported")
    config = DiffLlamaConfig(**copied(ours, "DiffLlama"), rms_norm_eps=ours.norm_eps)
    check_export("DiffLlama", ours, _imported(config), but=("head_norm",))
    state = model.state_dict()
    for name in list(state):
        if name.endswith(_PROJECTIONS):
            state[name] = _halves(state[name], ours.head_dim)
        elif name.endswith("maps.norm_weight"):
            output = name.replace("maps.norm_weight", "o_proj.weight")
            gain = state.pop(name)
            heads = state[output].unflatten(1, (-1, len(gain)))
            state[output] = (heads * gain).flatten(1)
    state = {name.replace(".maps.lambda_", ".lambda_"): weight for name, weight in state.items()}
    return filled(DiffLlamaForCausalLM, config, state, model)


def _imported(theirs: DiffLlamaConfig) -> ClearheadConfig:
    return ClearheadConfig(
        **copied(theirs), norm_eps=theirs.rms_norm_eps, maps="differential", head_norm="plain"
    )


def _neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """[H · D, C] with heads paired (i, i + H/2) → paired (2i, 2i + 1)."""
    return weight.unflatten(0, (2, -1, head_dim)).transpose(0, 1).reshape(weight.shape)


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    return weight.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).reshape(weight.shape)
