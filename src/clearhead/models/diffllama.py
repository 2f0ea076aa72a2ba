"""Differential attention V1 to and from transformers' DiffLlama, with equal logits.

Both are the same function in another order of heads: DiffLlama pairs head i with head i + H/2, here
neighbours are a pair. DiffLlama's per-head norm has no gain; on the way there a gain is multiplied
into the output projection, which reads the normed heads.
"""

from typing import Any

from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.configuration import ClearheadConfig

_SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "initializer_range",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")

# What DiffLlama is, on our axes; anything else has no place in it.
_DIFFLLAMA: dict[str, Any] = {
    "scores": "dot",
    "normalizer": "softmax",
    "maps": "differential",
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "lambda_init": None,
}


def from_diffllama(model: DiffLlamaForCausalLM) -> ClearheadForCausalLM:
    """The same function as a clearhead model, with copies of the weights in their dtype.

    Raises:
        ClearheadError: where the model has attention biases or another activation than silu.
    """
    theirs = model.config
    for key, wanted in (("attention_bias", False), ("hidden_act", "silu")):
        if (found := getattr(theirs, key)) != wanted:
            raise ClearheadError(
                f"a DiffLlama with {key}={found!r} has no place in clearhead: it needs {wanted!r}"
            )
    config = ClearheadConfig(
        **_copied(theirs), **_DIFFLLAMA, norm_eps=theirs.rms_norm_eps, head_norm="plain"
    )
    state = {}
    for name, weight in model.state_dict().items():
        if name.endswith(_PROJECTIONS):
            weight = _neighbours(weight, config.head_dim)  # type: ignore[arg-type]
        state[name.replace(".lambda_", ".maps.lambda_")] = weight
    return _filled(ClearheadForCausalLM, config, state)


def to_diffllama(model: ClearheadForCausalLM) -> DiffLlamaForCausalLM:
    """The same function as transformers' DiffLlama, with copies of the weights in their dtype.

    Raises:
        ClearheadError: where the model is on another point of the axes, naming the first.
    """
    ours = model.config
    for key, wanted in _DIFFLLAMA.items():
        if (found := getattr(ours, key)) != wanted:
            raise ClearheadError(
                f"DiffLlama has no {key}={found!r}: only {key}={wanted!r} can be exported"
            )
    if ours.rope_parameters["rope_type"] == "dynamic-causal":
        raise ClearheadError("DiffLlama has no rope_type='dynamic-causal': export it as 'dynamic'")
    if ours.head_norm == "none":
        raise ClearheadError("DiffLlama has no head_norm='none': only a normed head is exported")
    config = DiffLlamaConfig(**_copied(ours), rms_norm_eps=ours.norm_eps)
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
    return _filled(DiffLlamaForCausalLM, config, state)


def _copied(config: Any) -> dict[str, Any]:
    return {key: getattr(config, key) for key in _SAME}


def _neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """[H · D, C] with heads paired (i, i + H/2) → paired (2i, 2i + 1)."""
    return weight.unflatten(0, (2, -1, head_dim)).transpose(0, 1).reshape(weight.shape)


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    return weight.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).reshape(weight.shape)


def _filled(kind: Any, config: Any, state: dict[str, Tensor]) -> Any:
    first = next(iter(state.values()))
    model = kind(config).to(first.device, first.dtype)
    model.load_state_dict(state)
    return model.eval()
