"""A clearhead model for servers: one call of transformers' attention interface in each layer.

`clearhead convert MODEL OUTPUT --for serving` writes this file beside the weights. It needs
transformers and nothing of clearhead. What a mechanism adds lies before or after the call:

| setting | queries and keys before it | heads after it |
| --- | --- | --- |
| `scores="coca…"` | CoCA's (arXiv 2309.08646), keys cached rotated and at full width | |
| `maps="differential-v2"` | two queries for each head | o_2i − σ(x W_λ) o_2i+1 |
| `shaped` | beside each query a query of 0, whose attention is C v | α v + β A v − γ C v |
| `epilogue="gate"` | | o ∘ σ(x W_G) (arXiv 2505.06708) |
| `epilogue="xsa"` | | o without its part along the token's own value (arXiv 2603.09078) |

`num_attention_heads` counts the queries of the call, and `num_key_value_heads` its keys.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

# The keyword of the key-value cache: transformers names it `cache` from 5.24 on.
CACHE = "past_key_values"
if "cache" in BaseModelOutputWithPast.__dataclass_fields__:
    CACHE = "cache"


class ClearheadServingConfig(PreTrainedConfig):
    """Sizes as the attention call sees them, and the mechanisms around it."""

    model_type = "clearhead_serving"

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 6
    head_dim: int = 32
    max_position_embeddings: int = 256
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    layer_types: Any = None  # a list, full_attention or sliding_attention
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    bias: bool = False
    scores: str = "dot"
    qk_norm: bool = False
    sinks: bool = False
    maps: str = "single"
    shaped: bool = False
    epilogue: str = "none"
    value_projections: Any = None  # a list, by layer
    output_projection: bool = True
    position: str = "rope"
    norms: Any = None  # a list, by layer, and after all of them
    gated_mlp: bool = True
    hidden_act: str = "silu"
    parallel: bool = False
    attention_skip: bool = True
    mlp_skip: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        layers = self.num_hidden_layers
        self.layer_types = self.layer_types or ["full_attention"] * layers
        self.value_projections = self.value_projections or [True] * layers
        self.norms = self.norms or ["rmsnorm"] * (layers + 1)
        super().__post_init__(**kwargs)
        self.auto_map = {
            "AutoConfig": "modeling_clearhead_serving.ClearheadServingConfig",
            "AutoModel": "modeling_clearhead_serving.ClearheadServingModel",
            "AutoModelForCausalLM": "modeling_clearhead_serving.ClearheadServingForCausalLM",
        }


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_j, x_(j+D/2)), in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def coca(query: Tensor, key: Tensor, table: Any, form: str) -> tuple[Tensor, Tensor]:
    """CoCA's queries and keys, whose product is the score; `key` has half the width."""
    (cos, sin), wide, t = table, query.float(), key.float().relu()
    if form == "coca-slack":
        wide = wide * rotate(wide, cos, sin)
        near, far = t * (cos - sin), t * (cos + sin)
    else:
        first, second = (wide, wide) if form == "coca-strict" else wide.chunk(2, -1)
        amplitude = first.square() + second.square()
        wide = torch.cat([amplitude * cos, amplitude * sin], -1)
        near, far = t * cos, t * sin
    return wide.to(query.dtype), torch.cat([near, far], -1).to(key.dtype)


