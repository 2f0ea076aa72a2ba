"""The base class of every model, and the trunk: embedding, blocks, final norm."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from clearhead.models.attention_interface import interface_of
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.inputs import Inputs, Options, settle
from clearhead.nn import REGISTRY, Block, block_of, initialise
from clearhead.nn.annealing import moves, warn
from clearhead.nn.bases import NoPosition, PositionTables
from clearhead.nn.positionwise import EmbeddingProjection
from clearhead.ops.rope import Rotation
from clearhead.spec import LayerSpec

# The keyword of a key-value cache in calls and outputs: `cache` from transformers 5.24 on.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


def cache_of(output: Any) -> Any:
    """The key-value cache in a model's output; None for none, as of recurrent models."""
    cache = getattr(output, CACHE, None)
    layers = getattr(cache, "layers", ())
    return None if layers and not any(hasattr(layer, "keys") for layer in layers) else cache


class ClearheadPreTrainedModel(PreTrainedModel):
    config_class = ClearheadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ClearheadLayer"]  # noqa: RUF012 (transformers' own form)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    # flash_attn, flex_attn and attention_backend stay False: they would ignore sinks and λ.
    _can_compile_fullgraph = True
    _supports_context_parallel = False  # it would shard the text below attention, unseen

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        config.settle()  # it may have been changed since it was made
        for key in unknown:  # of from_pretrained, where no configuration took it
            config.refuse(key)
        super().__init__(config)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        if not cls.__module__.startswith("clearhead."):
            super().register_for_auto_class(auto_class)

    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, self.config.initializer_range)


@cache
def _layer_class(block: type[Block]) -> Any:
    return type("ClearheadLayer", (GradientCheckpointingLayer, block), {})


class ClearheadModel(ClearheadPreTrainedModel):
    """Token ids to hidden states after the final norm.

    Attributes:
        prefix_length: positions before every text, which belong to learned keys.
        longest: number of positions that the position embedding has; None for no limit.
        limits: the same for every kind of position with a limit, by its name.
    """

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        specs = config.layers()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        projection = EmbeddingProjection if config.embedding_projection else nn.Identity
        self.project_in = projection(config.hidden_size)
        first = replace(specs[0], position=config.position)
        self.position: Any = _position(first)
        self._adds_position = type(self.position).embed is not NoPosition.embed
        self.embedding_norm: nn.Module = nn.Identity()
        if config.embedding_norm != "none":
            norm = REGISTRY.find("norm", config.embedding_norm).build
            self.embedding_norm = norm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        layers = [_layer_class(block_of(spec))(spec) for spec in specs]  # type: ignore[arg-type]
        self.layers: Sequence[Block] = nn.ModuleList(layers)  # type: ignore[assignment]
        attentions = [layer.self_attn for layer in self.layers]
        # Of layers that tell order in another way, or to another number of heads.
        self._position_keys = [_position_key(spec) for spec in specs]
        others = dict(zip(self._position_keys, specs, strict=True))
        others.pop(_position_key(first), None)
        self.other_positions = nn.ModuleDict({key: _position(one) for key, one in others.items()})
        positions: Any = [self.position, *self.other_positions.values()]
        limits = {each.layer.position: each.longest() for each in positions}
        # Positions that each kind of position tells apart, and those that are added tell apart.
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}
        self.longest: int | None = self.position.longest()
        self.prefix_length = max([each.prefix_length for each in attentions])  # of learned keys
        self.windowed = {each.window for each in attentions} != {None}
        self.gated = {each.decay for each in attentions} != {None}  # caches gates beside keys
        self.prepares_late = True in {each.cache_unrotated for each in attentions}  # keys, as read
        self.norm = REGISTRY.find("norm", config.outer_norm).build(
            config.hidden_size, config.norm_eps
        )
        self.project_out = projection(config.hidden_size)
        self.gradient_checkpointing = False
        self.followed = not moves(self)  # by a training that moves its annealed parts
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        **options: Unpack[Options],
    ) -> BaseModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, S], 0 for padding, on either side; S counts cached tokens too, or
                is the whole room of a static cache.
            position_ids: int64 [B, T]; by default counted from the first token that is no padding.
                Where they do not rise, a document begins.
            document_ids: int [B, T]; a token sees only its own document (packing), in which
                positions are counted. No cache then.
            **options: `clearhead.models.inputs.Options`.

        Raises:
            ClearheadError: arguments that do not fit, and any other that would have no effect.
        """
        inputs = settle(self, input_ids, attention_mask, position_ids, document_ids, options)
        maps: list[Tensor] | None = [] if inputs.returns_maps else None
        interface, implementation = None, self.config._attn_implementation or "sdpa"
        if maps is not None or implementation != "sdpa":
            interface = interface_of(implementation, maps)
        embeds = options.get("inputs_embeds")
        x = self.project_in(self.embed_tokens(input_ids) if embeds is None else embeds)
        if self._adds_position:
            x = self.position.embed(x, inputs.positions)
        x = self.dropout(self.embedding_norm(x))
        hidden: list[Tensor] = []
        for layer, tables in zip(self.layers, self._tables(inputs), strict=True):
            if inputs.returns_hidden:  # else none is held until the end
                hidden.append(x)
            x = layer(
                x,
                tables=tables,
                interface=interface,
                cache=inputs.cache,
                past=inputs.past,
                prefixes=inputs.prefixes,
                visibility=inputs.visibility,
            )
        x = self.project_out(self.norm(x))
        if not self.followed and x.requires_grad and self.training:
            self.followed = True
            if not torch.compiler.is_compiling():
                warn(self)
        return BaseModelOutputWithPast(
            **{CACHE: inputs.cache},  # type: ignore[arg-type]
            last_hidden_state=x,
            # As in transformers' models, the last entry is what the head reads.
            hidden_states=(*hidden, x) if inputs.returns_hidden else None,  # type: ignore[arg-type]
            attentions=None if maps is None else tuple(maps),  # type: ignore[arg-type]
        )

    def _tables(self, inputs: Inputs) -> list[PositionTables]:
        """Each layer's tables; layers with equal positions share theirs."""
        positions_BT, keys_BS = inputs.positions, inputs.key_positions
        prepared = inputs.past and inputs.prefixes and not torch.is_grad_enabled()
        shared: dict[tuple[str, bool, int], PositionTables] = {}
        tables = []
        for layer, name in zip(self.layers, self._position_keys, strict=True):
            attention = layer.self_attn
            unrotated, length = attention.cache_unrotated, attention.prefix_length
            key = name, unrotated, length
            if key not in shared:
                own = name not in self.other_positions
                position: Any = self.position if own else self.other_positions[name]
                shared[key] = position.tables(positions_BT, keys_BS if unrotated else positions_BT)
                if length and (unrotated or not prepared):
                    first = torch.arange(length, device=positions_BT.device)[None]
                    prefix = position.tables(positions_BT, first).keys
                    prefix = prefix.table() if isinstance(prefix, Rotation) else prefix
                    shared[key] = shared[key]._replace(prefix=prefix)
            tables.append(shared[key])
        return tables


def _position(layer: LayerSpec) -> Any:
    heads = REGISTRY.find("maps", layer.maps).heads(layer)
    return REGISTRY.find("position", layer.position).build(layer, heads)


def _position_key(layer: LayerSpec) -> str:
    """The key by which layers share a position module."""
    heads = REGISTRY.find("maps", layer.maps).heads(layer)
    wide = REGISTRY.find("scores", layer.scores).rotary_width(layer)
    return f"{layer.position} of {heads} heads, {wide} wide"
