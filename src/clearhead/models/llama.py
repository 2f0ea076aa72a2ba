"""The baseline to and from transformers' Llama, with equal logits: weights have the same names.

What is exported must come back as it was: a model whose import would be another layer is refused.
"""

from typing import Any

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.configuration import ClearheadConfig
from clearhead.spec import AXES

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
# What a layer starts from, and what it leaves out in training: no part of a trained function.
_STARTS = ("initializer_range", "query_range", "value_init", "dropout")


def from_llama(model: LlamaForCausalLM) -> ClearheadForCausalLM:
    """The same function as a clearhead model, with copies of the weights in their dtype.

    Raises:
        ClearheadError: where the model has biases or another activation than silu.
    """
    require_settings("Llama", model.config, attention_bias=False, mlp_bias=False, hidden_act="silu")
    return filled(ClearheadForCausalLM, _imported(model.config), model.state_dict(), model)


def to_llama(model: ClearheadForCausalLM) -> LlamaForCausalLM:
    """The same function as transformers' Llama, with copies of the weights in their dtype.

    Raises:
        ClearheadError: where the model is on another point of the axes, naming the first.
    """
    ours = model.config
    config = LlamaConfig(**copied(ours, "Llama"), rms_norm_eps=ours.norm_eps)
    check_export("Llama", ours, _imported(config))
    return filled(LlamaForCausalLM, config, model.state_dict(), model)


def _imported(theirs: LlamaConfig) -> ClearheadConfig:
    return ClearheadConfig(**copied(theirs), norm_eps=theirs.rms_norm_eps)


def require_settings(name: str, theirs: Any, **wanted: Any) -> None:
    """Refuse a model of transformers with settings that clearhead has no place for."""
    for key, value in wanted.items():
        if (found := getattr(theirs, key)) != value:
            raise ClearheadError(
                f"a {name} with {key}={found!r} has no place in clearhead: it needs {value!r}"
            )


def copied(config: Any, target: str | None = None) -> dict[str, Any]:
    """The settings that have one name here and there; `target` is what they are exported to."""
    found = {key: getattr(config, key) for key in _SAME}
    rope = found["rope_parameters"] or {}
    if target and rope.get("rope_type") == "dynamic-causal":
        raise ClearheadError(f"{target} has no rope_type='dynamic-causal': export it as 'dynamic'")
    if target and config.hidden_size % config.num_attention_heads:
        raise ClearheadError(
            f"{target} has no hidden_size={config.hidden_size} with {config.num_attention_heads} "
            "heads: only a number of heads that divides it can be exported"
        )
    return found


def check_export(
    name: str, ours: ClearheadConfig, back: ClearheadConfig, *, but: tuple[str, ...] = ()
) -> None:
    """Refuse a model that, exported and imported again as `back`, would be another function.

    Args:
        name: of the family of models that it is exported to.
        but: settings of a layer that the export takes into the weights.
    """
    mine = [("embedding_norm", ours.embedding_norm, back.embedding_norm)]
    for index in range(ours.num_hidden_layers):
        there = vars(back.layer(index))
        mine += [(key, value, there[key]) for key, value in vars(ours.layer(index)).items()]
    # An axis says more than the gains that come with it.
    for key, value, only in sorted(mine, key=lambda entry: entry[0] not in AXES):
        if value != only and key not in (*_STARTS, *but):
            raise ClearheadError(
                f"{name} has no {key}={value!r}: only {key}={only!r} can be exported"
            )


def filled(kind: Any, config: Any, state: dict[str, Tensor], source: Any) -> Any:
    """A model of `kind` with these weights, on the device and in the dtype of its source, in
    evaluation mode, which generates as its source does."""
    model = kind(config).to(source.device, source.dtype)
    model.load_state_dict(state)
    model.generation_config = source.generation_config
    return model.eval()