class ClearheadServingAttention(nn.Module):
    def __init__(self, config: ClearheadServingConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.scaling, self.is_causal = config.head_dim, config.head_dim**-0.5, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        slides = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if slides else None
        self.key_width = self.head_dim // (1 if config.scores == "dot" else 2)
        self.query_width = self.key_width if config.scores == "coca-strict" else self.head_dim
        queries = config.num_attention_heads // (2 if config.shaped else 1)
        self.heads = queries // (2 if config.maps == "differential-v2" else 1)
        hidden, keys, width = config.hidden_size, config.num_key_value_heads, self.head_dim
        self.q_proj = nn.Linear(hidden, queries * self.query_width, bias=config.bias)
        self.k_proj = nn.Linear(hidden, keys * self.key_width, bias=config.bias)
        # No identity: vLLM merges projections alike in layers whose parts are named alike.
        values = config.value_projections[layer_idx]
        self.v_proj = nn.Linear(hidden, keys * width, bias=config.bias) if values else None
        # The identity takes any sizes.
        output: Any = nn.Linear if config.output_projection else nn.Identity
        norm: Any = LlamaRMSNorm if config.qk_norm else nn.Identity
        self.o_proj = output(self.heads * width, hidden, bias=config.bias)
        self.q_norm, self.k_norm = norm(width, config.norm_eps), norm(width, config.norm_eps)
        sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.sinks else None
        self.register_parameter("sinks", sinks)
        if config.maps == "differential-v2":
            self.lambda_proj = nn.Linear(hidden, self.heads, bias=False)
        if config.shaped:
            gains = (nn.Parameter(torch.ones(self.heads, 1)) for _ in range(3))
            self.alpha, self.beta, self.gamma = gains
        if config.epilogue == "gate":
            self.gate_proj = nn.Linear(hidden, self.heads * width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = kwargs.pop(CACHE, None)
        shape = hidden_states.shape[:-1]
        query = self.q_norm(self.q_proj(hidden_states).view(*shape, -1, self.query_width))
        key = self.k_norm(self.k_proj(hidden_states).view(*shape, -1, self.key_width))
        own = hidden_states if self.v_proj is None else self.v_proj(hidden_states)
        own = own.view(*shape, -1, self.head_dim)
        query, key, value = (x.transpose(1, 2) for x in (query, key, own))
        if self.config.scores != "dot":
            query, key = coca(query, key, position_embeddings, self.config.scores)
        elif position_embeddings is not None:
            query, key = (rotate(x, *position_embeddings) for x in (query, key))
        if self.config.shaped:
            query = torch.stack([query, torch.zeros_like(query)], 2).flatten(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs)
        eager = (modeling_llama if self.sinks is None else modeling_gpt_oss).eager_attention_forward
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager
        )
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            s_aux=self.sinks,
            **kwargs,
        )
        output = output.reshape(*shape, -1, self.head_dim)
        kinds = 2 if self.config.shaped else 1
        output, *centre = (
            self.combine(output[..., kind::kinds, :], hidden_states) for kind in range(kinds)
        )
        if centre:
            output = self.alpha * own + self.beta * output - self.gamma * centre[0]
        if self.config.epilogue == "xsa":
            own = own.repeat_interleave(self.heads // own.shape[-2], -2).float()
            share = (output.float() * own).sum(-1, keepdim=True)
            share = share / own.square().sum(-1, keepdim=True).clamp_min(1e-30)
            output = (output.float() - share * own).to(output.dtype)
        output = output.flatten(-2)
        if self.config.epilogue == "gate":
            output = output * torch.sigmoid(self.gate_proj(hidden_states))
        return self.o_proj(output), weights

    def combine(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        """The heads' outputs from those of their maps."""
        if self.config.maps != "differential-v2":
            return output
        weight = torch.sigmoid(self.lambda_proj(hidden_states).float())[..., None]
        first, second = (output[..., i::2, :].float() for i in (0, 1))
        return (first - weight * second).to(output.dtype)


class ClearheadServingMLP(nn.Module):
    def __init__(self, config: ClearheadServingConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, width, bias=config.bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(hidden, width, bias=config.bias)
        self.down_proj = nn.Linear(width, hidden, bias=config.bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def norm_of(config: ClearheadServingConfig, place: int) -> nn.Module:
    """The norm of a layer, by its index, or the last one, −1."""
    kinds = {"rmsnorm": LlamaRMSNorm, "layernorm": nn.LayerNorm, "none": nn.Identity}
    return kinds[config.norms[place]](config.hidden_size, eps=config.norm_eps)


class ClearheadServingLayer(nn.Module):
    def __init__(self, config: ClearheadServingConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = norm_of(config, layer_idx)
        self.self_attn = ClearheadServingAttention(config, layer_idx)
        if not config.parallel:
            self.post_attention_layernorm = norm_of(config, layer_idx)
        self.mlp = ClearheadServingMLP(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        x = hidden_states + attended if self.config.attention_skip else attended
        if self.config.parallel:
            return x + self.mlp(normed)
        changed = self.mlp(self.post_attention_layernorm(x))
        return x + changed if self.config.mlp_skip else changed


class ClearheadServingPreTrainedModel(PreTrainedModel):
    config_class = ClearheadServingConfig
    base_model_prefix = "model"
    _no_split_modules = ["ClearheadServingLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": ClearheadServingLayer,
        "attentions": ClearheadServingAttention,
    }

    def __init__(self, config: ClearheadServingConfig) -> None:
        self._supports_sdpa = not config.sinks  # which SDPA would leave out
        super().__init__(config)


class ClearheadServingModel(ClearheadServingPreTrainedModel):
    """Token ids to hidden states after the final norm."""

    def __init__(self, config: ClearheadServingConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            ClearheadServingLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = norm_of(config, -1)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cache = kwargs.pop(CACHE, None)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            new = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            position_ids = new[None] + past
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = create_masks_for_generate(
                self.config, inputs_embeds, attention_mask, cache, position_ids
            )
        hidden_states = inputs_embeds
        if self.config.position == "learned":
            hidden_states = hidden_states + self.embed_positions(position_ids)
        table = self._rotary_table(position_ids) if self.config.position == "rope" else None
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[kind],
                position_embeddings=table,
                **{CACHE: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), cache if use_cache else None)

    def _rotary_table(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [B, 1, T, head_dim / 2]: no buffer that loading has to fill."""
        rope, width, device = self.config.rope_parameters, self.config.head_dim, position_ids.device
        factor = 1.0
        if rope["rope_type"] == "default":
            exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
            frequency = rope["rope_theta"] ** -exponent
        else:
            frequency, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
        angle = position_ids[:, None, :, None].float() * frequency
        return angle.cos() * factor, angle.sin() * factor


class ClearheadServingForCausalLM(ClearheadServingPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ClearheadServingConfig) -> None:
        super().__init__(config)
        self.model = ClearheadServingModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = LlamaForCausalLM.forward  # the trunk, then the head


ClearheadServingConfig.register_for_auto_class()
ClearheadServingForCausalLM.register_for_auto_class("AutoModelForCausalLM")
