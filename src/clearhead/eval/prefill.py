"""Prompts read into a key-value cache, a shared prefix once.

A prompt is a context and a tail. Prompts share the cached keys and values of a common prefix, where
a token's state depends neither on later tokens nor on the length of its row. Rows of a batch end
together: shorter ones are padded on the left and masked, so that no row depends on its neighbours.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from clearhead.errors import ClearheadError
from clearhead.eval.rope_limits import follow_length, of_the_batch, reset_dynamic_rope
from clearhead.models.inspection import finite
from clearhead.models.pretrained import CACHE, cache_of


class Prompt(NamedTuple):
    """Token ids: `context`, which other prompts may share, and `tail`, one token or more."""

    context: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.context + self.tail


@dataclass(kw_only=True)
class State:
    """Prompts that were read.

    Attributes:
        cache: of transformers; `mask` says which of its slots hold tokens, bool [B, S].
        logits: float [B, V], of the token after each prompt.
    """

    cache: Any
    mask: Tensor
    logits: Tensor


class CachedRows(NamedTuple):
    """Cached tokens of several rows, one row after another, without padding.

    Attributes:
        layers: keys and values of each, [N, H, D]; none where nothing is cached.
        rows: what the tokens are.
    """

    layers: list[tuple[Tensor, Tensor]]
    rows: list[tuple[int, ...]]

    def firsts(self) -> list[int]:
        """The place of each row's first token."""
        return list(accumulate(map(len, self.rows[:-1]), initial=0))


_NOTHING = CachedRows([], [()])


def _cached(cache: DynamicCache, rows: list[tuple[int, ...]]) -> CachedRows:
    """The keys and values of rows that end a cache's rows; padding before them is left out."""
    slots = cache.get_seq_length()
    firsts = [slots - len(row) for row in rows]
    row_N = torch.cat([torch.full((len(row),), place) for place, row in enumerate(rows)])
    slot_N = _spans(firsts, list(map(len, rows)))
    layers = [
        (layer.keys[row_N, :, slot_N], layer.values[row_N, :, slot_N]) for layer in cache.layers
    ]
    return CachedRows(layers, rows)


def _spans(firsts: list[int], lengths: list[int]) -> Tensor:
    """Numbers that follow each first one, so many of each, all in a row."""
    spans = zip(firsts, lengths, strict=True)
    return torch.cat([torch.arange(first, first + length) for first, length in spans])


