"""Model families of transformers that are the same function as a point of clearhead's axes.

DiffLlama pairs head i with head i + H/2, clearhead pairs neighbours; its per-head norm has no gain,
so on export a gain is multiplied into the output projection. GraniteSWA's multipliers are merged
into the weights on import, and are 1 on export.

GPT-NeoX rotates a part of each head: transformers' rope_type "proportional" turns the first pairs
(j, j + D/2) of a head, so channels of W_Q and W_K are put in that order, and the base raised so
that frequencies stay. Where its branches are parallel they have two norms, whose gains and biases
go into the matrices that read them: one norm is left.
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

_LOGIT = "self_attn.normalizer.logit"
_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _diff_write(state: State, ours: Any) -> State:
    weights = _swapped(state, -1, 2, ours.head_dim)
    for name in state:
        if name.endswith("maps.norm_weight"):
            output = name.replace("maps.norm_weight", "o_proj.weight")
            gain = weights.pop(name)
            weights[output] = (weights[output].unflatten(1, (-1, len(gain))) * gain).flatten(1)
    return weights


def _swapped(state: State, first: int, second: int, head_dim: int) -> State:
    """Heads in another order: (2, −1) pairs neighbours in place of i and i + H/2, (−1, 2) back."""
    return state | {
        name: each.unflatten(0, (first, second, head_dim)).transpose(0, 1).reshape(each.shape)
        for name, each in state.items()
        if name.endswith(_PROJECTIONS)  # [H · D, C]
    }


DIFFLLAMA = Family(
    model=transformers.DiffLlamaForCausalLM,
    needs={"attention_bias": False, "hidden_act": "silu"},
    axes=lambda theirs: {"maps": "differential", "head_norm": "plain"},
    suits=lambda ours: ours.maps == "differential",
    names={".lambda_": ".maps.lambda_"},
    read=lambda state, theirs: _swapped(state, 2, -1, theirs.head_dim),
    write=_diff_write,
    but={"head_norm": ("affine",)},
)


def _granite_axes(theirs: Any) -> dict[str, Any]:
    thetas = set(theirs.layer_rope_theta) - {0}
    if len(thetas) > 1:
        raise ClearheadError(
            f"layer_rope_theta={theirs.layer_rope_theta} has no place: give one base for all layers"
        )
    return {
        "rope_parameters": {**rotation(theirs), "rope_theta": max(thetas, default=0)},
        **positions([theta != 0 for theta in theirs.layer_rope_theta]),
        **windows(theirs),
        "normalizer": "sink",
        "bias": theirs.attention_bias or theirs.mlp_bias,
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
    weights, rest = dict(state), torch.zeros_like(state["model.norm.weight"][:1])
    for index in range(ours.num_hidden_layers):
        name = f"model.layers.{index}.{_LOGIT}"  # softmax-1 is a sink that rests at 0
        logit = weights.get(name, rest.repeat(ours.num_attention_heads))
        weights[name] = logit + weights.pop(name.replace(".logit", ".offset"), 0.0)
    return weights


GRANITE_SWA = Family(
    model=transformers.GraniteSWAForCausalLM,
    axes=_granite_axes,
    settings=lambda ours: {
        "attention_bias": ours.bias,
        "mlp_bias": ours.bias,
        "attention_multiplier": ours.layer(0).head_dim ** -0.5,
        # transformers makes a sliding mask even if no layer has a window.
        "sliding_window": ours.sliding_window or ours.max_position_embeddings,
        "layer_types": [
            FULL if layer.sliding_window is None else SLIDING for layer in ours.layers()
        ],
        "layer_rope_theta": [
            layer.rope_parameters["rope_theta"] if layer.position == "rope" else 0
            for layer in ours.layers()
        ],
    },
    suits=lambda ours: ours.normalizer in ("softmax1", "sink"),
    names={"self_attn.sinks": _LOGIT},
    read=_granite_read,
    write=_granite_write,
    but={"normalizer": ("softmax1",), "annealed_start": (True,)},
)


# The last resort: its refusal names the axes that Llama lacks.
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
    settings=lambda ours: {
        "attention_bias": ours.bias,
        "use_sliding_window": ours.sliding_window is not None,
        "sliding_window": ours.sliding_window,
        "max_window_layers": 0 if ours.sliding_window else ours.num_hidden_layers,
        "layer_types": ours.layer_types,
    },
    # MLP biases that are 0 go: a model converted from Qwen3 has them.
    write=lambda state, ours: {
        name: each
        for name, each in state.items()
        if not (name.endswith(".bias") and ".mlp." in name) or bool(each.any())
    },
    suits=lambda ours: ours.qk_norm == "rmsnorm",
)
# Sinks, norms of queries and keys, position in sliding layers alone. transformers 5.17 has none.
FLINT = Family(
    model=getattr(transformers, "FlintForCausalLM", None),
    axes=lambda theirs: {
        "normalizer": "sink",
        "qk_norm": "rmsnorm",
        "bias": theirs.attention_bias,
        **windows(theirs),
        **positions([kind == SLIDING for kind in theirs.layer_types]),
    },
    names={"self_attn.sinks": _LOGIT},
)

# Activations of two-matrix MLPs, by transformers' names.
ACTIVATIONS = {"gelu": "gelu-exact", "relu": "relu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu")
# Settings of other families, which a configuration may state and neither model reads.
_UNREAD = {"num_key_value_heads": None, "head_dim": None}


def _split(state: State, split: Callable[[Tensor], Iterable[Tensor]]) -> State:
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
            f"rope_type={rope['rope_type']!r} and {turned} rotated channels have no place: give "
            "'default' and an even number"
        )
    axes = {
        **_UNREAD,
        "norm_eps": theirs.layer_norm_eps,
        "norm": "layernorm",
        "mlp": ACTIVATIONS[choose("GPTNeoX activation", theirs.hidden_act, ACTIVATIONS)],
        "bias": True,
        "order": "parallel" if theirs.use_parallel_residual else "sequential",
    }
    if not turned:
        return axes | positions([False])
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


def _rotation(theirs: Any) -> tuple[dict[str, Any], int, int]:
    """Rotary parameters, channels of a head, and how many of them are rotated."""
    rope, width = theirs.rope_parameters, theirs.hidden_size // theirs.num_attention_heads
    return rope, width, int(width * rope["partial_rotary_factor"])


def _one_norm(state: State, layer: str) -> None:
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
    axes=lambda theirs: {
        **_UNREAD,
        "rope_parameters": None,
        "norm_eps": theirs.layer_norm_epsilon,
        "intermediate_size": theirs.n_inner or 4 * theirs.n_embd,
        "position": "learned",
        "norm": "layernorm",
        "mlp": ACTIVATIONS[choose("GPT2 activation", theirs.activation_function, ACTIVATIONS)],
        "bias": True,
    },
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
    read=lambda state, theirs: _split(  # Conv1D has the inputs first
        {name: each.t() if "_proj." in name else each for name, each in state.items()},
        lambda joined: joined.chunk(3),
    ),
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
