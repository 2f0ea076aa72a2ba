"""The trunk of every model, as transformers knows one: embedding, blocks, final norm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from clearhead.errors import ClearheadError
from clearhead.models.attention_interface import IMPLEMENTATIONS, through_interface
from clearhead.models.checks import (
    PACKED_ARGUMENTS,
    arguments_of,
    check_arguments,
    check_below,
    check_cache,
    check_inputs,
    check_recomputation,
    check_whole,
    has_numbers,
    is_batch,
    the_cache,
)
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.paged import paged_attention
from clearhead.models.pretrained import CACHE, ClearheadPreTrainedModel
from clearhead.models.token_positions import (
    documents_of,
    key_positions,
    positions_of,
    read_mask,
    room_of,
    seen_slots,
)
from clearhead.nn import REGISTRY, Block
from clearhead.nn.annealing import moves, note
from clearhead.nn.protocols import Attend, Position, PositionTables
from clearhead.ops import oracles
from clearhead.ops.attention import at_zero_queries
from clearhead.ops.rope import Rotation
from clearhead.ops.visibility import Visibility, is_exporting
from clearhead.spec import LayerSpec


class ClearheadLayer(GradientCheckpointingLayer, Block):
    """A block, with transformers' gradient checkpointing."""

    _can_checkpoint_with_cache = True  # in the way that `check_recomputation` allows