class Prefill:
    """Reads prompts with one model, and caches the longest prefix that they shared.

    Attributes:
        shares: True if prefixes are shared: every layer keeps all its keys, and no frequency
            follows the length of the row. Elsewhere every prompt is read in full.
        pads: True if rows of unequal length may run together; not where transformers takes one
            frequency for the whole batch from its longest row.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        names = inspect.signature(model.forward).parameters
        self._keeps = "logits_to_keep" in names
        self._takes_positions = "position_ids" in names
        self.pads = not of_the_batch(model)
        self.shares = _keeps_all(_cache_of(model)) and not follow_length(model)
        self._prefix: CachedRows | None = None

    def read(self, prompts: Sequence[Prompt]) -> State:
        """Read a batch of prompts."""
        contexts = list(dict.fromkeys(prompt.context for prompt in prompts if prompt.context))
        read = _NOTHING
        reset_dynamic_rope(self._model)
        if self.shares and contexts:
            read = self._extend(self._start(contexts), [0] * len(contexts), contexts)
        places = {row: place for place, row in enumerate(read.rows)}
        each = [places.get(prompt.context, 0) for prompt in prompts]
        return self._onto(read, each, [prompt.ids for prompt in prompts])

    def step(self, state: State, tokens_B: Tensor) -> None:
        """Append a token to each row of the state."""
        ones = state.mask.new_ones(len(state.mask), 1)
        state.mask = torch.cat([state.mask, ones], 1)
        out = self._forward(state.cache, tokens_B[:, None], state.mask, 1)
        state.logits = finite(out.logits[:, -1])

    def follow(self, state: State, tokens_BT: Tensor) -> Tensor:
        """Append T tokens to each row in one pass: logits [B, T, V], of what is after each.

        Equal to T steps where `shares`; elsewhere the first would be read at the last one's length.
        """
        ones = state.mask.new_ones(tokens_BT.shape)
        state.mask = torch.cat([state.mask, ones], 1)
        logits = self._forward(state.cache, tokens_BT, state.mask, tokens_BT.shape[1]).logits
        state.logits = logits[:, -1]
        return finite(logits)

    def _start(self, contexts: list[tuple[int, ...]]) -> CachedRows:
        """The longest common start of the contexts, one row."""
        shared = contexts[0]
        for context in contexts[1:]:
            shared = shared[: common(shared, context)]
        if self._prefix is None:
            self._prefix = _NOTHING
        known = common(self._prefix.rows[0], shared)
        if known == len(shared):  # no more than is cached: what is cached stays whole
            return self._prefix
        start = self._extend(self._prefix, [0], [shared])
        # A passkey's filler grows from cell to cell, but the next length begins with a short start
        # that leaves it early: the long one stays, unless it is of little use here.
        if len(shared) > len(self._prefix.rows[0]) or known < len(shared) / 2:
            self._prefix = start
        return start

    def _extend(
        self, cached: CachedRows, places: list[int], rows: list[tuple[int, ...]]
    ) -> CachedRows:
        known = [common(cached.rows[place], row) for place, row in zip(places, rows, strict=True)]
        if known == list(map(len, rows)):
            firsts = cached.firsts()
            index_N = _spans([firsts[place] for place in places], known)
            return CachedRows([(k[index_N], v[index_N]) for k, v in cached.layers], rows)
        return _cached(self._onto(cached, places, rows).cache, rows)

    def _onto(self, cached: CachedRows, places: list[int], rows: list[tuple[int, ...]]) -> State:
        """Read `rows`, of which each has its start in the cached row at its place.

        All run as many new tokens as the one that needs most, so that padding, if any, is on the
        left of everything.
        """
        known = [common(cached.rows[place], row) for place, row in zip(places, rows, strict=True)]
        # At least the last token of each: its logits are needed.
        new = max(max(len(row) - n, 1) for row, n in zip(rows, known, strict=True))
        reused = [max(0, len(row) - new) for row in rows]
        cache = None
        if any(reused):
            cache = DynamicCache()
            for index, (k, v) in enumerate(self._cut(cached, places, reused)):
                cache.update(k, v, index)
        return self._run(cache, rows, reused)

    def _cut(
        self, cached: CachedRows, places: list[int], lengths: list[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """The first `lengths` tokens of the rows at `places`, right-aligned: [B, H, S, D]."""
        if not cached.layers:
            return []
        keys_NHD = cached.layers[0][0]
        firsts = cached.firsts()
        first_B = torch.tensor([firsts[place] for place in places], device=keys_NHD.device)
        length_B = torch.tensor(lengths, device=keys_NHD.device)
        slot_S = torch.arange(max(lengths), device=keys_NHD.device)
        # Padding takes some token or other: the mask hides it.
        index_BS = (slot_S - (max(lengths) - length_B)[:, None]).clamp_min(0) + first_B[:, None]
        index_BS = index_BS.clamp_max(len(keys_NHD) - 1)
        return [
            (k[index_BS].transpose(1, 2), v[index_BS].transpose(1, 2)) for k, v in cached.layers
        ]

    def _run(self, cache: Any, rows: list[tuple[int, ...]], reused: list[int]) -> State:
        """Run what is left of each row after its first `reused` tokens, which the cache holds."""
        device = self._model.device
        slots = max(map(len, rows))
        new = slots - max(reused)
        ids_BT = torch.zeros(len(rows), new, dtype=torch.int64)
        mask_BS = torch.zeros(len(rows), slots, dtype=torch.bool)
        for index, (row, n) in enumerate(zip(rows, reused, strict=True)):
            ids_BT[index, new - (len(row) - n) :] = torch.tensor(row[n:])
            mask_BS[index, slots - len(row) :] = True
        mask_BS = mask_BS.to(device)
        if cache is None:
            cache = DynamicCache() if self.shares else None
        out = self._forward(cache, ids_BT.to(device), mask_BS, 1)
        cache = cache_of(out)  # none of a recurrent model
        return State(cache=cache, mask=mask_BS, logits=finite(out.logits[:, -1]))

    def _forward(self, cache: Any, ids_BT: Tensor, mask_BS: Tensor, keep: int) -> Any:
        positions = {}
        if self._takes_positions:
            count_BS = (mask_BS.long().cumsum(-1) - 1).clamp_min(0)
            positions = {"position_ids": count_BS[:, -ids_BT.shape[1] :]}
        return self._model(
            input_ids=ids_BT,
            attention_mask=mask_BS.long(),
            **{CACHE: cache},
            use_cache=True,
            **positions,
            **({"logits_to_keep": keep} if self._keeps else {}),
        )


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the longest common prefix."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])


def _cache_of(model: Any) -> Any:
    """The cache that the model makes for itself."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    cache = cache_of(model(input_ids=token, use_cache=True))
    if cache is None:
        raise ClearheadError(
            f"{type(model).__name__} gives no key-value cache, by which answers "
            "are read token by token: ask for perplexity or hits"
        )
    return cache


def _keeps_all(cache: Any) -> bool:
    """True if every layer keeps the keys of all tokens, in the plain form that can be cut."""
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
