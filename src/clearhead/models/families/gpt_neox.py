"""GPT-NeoX (Pythia): partial rotation, and two norms where the branches are parallel.

Partial rotation is transformers' rope_type "proportional", which turns the first pairs (j, j + D/2)
of a head: channels of W_Q and W_K are put in that order, and the base raised so that frequencies
stay. The gains and biases of both norms go into the matrices that read them, so that parallel
branches read one norm.
"""

from typing import Any

import torch

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.gpt2 import activation
from clearhead.models.families.llama import State, filled, with_all_biases

_OUTER = {
    "gpt_neox.embed_in.weight": "model.embed_tokens.weight",
    "gpt_neox.final_layer_norm.weight": "model.norm.weight",
    "gpt_neox.final_layer_norm.bias": "model.norm.bias",
    "embed_out.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
_INNER = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def from_gpt_neox(model: Any) -> ClearheadForCausalLM:
    """The same function as a clearhead model, with copies of the weights in their dtype.

    Raises:
        ClearheadError: for another activation, scaled rotary frequencies, or an odd number of
            rotated channels.
    """
    theirs = model.config
    rope, width = theirs.rope_parameters, theirs.hidden_size // theirs.num_attention_heads
    turned = int(width * rope["partial_rotary_factor"])
    if rope["rope_type"] != "default" or turned % 2:
        raise ClearheadError(
            f"a GPTNeoX with rope_type={rope['rope_type']!r} and {turned} rotated channels has no "
            "place in clearhead: it needs 'default' and an even number"
        )
    config = ClearheadConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_hidden_layers=theirs.num_hidden_layers,
        num_attention_heads=theirs.num_attention_heads,
        max_position_embeddings=theirs.max_position_embeddings,
        initializer_range=theirs.initializer_range,
        tie_word_embeddings=theirs.tie_word_embeddings,
        pad_token_id=theirs.pad_token_id,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        norm_eps=theirs.layer_norm_eps,
        norm="layernorm",
        mlp=activation("GPTNeoX", theirs.hidden_act),
        bias=True,
        order="parallel" if theirs.use_parallel_residual else "sequential",
        **_position(rope["rope_theta"], turned, width),
    )
    order = [*range(turned // 2), *range(turned, turned + (width - turned) // 2)]
    order += sorted(set(range(width)) - set(order))
    state: State = {}
    for name, weight in model.state_dict().items():
        if name in _OUTER:
            state[_OUTER[name]] = weight
            continue
        _, _, layer, *parts, kind = name.split(".")
        prefix, part = f"model.layers.{layer}", ".".join(parts)
        if part == "attention.query_key_value":
            heads = weight.unflatten(0, (-1, 3, width))
            for index, letter in enumerate("qkv"):
                rows = heads[:, index] if letter == "v" else heads[:, index, order]
                state[f"{prefix}.self_attn.{letter}_proj.{kind}"] = rows.flatten(0, 1)
        else:
            state[f"{prefix}.{_INNER[part]}.{kind}"] = weight
    state = with_all_biases(state)
    if theirs.use_parallel_residual:
        for layer in range(theirs.num_hidden_layers):
            _one_norm(state, f"model.layers.{layer}")
    return filled(ClearheadForCausalLM, config, state, model)


def _position(theta: float, turned: int, width: int) -> dict[str, Any]:
    if not turned:
        return {"position": "none"}
    if turned == width:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return {
        "rope_parameters": {
            "rope_type": "proportional",
            "rope_theta": theta ** (width / turned),
            "partial_rotary_factor": turned / width,
        }
    }


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
