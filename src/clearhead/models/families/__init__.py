"""Model families of transformers that are the same function as a point of clearhead's axes.

Llama and the families built like it have nearly the same names of weights here. DiffLlama is
differential attention V1 in another order of heads: it pairs head i with head i + H/2, clearhead
pairs neighbours. Its per-head norm has no gain; on export a gain is multiplied into the output
projection, which reads the normed heads.

GraniteSWA has a sink logit for each head, windows, layers without position, and multipliers:
softmax-1 (a logit of 0) and the learned sink are exported to it. Its multipliers are merged into
the weights on import, and are 1 on export.

GPT-2 and GPT-NeoX (Pythia) have LayerNorm, biases, and q, k and v in one matrix; GPT-2's are stored
transposed. GPT-NeoX rotates a part of each head: transformers' rope_type "proportional" turns the
first pairs (j, j + D/2) of a head, so channels of W_Q and W_K are put in that order, and the base
raised so that frequencies stay. Where its branches are parallel they have two norms, whose gains
and biases go into the matrices that read them: one norm is left.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import Tensor

from clearhead.errors import ClearheadError, choose
from clearhead.models.configuration import FULL, SLIDING, ClearheadConfig
from clearhead.models.families.family import Family as Family
from clearhead.models.families.family import State, positions, rotation, windows, with_all_biases

_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _diff_read(state: State, theirs: Any) -> State:
    return _swapped(state, 2, -1, theirs.head_dim)


def _diff_write(state: State, ours: Any) -> State:
    weights = _swapped(state, -1, 2, ours.head_dim)
    for name in state:
        if name.endswith("maps.norm_weight"):
            output = name.replace("maps.norm_weight", "o_proj.weight")
            gain = weights.pop(name)
            weights[output] = (weights[output].unflatten(1, (-1, len(gain))) * gain).flatten(1)
    return weights


def _swapped(state: State, first: int, second: int, head_dim: int) -> State:
    """Heads in another order: (2, −1) pairs i + H/2 with i in place of neighbours; (−1, 2) the
    reverse."""

    def swapped(weight: Tensor) -> Tensor:  # [H · D, C]
        return weight.unflatten(0, (first, second, head_dim)).transpose(0, 1).reshape(weight.shape)

    turned = {name: swapped(each) for name, each in state.items() if name.endswith(_PROJECTIONS)}
    return state | turned


DIFFLLAMA = Family(
    model=transformers.DiffLlamaForCausalLM,
    needs={"attention_bias": False, "hidden_act": "silu"},
    axes=lambda theirs: {"maps": "differential", "head_norm": "plain"},
    suits=lambda ours: ours.maps == "differential",
    names={".lambda_": ".maps.lambda_"},
    read=_diff_read,
    write=_diff_write,
    but={"head_norm": ("affine",)},
)


_NORMALIZER = "self_attn.normalizer"
_LOGIT = f"{_NORMALIZER}.logit"


def _granite_axes(theirs: Any) -> dict[str, Any]:
    thetas = set(theirs.layer_rope_theta) - {0}
    if len(thetas) > 1:
        raise ClearheadError(
            f"a GraniteSWA with layer_rope_theta={theirs.layer_rope_theta} has no place in "
            "clearhead: it needs one base for all layers that rotate"
        )
    return {
        "rope_parameters": {**rotation(theirs), "rope_theta": max(thetas, default=0)},
        **positions([theta != 0 for theta in theirs.layer_rope_theta]),
        **windows(theirs),
        "normalizer": "sink",
        "bias": theirs.attention_bias or theirs.mlp_bias,
    }


def _granite_settings(ours: Any) -> dict[str, Any]:
    layers = [ours.layer(index) for index in range(ours.num_hidden_layers)]
    theta = (ours.rope_parameters or {}).get("rope_theta", 0)
    return {
        "attention_bias": ours.bias,
        "mlp_bias": ours.bias,
        "attention_multiplier": ours.head_dim**-0.5,
        # It makes a sliding mask even where no layer slides.
        "sliding_window": ours.sliding_window or ours.max_position_embeddings,
        "layer_types": [FULL if layer.sliding_window is None else SLIDING for layer in layers],
        "layer_rope_theta": [theta if layer.position == "rope" else 0 for layer in layers],
    }


def _granite_read(state: State, theirs: Any) -> State:
    """Multipliers into the weights; a head that is the embedding is scaled through its norm."""
    width = state["model.layers.0.self_attn.q_proj.weight"].shape[0] // theirs.num_attention_heads
    query = theirs.attention_multiplier * width**0.5
    branch, inner = theirs.residual_multiplier, theirs.embedding_multiplier
    tied = inner if theirs.tie_word_embeddings else 1.0
    factors = {"q_proj": query, "o_proj": branch, "down_proj": branch, "embed_tokens": inner}
    factors |= {"lm_head": tied, "norm": 1 / theirs.logits_scaling / tied}
    weights = dict(state)
    for name, weight in state.items():
        if (factor := factors.get(name.split(".")[-2], 1.0)) != 1:
            weights[name] = weight * factor
    return weights


def _granite_write(state: State, ours: ClearheadConfig) -> State:
    weights = dict(state)
    for index in range(ours.num_hidden_layers):
        # Softmax-1 is a sink that rests at 0.
        weight = state["model.norm.weight"]
        name = f"model.layers.{index}.{_LOGIT}"
        logit = weights.get(name, torch.zeros_like(weight[:1]).repeat(ours.num_attention_heads))
        weights[name] = logit + weights.pop(f"model.layers.{index}.{_NORMALIZER}.offset", 0.0)
    return weights


GRANITE_SWA = Family(
    model=transformers.GraniteSWAForCausalLM,
    axes=_granite_axes,
    settings=_granite_settings,
    suits=lambda ours: ours.normalizer in ("softmax1", "sink"),
    names={"self_attn.sinks": _LOGIT},
    read=_granite_read,
    write=_granite_write,
    but={"normalizer": ("softmax1",), "annealed_start": (True,)},
)


def _qwen_settings(ours: ClearheadConfig) -> dict[str, Any]:
    slides = ours.sliding_window is not None
    return {
        "attention_bias": ours.bias,
        "use_sliding_window": slides,
        "sliding_window": ours.sliding_window,
        "max_window_layers": 0 if slides else ours.num_hidden_layers,
        "layer_types": ours.layer_types,
    }


def _qwen_state(state: State, ours: ClearheadConfig) -> State:
    """The weights without those biases of MLPs that are 0, as in what was a Qwen3."""
    unread = {name for name in state if name.endswith(".bias") and ".mlp." in name}
    return {name: each for name, each in state.items() if name not in unread or bool(each.any())}


def _flint_axes(theirs: Any) -> dict[str, Any]:
    return {
        "normalizer": "sink",
        "qk_norm": "rmsnorm",
        "bias": theirs.attention_bias,
        **windows(theirs),
        **positions([kind == SLIDING for kind in theirs.layer_types]),
    }


# Of what no other family suits: Llama says what it lacks.
LLAMA = Family(
    model=transformers.LlamaForCausalLM,
    axes=lambda theirs: {"bias": theirs.attention_bias or theirs.mlp_bias},
    settings=lambda ours: {"attention_bias": ours.bias, "mlp_bias": ours.bias},
    suits=lambda ours: True,
)
# A sliding window in every layer: Mistral's attention reads no layer_types.
MISTRAL = Family(
    model=transformers.MistralForCausalLM,
    axes=lambda theirs: {"sliding_window": theirs.sliding_window},
    settings=lambda ours: {"sliding_window": ours.sliding_window},
    suits=lambda ours: ours.sliding_window is not None,
)
# Biases of q, k and v alone.
QWEN2 = Family(
    model=transformers.Qwen2ForCausalLM, axes=lambda theirs: {"bias": True, **windows(theirs)}
)
# Norms of queries and keys, by the same names in both libraries.
QWEN3 = Family(
    model=transformers.Qwen3ForCausalLM,
    axes=lambda theirs: {"bias": theirs.attention_bias, "qk_norm": "rmsnorm", **windows(theirs)},
    settings=_qwen_settings,
    write=_qwen_state,
    suits=lambda ours: ours.qk_norm == "rmsnorm",
)
# Sinks, norms of queries and keys, position in sliding layers alone. transformers 5.17 has none.
FLINT = Family(
    model=getattr(transformers, "FlintForCausalLM", None),
    axes=_flint_axes,
    names={"self_attn.sinks": "self_attn.normalizer.logit"},
)

# Activations of two-matrix MLPs, by transformers' names.
ACTIVATIONS = {
    "gelu": "gelu-exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
# Settings of other families, which a configuration may state and neither model reads.
_UNREAD = {"num_key_value_heads": None, "head_dim": None}


def _gpt2_axes(theirs: Any) -> dict[str, Any]:
    return {
        **_UNREAD,
        "rope_parameters": None,
        "norm_eps": theirs.layer_norm_epsilon,
        "intermediate_size": theirs.n_inner or 4 * theirs.n_embd,
        "position": "learned",
        "norm": "layernorm",
        "mlp": _activation("GPT2", theirs.activation_function),
        "bias": True,
    }


def _gpt2_read(state: State, theirs: Any) -> State:
    # Conv1D has the inputs first.
    state = {name: each.t() if "_proj." in name else each for name, each in state.items()}
    return _split(state, lambda joined: joined.chunk(3))


def _split(state: State, split: Callable[[Tensor], Iterable[Tensor]]) -> State:
    """The state with matrices and biases of q, k and v in place of each joined one."""
    joined = {name: weight for name, weight in state.items() if ".qkv_proj." in name}
    parts = {
        name.replace(".qkv_proj.", f".{part}_proj."): each
        for name, weight in joined.items()
        for part, each in zip("qkv", split(weight), strict=True)
    }
    return {name: weight for name, weight in state.items() if name not in joined} | parts


def _neox_axes(theirs: Any) -> dict[str, Any]:
    rope, width, turned = _rotation(theirs)
    if rope["rope_type"] != "default" or turned % 2:
        raise ClearheadError(
            f"a GPTNeoX with rope_type={rope['rope_type']!r} and {turned} rotated channels has no "
            "place in clearhead: it needs 'default' and an even number"
        )
    axes = {
        **_UNREAD,
        "norm_eps": theirs.layer_norm_eps,
        "norm": "layernorm",
        "mlp": _activation("GPTNeoX", theirs.hidden_act),
        "bias": True,
        "order": "parallel" if theirs.use_parallel_residual else "sequential",
    }
    if not turned:
        return axes | {"position": "none", "rope_parameters": None}
    rotates = {"rope_type": "default", "rope_theta": rope["rope_theta"] ** (width / turned)}
    if turned < width:
        rotates |= {"rope_type": "proportional", "partial_rotary_factor": turned / width}
    return axes | {"rope_parameters": rotates}


def _neox_read(state: State, theirs: Any) -> State:
    _, width, turned = _rotation(theirs)
    order = [*range(turned // 2), *range(turned, turned + (width - turned) // 2)]
    order += sorted(set(range(width)) - set(order))

    def split(joined: Tensor) -> list[Tensor]:
        q, k, v = joined.unflatten(0, (-1, 3, width)).unbind(1)
        return [rows.flatten(0, 1) for rows in (q[:, order], k[:, order], v)]

    weights = with_all_biases(_split(state, split))
    if theirs.use_parallel_residual:
        for layer in range(theirs.num_hidden_layers):
            _one_norm(weights, f"model.layers.{layer}")
    return weights


def _activation(family: str, name: str) -> str:
    """The value of the axis `mlp` for an activation of transformers."""
    return ACTIVATIONS[choose(f"{family} activation", name, ACTIVATIONS)]


def _rotation(theirs: Any) -> tuple[dict[str, Any], int, int]:
    """Rotary parameters, channels of a head, and those of them that are turned."""
    rope, width = theirs.rope_parameters, theirs.hidden_size // theirs.num_attention_heads
    return rope, width, int(width * rope["partial_rotary_factor"])


def _one_norm(state: State, layer: str) -> None:
    """Gains and biases of both norms into the matrices that read them; one norm is left."""
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.up_proj",),
    }
    for norm, matrices in readers.items():
        gain, shift = (state.pop(f"{layer}.{norm}.{kind}") for kind in ("weight", "bias"))
        for matrix in matrices:
            weight = state[f"{layer}.{matrix}.weight"]
            state[f"{layer}.{matrix}.bias"] = state[f"{layer}.{matrix}.bias"] + weight @ shift
            state[f"{layer}.{matrix}.weight"] = weight * gain
    state[f"{layer}.input_layernorm.weight"] = torch.ones_like(gain)
    state[f"{layer}.input_layernorm.bias"] = torch.zeros_like(gain)


GPT2 = Family(
    model=transformers.GPT2LMHeadModel,
    needs={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    axes=_gpt2_axes,
    names={
        "transformer.wte.": "model.embed_tokens.",
        "transformer.wpe.": "model.position.weight.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_attn.": ".self_attn.qkv_proj.",
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".mlp.c_fc.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    },
    read=_gpt2_read,
)
GPT_NEOX = Family(
    model=transformers.GPTNeoXForCausalLM,
    needs={},
    axes=_neox_axes,
    names={
        "gpt_neox.embed_in.": "model.embed_tokens.",
        "gpt_neox.final_layer_norm.": "model.norm.",
        "gpt_neox.layers.": "model.layers.",
        "embed_out.": "lm_head.",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    },
    read=_neox_read,
)
# By the name of the class for language; a model is exported to the first that suits it.
FAMILIES: dict[str, Family] = {
    family.model.__name__: family
    for family in (DIFFLLAMA, GRANITE_SWA, QWEN3, MISTRAL, LLAMA, QWEN2, FLINT, GPT2, GPT_NEOX)
    if family.model is not None  # as where this transformers lacks it
}
