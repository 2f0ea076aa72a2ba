"""GPT-2: learned positions, LayerNorm, biases, and matrices written the other way round."""

from typing import Any

from clearhead.errors import choose
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.families.llama import State, filled, require_settings

# Activations of two-matrix MLPs, by transformers' names.
ACTIVATIONS = {
    "gelu": "gelu-exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
_OUTER = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.wpe.weight": "model.position.weight.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "transformer.ln_f.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
}
_INNER = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def from_gpt2(model: Any) -> ClearheadForCausalLM:
    """The same function as a clearhead model, with copies of the weights in their dtype.

    Raises:
        ClearheadError: for another activation, scores scaled by layer or not at all, or
            cross-attention.
    """
    theirs = model.config
    require_settings(
        "GPT2",
        theirs,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    config = ClearheadConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.n_embd,
        intermediate_size=theirs.n_inner or 4 * theirs.n_embd,
        num_hidden_layers=theirs.n_layer,
        num_attention_heads=theirs.n_head,
        max_position_embeddings=theirs.n_positions,
        initializer_range=theirs.initializer_range,
        tie_word_embeddings=theirs.tie_word_embeddings,
        pad_token_id=theirs.pad_token_id,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        norm_eps=theirs.layer_norm_epsilon,
        position="learned",
        norm="layernorm",
        mlp=activation("GPT2", theirs.activation_function),
        bias=True,
    )
    state: State = {}
    for name, weight in model.state_dict().items():
        if name in _OUTER:
            state[_OUTER[name]] = weight
            continue
        layer, part, kind = _parted(name)
        if part.endswith(("c_attn", "c_proj", "c_fc")):
            weight = weight.t()  # Conv1D has the inputs first
        if part == "attn.c_attn":
            for letter, third in zip("qkv", weight.chunk(3), strict=True):
                state[f"model.layers.{layer}.self_attn.{letter}_proj.{kind}"] = third
        else:
            state[f"model.layers.{layer}.{_INNER[part]}.{kind}"] = weight
    return filled(ClearheadForCausalLM, config, state, model)


def activation(family: str, name: str) -> str:
    """The value of the axis `mlp` for an activation of transformers."""
    return ACTIVATIONS[choose(f"{family} activation", name, ACTIVATIONS)]


def _parted(name: str) -> tuple[str, str, str]:
    """transformer.h.3.attn.c_attn.weight as 3, attn.c_attn, weight."""
    _, _, layer, *part, kind = name.split(".")
    return layer, ".".join(part), kind
