"""GPT-2 and GPT-NeoX (Pythia): LayerNorm, biases, q, k and v in one matrix.

GPT-2's matrices are stored transposed. GPT-NeoX rotates a part of each head:
transformers' rope_type "proportional" turns the first pairs (j, j + D/2) of a head, so channels of
W_Q and W_K are put in that order, and the base raised so that frequencies stay. Where its branches
are parallel they have two norms, whose gains and biases go into the matrices that read them: one
norm is left.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, GPTNeoXForCausalLM

from clearhead.errors import ClearheadError, choose
from clearhead.models.families.family import Family, State, with_all_biases

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
    weights: State = {}
    for name, weight in state.items():
        parts = (
            zip("qkv", split(weight), strict=True) if ".qkv_proj." in name else [("qkv", weight)]
        )
        weights |= {name.replace(".qkv_proj.", f".{part}_proj."): each for part, each in parts}
    return weights


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


FAMILIES = (
    Family(
        model=GPT2LMHeadModel,
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
    ),
    Family(
        model=GPTNeoXForCausalLM,
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
    ),
)