class ClearheadModel(ClearheadPreTrainedModel):
    """Token ids to hidden states after the final norm.

    Attributes:
        places_before: positions before every text, which belong to learned keys.
        moves: True where training moves parts beside the weights.
        course: steps done and steps in all, 0 where nobody said, of the training it is in.
    """

    def __init__(self, config: ClearheadConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        first = config.layer(0)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        own = replace(first, position=config.position)
        self.position = _position(own)
        self.embedding_norm: nn.Module = nn.Identity()
        if config.embedding_norm != "none":
            norm = REGISTRY.find("norm", config.embedding_norm).build
            self.embedding_norm = norm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            ClearheadLayer(config.layer(index)) for index in range(config.num_hidden_layers)
        )
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        self.places_before: int = max(each.normalizer.places for each in attentions)
        self._windowed = {each.window for each in attentions} != {None}
        self._gated = {each.decay for each in attentions} != {None}
        self._prepares_late = True in {each.cache_unrotated for each in attentions}
        # Of layers that tell order in another way, or to another number of heads.
        self.other_positions = nn.ModuleDict()
        self._position_keys = [_position_key(each.layer) for each in attentions]
        for key, each in zip(self._position_keys, attentions, strict=True):
            if key != _position_key(own):
                self.other_positions[key] = _position(each.layer)
        self.norm = REGISTRY.find("norm", config.outer_norm).build(
            config.hidden_size, config.norm_eps
        )
        self.gradient_checkpointing = False
        self.moves = moves(self)
        self.course: tuple[int, int] | None = None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cache: Any = None,
        **unknown: Any,
    ) -> BaseModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids: int64 [B, T], or inputs_embeds: [B, T, C].
            attention_mask: [B, S], 0 for padding, on either side; S counts cached tokens too. With
                a static cache S may be all its room: what is said of tokens to come is not read.
                Without a cache the documents of a row may be numbered, from 1.
            position_ids: int64 [B, T]; by default counted from the first token not padded. Where
                they begin anew, a document begins.
            past_key_values: a transformers Cache. A lone token after a StaticCache, its mask of
                all the room or None, reads nothing on the host: a CUDA graph can hold the step.
            cache: the same, by its name from transformers 5.24 on.
            document_ids: int [B, T]; a token sees only its own document (packing), in which
                positions are counted. No cache then.
            output_attentions: needs attn_implementation="eager"; the matrices [B, heads, T, S] that
                multiply the values: for differential attention the signed difference. The output's
                gradient passes through them, for attribution (`attentions[i].retain_grad()`).
            **unknown: `return_dict=False` for a tuple; documents of one row as flash kernels take
                them, cu_seq_lens_q, cu_seq_lens_k and what goes with these, or as seq_idx.

        Raises:
            ClearheadError: arguments that do not fit, and any other that would have no effect.
        """
        check_arguments(unknown | {"cache": cache}, ARGUMENTS)
        batched = is_batch(cache)
        if batched:  # what a request sees, its lengths say
            attention_mask = None
        else:
            past_key_values = the_cache(past_key_values, cache)
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        causal = self.config.direction == "causal"
        if not causal:
            if past_key_values is not None:
                raise ClearheadError(
                    "a key-value cache needs direction='causal': with "
                    f"{self.config.direction!r} every token changes when one is added"
                )
            use_cache = False
        layers: Any = self.layers[: self.config.num_hidden_layers]  # fewer: assistant_early_exit
        check_cache(past_key_values, len(layers), self._gated)
        cached = past_key_values is not None
        if cached and self.training and self.gradient_checkpointing:
            check_recomputation(past_key_values, self._gradient_checkpointing_func)
        maps: list[Tensor] | None = None
        if _wanted(output_attentions, self.config.output_attentions):
            maps = []
        batch, tokens = x.shape[:2]
        check_whole(position_ids, "position_ids", batch, tokens)
        room = room_of(past_key_values)
        whole = attention_mask is not None and attention_mask.shape == (batch, room)
        on_device = self.steps_on_device(past_key_values, tokens) and maps is None
        on_device = on_device and (whole or attention_mask is None)
        key_mask: Tensor | None
        numbers = None
        if on_device:
            # Every slot is a key, the new token the last query; a mask says which slots are seen.
            length, key_mask = seen_slots(past_key_values, attention_mask, x)
            past = key_mask.shape[1] - 1
        else:
            past = _cached(past_key_values)
            length = past + tokens
            if whole:
                attention_mask = attention_mask[:, :length]  # type: ignore[index]
            key_mask, numbers = read_mask(attention_mask, batch, length, cached)
        documents = None
        if not batched:  # then a row is many texts
            masks = key_mask, numbers
            documents = documents_of(x, position_ids, masks, document_ids, unknown, cached)
        # Those that a compiler cannot rule out leave the cache, and the length, as of one text.
        told = document_ids is not None or not PACKED_ARGUMENTS.isdisjoint(unknown)
        packed = documents is not None and (told or has_numbers(x))
        if use_cache and not (cached or packed or self.training):
            windowed = self.config.sliding_window is not None
            past_key_values = DynamicCache(config=self.config if windowed else None)
        places = self.places_before
        positions = position_ids
        if positions is None:
            positions = positions_of(documents, key_mask, x, past)
        longest = self.position.longest()  # type: ignore[operator]
        if longest is not None and (packed or position_ids is not None):
            what = "the positions that the model tells apart"
            check_below(longest - places, positions, "position_ids", what)
        if not (batched or packed):  # then a row is many texts
            self._check_length(places + length)
        positions = positions + places if places else positions
        keys = positions
        if past_key_values is not None and self._prepares_late:
            rows = None if on_device or torch.compiler.is_compiling() else batch
            keys = key_positions(positions, key_mask, past_key_values, past, places, rows)
        wants_hidden = _wanted(output_hidden_states, self.config.output_hidden_states)
        attend = paged_attention(unknown | {"cache": cache}) if batched else self._attend(maps)
        x = self.dropout(self.embedding_norm(self.position.embed(x, positions)))
        tables = self._tables(layers, positions, keys, past)
        context = {
            "attend": attend,
            "cache": past_key_values,
            "past": past,
            "matrices": maps,
            "visibility": Visibility(causal, None, key_mask, documents),
        }
        hidden: list[Tensor] = []
        for layer, of_layer in zip(layers, tables, strict=True):
            if wants_hidden:  # else none is held until the end
                hidden.append(x)
            x = layer(x, tables=of_layer, **context)
        x = self.norm(x)
        if self.moves:
            note(self, x)
        return BaseModelOutputWithPast(
            **{CACHE: past_key_values},  # type: ignore[arg-type]
            last_hidden_state=x,
            # As in transformers' models, the last entry is after the final norm.
            hidden_states=(*hidden, x) if wants_hidden else None,  # type: ignore[arg-type]
            attentions=None if maps is None else tuple(maps),  # type: ignore[arg-type]
        )

    def steps_on_device(self, cache: Cache | None, tokens: int) -> bool:
        """True where `tokens` after this cache need not know its length on the host.

        transformers counts the tokens of windows on the host.
        """
        if cache is None or tokens > 1 or self._windowed or room_of(cache) is None:
            return False
        return isinstance(cache.get_seq_length(), Tensor)  # before its first token, 0

    def _tables(
        self, layers: Any, positions_BT: Tensor, keys_BS: Tensor, past: int
    ) -> list[PositionTables]:
        """Each layer's tables; layers that tell order alike share theirs."""
        shared: dict[tuple[str, bool, int], PositionTables] = {}
        tables = []
        for layer, position in zip(layers, self._position_keys, strict=False):
            attention: Any = layer.self_attn
            places = attention.normalizer.places
            key = position, attention.cache_unrotated, places
            if key not in shared:
                keys = keys_BS if attention.cache_unrotated else positions_BT
                make = self._position_of(position).tables
                shared[key] = make(positions_BT, keys)
                if places:
                    prefix = _prefix_table(make, positions_BT, places, past)
                    shared[key] = shared[key]._replace(prefix=prefix)
            tables.append(shared[key])
        return tables

    def _position_of(self, key: str) -> Position:
        others: Any = self.other_positions
        return others[key] if key in others else self.position  # noqa: SIM401 (no get)

    def _attend(self, maps: list[Tensor] | None) -> Attend:
        """The function that computes attention in every layer."""
        implementation = self.config._attn_implementation or "sdpa"
        if maps is not None:
            if implementation != "eager":
                raise ClearheadError(
                    "output_attentions needs attn_implementation='eager'; "
                    f"found {implementation!r}: call model.set_attn_implementation('eager')"
                )

            def recording(module: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
                lambdas = options.pop("lambdas")
                options |= options.pop("visibility")._asdict()

                def alone() -> Tensor:
                    resting = options | {"sink": at_zero_queries(options["sink"])}
                    return oracles.weights(
                        module.position_only(q), module.position_only(k), **resting
                    )

                weights = oracles.weights(q, k, **options)[..., -k.shape[2] :]
                first = k.shape[2] - q.shape[2]
                matrix = module.effective_weights(weights, lambdas, alone, first)
                maps.append(matrix.to(q.dtype))
                return oracles.attend(q, k, v, **options).to(v.dtype)

            return recording
        if implementation in IMPLEMENTATIONS:
            return IMPLEMENTATIONS[implementation]
        if implementation.startswith("paged|"):  # it knows neither sinks nor windows
            raise ClearheadError(
                f"{implementation!r} is of continuous batching, which sets it by itself: call "
                "model.set_attn_implementation('sdpa')"
            )
        return through_interface(ALL_ATTENTION_FUNCTIONS[implementation])

    def _check_length(self, length: int) -> None:
        for position in (self.position, *self.other_positions.values()):
            limit = position.longest()  # type: ignore[operator]
            if limit is not None and length > limit:
                raise ClearheadError(
                    f"{length} tokens are more than the {limit} positions that this model can tell "
                    f"apart (position={position.layer.position!r}): shorten the text, or train "
                    "with position='rope'"
                )


def _position(layer: LayerSpec) -> Any:
    return REGISTRY.find("position", layer.position).build(layer, _heads(layer))


def _heads(layer: LayerSpec) -> int:
    return REGISTRY.find("maps", layer.maps).heads(layer)


def _position_key(layer: LayerSpec) -> str:
    """Layers of the same key share one position module."""
    return f"{layer.position} of {_heads(layer)} heads"


ARGUMENTS = arguments_of(ClearheadModel.forward) | PACKED_ARGUMENTS


def _wanted(argument: bool | None, configured: bool | None) -> bool:
    return bool(configured if argument is None else argument)


def _cached(cache: Cache | None) -> int:
    """The number of tokens in a cache."""
    length = 0 if cache is None else cache.get_seq_length()
    # A static cache holds it in a tensor; of another, export keeps it symbolic, as int() would not.
    if not isinstance(length, Tensor):
        return length
    if is_exporting():
        raise ClearheadError("with a static cache only a step of one token exports: give one")
    return int(length)


def _prefix_table(
    make: Callable[[Tensor, Tensor], PositionTables], positions_BT: Tensor, places: int, past: int
) -> Callable[[], Any]:
    """The table of a prefix's keys. After `past` keys it is made when it is first wanted: a cache
    keeps these keys, so that a step of decoding wants none."""
    known: list[Any] = []

    def table() -> Any:
        if not known:
            keys = make(positions_BT, torch.arange(places, device=positions_BT.device)[None]).keys
            known.append(keys.table() if isinstance(keys, Rotation) else keys)
        return known[0]

    if not past:
        table()  # here, for the first layer's graph to be that of all
    return table
